"""Decoupled DiLoCo against bandwidth: the real machines on the simulated cluster, with an executor that moves only sizes.

A decoupled learner never waits for its link, so its utilisation would be 1 on any link. A slow link costs the schedule
instead: at most tau rounds are in flight, and at most one announcement of a fragment is in transit to a learner, so the
interval between two synchronisations of a fragment grows beyond H. Both are measured; as one number the smaller counts.
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
"""Intervals. During the warm-up the queue of a link that is too slow fills; during the measurement the pattern repeats."""
LONG_WAITS = {"start_wait_seconds": 1e9, "first_pull_seconds": 1e9, "recovery_intervals": 1e9}
"""When a learner joins, the whole model crosses the link. On a slow link that takes hours and must not count as a failure."""


@dataclass(frozen=True)
class DecoupledEstimate:
    compute_share: float
    """Share of the learners' time since the first round spent in inner steps: 1 less waits in the ramp, pauses and recoveries."""
    schedule_kept: float
    """H over `interval_kept`, at most 1."""
    interval_kept: float
    """Measured inner steps between two adoptions of a fragment, once ramp and warm-up are over."""
    staleness: float
    """Inner steps from fixing a round's participants to adopting its result."""

    @property
    def utilisation(self) -> float:
        return min(self.compute_share, self.schedule_kept)


def settings_for(preset: str, layers: Mapping[str, Any]) -> Config:
    """A preset with `layers` (sections of keys) over it, with the length and the timeouts that the measurement needs."""
    settings = config.load(preset_name=preset, overrides={"limits": LONG_WAITS, **layers})
    protocol = settings.protocol
    steps = round((WARM_UP + MEASURED) * protocol.local_steps_per_round / (1 - protocol.ramp))
    cluster = msgspec.structs.replace(settings.cluster, step_noise=0.0)
    return msgspec.structs.replace(settings, total_steps=steps, cluster=cluster)


def measure_decoupled(settings: Config) -> DecoupledEstimate:
    """Run and measure; `settings_for` makes the settings."""
    interval = settings.protocol.local_steps_per_round
    watch = AdoptionWatch(settings.total_steps - MEASURED * interval)
    VirtualCluster(settings, observers=[watch]).run()
    kept = watch.interval(settings.learners * settings.protocol.fragments)
    return DecoupledEstimate(
        compute_share=watch.compute_share(), schedule_kept=min(1.0, interval / kept), interval_kept=kept,
        staleness=watch.staleness(settings.cluster.step_seconds),
    )  # fmt: skip


def at_bandwidth(settings: Config, up_gbit: float, down_gbit: float) -> Config:
    cluster = msgspec.structs.replace(settings.cluster, up_gbit=up_gbit, down_gbit=down_gbit)
    return msgspec.structs.replace(settings, cluster=cluster)


class AdoptionWatch:
    """Observes every event. Adoptions count from the outer step `since` on."""

    def __init__(self, since: OuterStep) -> None:
        self._since = since
        self._began: Nanos | None = None
        self._fixed: dict[OuterStep, Nanos] = {}
        self._steps: dict[LearnerId, LocalStep] = {}
        self._steps_before: dict[LearnerId, LocalStep] = {}
        """Steps at the beginning of the measurement; empty before that."""
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

    # ------------------------------------------------------------ results

    def compute_share(self) -> float:
        """Up to each learner's last whole step: the step that the end of the run cut off does not count as idle."""
        assert self._began is not None
        lasted = sum(last - self._began for last in self._last.values())
        return self._stepping / lasted if lasted else 0.0

    def interval(self, pairs: int) -> float:
        """Mean inner steps between two adoptions, over all `pairs` of a learner and a fragment. Where every pair adopted twice,
        from its first adoption to its last, so that the edges of the measured time have no effect. On a link too slow for
        that, all steps over all adoptions: leaving out pairs with fewer than two adoptions would flatter the link."""
        counts = [count for _, _, count in self._adopted.values()]
        if len(counts) == pairs and min(counts) > 1:
            return sum(last - first for first, last, _ in self._adopted.values()) / (sum(counts) - pairs)
        measured = sum(self._steps[m] - since for m, since in self._steps_before.items())
        return measured * (pairs / len(self._steps_before)) / max(1, sum(counts))

    def staleness(self, step_seconds: float) -> float:
        return seconds(sum(self._lags)) / len(self._lags) / step_seconds if self._lags else 0.0


def first_reaching_by_bisection(answer: Callable[[float], float], axis: Sequence[float], target: float) -> float | None:
    """The first value of the axis whose answer reaches the target; None: no value does. `answer` must be non-decreasing."""
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
