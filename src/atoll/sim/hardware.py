"""Virtual hardware: how long an inner step takes on each learner, when the learner fails, and when it returns."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from atoll.config import Config
from atoll.ids import LearnerId, Nanos, nanos


class Boundary(NamedTuple):
    """How a learner's slices changed during the step that just ended."""

    share: float
    """Share of its chips that are up; 0: none, so its process is dead too."""
    stop: Nanos
    """Pause before its next step; for a dead process, time until it restarts."""


class Hardware:
    """The first `slow_share` of the learners are `slow_factor` slower; a step never takes less than a tenth of its mean.

    Each learner has one random stream per purpose, so that a new fault or one more learner does not change the step times of
    the others.
    """

    def __init__(self, config: Config) -> None:
        self._cluster = config.cluster
        self._seed = config.seed
        self._streams: dict[tuple[str, LearnerId], random.Random] = {}
        self._slowed: dict[LearnerId, float] = {}
        self._slow_class = round(config.cluster.slow_share * config.learners)

    def _stream(self, purpose: str, learner: LearnerId) -> random.Random:
        stream = self._streams.get((purpose, learner))
        if stream is None:
            stream = self._streams[purpose, learner] = random.Random(f"{self._seed}/{purpose}/{learner}")
        return stream

    def slow(self, learner: LearnerId, factor: float) -> None:
        """Multiply its step time; the end of the fault divides by the same factor."""
        self._slowed[learner] = self._slowed.get(learner, 1.0) * factor

    def speed_class(self, learner: LearnerId) -> float:
        return self._cluster.slow_factor if learner < self._slow_class else 1.0

    def step_nanos(self, learner: LearnerId) -> Nanos:
        mean = self._cluster.step_seconds * self.speed_class(learner)
        if learner in self._slowed:
            mean *= self._slowed[learner]
        return max(1, nanos(mean * self._noise(learner)))

    def _noise(self, learner: LearnerId) -> float:
        deviation = self._cluster.step_noise
        if deviation == 0:
            return 1.0
        stream = self._streams.get(("step time", learner)) or self._stream("step time", learner)
        draw = stream.gauss(0.0, 1.0)
        if self._cluster.step_distribution == "normal":
            return max(0.1, 1.0 + deviation * draw)
        sigma = math.sqrt(math.log1p(deviation**2))  # so that mean and deviation are those of the config
        return max(0.1, math.exp(sigma * draw - sigma**2 / 2))

    def time_to_failure(self, learner: LearnerId) -> Nanos | None:
        """From a start to the next failure; None: only a chaos plan makes this hardware fail."""
        mean = self._cluster.mtbf_seconds
        return nanos(self._stream("failures", learner).expovariate(1 / mean)) if mean else None

    def repair_seconds(self, learner: LearnerId) -> float:
        return self._stream("repairs", learner).expovariate(1 / self._cluster.repair_seconds)

    def absent_at_start(self, learner: LearnerId) -> Nanos:
        """From the start of the run until this learner's process starts."""
        return 0

    def boundary(self, learner: LearnerId, now: Nanos) -> Boundary | None:
        """Called at the end of every step; None: no slice failed or returned."""
        return None

    def share(self, learner: LearnerId) -> float:
        """Share of the learner's chips that are up."""
        return 1.0
