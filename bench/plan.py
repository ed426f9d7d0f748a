"""How long does `atoll plan` take for each shipped example?

    python bench/plan.py [NAME ...] [--out bench/results/plan.jsonl]

Whole commands, with what would change the answer, as a user runs them. The target is a minute of wall time on two cores. The
machine may be shared, so CPU time and load average are beside it. One JSON line for each example.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from provenance import commit
from scripted import load_average

ROOT = Path(__file__).parents[1]
LIMIT = 60.0


def timed(path: Path) -> dict[str, Any]:
    """One command: its wall and CPU time, and what it recommends."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "atoll", "plan", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    answer = json.loads(done.stdout)
    return {
        "plan": path.stem, "wall_seconds": round(wall, 1), "cpu_seconds": round(cpu, 1), "limit_seconds": LIMIT,
        "preset": answer["preset"], "learners": answer["learners"], "runs_of_the_machines": answer["runs_simulated"],
        "load": load_average(), "cores": os.cpu_count(), "machine": platform.machine(), "commit": commit(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of examples/plans; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "plan.jsonl")
    asked = parser.parse_args()
    paths = sorted((ROOT / "examples" / "plans").glob("*.toml"))
    late = False
    for path in paths:
        if asked.names and path.stem not in asked.names:
            continue
        line = timed(path)
        with asked.out.open("a", encoding="utf8") as file:
            file.write(json.dumps(line) + "\n")
        kept = line["wall_seconds"] < LIMIT
        late = late or not kept
        print(f"{path.stem}: {line['wall_seconds']} s, {line['cpu_seconds']} s of CPU, load average {line['load']}, "
              f"wanted below {LIMIT:g} s: {'PASS' if kept else 'FAIL'}")  # fmt: skip
    sys.exit(1 if late else 0)


if __name__ == "__main__":
    main()
