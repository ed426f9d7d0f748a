"""Virtual hardware: how long an inner step takes on which learner."""

from __future__ import annotations

import random

from atoll.config import Config
from atoll.ids import LearnerId, Nanos, nanos


class Hardware:
    """The first `slow_share` of the learners are `slow_factor` slower; noise is normal, never below a tenth of the mean.

    One random stream a learner: a new fault, or another learner, does not reshuffle anybody's step times.
    """

    def __init__(self, config: Config) -> None:
        self._cluster = config.cluster
        self._learners = config.learners
        self._seed = config.seed
        self._rng: dict[LearnerId, random.Random] = {}
        self._slowed: dict[LearnerId, float] = {}

    def slow(self, learner: LearnerId, factor: float) -> None:
        """Multiply; a fault that ends divides again."""
        self._slowed[learner] = self._slowed.get(learner, 1.0) * factor

    def speed_class(self, learner: LearnerId) -> float:
        slow = round(self._cluster.slow_share * self._learners)
        return self._cluster.slow_factor if learner < slow else 1.0

    def step_nanos(self, learner: LearnerId) -> Nanos:
        rng = self._rng.get(learner)
        if rng is None:
            rng = self._rng[learner] = random.Random(f"{self._seed}/step time/{learner}")
        noise = max(0.1, 1.0 + self._cluster.step_noise * rng.gauss(0.0, 1.0)) if self._cluster.step_noise else 1.0
        mean = self._cluster.step_seconds * self.speed_class(learner) * self._slowed.get(learner, 1.0)
        return max(1, nanos(mean * noise))
