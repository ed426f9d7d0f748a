"""Progress of long commands: a bar on a terminal, lines at a bounded rate elsewhere. A step number never goes back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from atoll.cli.shared import err, out
from atoll.config import Config
from atoll.ids import SYNCER, Nanos, WorkerId
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Effect, Event, Finished, FixParticipants, Refuse
from atoll.tape.heldout import HeldoutPoint
from atoll.views.run import RunView

STANDSTILL: Final = 5
"""Refused updates of every learner, without a step between them, that are worth a warning."""
LINE_SECONDS: Final = 5.0
"""Between two lines of a command that has nothing else to print."""


class RunProgress:
    """Of a run that trains: a bar on a terminal, otherwise a line every tenth of the run."""

    def __init__(self, settings: Config, view: RunView, quiet: bool, clock: str) -> None:
        """`quiet`: standard output is for JSON. `clock`: goes before the unit of time, as in "virtual s"."""
        self._settings, self._view, self._clock = settings, view, clock
        self._console: Console = err if quiet else out
        self._bar: Progress | None = None
        self._next = 0
        self._ended = False
        self._refusals = 0
        self._heldout = ""

    def __enter__(self) -> RunProgress:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("{task.fields[loss]}"), console=self._console,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(f"{self._settings.preset}: step", total=self._settings.total_steps, loss="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        """An observer of the syncer's events."""
        if worker != SYNCER:
            return
        for effect in effects:
            if isinstance(effect, FixParticipants | Finished):
                self._refusals = 0
                self.reached(effect.outer_step, now / 1e9, self._view.train_loss)
            elif isinstance(effect, Refuse) and effect.reason.why in (Why.POISONED, Why.OUTLIER):
                self._refused(effect.reason)

    def _refused(self, reason: Reason) -> None:
        """Learners that recover only to fail again take part in no round: without this warning the run would stand still in
        silence."""
        self._refusals += 1
        if self._refusals == STANDSTILL * self._settings.learners:
            why = f"no step since {self._refusals} updates were refused ({reason.detail})"
            self.say(f"warning: {why}; lower inner.learning_rate")

    def on_point(self, point: HeldoutPoint) -> None:
        """A held-out loss of Theta. It may come long after its step, so it names that step and is no progress."""
        if self._bar is None:
            self.say(f"{self._settings.preset}: {heldout_line(point)}")
        else:
            self._heldout = f", {heldout_line(point)}"

    def reached(self, step: int, seconds: float, loss: float | None) -> None:
        last = self._settings.total_steps
        text = f"train loss {loss:.4f}" if loss is not None else ""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=text + self._heldout)
        elif step >= self._next or (step == last and not self._ended):
            self._next, self._ended = step + max(1, last // 10), step == last
            done = f"{self._settings.preset}: step {step} of {last}, {seconds:.1f} {self._clock}s"
            self.say(f"{done}, {text}" if text else done)


def heldout_line(point: HeldoutPoint) -> str:
    number = point.loss is not None and math.isfinite(point.loss)
    return f"held-out loss of step {point.outer_step}: " + (f"{point.loss:.4f}" if number else "no number")


class Paced:
    """Lines at a bounded rate, for work that takes long and has no bar."""

    def __init__(self, say: Callable[[str], None], seconds: float = LINE_SECONDS) -> None:
        self._say, self._seconds = say, seconds
        self._next = time.monotonic() + seconds

    def __call__(self, text: Callable[[], str]) -> None:
        """`text` is made only where it is printed."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + self._seconds
            self._say(text())


class ReplayProgress:
    """Of a replay: how many records were re-derived, and which step of the run they belong to."""

    def __init__(self, total_steps: int, say: Callable[[str], None]) -> None:
        self._total, self._paced = total_steps, Paced(say)

    def __call__(self, records: int, step: int) -> None:
        self._paced(lambda: f"replay: step {step} of {self._total}, {records:,} records")
