"""Real kills on a local cluster for an hour: learners, syncer, links and disks, and now and then a rollback.

    python bench/kills.py --minutes 60 --out bench/results/kills.jsonl

Runs of some minutes each, one line a run. After each run its tapes are fed to new machines: every decision must be as taped,
every invariant is checked after every event, and the fates of all tokens must add up. Exit code 1 if a run fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "live"))

from harness import judge, small  # noqa: E402
from provenance import commit  # noqa: E402

from atoll.chaos import ChaosPlan, Fault, Rollback, Slow, random_plan  # noqa: E402
from atoll.runtime.local.cluster import LocalCluster  # noqa: E402
from atoll.tape.format import Record  # noqa: E402

LEARNERS, SLOWER, STEPS_A_SECOND = 4, 12.0, 8.0
"""Steps are slowed, so that two cores are enough and an hour's tapes stay small."""
FAULT_EVERY, DISK_EVERY = 5.0, 30.0
"""Seconds."""


class FullDisks:
    """The kernel refuses the files of a random process to grow for some seconds (RLIMIT_FSIZE), again and again."""

    def __init__(self, rng: random.Random, seconds: float) -> None:
        self._rng, self._seconds = rng, seconds
        self._over = threading.Event()
        self.count = 0
        self.cluster: LocalCluster | None = None

    def __enter__(self) -> FullDisks:
        self._thread = threading.Thread(target=self._strike)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _strike(self) -> None:
        began = time.monotonic()
        while not self._over.wait(self._rng.expovariate(1 / DISK_EVERY)) and time.monotonic() - began < self._seconds:
            with contextlib.suppress(OSError, AssertionError, AttributeError):  # it is not up at this moment
                assert self.cluster is not None
                pid = self.cluster.syncer_child().pid
                hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024, hard))
                self.count += 1
                self._over.wait(0.5 + self._rng.random() * 3)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


def plan_of(rng: random.Random, seconds: float) -> ChaosPlan:
    faults: list[Fault] = [Slow(0.0, m, SLOWER, 1e6) for m in range(LEARNERS)]
    faults += random_plan(rng, LEARNERS, count=int(seconds / FAULT_EVERY), span=seconds, start=10.0).faults
    faults += [Rollback(rng.uniform(30.0, seconds), rng.choice([1, 2]), rng.random() < 0.3) for _ in range(int(seconds / 120))]
    return ChaosPlan(tuple(sorted(faults, key=lambda fault: fault.at)))


def one_run(seed: int, minutes: float, folder: Path) -> dict[str, Any]:
    rng = random.Random(seed)
    seconds = 60 * minutes
    limits = {"protocol": {"fragments": 6, "local_steps_per_round": 6, "snapshot_interval": 200, "rollback_interval": 100}}
    config = small(LEARNERS, total_steps=int(seconds * STEPS_A_SECOND), **limits)
    plan, began = plan_of(rng, seconds), time.monotonic()
    disks = FullDisks(rng, seconds)

    def watch(record: Record) -> None:
        disks.cluster = cluster

    cluster = LocalCluster(config, folder, plan, watch=watch)
    with disks:
        cluster.run()
    lasted = time.monotonic() - began
    outcome = judge(folder, config)
    struck = Counter(words.split("  ")[1].strip().split(" ")[0] if "  " in words else words for words in cluster.struck)
    assert outcome.fates is not None
    return {
        "seed": seed, "seconds": round(lasted, 1), "steps": config.total_steps, "learners": LEARNERS,
        "faults": dict(sorted(struck.items())), "full_disks": disks.count, "merged": outcome.fates.merged,
        "trained": outcome.fates.trained, "verdict": "clean",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--each", type=float, default=6.0, help="minutes of one run")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "kills.jsonl")
    asked = parser.parse_args()
    lasted, seed, failed = 0.0, asked.seed, False
    while lasted < 60 * asked.minutes:
        with tempfile.TemporaryDirectory(prefix="atoll-kills-", ignore_cleanup_errors=True) as folder:
            try:
                line = one_run(seed, asked.each, Path(folder))
            except Exception as error:
                line = {"seed": seed, "seconds": 60 * asked.each, "verdict": f"{type(error).__name__}: {error}"[:600]}
                failed = True
        lasted += line["seconds"]
        line |= {"commit": commit(), "machine": platform.machine()}
        with asked.out.open("a") as file:
            print(json.dumps(line), file=file)
        print(json.dumps(line), file=sys.stderr)
        seed += 1
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
