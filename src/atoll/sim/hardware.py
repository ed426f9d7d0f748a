"""Virtual hardware: how long an inner step takes on which learner, when it fails, and when it is back."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from atoll.config import Config
from atoll.ids import LearnerId, Nanos, nanos


class Boundary(NamedTuple):
    """What a learner's slices did during the step that just ended."""

    share: float
    """Of its chips that are up; 0: none, and its process is gone with them."""
    stop: Nanos
    """How long it stands before its next step; or until it is back."""


class Hardware:
    """The first `slow_share` of the learners are `slow_factor` slower; a step never takes less than a tenth of its mean.

    One random stream a learner and purpose: a new fault, or another learner, does not reshuffle anybody's step times.
    """

    def __init__(self, config: Config) -> None:
        self._cluster = config.cluster
        self._learners = config.learners
        self._seed = config.seed
        self._streams: dict[tuple[str, LearnerId], random.Random] = {}
        self._slowed: dict[LearnerId, float] = {}

    def _stream(self, purpose: str, learner: LearnerId) -> random.Random:
        stream = self._streams.get((purpose, learner))
        if stream is None:
            stream = self._streams[purpose, learner] = random.Random(f"{self._seed}/{purpose}/{learner}")
        return stream

    def slow(self, learner: LearnerId, factor: float) -> None:
        """Multiply; a fault that ends divides again."""
        self._slowed[learner] = self._slowed.get(learner, 1.0) * factor

    def speed_class(self, learner: LearnerId) -> float:
        slow = round(self._cluster.slow_share * self._learners)
        return self._cluster.slow_factor if learner < slow else 1.0

    def step_nanos(self, learner: LearnerId) -> Nanos:
        mean = self._cluster.step_seconds * self.speed_class(learner) * self._slowed.get(learner, 1.0)
        return max(1, nanos(mean * self._noise(learner)))

    def _noise(self, learner: LearnerId) -> float:
        deviation = self._cluster.step_noise
        if deviation == 0:
            return 1.0
        draw = self._stream("step time", learner).gauss(0.0, 1.0)
        if self._cluster.step_distribution == "normal":
            return max(0.1, 1.0 + deviation * draw)
        sigma = math.sqrt(math.log1p(deviation**2))  # so that mean and deviation are those of the config
        return max(0.1, math.exp(sigma * draw - sigma**2 / 2))

    def time_to_failure(self, learner: LearnerId) -> Nanos | None:
        """From a start to the next failure; None: this hardware does not fail by itself."""
        mean = self._cluster.mtbf_seconds
        return nanos(self._stream("failures", learner).expovariate(1 / mean)) if mean else None

    def repair_seconds(self, learner: LearnerId) -> float:
        return self._stream("repairs", learner).expovariate(1 / self._cluster.repair_seconds)

    def boundary(self, learner: LearnerId, now: Nanos) -> Boundary | None:
        """Asked whenever a step ends; None: this hardware has no slices that come and go."""
        return None

    def share(self, learner: LearnerId) -> float:
        """Of the learner's chips that are up."""
        return 1.0
