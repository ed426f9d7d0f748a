"""A live run as a new user meets it: what is printed and logged, and the ways to name the run afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import atoll
from harness import forks_of
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.store.lock import lock_directory

SNAPSHOT = 10
STEPS = 2 * SNAPSHOT - 1
SLOW = "\n".join(f'[[faults]]\nfault = "slow"\nat = 0.0\nlearner = {m}\nfactor = 8.0\nlasts = 1000.0' for m in (0, 1))
"""One snapshot, in the middle. One that is not written when the next is due or the run ends is abandoned: so the steps are slow,
200 ms and eight times what they cost on any machine, and the snapshot has nine of them. Its parts cost less than one. No round
is without both learners, so one that stalls is not left behind."""
TINY = [
    word
    for key in (
        f"total_steps={STEPS}", "learners=2", "protocol.fragments=4", "protocol.local_steps_per_round=4",
        "limits.silence_steps=1000", "protocol.quorum=2",
        "data.seq_len=16", "data.batch_size=2", "data.max_bytes=200000", "data.heldout_batches=2",
        "model.numbers={width=16, layers=2, heads=2, mlp=24}", f"protocol.snapshot_interval={SNAPSHOT}",
    )
    for word in ("--set", key)
]  # fmt: skip

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A live run's folder and its summary."""
    folder = tmp_path_factory.mktemp("new-user")
    (folder / "slow.toml").write_text(SLOW)
    with forks_of():
        done = atoll("train", *TINY, "--chaos", "slow.toml", "--out", "run", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run", json.loads(done.stdout)


def test_summary_names_the_weights_and_both_times(live: tuple[Path, dict[str, object]]) -> None:
    folder, summary = live
    assert summary["theta"] == "run/syncer/theta.safetensors" and (folder / "syncer" / "theta.safetensors").is_file()
    seconds, command = summary["seconds"], summary["command_seconds"]
    assert isinstance(seconds, float) and isinstance(command, float) and 0 < seconds < command


def test_syncer_logs_its_start_its_progress_and_an_end_that_is_no_failure(live: tuple[Path, dict[str, object]]) -> None:
    log = (live[0] / "syncer.log").read_text()
    for words in (
        "waiting for 2 learners", "learner0 has joined", "learner1 has joined", f"step 1 of {STEPS}: ",
        f"step {STEPS} of {STEPS}: the run is finished", "learner0 has ended: the run is finished",
        "learner1 has ended: the run is finished", "trained weights: ",
    ):  # fmt: skip
        assert words in log, f"{words!r} is not in: {log}"
    assert "is lost" not in log and "Traceback" not in log and "{" not in log


@pytest.mark.parametrize("name", ["", "syncer", "syncer/run.tape"])
def test_every_command_takes_the_run_by_any_of_its_names(
    live: tuple[Path, dict[str, object]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, theta = str(live[0] / name), str(live[1]["theta_sha256"])
    for words, expected in (
        (["replay", run], "every decision as recorded"), (["replay", run, "--weights"], theta),
        (["strip", run], "learner1 has ended"), (["eval", run], "heldout"), (["export", run, "--hf", "hf"], "model.safetensors"),
        (["snapshot", "ls", run], f"step {SNAPSHOT}: complete, learners [0, 1],"),
        (["snapshot", "verify", run], f"step {SNAPSHOT}: sound"),
    ):  # fmt: skip
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0 and expected in done.output, done.output


def test_second_syncer_of_a_folder_is_refused_before_it_loads_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.cli.syncer.built", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr("atoll.cli.building.logging.basicConfig", lambda **_: None)
    with lock_directory(tmp_path / "syncer"):
        done = CliRunner().invoke(app, ["syncer", *TINY, "--dir", str(tmp_path / "syncer"), "--listen", "127.0.0.1:0"])
    assert "another syncer (pid " in str(done.exception)
