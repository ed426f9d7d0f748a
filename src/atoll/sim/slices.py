"""Learners made of slices that fail: the goodput simulator's chips under the real protocol machines.

At every step boundary the failure model (sim/estimates/failures.py) returns which slices failed or returned during the step. The
learner pauses for the resize and continues with the share of its batch that its live slices can hold. A learner that has
lost all of its slices dies, and rejoins through recovery.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from atoll.config import Config
from atoll.ids import LearnerId, Nanos, nanos, seconds
from atoll.sim.estimates.failures import FailureModel
from atoll.sim.estimates.goodput import check_sizes, learners_of
from atoll.sim.hardware import Boundary, Hardware


class SliceHardware(Hardware):
    def __init__(self, config: Config, chips: int, model: FailureModel, seed: int) -> None:
        super().__init__(config)
        self._description = {"chips": chips, "seed": seed, "model": asdict(model)}
        check_sizes(chips, config.learners, model)
        self._slices = learners_of(chips, config.learners, model, seed)
        for slices in self._slices:  # the run begins in the steady state: some slices are already down
            slices.advance(2 * model.return_seconds)
        self._begun = [slices.now for slices in self._slices]

    def describe(self) -> dict[str, Any]:
        """For the tape's header."""
        return self._description

    def boundary(self, learner: LearnerId, now: Nanos) -> Boundary | None:
        slices = self._slices[learner]
        step = slices.step(self._begun[learner] + seconds(now))
        if not step.moved:
            return None
        return Boundary(slices.live / slices.chips if step.last_live else 0.0, nanos(step.stop))

    def share(self, learner: LearnerId) -> float:
        slices = self._slices[learner]
        return slices.live / slices.chips
