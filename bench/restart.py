"""How long is a killed syncer away?

    python bench/restart.py [--size 500M] [--fragments 12] [--rounds 60] [--kills 3] [--json] [--out bench/results/restart.jsonl]

The syncer's real process, one scripted learner that sends different packets each round (int4 up, int8 down). After `--rounds`
outer steps it is killed with SIGKILL and started again at once, `--kills` times. Times count from the start of the new process:
until it listens (its tape fed to a machine, versions read, and merged again where they are stored by their inputs), and until
the learner is in sync again. One JSON line. The target is 15 s at 560M parameters; its other half, after a million events, is
not measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from provenance import commit
from scripted import Cluster, load_average

from atoll.config import Config, load
from atoll.protocol.membership import Standing
from atoll.protocol.vocabulary import Membership, Started
from atoll.store.version_folder import newest_step
from atoll.tape.format import Record, Tape
from atoll.tape.tail import Tail

ROOT = Path(__file__).parents[1]


def settings(size: str, fragments: int) -> Config:
    return load(preset_name="decoupled", overrides={
        "learners": 1, "total_steps": 1_000_000, "model": {"size": size},
        "data": {"max_bytes": 200_000, "seq_len": 64, "batch_size": 8, "heldout_batches": 1},
        "protocol": {
            "fragments": fragments, "local_steps_per_round": fragments, "overlap": 2, "codec_up": "int4", "codec_down": "int8",
            "fragmentation": "balanced", "rollback_interval": 0,
        },
        "limits": {"start_wait_seconds": 300.0},
    })  # fmt: skip


def in_sync(record: Record) -> bool:
    return any(isinstance(e, Membership) and e.standing is Standing.IN_SYNC for e in record.effects)


def restarted(cluster: Cluster) -> dict[str, float]:
    """Kills the syncer, starts it again, and times its way back."""
    tail = Tail(Tape(cluster.tape))
    list(tail.more())
    cluster.syncer.kill()
    address = cluster.directory / "address"
    address.unlink()
    began = time.monotonic()
    cluster.start_again()
    found: dict[str, float] = {}
    started = False
    while "in_sync" not in found:
        time.sleep(0.01)
        cluster.syncer.check()
        if "listens" not in found and address.exists():
            found["listens"] = time.monotonic() - began
        for record in tail.more():
            started = started or isinstance(record.event, Started)
            if started and in_sync(record):
                found["in_sync"] = time.monotonic() - began
    return found


def wait_for(cluster: Cluster, steps: int) -> None:
    while newest_step(cluster.directory) < steps:
        time.sleep(0.1)
        cluster.syncer.check()
        print(f"\r{newest_step(cluster.directory)} of {steps} outer steps  ", end="", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="500M")
    parser.add_argument("--fragments", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the line")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "restart.jsonl")
    asked = parser.parse_args()
    times: list[dict[str, float]] = []
    with Cluster(settings(asked.size, asked.fragments)) as cluster:
        load_process = cluster.learners(0, 1, "--step", "0.05", "--packets", "2")
        for kill in range(asked.kills):
            wait_for(cluster, asked.rounds * (kill + 1))
            times.append(restarted(cluster))
            print(f"\n{times[-1]}", file=sys.stderr)
        load_process.stop()
    line: dict[str, Any] = {
        "size": asked.size, "fragments": asked.fragments, "rounds": asked.rounds,
        "listens": [round(each["listens"], 2) for each in times], "in_sync": [round(each["in_sync"], 2) for each in times],
        "median": round(statistics.median(each["in_sync"] for each in times), 2), "load": load_average(),
        "cores": os.cpu_count(), "machine": platform.machine(), "commit": commit(),
    }  # fmt: skip
    with asked.out.open("a", encoding="utf8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line) if asked.json else f"in sync again after {line['median']} s (median of {asked.kills})")


if __name__ == "__main__":
    main()
