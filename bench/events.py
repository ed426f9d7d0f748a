"""Protocol events per second of the virtual event loop on one core, with the tape on.

    python bench/events.py [--learners 8] [--total-steps 800] [--runs 5]

Prints each preset's median over the runs. The targets are 40,000 events per second for `decoupled` and 20,000 for every other
preset, of CPU time, because machines may be shared; wall time is printed too. Exit code 1 if one is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from atoll.chaos import ChaosPlan
from atoll.config import PRESETS, load
from atoll.sim.cluster import VirtualCluster
from atoll.sim.run import header_for
from atoll.tape.format import TapeWriter

TARGET, DECOUPLED_TARGET = 20_000, 40_000


def one_run(preset: str, learners: int, total_steps: int, directory: Path, run: int) -> tuple[float, float]:
    config = load(preset_name=preset, overrides={"learners": learners, "total_steps": total_steps})
    with TapeWriter.create(directory / f"{preset}-{run}.tape", header_for(config, ChaosPlan(), None)) as tape:
        cluster = VirtualCluster(config, observers=[tape.append])
        wall, start = time.perf_counter(), time.process_time()
        cluster.run()
        return cluster.events / (time.process_time() - start), cluster.events / (time.perf_counter() - wall)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--total-steps", type=int, default=800)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    medians = {}
    with tempfile.TemporaryDirectory() as folder:
        for preset in PRESETS:
            rates = [
                one_run(preset, arguments.learners, arguments.total_steps, Path(folder), run) for run in range(arguments.runs)
            ]
            medians[preset] = statistics.median(cpu for cpu, _ in rates)
            wall = statistics.median(wall for _, wall in rates)
            print(f"{preset:<16} {medians[preset]:>9,.0f} events a CPU second, tape on ({wall:,.0f} by the wall clock)")
    targets = {preset: DECOUPLED_TARGET if preset == "decoupled" else TARGET for preset in medians}
    missed = [preset for preset, rate in medians.items() if rate < targets[preset]]
    for preset in missed:
        print(f"FAIL {preset}: {medians[preset]:,.0f} events a second, {targets[preset]:,} is the target")
    if not missed:
        print("PASS every preset reaches its target")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
