"""`bench/plan.py`, and its kept lines: a plan of every shipped example takes less than a minute."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiers import mostly_soak

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "plans").glob("*.toml"))


@pytest.fixture
def bench(bench_script: Callable[[str], ModuleType]) -> Any:
    return bench_script("plan")


@pytest.mark.parametrize("name", mostly_soak([path.stem for path in EXAMPLES], keep=["one_datacentre"]))
def test_a_plan_takes_less_than_a_minute_of_a_core(bench: Any, name: str) -> None:
    """Of CPU time: it has one thread, and the machine of a test may be shared."""
    line = bench.timed(ROOT / "examples" / "plans" / f"{name}.toml")
    assert line["cpu_seconds"] < bench.LIMIT
    assert line["runs_of_the_machines"] > 0


def test_kept_lines_are_of_every_example_and_within_the_limit(bench: Any) -> None:
    lines = [json.loads(text) for text in (ROOT / "bench" / "results" / "plan.jsonl").read_text(encoding="utf8").splitlines()]
    newest = {line["plan"]: line for line in lines}
    assert set(newest) == {path.stem for path in EXAMPLES}
    assert all(line["wall_seconds"] < bench.LIMIT and line["cores"] == 2 for line in newest.values())
    page = " ".join((ROOT / "docs" / "planning" / "planner.md").read_text(encoding="utf8").split())
    names = ("one_datacentre", "two_continents", "spot")
    wall, cpu = ([round(newest[name][key]) for name in names] for key in ("wall_seconds", "cpu_seconds"))
    assert f"take {wall[0]}, {wall[1]} and {wall[2]} s, or {cpu[0]}, {cpu[1]} and {cpu[2]} s of a core" in page
