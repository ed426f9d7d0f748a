"""What a syncer logs while a run goes on: which learners come and go, and how far the run is, at a bounded rate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Final

from atoll.config import Config
from atoll.ids import LearnerId, OuterStep, worker_name
from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import FixParticipants, Membership, Standing

QUICKEST_SECONDS: Final = 1.0
"""Between two lines of progress."""
SLOWEST_SECONDS: Final = 30.0
"""After so long a line is due, however little of the run has passed; before, after every tenth of the run."""
WORDS: Final[Mapping[Standing, str]] = {
    Standing.JOINING: "is joining",
    Standing.IN_SYNC: "has joined",
    Standing.SILENT: "is silent",
    Standing.LOST: "is lost",
    Standing.LEFT: "has left",
    Standing.EXPELLED: "is expelled",
}


class SyncerProgress:
    def __init__(self, config: Config, say: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._learners, self._total, self._say, self._now = config.learners, config.total_steps, say, now
        self._losses: dict[LearnerId, float] = {}
        self._said_at = now() - SLOWEST_SECONDS
        self._next_step: OuterStep = 0

    def reported(self, learner: LearnerId, loss: float | None) -> None:
        if loss is not None and math.isfinite(loss):  # a learner may send anything
            self._losses[learner] = loss

    def fixed(self, effect: FixParticipants) -> None:
        """The learners of a step are fixed: that many steps have been reached."""
        step, now = effect.outer_step, self._now()
        waited = now - self._said_at
        if waited >= SLOWEST_SECONDS or (step >= self._next_step and waited >= QUICKEST_SECONDS):
            self._said_at, self._next_step = now, step + max(1, self._total // 10)
            self._say(f"step {step} of {self._total}: {len(effect.participants)} of {self._learners} learners{self._loss()}")

    def _loss(self) -> str:
        return f", train loss {sum(self._losses.values()) / len(self._losses):.4f}" if self._losses else ""


def membership_line(change: Membership) -> str:
    """A learner that disconnects because the run is finished has ended as it should, and is not lost."""
    name = worker_name(change.learner)
    if change.standing == Standing.LOST and change.reason.why is Why.RUN_OVER:
        return f"{name} has ended: the run is finished"
    return f"{name} {WORDS[change.standing]}: {change.reason}"


def refusals_line(refused: Mapping[str, int]) -> str:
    """By what was refused: a token, a message, ..."""
    kinds = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in sorted(refused.items()))
    return f"{sum(refused.values())} requests and messages were refused ({kinds})"
