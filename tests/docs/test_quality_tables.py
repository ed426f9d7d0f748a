"""The marked tables of docs/research/results.md are made from the lines of the runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "research" / "results.md"
MARKS = re.findall(r"<!-- tables\.py (.*?) -->", PAGE.read_text(encoding="utf8"))


def test_the_page_has_tables_that_are_made_from_lines() -> None:
    assert len(MARKS) == 8


@pytest.mark.parametrize("arguments", MARKS)
def test_a_marked_table_is_what_its_lines_give(arguments: str, bench_script: Callable[[str], ModuleType]) -> None:
    tables = bench_script("quality/tables")
    shown = dict(tables.blocks(PAGE.read_text(encoding="utf8")))
    assert shown[arguments] == tables.made(arguments), "run: python bench/quality/tables.py --page docs/research/results.md"


def test_a_page_is_made_anew(tmp_path: Path, bench_script: Callable[[str], ModuleType]) -> None:
    tables = bench_script("quality/tables")
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n<!-- tables.py {MARKS[-1]} -->\n\n| an old table |\n\nafter\n", encoding="utf8")
    assert tables.renew(page) == 1
    assert page.read_text(encoding="utf8") == f"before\n\n<!-- tables.py {MARKS[-1]} -->\n\n{tables.made(MARKS[-1])}\nafter\n"
    assert tables.renew(page) == 0
    with pytest.raises(SystemExit, match="--only nobody: no such run"):
        tables.made("search_50M.jsonl --reference muloco_1.0_0.5 --only nobody")


def test_losses_on_the_way_are_those_nearest_to_each_outer_step(bench_script: Callable[[str], ModuleType]) -> None:
    tables = bench_script("quality/tables")
    points = [[8, 5.0], [104, 4.5], [196, 4.25], [208, 4.0]]
    run = {"heldout_points": points, "total_steps": 300, "method": "decoupled", "loss_final": 3.5}
    shown = tables.points_table({"m8": [run], "without": [run | {"heldout_points": []}]}, 100).splitlines()
    assert shown[0] == "| outer step | 100 | 200 | 300 |"
    assert shown[2:] == ["| m8 | 4.5000 | 4.2500 | 3.5000 |"]
    with pytest.raises(SystemExit, match="--points: no run here has losses on the way"):
        tables.points_table({"without": [run | {"heldout_points": []}]}, 100)
