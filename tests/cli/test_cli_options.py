"""Nothing is ignored: every option of `atoll simulate ...` and `atoll plan` gives another answer, a refusal or a reason.

One row for each option: the command without it, the option, and what it does there. A new option without a row fails here.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.errors import AtollError

PLANS = Path(__file__).parents[2] / "examples" / "plans"
DIFFERS, REFUSED, FILE = "another answer", "a refusal", "a file"


class Case(NamedTuple):
    option: str
    """As the help names it first."""
    base: str
    words: str
    does: str
    """DIFFERS, REFUSED, FILE, or words of the option's help that say why it changes no figure."""


GRAPH = "bandwidth --layers 12 --parameters 1e9 --step-time 0.5 --targets 80 --grid 0.1:100:400 --json"
STREAMS = f"{GRAPH} --method streaming_overlap"
MODEL = "--layers 6 --parameters 1e8 --step-time 0.5 --interval 24 --fragments 6"
STAR = f"bandwidth {MODEL} --targets 90 --grid 0.02:0.4:2 --at 0.12 --json --method decoupled"
RATE = "bandwidth --layers 12 --parameters 1e9 --targets 80 --json --method diloco"
CHIPS = "goodput --chips 2048 --learners 2 --mtbi 10 --days 6 --json"
RIGID = "goodput --chips 2048 --learners 1 --no-elastic --mtbi 10 --days 6 --json"
NIGHT = "scavenge --extra 1 --learners 2 --day 0.2 --cycles 1 --json"
SLOW = "uneven --learners 3 --interval 8 --steps 40 --slow-share 0.34 --json"
TAPE = "tape --learners 2 --chips 1024 --mtbi 0.05 --return 1 --set total_steps=60 --json"
PLAN = f"plan {PLANS / 'one_datacentre.toml'} --no-what-if"
FLOPS = "--chips 64 --flops-per-chip 1e15 --mfu 0.4 --batch-tokens 1e6"

BANDWIDTH = [
    Case("models", "bandwidth 1B --json --targets 80 --method diloco", "10B", DIFFERS),
    Case("--layers", GRAPH, "--layers 24", DIFFERS),
    Case("--parameters", GRAPH, "--parameters 2e9", DIFFERS),
    Case("--step-time", GRAPH, "--step-time 1.0", DIFFERS),
    Case("--chips", f"{RATE} {FLOPS}", "--chips 128", DIFFERS),
    Case("--flops-per-chip", f"{RATE} {FLOPS}", "--flops-per-chip 2e15", DIFFERS),
    Case("--mfu", f"{RATE} {FLOPS}", "--mfu 0.2", DIFFERS),
    Case("--batch-tokens", f"{RATE} {FLOPS}", "--batch-tokens 2e6", DIFFERS),
    Case("--method", GRAPH, "--method diloco", DIFFERS),
    Case("--interval", GRAPH, "--interval 50", DIFFERS),
    Case("--interval", f"{GRAPH} --method data_parallel", "--interval 50", REFUSED),
    Case("--overlap", STREAMS, "--overlap 3", DIFFERS),
    Case("--overlap", f"{STAR} --codec-up fp32", "--overlap 1", DIFFERS),
    Case("--overlap", f"{GRAPH} --method async_diloco", "--overlap 250", DIFFERS),
    Case("--overlap", f"{GRAPH} --method diloco", "--overlap 3", REFUSED),
    Case("--fragments", STREAMS, "--fragments 12", DIFFERS),
    Case("--fragments", f"{GRAPH} --method diloco", "--fragments 12", REFUSED),
    Case("--layers-per-fragment", STREAMS, "--layers-per-fragment 1", DIFFERS),
    Case("--layers-per-fragment", f"{STREAMS} --fragments 12", "--layers-per-fragment 1", REFUSED),
    Case("--pattern", f"{GRAPH} --method streaming", "--pattern sequential", DIFFERS),
    Case("--pattern", STAR, "--pattern sequential", REFUSED),
    Case("--codec", STREAMS, "--codec int8", DIFFERS),
    Case("--codec", STAR, "--codec int8", REFUSED),
    Case("--bits-per-parameter", STREAMS, "--bits-per-parameter 8", DIFFERS),
    Case("--bits-per-parameter", STAR, "--bits-per-parameter 8", REFUSED),
    Case("--calibration", STREAMS, "--calibration published", DIFFERS),
    Case("--calibration", STAR, "--calibration published", DIFFERS),
    Case("--calibration", f"{STREAMS} --bits-per-parameter 8", "--calibration published", REFUSED),
    Case("--datacentres", STREAMS, "--datacentres 8", DIFFERS),
    Case("--datacentres", STAR, "--datacentres 8", REFUSED),
    Case("--datacentres", f"{STAR} --shards 2", "--datacentres 8", DIFFERS),
    Case("--latency", STREAMS, "--latency 0.4", DIFFERS),
    Case("--latency", STAR, "--latency 0.4", DIFFERS),
    Case("--run-steps", STREAMS, "--run-steps 40", DIFFERS),
    Case("--run-steps", f"{GRAPH} --method async_diloco", "--run-steps 500", DIFFERS),
    Case("--run-steps", STAR, "--run-steps 500", REFUSED),
    Case("--run-steps", f"{STREAMS} --steady", "--run-steps 500", REFUSED),
    Case("--steady", STREAMS, "--steady", DIFFERS),
    Case("--steady", STAR, "--steady", REFUSED),
    Case("--learners", STAR, "--learners 4", "moves no figure by itself"),
    Case("--learners", STREAMS, "--learners 4", REFUSED),
    Case("--learners-per-datacentre", STAR, "--learners-per-datacentre 4", DIFFERS),
    Case("--shards", STAR, "--shards 2", DIFFERS),
    Case("--shard-topology", f"{STAR} --shards 4 --datacentres 4 --learners-per-datacentre 2", "--shard-topology ring", DIFFERS),
    Case("--shard-topology", STAR, "--shard-topology ring", REFUSED),
    Case("--quorum", STAR, "--quorum 2", "moves no figure by itself"),
    Case("--quorum", STREAMS, "--quorum 2", REFUSED),
    Case("--grace", STAR, "--no-grace", "Equally fast learners leave it nothing to wait for"),
    Case("--ramp", STAR, "--ramp 0.2", DIFFERS),
    Case("--codec-up", STAR, "--codec-up fp32", DIFFERS),
    Case("--codec-down", STAR, "--codec-down fp32", DIFFERS),
    Case("--down-ratio", STAR, "--down-ratio 0.25", DIFFERS),
    Case("--targets", GRAPH, "--targets 50", DIFFERS),
    Case("--grid", GRAPH, "--grid 0.1:50:7", DIFFERS),
    Case("--at", GRAPH, "--at 3", DIFFERS),
    Case("--json", RATE.replace(" --json", f" {FLOPS}"), "--json", DIFFERS),
    Case("--csv", GRAPH, "--csv FILE.csv", FILE),
    Case("--figure", GRAPH, "--figure FILE.png", FILE),
    Case("--allow-plugin", GRAPH, "--allow-plugin nowhere.py", REFUSED),
]
GOODPUT = [
    Case("--chips", CHIPS, "--chips 4096", DIFFERS),
    Case("--learners", CHIPS, "--learners 4", DIFFERS),
    Case("--elastic", CHIPS, "--no-elastic", DIFFERS),
    Case("--days", CHIPS, "--days 9", DIFFERS),
    Case("--precision", CHIPS.replace("--days 6", "--precision 2"), "--precision 0.5", DIFFERS),
    Case("--precision", CHIPS, "--precision 1", REFUSED),
    Case("--mtbi", CHIPS, "--mtbi 20", DIFFERS),
    Case("--slice", CHIPS, "--slice 64", DIFFERS),
    Case("--step-time", CHIPS, "--step-time 9", DIFFERS),
    Case("--step-noise", CHIPS, "--step-noise 0.2", DIFFERS),
    Case("--resize-down", CHIPS, "--resize-down 60", DIFFERS),
    Case("--resize-down", RIGID, "--resize-down 60", REFUSED),
    Case("--resize-up", CHIPS, "--resize-up 60", DIFFERS),
    Case("--resize-up", RIGID, "--resize-up 60", REFUSED),
    Case("--restart", RIGID, "--restart 200", DIFFERS),
    Case("--restart", CHIPS, "--restart 200", REFUSED),
    Case("--return", CHIPS, "--return 10", DIFFERS),
    Case("--return", RIGID, "--return 10", REFUSED),
    Case("--return-shape", CHIPS, "--return-shape 1.5", DIFFERS),
    Case("--return-exponent", CHIPS, "--return-exponent 1", DIFFERS),
    Case("--seed", CHIPS, "--seed 5", DIFFERS),
    Case("--json", CHIPS.replace(" --json", ""), "--json", DIFFERS),
    Case("--csv", CHIPS, "--csv FILE.csv", FILE),
    Case("--figure", CHIPS, "--figure FILE.png", FILE),
    Case("--pattern", CHIPS, "--pattern FILE.png", FILE),
    Case("--pattern-minutes", f"{CHIPS} --pattern FILE.png", "--pattern-minutes 3", FILE),
    Case("--pattern-minutes", CHIPS, "--pattern-minutes 3", REFUSED),
]
SCAVENGE = [
    Case("--extra", NIGHT, "--extra 0.5", DIFFERS),
    Case("--learners", NIGHT, "--learners 3", DIFFERS),
    Case("--day", NIGHT, "--day 0.3", DIFFERS),
    Case("--cycles", NIGHT, "--cycles 2", DIFFERS),
    Case("--step-time", NIGHT, "--step-time 4", DIFFERS),
    Case("--parameters", NIGHT, "--parameters 3e9", DIFFERS),
    Case("--layers", NIGHT, "--layers 8", DIFFERS),
    Case("--gbit", NIGHT, "--gbit 3", DIFFERS),
    Case("--latency", NIGHT, "--latency 0.5", DIFFERS),
    Case("--resize", NIGHT, "--resize 60", DIFFERS),
    Case("--seed", NIGHT, "--seed 5", DIFFERS),
    Case("--json", NIGHT.replace(" --json", ""), "--json", DIFFERS),
]
UNEVEN = [
    Case("--learners", SLOW, "--learners 4", DIFFERS),
    Case("--learners", SLOW, "--learners 1", REFUSED),
    Case("--slow-share", SLOW, "--slow-share 0.67", DIFFERS),
    Case("--slow-share", SLOW, "--slow-share 1.5", REFUSED),
    Case("--slow-factor", SLOW, "--slow-factor 1.5", DIFFERS),
    Case("--slow-factor", SLOW, "--slow-factor 0.5", REFUSED),
    Case("--step-noise", SLOW, "--step-noise 0.3", DIFFERS),
    Case("--step-noise", SLOW, "--step-noise 1", REFUSED),
    Case("--interval", SLOW, "--interval 12", DIFFERS),
    Case("--interval", SLOW, "--interval 1", REFUSED),
    Case("--overlap", SLOW, "--overlap 1", DIFFERS),
    Case("--overlap", SLOW, "--overlap 8", REFUSED),
    Case("--lead", SLOW, "--lead 0", DIFFERS),
    Case("--lead", SLOW, "--lead -1", REFUSED),
    Case("--latency", SLOW, "--latency 0.4", DIFFERS),
    Case("--latency", SLOW, "--latency -1", REFUSED),
    Case("--steps", SLOW, "--steps 60", DIFFERS),
    Case("--steps", SLOW, "--steps 4", REFUSED),
    Case("--seed", SLOW, "--seed 5", DIFFERS),
    Case("--json", SLOW.replace(" --json", ""), "--json", DIFFERS),
]
TAPES = [
    Case("recipe", TAPE, "RECIPE.toml", DIFFERS),
    Case("--chips", TAPE, "--chips 2048", DIFFERS),
    Case("--preset", TAPE, "--preset streaming", DIFFERS),
    Case("--learners", TAPE, "--learners 3", DIFFERS),
    Case("--set", TAPE, "--set total_steps=70", DIFFERS),
    Case("--seed", TAPE, "--seed 4", DIFFERS),
    Case("--mtbi", TAPE, "--mtbi 0.02", DIFFERS),
    Case("--slice", TAPE, "--slice 64", DIFFERS),
    Case("--step-time", TAPE, "--step-time 9", DIFFERS),
    Case("--step-noise", TAPE, "--step-noise 0.2", DIFFERS),
    Case("--resize-down", TAPE, "--resize-down 60", DIFFERS),
    Case("--resize-up", TAPE, "--resize-up 60", DIFFERS),
    Case("--return", TAPE, "--return 5", DIFFERS),
    Case("--return-shape", TAPE, "--return-shape 1.5", DIFFERS),
    Case("--return-exponent", TAPE, "--return-exponent 1", DIFFERS),
    Case("--out", TAPE, "--out FILE.folder", FILE),
    Case("--json", TAPE.replace(" --json", ""), "--json", DIFFERS),
]
PLANNED = [
    Case("cluster_file", PLAN, "nowhere.toml", REFUSED),
    Case("--out", PLAN, "--out FILE.toml", FILE),
    Case("--candidates", PLAN, "--candidates 2", DIFFERS),
    Case("--what-if", PLAN, "--what-if", DIFFERS),
    Case("--verbose", PLAN, "--verbose", DIFFERS),
    Case("--json", PLAN, "--json", DIFFERS),
    Case("--allow-plugin", PLAN, "--allow-plugin nowhere.py", REFUSED),
]
CASES = {"bandwidth": BANDWIDTH, "goodput": GOODPUT, "scavenge": SCAVENGE, "uneven": UNEVEN, "tape": TAPES, "plan": PLANNED}
UNREPEATABLE = ("tape", "run_dir", "command_seconds")
"""Of a summary: they differ between two runs of the same command."""


def options(command: str) -> dict[str, str]:
    """The help of each option of a command."""
    group: Any = typer.main.get_command(app)
    found = group.commands[command] if command == "plan" else group.commands["simulate"].commands[command]
    shown = [p for p in found.params if p.name != "help"]
    return {p.opts[0] if p.opts[0].startswith("--") else p.name: getattr(p, "help", "") or "" for p in shown}


@pytest.mark.parametrize("command", CASES)
def test_every_option_has_a_row(command: str) -> None:
    assert {case.option for case in CASES[command]} == set(options(command))


_folders = count()


def said(words: str, folder: Path) -> str | None:
    """What the command prints, less what no two runs share. None: it is refused."""
    names = {"FILE": str(folder / f"file{next(_folders)}"), "RECIPE.toml": str(_recipe(folder))}
    for name, value in names.items():
        words = words.replace(name, value)
    parts = words.split() if words.startswith("plan") else ["simulate", *words.split()]
    if parts[1] == "tape" and "--out" not in parts:
        parts += ["--out", str(folder / f"tape{next(_folders)}")]
    done = CliRunner().invoke(app, parts, terminal_width=160)
    if isinstance(done.exception, AtollError) or done.exit_code == 2:
        return None
    assert done.exit_code == 0, (parts, done.output, done.exception)
    text = done.stdout.strip().splitlines()
    if text and text[-1].startswith("{") and parts[1] == "tape":
        return json.dumps({key: value for key, value in json.loads(text[-1]).items() if key not in UNREPEATABLE})
    return "\n".join(text)


def _recipe(folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text("seed = 9\n", encoding="utf8")
    return path


@cache
def base_said(words: str, folder: Path) -> str | None:
    return said(words, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("options")


ON_MACHINES = (STAR, NIGHT)
"""What these simulate takes a second each time: their rows are tried by `make soak`."""


def rows() -> list[Any]:
    """(command, its rows), those on machines apart; no row is left out, and no test is without rows."""
    found = []
    for command, cases in CASES.items():
        heavy = [case for case in cases if case.base.startswith(ON_MACHINES)]
        light = [case for case in cases if case not in heavy]
        found += [pytest.param(light, id=command)] if light else []
        found += [pytest.param(heavy, id=f"{command} on machines", marks=pytest.mark.soak)] if heavy else []
    return found


@pytest.mark.parametrize("cases", rows())
def test_every_option_changes_the_answer_or_is_refused_or_says_why(cases: list[Case], folder: Path) -> None:
    for case in cases:
        before, written = base_said(case.base, folder), set(folder.iterdir())
        assert before is not None, case
        after = said(f"{case.base} {case.words}", folder)
        if case.does == REFUSED:
            assert after is None, case
        elif case.does == FILE:
            assert set(folder.iterdir()) - written, case
        elif case.does == DIFFERS:
            assert after is not None, case
            assert after != before, case
        else:
            assert case.does in " ".join(options(case.base.split()[0])[case.option].split()), case
