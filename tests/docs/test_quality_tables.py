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
    assert len(MARKS) == 5


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
