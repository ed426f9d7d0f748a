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
        self._begun, self._absent = [], []
        warm = 2 * model.return_seconds
        for slices in self._slices:  # the run begins in the steady state: some slices, or all of a learner, are already down
            dead = slices.advance(warm, exactly=True)[-1].last_live == 0
            self._begun.append(warm if dead else slices.now)
            self._absent.append(nanos(max(0.0, slices.now - warm)) if dead else 0)

    @classmethod
    def of_config(cls, config: Config) -> SliceHardware | None:
        """The chips that `cluster.chips` describes; None: there are none."""
        c = config.cluster
        if c.chips == 0:
            return None
        model = FailureModel(
            mtbi_seconds=3600 * c.mtbi_hours, slice_chips=c.slice_chips, step_seconds=c.step_seconds, step_noise=c.step_noise,
            down_seconds=c.resize_seconds, up_seconds=c.resize_seconds, return_seconds=c.repair_seconds,
        )  # fmt: skip
        return cls(config, c.chips, model, config.seed)

    def describe(self) -> dict[str, Any]:
        """For the tape's header."""
        return self._description

    def absent_at_start(self, learner: LearnerId) -> Nanos:
        return self._absent[learner]

    def boundary(self, learner: LearnerId, now: Nanos) -> Boundary | None:
        slices = self._slices[learner]
        step = slices.step(self._begun[learner] + seconds(now))
        if not step.moved:
            return None
        return Boundary(slices.live / slices.chips if step.last_live else 0.0, nanos(step.stop))

    def share(self, learner: LearnerId) -> float:
        slices = self._slices[learner]
        return slices.live / slices.chips
