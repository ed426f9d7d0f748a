"""The numbers of docs/planning/planner.md are those that its commands print."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from pages import tables_of
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.planner import evidence, quality
from atoll.planner.site import Quality

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "quality" / "results"
PAGE = (ROOT / "docs" / "planning" / "planner.md").read_text(encoding="utf8")
BLOCKS = re.findall(r"```\n\$ atoll ([^\n]+)\n(.*?)```", PAGE, re.DOTALL)
SLOW = "spot"


def test_the_page_shows_three_plans() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.parametrize(
    ("command", "shown"),
    [pytest.param(command, shown, marks=[pytest.mark.soak] if SLOW in command else []) for command, shown in BLOCKS],
    ids=[command.split("/")[-1] for command, _ in BLOCKS],
)
def test_the_page_shows_what_the_command_prints(command: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert [line.rstrip() for line in done.stdout.splitlines()] == shown.splitlines()


# ---------------------------------------------------------------- the quality model

Q = Quality()
ROWS = {row["key of [quality]"]: row for row in next(rows for rows in tables_of(PAGE) if "key of [quality]" in rows[0])}


def said(words: str) -> bool:
    """Whether the page says so, wherever its lines break."""
    return words in " ".join(PAGE.split())


def test_the_page_has_every_constant_with_its_value_and_what_it_rests_on() -> None:
    keys = [key for row in ROWS for key in row.split(", ")]
    assert sorted(keys) == sorted(Quality.__struct_fields__)
    for row in ROWS.values():
        for key, value in zip(row["key of [quality]"].split(", "), row["value"].split(", "), strict=True):
            assert float(value) == getattr(Q, key)
            assert quality.SUPPORT[key].removeprefix("fitted to ") == row["rests on"], key
    assert said(f"(parameters / 35M)^-{Q.size_exponent:g} x (H / 30)^{Q.interval_exponent:g}")
    assert said(f"x (1 + {Q.staleness_step:g} x staleness)")
    assert said(f"and {Q.learners_doubling:g} more with each doubling")
    assert said(f"(1 + loss)^(-1 / {Q.loss_slope:g})")
    assert said(f"to make up for 1 % of loss takes {100 * (1.01 ** (1 / Q.loss_slope) - 1):.0f} % more compute")


def test_the_page_says_how_far_the_fit_is_from_the_rows() -> None:
    rows = evidence.residuals(Q.base_percent, Q.size_exponent, Q.interval_exponent, Q.learners_doubling)
    mean = math.sqrt(sum(r * r for _, r in rows) / len(rows))
    row, worst = max(rows, key=lambda pair: abs(pair[1]))
    assert (row.source, row.parameters, row.percent < 0) == ("streaming", 1e9, True)
    assert said(f"Of the {len(rows)} published rows the root mean square is {mean:.2f} points, the largest {abs(worst):.2f}")
    own = evidence.OWN[0]
    factors = [(h / 30) ** Q.interval_exponent for h in own.interval]
    shape = [sum(own.percent) / sum(factors) * factor for factor in factors]
    measured, fitted = ("{:.1f}, {:.1f} and {:.1f}".format(*values) for values in (own.percent, shape))
    assert said(f"{measured} % at H = 12, 24 and 48, where its shape says {fitted}")


def test_the_page_says_what_a_delay_of_one_round_cost() -> None:
    lines = [json.loads(line) for line in (RESULTS / "main_200M.jsonl").read_text(encoding="utf8").splitlines()]
    replicas = [line["loss_replica"] for line in lines if line["name"] == "data_parallel"]
    alone = sum(replicas) / len(replicas)
    late, usual = (next(line["loss_final"] for line in lines if line["name"] == name) / alone - 1
                   for name in ("async_diloco_m8_h30", "diloco_m8_h30"))  # fmt: skip
    model = 1 + 30 * Q.staleness_step
    assert said(f"`async_diloco_m8_h30` is {late / usual:.1f} times `diloco_m8_h30`, where the model says {model:.1f}")
