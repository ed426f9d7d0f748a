"""The numbers of docs/planning/planner.md are those that its commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli.app import app

ROOT = Path(__file__).parents[2]
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
