"""Bars: on a terminal with a rate and the time left, and never in a pipe."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from command import atoll
from rich.console import Console

from atoll.cli import progress as progress_module
from atoll.cli.bars import Bars
from atoll.cli.progress import COMPILE_NOTE, COMPILING, WAITING, ReplayProgress, RunProgress
from atoll.config import load
from atoll.ids import SYNCER
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import DeadlinePassed, FixParticipants, Membership, Standing, StepDone
from atoll.views.run import RunView


class Screen:
    """A terminal of 200 columns, and what was drawn on it."""

    def __init__(self, *, terminal: bool = True) -> None:
        self._text = io.StringIO()
        self.console = Console(file=self._text, force_terminal=terminal, width=200, color_system=None)

    def drawn(self) -> str:
        text = self._text.getvalue()
        self._text.truncate(0)
        self._text.seek(0)
        return text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_bar_says_how_much_how_fast_and_how_long(clock: list[float]) -> None:
    screen = Screen()
    with Bars(screen.console) as bars:
        for done in range(0, 60_000_001, 10_000_000):
            bars.update("encoding text", done, 100_000_000, "MB", scale=1e6)
            clock[0] += 5.0
    drawn = screen.drawn()
    assert "encoding text" in drawn and "60 of 100 MB" in drawn and "2 MB/s" in drawn and "0:00:20" in drawn and "left" in drawn


def test_bar_is_not_redrawn_for_every_piece_of_work_and_ends_where_it_is_told_to(clock: list[float]) -> None:
    screen = Screen()
    with Bars(screen.console) as bars:
        for done in range(1000):
            bars.update("replay", done, 1000, "steps", note=f"note {done}")
        bars.update("compiling", 0, None)
        bars.end("replay")
        bars.end("never begun")
        screen.drawn()
    assert "replay" not in screen.drawn()


def test_nothing_is_drawn_in_a_pipe() -> None:
    screen = Screen(terminal=False)
    with Bars(screen.console) as bars:
        bars.update("encoding text", 1, 2, "MB")
        assert not bars.shown
        ReplayProgress(40, lambda text: pytest.fail(text), bars)(10, 1)
    assert screen.drawn() == ""


def change(learner: int, standing: Standing) -> Membership:
    return Membership(learner, standing, Reason(Why.ENTERED))


def test_run_shows_who_is_awaited_then_its_steps(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    screen = Screen()
    monkeypatch.setattr(progress_module, "out", screen.console)
    with RunProgress(load(assignments=["learners=3"]), RunView(3), quiet=False, clock="") as progress:
        progress.waits_for_learners()
        for learner in (0, 1, 2):
            progress(0, SYNCER, DeadlinePassed(), [change(learner, Standing.IN_SYNC)])
            clock[0] += 1.0
        progress(0, SYNCER, DeadlinePassed(), [change(1, Standing.LOST)])
        clock[0] += 1.0
        progress(0, SYNCER, DeadlinePassed(), [change(1, Standing.LOST)])
        for step in (1, 2, 3):
            progress(0, SYNCER, DeadlinePassed(), [FixParticipants(step, (0,), (0, 2), Reason(Why.ALL_REPORTED))])
            clock[0] += 0.5
    last = screen.drawn()
    assert "decoupled: step" in last and "3 of 240 steps" in last and "2 steps/s" in last
    assert WAITING in last and WAITING not in last.splitlines()[-1]


def test_run_says_that_it_compiles_until_its_first_inner_step(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, plain = Screen(), Screen(terminal=False)
    for each in (screen, plain):
        monkeypatch.setattr(progress_module, "out", each.console)
        with RunProgress(load(), RunView(4), quiet=False, clock="virtual ") as progress:
            progress.compiles()
            progress(0, 2, StepDone(1, 1, 1, 2.5), [])
    assert COMPILING in screen.drawn() and plain.drawn().strip() == COMPILE_NOTE


def test_run_in_a_pipe_says_who_is_awaited_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    screen = Screen(terminal=False)
    monkeypatch.setattr(progress_module, "out", screen.console)
    with RunProgress(load(assignments=["learners=3"]), RunView(3), quiet=False, clock="") as progress:
        for learner in (0, 1):
            clock[0] += 6.0
            for _ in range(5):
                progress(0, SYNCER, DeadlinePassed(), [change(learner, Standing.IN_SYNC)])
    assert screen.drawn().splitlines() == [f"{WAITING}: {n} of 3 have joined" for n in (1, 2)]


GOODPUT = ["simulate", "goodput", "--chips", "6000", "--learners", "2", "--learners", "4", "--days", "0.2"]
PLAN = ["plan", str(Path(__file__).parents[2] / "examples" / "plans" / "one_datacentre.toml")]


@pytest.mark.parametrize(
    ("words", "shown"), [(GOODPUT, ("simulating", "of 2 clusters")), (PLAN, ("searching", "what would change", "parts/s"))]
)
def test_command_draws_on_a_terminal_and_not_in_a_pipe(words: list[str], shown: tuple[str, ...], tmp_path: Path) -> None:
    piped = atoll(*words, cwd=tmp_path)
    assert piped.returncode == 0 and "\x1b" not in piped.stdout + piped.stderr
    assert "clusters/s" not in piped.stderr and "parts/s" not in piped.stderr
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "50"}
    with subprocess.Popen(
        [sys.executable, "-m", "atoll", *words], cwd=tmp_path, stderr=theirs, stdout=subprocess.DEVNULL, env=environment
    ) as command:
        os.close(theirs)
        drawn = b""
        while chunk := _read(ours):
            drawn += chunk
    os.close(ours)
    assert command.returncode == 0 and all(each.encode() in drawn for each in shown), drawn[-2000:]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # its other end is closed
        return b""
