"""The tables of docs/research/results.md are those that its commands print from the kept lines."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import DOCS, ROOT, tables_of

from atoll.sim.estimates.published import GOODPUT, UPTIME

TEXT = (DOCS / "research" / "results.md").read_text(encoding="utf8")
TABLES = tables_of(TEXT)
RESULTS = ROOT / "bench" / "quality" / "results"
HOURS = "hours at 1 Gbit/s"


def first_with(column: str) -> list[dict[str, str]]:
    return next(rows for rows in TABLES if column in rows[0])


@pytest.fixture
def tables(bench_script: Callable[[str], ModuleType]) -> Any:
    return bench_script("quality/tables")


def cells_of(tables: Any, file: str, reference: str) -> dict[str, dict[str, str]]:
    """By run: what the command prints, by the head's words."""
    (found,) = tables_of(tables.table(tables.rows([RESULTS / file], 0.1, reference)))
    return {row["run"]: row for row in found}


def test_the_main_table_is_what_the_command_prints(tables: Any) -> None:
    assert first_with(HOURS) == list(cells_of(tables, "main_200M.jsonl", "data_parallel").values())


@pytest.mark.soak
@pytest.mark.parametrize(
    ("file", "reference", "first", "over"),
    [
        ("ablations_50M.jsonl", "base", "codec_bf16", "over base, %"),
        ("ablations_50M.jsonl", "data_parallel_muon", "muon_rda_rda", "over data-parallel with Muon, %"),
        ("ablations_2M_cpu.jsonl", "base", "overlap_0", "over base, %"),
    ],
)
def test_other_tables_are_what_their_commands_print(tables: Any, file: str, reference: str, first: str, over: str) -> None:
    (rows,) = [rows for rows in TABLES if over in rows[0] and rows[1]["run"] == first]
    found = cells_of(tables, file, reference)
    for row in rows:
        mine = found[row["run"]]
        same = ("held-out loss", "replica", "bytes", "peak Gbit/s", HOURS)
        assert [row[key] for key in same] == [mine[key] for key in same], row["run"]
        assert row[over] == ("" if row["run"] == reference else mine["over data-parallel, %"]), row["run"]


@pytest.mark.soak
def test_the_first_comparison_with_muon_is_what_its_command_prints(tables: Any) -> None:
    found = cells_of(tables, "sweep_muon_90M.jsonl", "dp_muon_3e-3")
    rows = next(rows for rows in TABLES if "bytes of bf16 data-parallel" in rows[0])
    for row, name in zip(rows, ("dp_muon_3e-3", "m2_muon_mean", "m8_muon_mean"), strict=True):
        mine = found[name]
        assert (row["held-out loss"], row["bytes of bf16 data-parallel"]) == (mine["held-out loss"], mine["bytes"])
        assert (row["peak Gbit/s"], row[HOURS]) == (mine["peak Gbit/s"], mine[HOURS])


@cache
def lines(file: str) -> list[Mapping[str, Any]]:
    return [json.loads(text) for text in Path(RESULTS / file).read_text(encoding="utf8").splitlines()]


def test_the_rates_of_muon_are_those_of_the_lines() -> None:
    names = {"data-parallel, 1.5e-3": "dp_0.0015", "data-parallel, 3e-3": "dp_0.003", "data-parallel, 6e-3": "dp_0.006",
             "decoupled, M = 8, 3e-3": "m8_0.003", "decoupled, M = 8, 6e-3": "m8_0.006"}  # fmt: skip
    loss = {
        line["name"]: line["loss_replica" if line["method"] == "data_parallel" else "loss_final"]
        for line in lines("rates_50M.jsonl")
    }
    rows = next(rows for rows in TABLES if rows[0].get("run") == "data-parallel, 1.5e-3")
    for row in rows:
        name = names[row["run"]]
        assert row["held-out loss"] == f"{loss[name]:.4f}"
        assert row["over data-parallel, %"] == ("" if name == "dp_0.003" else f"{100 * (loss[name] / loss['dp_0.003'] - 1):+.2f}")


def test_the_table_of_failures_is_that_of_the_lines_beside_the_published_one() -> None:
    found = {line["name"]: line for line in lines("main_200M.jsonl") if line["seed"] == 0}
    for row in first_with("goodput, % (published)"):
        m = 1 if "data-parallel" in row["learners"] else int(row["learners"])
        name, loss = ("data_parallel", "loss_replica") if m == 1 else (f"decoupled_m{m}", "loss_final")
        calm, failing = found[name], found[f"{name}_failures"]
        assert row["goodput, % (published)"] == f"{100 * failing['goodput']:.1f} ({GOODPUT[m, True][1_200_000]})"
        assert row["uptime, % (published)"] == f"{100 * failing['uptime']:.1f} ({UPTIME[m, True][1_200_000]})"
        assert row["discarded, %"] == f"{_discarded(failing):.0f} (without: {_discarded(calm):.0f})"
        over = row["loss over the same seed without failures, %"]
        assert over == f"{100 * (failing[loss] / calm[loss] - 1):+.2f}", name


def _discarded(line: Mapping[str, Any]) -> float:
    return float(100 * line["tokens"]["discarded"] / line["tokens"]["trained"])


def test_the_headline_is_the_mean_of_the_seeds() -> None:
    def mean(name: str, key: str) -> float:
        return statistics.mean(line[key] for line in lines("main_200M.jsonl") if line["name"] == name)

    base = mean("data_parallel", "loss_replica")
    two, four, eight = (100 * (mean(f"decoupled_m{m}", "loss_final") / base - 1) for m in (2, 4, 8))
    says = f"ends {two:.2f} % above data-parallel with two learners, {four:.2f} % with four and {eight:.2f} % with eight"
    assert says in " ".join(TEXT.split())
