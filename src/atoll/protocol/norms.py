"""Is a contribution's norm usual? The executor measures, this decides: what it needs is on the tape, so a syncer that comes back
judges as before.

A norm is compared per step and per learning rate, by the steps that the syncer counted. The usual norm of a fragment is the
median over the learners of each learner's own median: one learner cannot move it, however often it contributes. Many could send
next to nothing until every honest norm is unusual; so what is a share of Theta's own usual movement is never too long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from atoll.config import Config
from atoll.ids import FragmentId, LearnerId, OuterStep
from atoll.protocol.accounts import RATIO_MAX
from atoll.protocol.medians import Medians
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Measure
from atoll.rules import learning_rate

WINDOW = 8
"""Norms kept of each learner and fragment, and jumps kept of each fragment."""
ENOUGH = 4
"""With fewer norms of a fragment in all, the norm of the weights themselves is the measure."""
JUMP_SHARE = 0.25
"""Of Theta's usual movement. An honest norm is about as long as that, so this only limits how far `usual` can be lowered."""
PEERS_LEAST = 3
"""A round of fewer contributions has no majority to compare one with."""


class Judged(NamedTuple):
    """A contribution's norm, and the steps behind it by the syncer's count."""

    norm: float
    steps: int


class Norms:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._factor = config.limits.outlier_factor
        self._peer_factor = config.limits.peer_factor
        fragments = config.protocol.fragments
        self._norms: list[dict[LearnerId, deque[float]]] = [{} for _ in range(fragments)]
        self._jumps: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(fragments)]
        self._known_usual: list[float | None] = [None] * fragments
        """`_usual` since a norm or a jump was last added: every contribution asks."""

    def scale(self, steps: int, outer_step: OuterStep) -> float:
        """Steps x learning rate, to which an honest difference is roughly proportional. In the warm-up both grow: a fragment
        that is first due after two steps moves hundreds of times as far by its next turn. A gradient depends on neither."""
        if self._config.protocol.contribution == "gradient":
            return 1.0
        least = 1e-3 * self._config.inner.learning_rate  # a schedule may end at zero
        return max(1, steps) * max(least, learning_rate(self._config, max(0, outer_step - 1)))

    def objection(self, fragment: FragmentId, measure: Measure, scale: float) -> Reason | None:
        """Judges a contribution by itself, when it arrives."""
        if not math.isfinite(measure.norm):
            return Reason(Why.POISONED, f"fragment {fragment} holds NaN or Inf")
        found = self._known_usual[fragment]
        if found is None:
            found = self._known_usual[fragment] = self._usual(fragment)
        usual = scale * found
        if usual > 0:
            return self._far(fragment, measure.norm, usual, self._factor, "the usual")
        if measure.weights > 0:  # too few to say what is usual: no step moves weights by many times their own size
            return self._far(fragment, measure.norm, measure.weights, self._factor, "the weights'")
        return None

    def outliers(self, fragment: FragmentId, judged: Mapping[LearnerId, Judged]) -> dict[LearnerId, Reason]:
        """Judges the contributions of one round against each other: at the same moment of training, honest ones are alike. More
        steps go farther, by at most `RATIO_MAX`; fewer steps are allowed the norm of the others."""
        found: dict[LearnerId, Reason] = {}
        if not judged:
            return found  # no tensor moves
        trained = [each for each in judged.values() if each.steps]
        all_norms, all_steps = Medians(each.norm for each in trained), Medians(each.steps for each in trained)
        for learner, (norm, steps) in judged.items():
            if len(trained) - bool(steps) < PEERS_LEAST - 1:
                continue
            others_steps = all_steps.without(steps) if steps else all_steps.all()
            farther = max(1.0, min(RATIO_MAX, steps / others_steps))
            usual = farther * (all_norms.without(norm) if steps else all_norms.all())
            reason = self._far(fragment, norm, usual, self._peer_factor, "the other learners'") if usual > 0 else None
            if reason is not None:
                found[learner] = reason
        return found

    def merged(self, fragment: FragmentId, outer_step: OuterStep, judged: Mapping[LearnerId, Judged]) -> None:
        """These were merged: they are what later ones are compared with."""
        self._known_usual[fragment] = None
        for learner, (norm, steps) in judged.items():
            if steps:
                seen = self._norms[fragment].setdefault(learner, deque(maxlen=WINDOW))
                seen.append(norm / self.scale(steps, outer_step))

    # ------------------------------------------------------------ Theta

    def jump_limit(self, fragment: FragmentId, scale: float) -> float:
        """How far Theta may move in one outer step; 0: there is nothing to compare with yet."""
        jumps = self._jumps[fragment]
        return self._factor * scale * median(jumps) if len(jumps) >= ENOUGH else 0.0

    def moved(self, fragment: FragmentId, jump: float, scale: float) -> None:
        if jump > 0:
            self._known_usual[fragment] = None
            self._jumps[fragment].append(jump / scale)

    def _usual(self, fragment: FragmentId) -> float:
        known, jumps = self._norms[fragment].values(), self._jumps[fragment]
        if sum(map(len, known)) < ENOUGH:
            return 0.0
        least = JUMP_SHARE * median(jumps) if len(jumps) >= ENOUGH else 0.0
        return max(least, median(median(norms) for norms in known))

    @staticmethod
    def _far(fragment: FragmentId, norm: float, usual: float, factor: float, whose: str) -> Reason | None:
        if norm <= factor * usual:
            return None
        words = f"the norm {norm:.3g} of fragment {fragment} is {norm / usual:.0f} times {whose} {usual:.3g}"
        return Reason(Why.OUTLIER, words)
