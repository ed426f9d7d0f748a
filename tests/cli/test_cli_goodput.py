"""The command line of the failure model: goodput, scavenging, synthetic tapes."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.cli.simulate.failure_options import model_from_options
from atoll.errors import UserError
from atoll.sim.estimates.failures import FailureModel

KEYS = {"learners", "elastic", "chips", "goodput", "uptime", "standard_error"}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_options_default_to_the_models_own_constants() -> None:
    assert asdict(model_from_options()) == pytest.approx(asdict(FailureModel()))


def test_goodput_json_is_a_list_of_cells() -> None:
    size = "150000"
    cells = json.loads(run("goodput", "--chips", size, "--learners", "1", "--learners", "4", "--precision", "0.5", "--json"))
    assert [(c["learners"], c["elastic"]) for c in cells] == [(1, False), (1, True), (4, True)]
    assert all(set(c) == KEYS and c["chips"] == 150_000 for c in cells)
    assert all(0 < c["goodput"] <= c["uptime"] + 1e-6 <= 100 + 1e-5 for c in cells)
    assert all(0 < c["standard_error"] <= 0.5 for c in cells)


def test_goodput_table_says_its_constants_and_writes_what_it_drew(tmp_path: Path) -> None:
    drawn, pattern, table = tmp_path / "g.png", tmp_path / "p.svg", tmp_path / "g.csv"
    text = run(
        "goodput", "--chips", "100000", "--learners", "2", "--days", "3", "--mtbi", "90", "--figure", str(drawn),
        "--pattern", str(pattern), "--csv", str(table),
    )  # fmt: skip
    assert "MTBI 90 days a chip" in text and "100,000" in text
    assert drawn.stat().st_size > 10_000 and b"recovers" in pattern.read_bytes()
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert row["learners"] == "2" and 0 < float(row["live_1"]) <= float(row["live_90"]) <= 100


def test_scavenge_json(tmp_path: Path) -> None:
    (answer,) = json.loads(run("scavenge", "--extra", "1", "--day", "0.5", "--cycles", "1", "--learners", "2", "--json"))
    assert answer["share"] == 1.0 and answer["ideal"] == 0.75
    assert answer["decoupled"] == pytest.approx(0.75, rel=0.05) and answer["joins"] == 2


def test_synthetic_tape_is_an_ordinary_run(tmp_path: Path) -> None:
    directory = tmp_path / "history"
    summary = json.loads(run("tape", "--chips", "400000", "--set", "total_steps=20", "--out", str(directory), "--json"))
    assert summary["total_steps"] == 20 and (directory / "run.tape").exists()
    told = CliRunner().invoke(app, ["replay", str(directory)], catch_exceptions=False)
    assert told.exit_code == 0 and "every decision as recorded" in told.stdout


def test_folder_without_a_virtual_tape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--tape .*: no run is there"):
        CliRunner().invoke(app, ["train", "--tape", str(tmp_path)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["goodput", "--mtbi", "-3"], "--mtbi -3: must be above 0"),
        (["goodput", "--chips", "1000", "--learners", "9"], "--learners 9: more than the 8 slices"),
        (["goodput", "--chips", "0"], "--chips 0"),
        (["goodput", "--step-time", "nan"], "--step-time nan"),
        (["goodput", "--step-noise", "1.5"], "--step-noise 1.5"),
        (["goodput", "--days", "0"], "--days 0"),
        (["goodput", "--precision", "0"], "--precision 0"),
        (["goodput", "--return", "0"], "--return 0"),
        (["goodput", "--figure", "x.pdf"], "must end in .png or .svg"),
        (["scavenge", "--extra", "0.3"], "whole number of scavenged learners"),
        (["scavenge", "--gbit", "0"], "--gbit 0: must be above 0"),
        (["scavenge", "--day", "-1"], "--day -1"),
        (["scavenge", "--latency", "-1"], "--latency -1"),
        (["tape", "--chips", "100", "--learners", "8"], "--learners 8: more than the 1 slices"),
        (["tape", "--mtbi", "0"], "--mtbi 0"),
    ],
)
def test_nonsense_gets_one_sentence(arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert words in str(refused.value) and "\n" not in str(refused.value)
