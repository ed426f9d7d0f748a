"""Loggers: what is logged once is not logged again, a growing tape is followed, and one logger at a time writes to a place."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from command import atoll

from atoll.chaos import ChaosPlan
from atoll.config import load
from atoll.errors import RunFailed, UserError
from atoll.runtime.loggers import sinks
from atoll.runtime.loggers.follow import log_run, own_folder
from atoll.runtime.loggers.sinks import LogTarget, log_target
from atoll.sim.run import run_virtual
from atoll.store.lock import lock_directory
from atoll.tape.folder import find_run
from atoll.tape.heldout import HeldoutPoint, append_point
from atoll.views.log_points import LogPoint, RunIdentity

STEPS = 40


class Lines:
    """A sink for tests: a file with a line for each point."""

    def __init__(self, where: str, identity: RunIdentity) -> None:
        if where == "dead":
            raise ConnectionError("nobody is there")
        self._path = Path(where)
        self._there = lines_in(self._path)

    def last_step(self, stream: str) -> int:
        return max((point.step for point in self._there if point.stream == stream), default=0)

    def write(self, points: Sequence[LogPoint]) -> None:
        with self._path.open("ab") as file:
            file.writelines(msgspec.json.encode(point) + b"\n" for point in points)

    def close(self) -> None:
        pass


def lines_in(path: Path) -> list[LogPoint]:
    """Those that are whole: its last one may be being written."""
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=LogPoint) for line in lines]


@pytest.fixture(autouse=True)
def lines_are_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sinks.KINDS, "lines", sinks.KINDS["tensorboard"]._replace(opened=Lines, form="lines:FILE", module="json"))


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    config = load(overrides={"learners": 2, "total_steps": STEPS, "protocol": {"fragments": 4, "local_steps_per_round": 8}})
    return run_virtual(config, ChaosPlan(), tmp_path_factory.mktemp("logged"), tensors=False).tape.read_bytes()


def grown(run: Path, tape: bytes, share: float) -> None:
    """The run's tape so far: its writer was killed in the middle of a line."""
    run.mkdir(exist_ok=True)
    (run / "config.toml").touch()
    (run / "run.tape").write_bytes(tape[: round(share * len(tape))])


def test_run_that_is_logged_in_parts_and_again_is_logged_once(tape: bytes, tmp_path: Path) -> None:
    run, target, counts = tmp_path / "run", LogTarget("lines", str(tmp_path / "log")), []
    for share, point in ((0.3, HeldoutPoint(5, 3.0)), (0.7, HeldoutPoint(10, 2.5)), (1.0, HeldoutPoint(STEPS, 2.0)), (1.0, None)):
        grown(run, tape, share)
        if point is not None:
            append_point(run, point)
        counts.append(log_run(find_run(run), target))
    logged = lines_in(tmp_path / "log")
    assert [point.step for point in logged if point.stream == "rounds"] == list(range(1, STEPS + 1))
    assert [(point.step, *point.values.values()) for point in logged if point.stream == "heldout"] == [
        (5, 3.0), (10, 2.5), (STEPS, 2.0),
    ]  # fmt: skip
    assert sum(counts) == len(logged) and counts[-1] == 0 and min(counts[:3]) > 5


def test_growing_tape_is_followed_to_its_end(tape: bytes, tmp_path: Path) -> None:
    run, log, done = tmp_path / "run", tmp_path / "log", list[int]()
    grown(run, tape, 0.5)
    follower = threading.Thread(target=lambda: done.append(log_run(find_run(run), LogTarget("lines", str(log)), follow=True)))
    follower.start()
    pause = threading.Event()
    while len(lines_in(log)) < 5:
        assert follower.is_alive()
        pause.wait(0.01)
    with (run / "run.tape").open("ab") as file:
        file.write(tape[round(0.5 * len(tape)) :])
    follower.join(60)
    assert done == [STEPS] == [len(lines_in(log))]


def test_follower_that_is_stopped_logs_what_is_there_and_ends(tape: bytes, tmp_path: Path) -> None:
    run, log, stop = tmp_path / "run", tmp_path / "log", threading.Event()
    grown(run, tape, 0.5)
    stop.set()
    logged = log_run(find_run(run), LogTarget("lines", str(log)), follow=True, stop=stop, lingers=True)
    assert 5 < logged == len(lines_in(log)) < STEPS


def test_two_loggers_of_one_place_and_a_dead_sink_are_refused_in_a_sentence(tape: bytes, tmp_path: Path) -> None:
    run, target = tmp_path / "run", LogTarget("lines", str(tmp_path / "log"))
    grown(run, tape, 1.0)
    with (
        lock_directory(own_folder(run, target), "logger"),
        pytest.raises(UserError, match=r"another logger \(pid \d+\) uses it; stop that one, or give another --to"),
    ):
        log_run(find_run(run), target)
    with pytest.raises(RunFailed, match=r"^lines:dead: cannot be logged to: nobody is there$"):
        log_run(find_run(run), LogTarget("lines", "dead"))


@pytest.mark.parametrize("text", ["tensorboard", "tensorboard:", "stdout:x", "", ":x"])
def test_what_names_no_logger_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(UserError, match=r"^--log-to .*: names no logger; give one of tensorboard:FOLDER, wandb:PROJECT, mlflow:"):
        log_target(text, "--log-to")


def test_logger_whose_package_is_missing_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sinks.KINDS, "wandb", sinks.KINDS["wandb"]._replace(module="no_such_package_anywhere"))
    done = atoll("train", "--log-to", "wandb:mine", cwd=tmp_path)
    assert done.returncode == 2 and "pip install 'atoll[wandb]'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_command_logs_a_finished_run_and_says_how_much(tape: bytes, tmp_path: Path) -> None:
    grown(tmp_path / "run", tape, 1.0)
    for expected in (STEPS, 0):
        done = atoll("log", "run", "--to", "lines:points", cwd=tmp_path)
        assert done.returncode == 0 and f"lines:points: {expected} points logged" in done.stdout
