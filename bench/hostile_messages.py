"""A listening syncer with two honest learners, and admitted attackers that throw a million messages at it.

    python bench/hostile_messages.py --messages 1000000 --out bench/results/hostile_messages.jsonl

The checks are those of tests/live/test_hostile.py: no crash, no restart, flat memory, descriptors given back, honest learners in
more than half of the merges while they are in sync, every invariant on the tapes. One JSON line with what was measured; exit
code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "live"), str(ROOT / "tests" / "helpers")]

import harness  # noqa: E402
from provenance import commit  # noqa: E402
from test_hostile import Unfooled, withstands  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=70_000, help="of the run under attack, which must outlast it")
    parser.add_argument("--links", type=int, default=12, help="attackers at a time")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "hostile_messages.jsonl")
    asked = parser.parse_args()
    harness.Safety = Unfooled  # type: ignore[misc]
    with tempfile.TemporaryDirectory(prefix="atoll-hostile-", ignore_cleanup_errors=True) as folder:
        figures = withstands(
            Path(folder), goal=asked.messages, total_steps=asked.steps, workers=asked.links, seed=asked.seed, offences=10**9
        )
    with asked.out.open("a") as file:
        print(json.dumps({**figures, "commit": commit(), "machine": platform.machine()}), file=file)


if __name__ == "__main__":
    main()
