"""How long is a killed syncer away?

    python bench/restart.py [--size 500M] [--fragments 12] [--rounds 60] [--kills 3] [--json] [--out bench/results/restart.jsonl]
    python bench/restart.py --events 1000000 [--json]

The syncer's real process, one scripted learner that sends different packets each round (int4 up, int8 down). After `--rounds`
outer steps it is killed with SIGKILL and started again at once, `--kills` times. Times count from the start of the new process:
until it listens (its tape fed to a machine, versions read, and merged again where they are stored by their inputs), and until
the first learner is in sync again. One JSON line. The target is 15 s at 560M parameters.

With `--events` a small model and eight scripted learners, until the syncer has recorded so many events; then it is killed once.
The line has its memory as it goes: at a million events it should be what it was at ten thousand.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from provenance import commit
from scripted import Cluster, load_average

from atoll.config import Config, load
from atoll.protocol.membership import Standing
from atoll.protocol.vocabulary import Membership, Started
from atoll.store.version_folder import newest_step
from atoll.tape.format import Record, Tape
from atoll.tape.tail import Tail

ROOT = Path(__file__).parents[1]
LEARNERS = 8
FIRST_MARK = 10_000


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


def many_events(count: int) -> dict[str, Any]:
    """A small model, so that events are all there is."""
    base = settings("nano", 4)
    config = msgspec.structs.replace(base, learners=LEARNERS)
    with Cluster(config) as cluster:
        halves = [cluster.learners(first, LEARNERS // 2, "--step", "0.004") for first in (0, LEARNERS // 2)]
        memory: dict[int, float] = {}
        began, marks = time.monotonic(), [FIRST_MARK, *range(count // 10, count + 1, count // 10)]
        for mark in marks:
            while (seen := events_on(cluster.tape)) < mark:
                time.sleep(0.2)
                cluster.syncer.check()
                print(f"\r{seen:,} of {count:,} events  ", end="", file=sys.stderr)
            memory[mark] = resident_mb(cluster.syncer.pid)
        rate = events_on(cluster.tape) / (time.monotonic() - began)
        times = restarted(cluster)
        for half in halves:
            half.stop()
    return {
        "size": "nano", "learners": LEARNERS, "events": count, "events_per_second": round(rate), "memory_mb": memory,
        "listens": [round(times["listens"], 2)], "in_sync": [round(times["in_sync"], 2)], "median": round(times["in_sync"], 2),
    }  # fmt: skip


def events_on(tape: Path) -> int:
    """The number of the last whole record. A new segment begins with its header, which says how many there were before."""
    with tape.open("rb") as file:
        file.seek(max(0, tape.stat().st_size - 65536))
        found = re.findall(rb'"(?:n|records)":(\d+)', file.read())
    return int(found[-1]) if found else 0


def resident_mb(pid: int) -> float:
    words = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return round(int(re.findall(r"VmRSS:\s+(\d+) kB", words)[0]) / 1024, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="500M")
    parser.add_argument("--fragments", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--events", type=int, help="a small model and so many events instead")
    parser.add_argument("--json", action="store_true", help="print the line")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "restart.jsonl")
    asked = parser.parse_args()
    found = many_events(asked.events) if asked.events else large_model(asked)
    line = found | {"load": load_average(), "cores": os.cpu_count(), "machine": platform.machine(), "commit": commit()}
    with asked.out.open("a", encoding="utf8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line) if asked.json else f"in sync again after {line['median']} s (median of {len(line['in_sync'])})")


def large_model(asked: argparse.Namespace) -> dict[str, Any]:
    times: list[dict[str, float]] = []
    with Cluster(settings(asked.size, asked.fragments)) as cluster:
        load_process = cluster.learners(0, 1, "--step", "0.05", "--packets", "2")
        for kill in range(asked.kills):
            wait_for(cluster, asked.rounds * (kill + 1))
            times.append(restarted(cluster))
            print(f"\n{times[-1]}", file=sys.stderr)
        load_process.stop()
    return {
        "size": asked.size, "fragments": asked.fragments, "rounds": asked.rounds,
        "listens": [round(each["listens"], 2) for each in times], "in_sync": [round(each["in_sync"], 2) for each in times],
        "median": round(statistics.median(each["in_sync"] for each in times), 2),
    }  # fmt: skip


if __name__ == "__main__":
    main()
