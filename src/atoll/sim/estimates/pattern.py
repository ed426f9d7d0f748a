"""Which groups of chips step, are stopped or recover over a short time: elastic data-parallel beside decoupled learners.

Both have the same chips in the same groups. In data-parallel training all groups are one learner, so a slice that fails in
one group stops every group; a decoupled learner recovers alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.errors import UserError
from atoll.sim.estimates.failures import FailureModel, SlicedLearner, Stretch
from atoll.sim.estimates.goodput import check_sizes, deal

STEPS, STOPPED, RECOVERS = "steps", "is stopped", "recovers"


@dataclass(frozen=True)
class Band:
    start: float
    """Seconds from the window's beginning."""
    end: float
    state: str


Rows = list[list[Band]]


def patterns(chips: int, groups: int, model: FailureModel, span: float, seed: int = 0) -> tuple[Rows, Rows]:
    """(data-parallel, decoupled): a row of bands for each group of chips, in the steady state of failures and returns."""
    check_sizes(chips, groups, model)
    if not span > 0:
        raise UserError(f"--pattern-minutes {span / 60:g}: must be above 0")
    warm = 2 * model.return_seconds
    rngs = np.random.default_rng([seed, chips, groups]).spawn(groups + 1)
    whole = SlicedLearner(chips, model, rngs[0])
    together = _within(whole.advance(warm + span), warm, warm + span)
    alone = [SlicedLearner(n, model, rng) for n, rng in zip(deal(chips, groups), rngs[1:], strict=True)]
    apart = [_within(learner.advance(warm + span), warm, warm + span) for learner in alone]
    return (
        [_row(together, warm, span, _Group(group, groups, whole.slices)) for group in range(groups)],
        [_row(history, warm, span, None) for history in apart],
    )


@dataclass(frozen=True)
class _Group:
    number: int
    groups: int
    slices: int

    def moved(self, s: Stretch) -> bool:
        """One of its own slices failed or returned."""
        return any(slice_ * self.groups // self.slices == self.number for slice_ in s.moved)


def _within(history: list[Stretch], start: float, end: float) -> list[Stretch]:
    return [s for s in history if s.end > start and s.start < end]


def _row(history: list[Stretch], start: float, span: float, group: _Group | None) -> list[Band]:
    """`group`: which part of a learner the row shows; None: all of it."""
    bands = []
    for s in history:
        for a, b, state in (
            (s.start, s.start + s.seconds, STEPS),
            (s.start + s.seconds, s.end, RECOVERS if group is None or group.moved(s) else STOPPED),
        ):
            a, b = max(0.0, a - start), min(span, b - start)
            if b > a:
                bands.append(Band(a, b, state))
    return bands
