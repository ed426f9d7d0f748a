"""What a run prints, as a new user reads it: progress, times, tokens, and where the weights are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.cli.progress import Paced, ReplayProgress, RunProgress, heldout_line
from atoll.cli.shared import out
from atoll.config import load
from atoll.protocol.ledger import Loss
from atoll.tape.heldout import HeldoutPoint
from atoll.views.run import RunView, Summary, TokenCounts, token_shares
from atoll.views.tables import FATES, run_table

TINY = [
    word
    for key in (
        "total_steps=8", "learners=2", "data.seq_len=16", "data.batch_size=2", "data.max_bytes=200000", "data.heldout_batches=2",
        "model.numbers={width=16, layers=2, heads=2, mlp=24}", "protocol.fragments=4", "protocol.local_steps_per_round=4",
        "data.heldout_every=3",
    )
    for word in ("--set", key)
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A virtual run's folder, and what it printed."""
    folder = tmp_path_factory.mktemp("summary") / "run"
    done = CliRunner().invoke(app, ["train", "--virtual", *TINY, "--out", str(folder)], catch_exceptions=False)
    return folder, done.output


# ---------------------------------------------------------------- the summary


def test_last_line_names_the_file_with_the_weights_and_the_json_has_it_as_theta(run: tuple[Path, str]) -> None:
    folder, printed = run
    assert printed.splitlines()[-1] == f"trained weights: {folder / 'theta.safetensors'}"
    summary = json.loads((folder / "summary.json").read_bytes())
    assert Path(summary["theta"]) == folder / "theta.safetensors" and Path(summary["theta"]).is_file()


def test_run_without_tensors_names_no_weights(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["sim", *TINY, "--out", "sim", "--json"], catch_exceptions=False)
    assert json.loads(done.stdout)["theta"] is None and not (tmp_path / "sim" / "theta.safetensors").exists()


def test_summary_has_the_time_of_training_and_that_of_the_command(run: tuple[Path, str]) -> None:
    summary = json.loads((run[0] / "summary.json").read_bytes())
    assert summary["clock"] == "virtual" and summary["seconds"] > 7.0, "eight virtual seconds"
    assert 0.0 < summary["command_seconds"] < 600.0
    assert re.search(r"training time .*virtual time", run[1]) and "command took" in run[1]


def test_rounds_that_merged_are_not_steps() -> None:
    few = ["--preset", "diloco", "--set", "total_steps=12", "--set", "protocol.local_steps_per_round=4"]
    summary = json.loads(CliRunner().invoke(app, ["sim", *few, "--json"], catch_exceptions=False).stdout)
    assert (summary["total_steps"], summary["rounds_merged"], summary["participants"]) == (12, 3, {"4": 3})


def test_shares_of_tokens_add_up_and_tokens_are_counted_once(run: tuple[Path, str]) -> None:
    summary = json.loads((run[0] / "summary.json").read_bytes())
    assert sum(summary["token_shares"].values()) == pytest.approx(1.0, abs=1e-5)
    assert summary["tokens_trained"] == summary["tokens"]["trained"] // 4
    assert summary["tokens_trained"] % (2 * 16) == 0, "samples, tokens"
    assert "(token, fragment)" not in run[1] and "goodput of time" in run[1] and "goodput of tokens" in run[1]


def test_every_fate_of_a_token_has_words() -> None:
    assert set(FATES) == {"merged", "in_flight"} | {f"discarded_{reason.value}" for reason in Loss}
    assert token_shares(TokenCounts(0, 0, 0, 0, {})) == {}


def test_table_of_a_run_that_trained_nothing_is_printed() -> None:
    empty = Summary(
        preset="diloco", learners=2, seed=0, total_steps=0, goodput=0.0, uptime=0.0, waited_seconds=0.0, participants={},
        tokens=TokenCounts(0, 0, 0, 0, {}), recoveries=[], bytes_up=0, bytes_down=0, loss_first=None, loss_final=None,
        theta_sha256=None, tape=None, run_dir=None, clock="wall", seconds=0.0, fragments=1,
    )  # fmt: skip
    with out.capture() as shown:
        out.print(run_table(empty))
    assert "none: no update was due" in shown.get()


# ---------------------------------------------------------------- progress


def test_steps_never_go_back_and_a_late_heldout_loss_names_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load(assignments=["total_steps=40"])
    with RunProgress(settings, RunView(2), quiet=False, clock="") as progress, out.capture() as shown:
        for step in range(1, 41):
            progress.reached(step, step / 10, 2.5)
            if step == 30:
                progress.on_point(HeldoutPoint(11, 5.25))
        progress.reached(40, 4.1, 2.5)
    lines = shown.get().splitlines()
    steps = [int(match[1]) for line in lines if (match := re.match(r"decoupled: step (\d+) of 40, ", line))]
    assert steps == sorted(set(steps)) and steps[-1] == 40 and len(steps) <= 12
    assert "decoupled: held-out loss of step 11: 5.2500" in lines
    for loss in (None, float("nan")):
        assert heldout_line(HeldoutPoint(3, loss)) == "held-out loss of step 3: no number"


def test_progress_of_a_run_speaks_of_steps_of_the_run(run: tuple[Path, str]) -> None:
    assert "decoupled: step 8 of 8, " in run[1] and "decoupled: held-out loss of step 3: " in run[1]
    assert "outer step" not in run[1]


def test_replay_says_how_far_it_is_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr("atoll.cli.progress.time.monotonic", lambda: now[0])
    progress = ReplayProgress(40, said.append)
    for record in range(1, 1001):
        now[0] += 0.02  # twenty seconds in all
        progress(record, record // 25)
    assert 3 <= len(said) <= 4 and said[0].startswith("replay: step 10 of 40, ")


def test_text_of_a_line_that_is_not_due_is_not_made() -> None:
    Paced(lambda text: None)(lambda: pytest.fail("made"))


def test_replay_of_weights_says_at_once_what_it_does(run: tuple[Path, str]) -> None:
    done = CliRunner().invoke(app, ["replay", str(run[0]), "--weights"], catch_exceptions=False)
    assert done.stderr.startswith("replaying ")
    assert json.loads((run[0] / "summary.json").read_bytes())["theta_sha256"] in done.stdout


# ---------------------------------------------------------------- one run, named in several ways


@pytest.mark.parametrize("name", ["", "run.tape"])
@pytest.mark.parametrize(
    "command", [["replay"], ["replay", "--weights"], ["strip"], ["eval"], ["export", "--hf", "hf"]], ids=" ".join
)
def test_commands_take_the_folder_of_a_run_or_its_tape(command: list[str], name: str, run: tuple[Path, str]) -> None:
    done = CliRunner().invoke(app, [command[0], str(run[0] / name), *command[1:]], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("command", [["replay"], ["strip"], ["eval"], ["export", "--hf", "hf"], ["snapshot", "ls"]], ids=" ".join)
def test_commands_refuse_what_is_no_run_with_the_same_sentence(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("missing", "empty"):
        words = [*command, name] if command[0] == "snapshot" else [command[0], name, *command[1:]]
        done = CliRunner().invoke(app, words)
        assert str(done.exception).startswith(f"run {name}: no run is there; give a run's folder"), done.output
