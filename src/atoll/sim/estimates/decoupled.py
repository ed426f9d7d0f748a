"""Decoupled DiLoCo against bandwidth: the real machines on the simulated cluster, with hands that move only sizes.

A decoupled learner never waits for its link, so utilisation alone would say 1 on any link. What a slow link costs is the
schedule: at most tau rounds are in flight, and at most one announcement of a fragment is on its way to a learner, so the
interval between two synchronisations of a fragment stretches beyond H. Both are measured, and where one number is wanted
it is the smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll import config
from atoll.config import Config
from atoll.ids import SYNCER, LearnerId, LocalStep, Nanos, OuterStep, WorkerId, seconds
from atoll.protocol.vocabulary import Adopt, Effect, Event, FixParticipants, StepDone
from atoll.sim.cluster import VirtualCluster

WARM_UP, MEASURED = 4, 3
"""Intervals. The queue of a link that is too slow fills up within the first; in the second the pattern repeats."""
PATIENT = {"start_wait_seconds": 1e9, "first_pull_seconds": 1e9, "recovery_intervals": 1e9}
"""The whole model crosses the link when a learner joins: hours on a slow one, and nobody has died."""


@dataclass(frozen=True)
class DecoupledEstimate:
    compute_share: float
    """Of the learners' time since the first round, spent in inner steps: 1 but for waits in the ramp, pauses, recoveries."""
    schedule_kept: float
    """H over the inner steps that really pass between two adoptions of a fragment, once ramp and warm-up are over."""
    interval_kept: float
    """Those inner steps."""
    staleness: float
    """Inner steps from the moment a round's participants are fixed until its result is adopted."""

    @property
    def utilisation(self) -> float:
        return min(self.compute_share, self.schedule_kept)


def settings_for(preset: str, layers: Mapping[str, Any]) -> Config:
    """A preset with `layers` (sections of keys) over it, as long and as patient as the measurement needs."""
    settings = config.load(preset_name=preset, overrides={"limits": PATIENT, **layers})
    protocol = settings.protocol
    steps = round((WARM_UP + MEASURED) * protocol.local_steps_per_round / (1 - protocol.ramp))
    cluster = msgspec.structs.replace(settings.cluster, step_noise=0.0)
    return msgspec.structs.replace(settings, total_steps=steps, cluster=cluster)


def measure_decoupled(settings: Config) -> DecoupledEstimate:
    """Run it; `settings_for` gives it the length it needs."""
    interval = settings.protocol.local_steps_per_round
    watch = _Watch(settings.total_steps - MEASURED * interval)
    VirtualCluster(settings, observers=[watch]).run()
    kept = watch.interval(settings.learners * settings.protocol.fragments)
    return DecoupledEstimate(
        compute_share=watch.compute_share(), schedule_kept=min(1.0, interval / kept), interval_kept=kept,
        staleness=watch.staleness(settings.cluster.step_seconds),
    )  # fmt: skip


def at_bandwidth(settings: Config, up_gbit: float, down_gbit: float) -> Config:
    cluster = msgspec.structs.replace(settings.cluster, up_gbit=up_gbit, down_gbit=down_gbit)
    return msgspec.structs.replace(settings, cluster=cluster)


class _Watch:
    """Told of every event. Adoptions count from the outer step `since` on."""

    def __init__(self, since: OuterStep) -> None:
        self._since = since
        self._began: Nanos | None = None
        self._fixed: dict[OuterStep, Nanos] = {}
        self._steps: dict[LearnerId, LocalStep] = {}
        self._steps_before: dict[LearnerId, LocalStep] = {}
        """Those taken when the measurement began; empty before that."""
        self._stepping: Nanos = 0
        self._last: dict[LearnerId, Nanos] = {}
        self._adopted: dict[tuple[LearnerId, int], tuple[LocalStep, LocalStep, int]] = {}
        self._lags: list[Nanos] = []

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if worker == SYNCER:
            for effect in effects:
                if isinstance(effect, FixParticipants):
                    self._fix(effect.outer_step, now)
            return
        if isinstance(event, StepDone):
            self._stepped(worker, now, event.nanos)
        if self._steps_before:
            for effect in effects:
                if isinstance(effect, Adopt):
                    self._adopt(worker, effect, now)

    def _fix(self, outer_step: OuterStep, now: Nanos) -> None:
        self._fixed[outer_step] = now
        self._began = now if self._began is None else self._began
        if outer_step > self._since and not self._steps_before:
            self._steps_before = dict(self._steps)

    def _stepped(self, learner: LearnerId, now: Nanos, took: Nanos) -> None:
        self._steps[learner] = self._steps.get(learner, 0) + 1
        if self._began is not None:
            self._stepping += now - max(now - took, self._began)
            self._last[learner] = now

    def _adopt(self, learner: LearnerId, effect: Adopt, now: Nanos) -> None:
        if effect.version in self._fixed:
            self._lags.append(now - self._fixed[effect.version])
        at = self._steps.get(learner, 0)
        first, _, count = self._adopted.get((learner, effect.fragment), (at, at, 0))
        self._adopted[learner, effect.fragment] = (first, at, count + 1)

    # ------------------------------------------------------------ what came of it

    def compute_share(self) -> float:
        """Up to each learner's last whole step: the one in which the run ended does not count against it."""
        assert self._began is not None
        lasted = sum(last - self._began for last in self._last.values())
        return self._stepping / lasted if lasted else 0.0

    def interval(self, pairs: int) -> float:
        """Inner steps between two adoptions of a fragment by a learner, over all `pairs` of those: from adoption to adoption
        where each pair has two, which no edge of the measured time disturbs. On a link too slow for that, all steps over all
        adoptions: to leave out whoever adopted once or never would flatter it."""
        counts = [count for _, _, count in self._adopted.values()]
        if len(counts) == pairs and min(counts) > 1:
            return sum(last - first for first, last, _ in self._adopted.values()) / (sum(counts) - pairs)
        measured = sum(self._steps[m] - since for m, since in self._steps_before.items())
        return measured * (pairs / len(self._steps_before)) / max(1, sum(counts))

    def staleness(self, step_seconds: float) -> float:
        return seconds(sum(self._lags)) / len(self._lags) / step_seconds if self._lags else 0.0


def bisected(answer: Callable[[float], float], axis: Sequence[float], target: float) -> float | None:
    """The first value of the axis whose answer reaches the target; None: not even the last. Answers must not fall again."""
    if answer(axis[-1]) < target:
        return None
    low, high = -1, len(axis) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if answer(axis[middle]) >= target:
            high = middle
        else:
            low = middle
    return axis[high]
