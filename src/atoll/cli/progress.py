"""Progress of long commands: a bar on a terminal, lines at a bounded rate elsewhere. A step number never goes back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console

from atoll.cli.bars import Bars
from atoll.cli.shared import err, out
from atoll.config import Config
from atoll.ids import SYNCER, LearnerId, Nanos, WorkerId
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Effect, Event, Finished, FixParticipants, Membership, Refuse, Standing, StepDone
from atoll.tape.heldout import HeldoutPoint
from atoll.views.run import RunView

STANDSTILL: Final = 5
"""Refused updates of every learner, without a step between them, that are worth a warning."""
LINE_SECONDS: Final = 5.0
"""Between two lines of a command that has nothing else to print."""
WAITING, COMPILING = "waiting for learners", "compiling the step"
COMPILE_NOTE: Final = "torch.compile builds the step, which takes up to a minute"


class RunProgress:
    """Of a run that trains: a bar on a terminal, otherwise a line every tenth of the run."""

    def __init__(self, settings: Config, view: RunView, quiet: bool, clock: str) -> None:
        """`quiet`: standard output is for JSON. `clock`: goes before the unit of time, as in "virtual s"."""
        self._settings, self._view, self._clock = settings, view, clock
        self._console: Console = err if quiet else out
        self.bars = Bars(self._console)
        self._step = f"{settings.preset}: step"
        self._waits = Paced(self.say)
        self._note = ""
        self._there: set[LearnerId] = set()
        self._begun = self._stepped = False
        self._next = 0
        self._ended = False
        self._refusals = 0
        self._heldout = ""

    def __enter__(self) -> RunProgress:
        self.bars.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.__exit__()

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        """An observer of the syncer's events; of learners' only the first step is of interest, which has compiled the model."""
        if worker != SYNCER:
            if not self._stepped and isinstance(event, StepDone):
                self._compiled()
            return
        for effect in effects:
            if isinstance(effect, Membership) and not self._begun:
                self._joined(effect)
            elif isinstance(effect, FixParticipants | Finished):
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

    def waits_for_learners(self, note: str = "") -> None:
        """Until the first step: processes start, load, compile and join."""
        self._note = note
        self.bars.update(WAITING, 0, self._settings.learners, "learners", note=note)

    def _joined(self, change: Membership) -> None:
        (self._there.add if change.standing is Standing.IN_SYNC else self._there.discard)(change.learner)
        there, of = len(self._there), self._settings.learners
        self.bars.update(WAITING, there, of, "learners", note=self._note)
        if not self.bars.shown and there < of:
            self._waits(lambda: f"{WAITING}: {there} of {of} have joined")

    def compiles(self) -> None:
        """Until the first inner step is done."""
        if self.bars.shown:
            self.bars.update(COMPILING, 0, None, note=COMPILE_NOTE)
        else:
            self.say(COMPILE_NOTE)

    def _compiled(self) -> None:
        self._stepped = True
        self.bars.end(COMPILING)

    def on_point(self, point: HeldoutPoint) -> None:
        """A held-out loss of Theta. It may come long after its step, so it names that step and is no progress."""
        if not self.bars.shown:
            self.say(f"{self._settings.preset}: {heldout_line(point)}")
        else:
            self._heldout = f", {heldout_line(point)}"

    def reached(self, step: int, seconds: float, loss: float | None) -> None:
        last = self._settings.total_steps
        text = f"train loss {loss:.4f}" if loss is not None else ""
        if not self._begun:
            self._begun = True
            self._compiled()
            self.bars.end(WAITING)
        if self.bars.shown:
            self.bars.update(self._step, step, last, "steps", note=text + self._heldout)
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

    def __init__(self, total_steps: int, say: Callable[[str], None], bars: Bars | None = None) -> None:
        self._total, self._paced, self._bars = total_steps, Paced(say), bars

    def __call__(self, records: int, step: int) -> None:
        if self._bars is not None and self._bars.shown:
            self._bars.update("replay", step, self._total, "steps", note=f"{records:,} records")
            return
        self._paced(lambda: f"replay: step {step} of {self._total}, {records:,} records")
