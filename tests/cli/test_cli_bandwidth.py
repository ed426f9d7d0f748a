"""`atoll simulate bandwidth` as a user meets it: the table, data for programs, a figure, and refusals in one sentence."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from command import atoll
from typer.testing import CliRunner

from atoll.cli import app
from atoll.errors import UserError

KEYS = ["model", "method", "interval", "utilisation", "gbit_per_s"]
CHIPS = ["--chips", "8", "--flops-per-chip", "1e15", "--batch-tokens", "1e6"]
SEVEN = ["--layers", "32", "--parameters", "7e9", "--step-time", "0.5"]


def ask(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["simulate", "bandwidth", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def objects(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ask("--json", *arguments))
    assert all(list(each) == KEYS for each in found)
    return found


def test_published_table_is_printed_beside_ours_without_torch(tmp_path: Path) -> None:
    code = "import sys; from atoll.cli import main; sys.argv = ['atoll', 'simulate', 'bandwidth']\ntry: main()\n" \
           "except SystemExit as e: code = e.code\nassert 'torch' not in sys.modules; sys.exit(code)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "exact 71 of 75, the others one grid point off (*)" in lines
    assert sum("published" in line for line in lines) == 16  # a row each, and the calibration's name
    assert sum("ours" in line for line in lines) == 15
    assert done.stdout.count("*") == 5
    assert "13.33 effective bits" in done.stdout
    assert "100B: 108 layers, 1e11 parameters, 4.9 s a step" in done.stdout
    assert max(map(len, lines[:-1])) <= 100


def test_one_model_prints_one_table() -> None:
    shown = ask("10B")
    assert "exact 24 of 25, the others one grid point off (*)" in shown
    assert "1B:" not in shown.replace("10B:", "")


def test_json_is_a_list_of_cells() -> None:
    found = objects()
    assert len(found) == 75
    assert found[0] == {"model": "1B", "method": "data_parallel", "interval": 1, "utilisation": 50, "gbit_per_s": 86.8}
    assert {each["interval"] for each in found if each["method"] != "data_parallel"} == {100}
    assert {each["utilisation"] for each in found} == {50, 80, 90, 95, 99}


def test_what_the_grid_never_reaches_is_null() -> None:
    found = objects("1B", "--method", "data_parallel", "--grid", "0.1:1:5", "--targets", "0.5,99.5")
    assert [each["gbit_per_s"] is None for each in found] == [False, True]
    assert [each["utilisation"] for each in found] == [0.5, 99.5]
    assert "> 1" in ask("1B", "--method", "data_parallel", "--grid", "0.1:1:5")


def test_described_like_a_published_model_with_its_effective_bits_it_needs_the_same() -> None:
    described = objects("--layers", "24", "--parameters", "1e9", "--step-time", "0.1", "--bits-per-parameter", "13.3333")
    for ours, published in zip(described, objects("1B"), strict=True):
        assert ours["model"] == "custom"
        assert ours["gbit_per_s"] == pytest.approx(published["gbit_per_s"], abs=0.0541)


def test_calibration_is_selectable_and_plain_for_a_model_of_ones_own() -> None:
    assert "16 effective bits a parameter (bf16, plain calibration)" in ask(*SEVEN)
    assert "13.33 effective bits a parameter (bf16, published calibration" in ask(*SEVEN, "--calibration", "published")
    assert "4.125 effective bits a parameter (int4, plain calibration)" in ask(*SEVEN, "--codec", "int4")
    plain = ask("1B", "--calibration", "plain")
    assert "exact" not in plain


def test_step_time_from_chips_is_six_times_parameters_times_tokens_over_flops() -> None:
    shown = ask("--layers", "32", "--parameters", "7e9", "--chips", "100", "--flops-per-chip", "1e15", "--mfu", "0.42",
                "--batch-tokens", "1e6")  # fmt: skip
    assert "1 s a step" in shown


def test_at_adds_the_utilisation_there() -> None:
    shown = ask(*SEVEN, "--method", "diloco", "--method", "async_diloco", "--at", "2", "--at", "20")
    assert "at 20 Gbit/s" in shown
    found = objects(*SEVEN, "--method", "diloco", "--at", "2")
    assert len(found) == 6
    assert found[-1]["gbit_per_s"] == 2.0
    assert 0 < found[-1]["utilisation"] < 50


def test_options_change_the_answer_the_way_they_should() -> None:
    def needs(*more: str, method: str = "streaming_overlap") -> float:
        cells = objects(*SEVEN, "--method", method, "--targets", "95", "--grid", "0.1:10000:400", *more)
        assert isinstance(cells[0]["gbit_per_s"], float)
        return float(cells[0]["gbit_per_s"])

    base = needs()
    assert needs("--interval", "200") < base < needs("--interval", "50")
    assert needs("--overlap", "2") < base
    assert needs("--datacentres", "8") > base
    assert needs("--codec", "int4") < base < needs("--codec", "fp32")
    assert needs("--fragments", "16") < base  # smaller pieces, better hidden
    assert needs("--layers-per-fragment", "8") > base
    assert needs("--latency", "0.1", method="diloco") > needs(method="diloco")
    assert needs("--run-steps", "1000") < base  # the trailing reduction weighs less
    assert needs("--steady") < base


def test_decoupled_says_how_it_was_measured(tmp_path: Path) -> None:
    arguments = ["--layers", "6", "--parameters", "1e9", "--step-time", "1", "--interval", "12", "--grid", "0.1:10:9"]
    arguments += ["--method", "decoupled", "--learners", "3", "--quorum", "2", "--no-grace", "--codec-down", "int8", "--at", "5"]
    done = CliRunner().invoke(app, ["simulate", "bandwidth", *arguments], catch_exceptions=False)
    assert "running the state machines in virtual time" in done.stderr
    assert "the smaller of two shares" in done.stdout
    assert "decoupled: 3 learners, 1 on each datacentre's link, quorum 2, " in done.stdout
    assert "grace none, tau 2, ramp 0, int4 up, int8 down" in done.stdout
    assert "computes 100.0% of the time, a fragment every 12.0 steps instead of 12" in done.stdout


def test_csv_holds_the_same_cells_and_the_published_ones(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    found = objects("--csv", str(path))
    with path.open(encoding="utf8") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == [*KEYS, "published_gbit_per_s"]
    assert [float(line["gbit_per_s"]) for line in lines] == [each["gbit_per_s"] for each in found]
    assert sum(line["gbit_per_s"] == line["published_gbit_per_s"] for line in lines) == 71


def test_figure_is_written_as_png_or_svg(tmp_path: Path) -> None:
    ask("1B", "--figure", str(tmp_path / "a.png"))
    ask("1B", "--method", "diloco", "--figure", str(tmp_path / "a.svg"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


REFUSED = [
    (["2B"], "model '2B': there are 1B, 10B, 100B"),
    (["--layers", "0", "--parameters", "1e9", "--step-time", "1"], "--layers 0: must be from 1"),
    (["--layers", "4", "--parameters", "-1", "--step-time", "1"], "--parameters -1: must be a number above 0"),
    (["--layers", "4", "--parameters", "nan", "--step-time", "1"], "--parameters nan: must be a number above 0"),
    (["--layers", "4", "--parameters", "1e9", "--step-time", "0"], "--step-time 0: must be a number above 0"),
    (["--layers", "4"], "--parameters, --step-time: not given"),
    (["--layers", "4", "--parameters", "1e9", "--chips", "8"], "--flops-per-chip, --mfu, --batch-tokens: not given"),
    ([*SEVEN, *CHIPS, "--mfu", "0.4"], "--step-time 0.5: goes without --chips"),
    ([*CHIPS, "--mfu", "40"], "--mfu 40.0: is a share"),
    (["1B", "--method", "gossip"], "--method gossip: no such method; there are data_parallel"),
    (["1B", "--codec", "int3"], "--codec int3: must be fp32, bf16"),
    (["1B", "--codec-up", "zip"], "--codec-up zip: must be fp32, bf16"),
    (["1B", "--interval", "0"], "--interval 0: must be from 1"),
    (["1B", "--overlap", "100"], "--overlap 100: must be below --interval 100"),
    (["1B", "--overlap", "-1"], "--overlap -1: must be 0"),
    (["1B", "--interval", "1"], "--interval 1: must be above the overlap, which is 1 by default"),
    (["1B", "--fragments", "25"], "--fragments 25: must be at most as many as there are layers, 24"),
    (["1B", "--fragments", "0"], "--fragments 0: must be at least 1"),
    (["1B", "--layers-per-fragment", "0"], "--layers-per-fragment 0: must be at least 1"),
    (["1B", "--pattern", "spiral"], "--pattern spiral: must be one of strided, sequential, balanced"),
    (["1B", "--bits-per-parameter", "0"], "--bits-per-parameter 0.0: must be above 0"),
    (["1B", "--calibration", "guess"], "--calibration guess: must be one of published, plain"),
    (["1B", "--datacentres", "1"], "--datacentres 1: must be from 2"),
    (["1B", "--latency", "-0.1"], "--latency -0.1: must be 0 s or more"),
    (["1B", "--run-steps", "0"], "--run-steps 0: must be from 1"),
    (["1B", "--learners", "0"], "--learners 0: must be at least 1"),
    (["1B", "--quorum", "3"], "--quorum 3: must be from 1 to the 2 learners"),
    (["1B", "--ramp", "1"], "--ramp 1.0: is a share of the run"),
    (["1B", "--down-ratio", "0"], "--down-ratio 0: must be above 0"),
    (["1B", "--targets", "50,101"], "--targets 50,101: must be numbers above 0 and up to 100"),
    (["1B", "--targets", "half"], "--targets half: must be numbers"),
    (["1B", "--grid", "0:10:5"], "--grid 0:10:5: bandwidth must be above 0 Gbit/s"),
    (["1B", "--grid", "5:1:5"], "--grid 5:1:5: must end above its beginning"),
    (["1B", "--grid", "1:10:1"], "--grid 1:10:1: must have from 2"),
    (["1B", "--grid", "1-10"], "--grid 1-10: must be FROM:TO:POINTS"),
    (["1B", "--at", "0"], "--at 0: bandwidth must be above 0 Gbit/s"),
    (["1B", "--at", "-3"], "--at -3: bandwidth must be above 0 Gbit/s"),
    (["1B", "--figure", "a.pdf"], "figure a.pdf: its name must end in .png or .svg"),
    (["1B", "--csv", "missing/a.csv"], "--csv missing/a.csv: cannot be written"),
    (["1B", "--method", "decoupled", "--overlap", "0"], "overlap = 0: adoption on arrival needs at least 1"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_nonsense_is_refused_in_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refusal:
        CliRunner().invoke(app, ["simulate", "bandwidth", *arguments], catch_exceptions=False)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_refusal_exits_with_2(tmp_path: Path) -> None:
    done = atoll("simulate", "bandwidth", "--overlap", "100", cwd=tmp_path)
    sentence = "atoll: --overlap 100: must be below --interval 100; only async_diloco overlaps whole rounds\n"
    assert (done.returncode, done.stderr) == (2, sentence)
