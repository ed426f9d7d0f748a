"""Folders that cannot be used, ports that are taken, full disks and Ctrl-C: a sentence each, and nothing half done is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from atoll.cli import runs as running
from atoll.cli.app import app, main
from atoll.cli.shared import write_summary
from atoll.errors import UserError
from atoll.transport.keys import make_keys
from atoll.views.run import Summary, TokenCounts

SMALL = [
    "total_steps=4", "learners=2", "data.seq_len=16", "data.batch_size=2", "data.max_bytes=200000", "data.heldout_batches=2",
    "model.numbers={width=16, layers=2, heads=2, mlp=24}", "protocol.fragments=4", "protocol.local_steps_per_round=4",
]  # fmt: skip
TINY = [word for key in SMALL for word in ("--set", key)]
SUMMARY = Summary(
    preset="decoupled", learners=2, seed=0, total_steps=4, goodput=1.0, uptime=1.0, waited_seconds=0.0, participants={},
    tokens=TokenCounts(0, 0, 0, 0, {}), recoveries=[], bytes_up=1, bytes_down=1, loss_first=3.0, loss_final=2.5,
    theta_sha256=None, tape=None, run_dir="run", clock="wall", seconds=1.0, fragments=1,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("elsewhere")


def refusal(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(done.exception, UserError), done.output
    assert "\n" not in str(done.exception)
    return str(done.exception)


# ---------------------------------------------------------------- folders


@pytest.fixture
def not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere: ask the mode instead."""
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK or bool(Path(path).stat().st_mode & 0o200))


@pytest.mark.parametrize(
    "command", [["syncer", "--listen", "127.0.0.1:0", "--dir"], ["learner", "--out"], ["sim", "--out"]], ids=" ".join
)
@pytest.mark.usefixtures("unbuilt", "not_root")
def test_folder_that_cannot_be_one_is_refused_before_anything_is_loaded(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "closed").mkdir(mode=0o555)
    for path in ("file", "file/x"):
        assert refusal(*command, path) == f"{command[-1]} {path}: file is not a folder; choose a new one"
    for path in ("closed", "closed/x"):
        assert refusal(*command, path) == f"{command[-1]} {path}: closed is not writable; choose a folder of your own"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["closed", "file"]


# ---------------------------------------------------------------- syncers that start in vain


@pytest.mark.usefixtures("unbuilt")
def test_syncer_whose_port_is_taken_leaves_no_folder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host in ("127.0.0.1", "localhost"):
            address = f"{host}:{taken.getsockname()[1]}"
            said = refusal("syncer", *TINY, "--dir", "new", "--listen", address)
            assert said == f"cannot listen on {address}: the port is taken or the address is not one of this machine"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("unbuilt")
def test_syncer_whose_token_key_is_no_secret_leaves_no_folder(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", learners=0)
    (tmp_path / "keys" / "token.key").write_bytes(b"short")
    said = refusal("syncer", *TINY, "--dir", "new", "--listen", "127.0.0.1:0", "--keys", "keys")
    assert said.startswith("keys/token.key is too short for a secret")
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


# ---------------------------------------------------------------- what nobody foresaw


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (OSError(28, "No space left", "a/b"), "a/b: the disk is full (No space left); make room and try again", 1),
        (OSError(28, "No space left"), "the disk is full (No space left); make room and try again", 1),
        (FileExistsError(17, "File exists", "f"), "f: cannot be used (File exists)", 2),
        (PermissionError(13, "Permission denied", "[red]f"), "[red]f: cannot be used (Permission denied)", 2),
        (FileNotFoundError(2, "No such file or directory", "f"), "f: cannot be used (No such file or directory)", 1),
        (OSError("as it is"), "as it is", 1),
    ],
)  # fmt: skip
def test_error_of_the_system_is_a_sentence(
    error: OSError, said: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> None:
        raise error

    monkeypatch.setattr(sys.modules[main.__module__], "app", failing)
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (code, f"atoll: {said}\n")


def test_full_disk_under_a_virtual_run_is_told_by_its_file_or_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("atoll.store.weights.tensor_chunks", full)
    done = CliRunner().invoke(app, ["train", "--virtual", *TINY, "--out", "run"])
    assert isinstance(done.exception, OSError) and done.exception.filename == "run/theta.safetensors"
    assert not (tmp_path / "run" / "theta.safetensors").exists() and (tmp_path / "run" / "run.tape").exists()
    for filename, told in ((None, "run"), ("cache/text", "cache/text")):
        with pytest.raises(OSError, match="No space left") as caught, running.readable_tape(Path("run")):
            raise OSError(28, "No space left on device", filename)
        assert caught.value.filename == told


def test_summary_that_cannot_be_written_leaves_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, _: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError) as caught:
        write_summary(tmp_path, SUMMARY)
    assert caught.value.filename == str(tmp_path / "summary.json") and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("began", [False, True])
def test_interrupt_names_a_tape_only_if_there_is_one(began: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if began:
        (tmp_path / "run.tape").touch()
    with pytest.raises(typer.Exit) as ended, running.readable_tape(tmp_path):
        raise KeyboardInterrupt
    left = f"; {tmp_path / 'run.tape'} is readable up to its last whole record" if began else " before the run began"
    assert (ended.value.exit_code, capsys.readouterr().err) == (130, f"atoll: interrupted{left}\n")


# ---------------------------------------------------------------- words that say nothing


@pytest.mark.parametrize("command", [["train"], ["train", "--virtual"], ["sim"], ["compare", "diloco"]], ids=" ".join)
@pytest.mark.usefixtures("unbuilt")
def test_chaos_that_names_no_plan_is_refused(command: list[str], tmp_path: Path) -> None:
    assert refusal(*command, "--chaos", "").startswith("--chaos '': names no plan; give a TOML file or random:")
    assert list(tmp_path.iterdir()) == []


def test_recipe_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    assert refusal("sim", "folder.toml") == "recipe folder.toml: cannot be read (Is a directory)"


# ---------------------------------------------------------------- Ctrl-C before there is anything

EARLY = """
import builtins, os, signal
real = builtins.__import__

def hook(name, *rest, **more):
    if name.startswith(("atoll.cli", "typer")):
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest, **more)

import atoll.__main__
builtins.__import__ = hook
atoll.__main__.main()
"""


@pytest.mark.parametrize(("ignored", "code"), [(False, 130), (True, 0)])
def test_interrupt_during_the_imports_is_quiet_and_one_that_a_shell_ignores_is_none(
    ignored: bool, code: int, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        words = [sys.executable, "-c", EARLY, "--version"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stderr) == (code, "")


def test_command_begins_where_the_module_does() -> None:
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf8"))["project"]["scripts"]
    assert scripts == {"atoll": "atoll.__main__:main"}
