"""How many machine events a second the virtual event loop does on one core, with the tape on.

    python bench/events.py [--learners 8] [--outer-steps 1500] [--runs 5]

Prints each preset's median over the runs and the slowest of them. The target is 20,000 events a second.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from atoll.chaos import Plan
from atoll.config import PRESETS, load
from atoll.sim.cluster import Cluster
from atoll.sim.run import header_for
from atoll.tape.format import TapeWriter

TARGET = 20_000


def one_run(preset: str, learners: int, outer_steps: int, directory: Path, run: int) -> float:
    config = load(preset_name=preset, overrides={"learners": learners, "outer_steps": outer_steps})
    with TapeWriter.create(directory / f"{preset}-{run}.tape", header_for(config, Plan(), None)) as tape:
        cluster = Cluster(config, observers=[tape.append])
        start = time.perf_counter()
        cluster.run()
        return cluster.events / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--outer-steps", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    medians = {}
    with tempfile.TemporaryDirectory() as folder:
        for preset in PRESETS:
            rates = [
                one_run(preset, arguments.learners, arguments.outer_steps, Path(folder), run) for run in range(arguments.runs)
            ]
            medians[preset] = statistics.median(rates)
            print(f"{preset:<16} {medians[preset]:>10,.0f} events/s, tape on (best of {arguments.runs}: {max(rates):,.0f})")
    worst = min(medians, key=lambda name: medians[name])
    print(f"slowest: {worst}, {medians[worst]:,.0f} events/s: {'PASS' if medians[worst] >= TARGET else 'FAIL'} (target {TARGET:,})")


if __name__ == "__main__":
    main()
