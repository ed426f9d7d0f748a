"""Seeded histories of faults, hostile learners in half of them, on all cores; every invariant is checked after every event.

    python bench/histories.py --count 10000 --out bench/results/histories.jsonl

A line for every hundred seeds. A run that is stopped goes on after the hundreds that the file already has.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from provenance import commit  # noqa: E402
from scenario import HOSTILE_FROM, Scenario, verdict  # noqa: E402

CHUNK = 100


def history(seed: int) -> tuple[int, str]:
    """The seed, and what went wrong."""
    failure = verdict(seed)
    return seed, "" if failure is None else str(failure).splitlines()[0][:300]


def done_before(out: Path) -> set[int]:
    lines = out.read_text().splitlines() if out.exists() else []
    return {json.loads(line)["first"] for line in lines}


def run(count: int, out: Path, jobs: int) -> list[dict[str, Any]]:
    """The lines written by this call."""
    done, written = done_before(out), []
    with multiprocessing.get_context("fork").Pool(jobs) as pool, out.open("a") as file:
        for first in range(HOSTILE_FROM, HOSTILE_FROM + count, CHUNK):
            if first in done:
                continue
            began, seeds = time.monotonic(), range(first, first + CHUNK)
            failed = {str(seed): words for seed, words in pool.imap_unordered(history, seeds) if words}
            hostile = sum(any(type(f).__name__ == "Hostile" for f in Scenario(seed).plan.faults) for seed in seeds)
            line = {
                "first": first, "count": CHUNK, "hostile": hostile, "failed": failed,
                "seconds": round(time.monotonic() - began, 1), "jobs": jobs, "machine": platform.machine(),
                "commit": commit(),
            }  # fmt: skip
            written.append(line)
            print(json.dumps(line), file=file, flush=True)
            print(f"{first + CHUNK - HOSTILE_FROM} of {count}: {len(failed)} failed, {line['seconds']} s", file=sys.stderr)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "histories.jsonl")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if any(line["failed"] for line in run(asked.count, asked.out, asked.jobs)):
        sys.exit(1)


if __name__ == "__main__":
    main()
