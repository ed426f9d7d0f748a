"""Run times of the simulators as commands, and their distance from the published tables.

    python bench/simulators.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence

from atoll.sim.estimates.published import BANDWIDTH, GOODPUT, TARGETS, UPTIME, grid_points_apart

LIMITS = {"bandwidth table": 5.0, "goodput table": 60.0, "2.4 million chips for a month": 10.0}


def timed(name: str, arguments: Sequence[str]) -> list[dict[str, object]]:
    start = time.perf_counter()
    command = [sys.executable, "-m", "atoll", "simulate", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    took = time.perf_counter() - start
    print(f"{name}: {took:.1f} s, wanted below {LIMITS[name]:g} s: {'PASS' if took < LIMITS[name] else 'FAIL'}")
    cells: list[dict[str, object]] = json.loads(done.stdout)
    return cells


def main() -> None:
    cells = timed("bandwidth table", ["bandwidth"])
    apart = [
        grid_points_apart(cell["gbit_per_s"], BANDWIDTH[cell["model"], cell["method"]][TARGETS.index(cell["utilisation"])])
        for cell in cells
    ]
    fits = apart.count(0) >= 71 and max(apart) <= 1
    print(f"  exact {apart.count(0)} of {len(apart)}, at most {max(apart)} grid points off: {'PASS' if fits else 'FAIL'}")
    cells = timed("goodput table", ["goodput"])
    away = [
        abs(float(cell[name]) - published[cell["learners"], cell["elastic"]][cell["chips"]])
        for name, published in (("goodput", GOODPUT), ("uptime", UPTIME))
        for cell in cells
    ]
    error = max(float(str(cell["standard_error"])) for cell in cells)
    fits = max(away) <= 3.5 and sum(d <= 3.0 for d in away) >= 57 and error <= 0.2
    near = f"{sum(d <= 3.0 for d in away)} of {len(away)} cells within 3 points, at most {max(away):.2f} apart"
    print(f"  {near}, standard error at most {error:.2f}: {'PASS' if fits else 'FAIL'}")
    timed("2.4 million chips for a month", ["goodput", "--chips", "2400000", "--learners", "16", "--days", "30"])


if __name__ == "__main__":
    main()
