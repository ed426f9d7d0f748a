"""Any preset on the real machines in virtual time: its steady state, and what the loss of one learner costs.

Start-up (the first transfer of the model, and the intervals in which queues fill) is measured apart, because a run of weeks does
not pay it again. Both measurements use an executor that moves sizes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from atoll.chaos import Kill
from atoll.config import Config
from atoll.ids import SYNCER, LearnerId, Nanos, WorkerId, seconds
from atoll.protocol.vocabulary import Effect, Event, FixParticipants, StepDone
from atoll.sim.cluster import VirtualCluster
from atoll.sim.estimates.decoupled import AdoptionWatch

WARM_UP, MEASURED = 2, 3
"""Intervals, as in decoupled.py. A run with exact adoption repeats itself after one interval, or after two where the result of
one round is awaited in the next."""
AWAY_STEPS = 12
"""Inner steps that the lost learner is away."""
PATIENCE_STEPS = 4000
"""Inner steps after which a learner that is still not back is not waited for."""


@dataclass(frozen=True)
class SteadyEstimate:
    shares: tuple[float, ...]
    """By learner: the share of its time in inner steps."""
    interval_kept: float
    """Inner steps between two adoptions of a fragment."""
    staleness: float
    """Inner steps from fixing a round's participants to adopting its result."""
    startup_seconds: float
    """From the start of the processes to the first round."""


@dataclass(frozen=True)
class LossCost:
    """What the loss of one learner costs beyond its absence, in seconds of training."""

    others: float
    """Of each learner that stays: waiting, when the learner is lost and when it is back."""
    itself: float
    """Of the learner, after its process is back: dialling, the transfer of a peer's state, waiting."""


@dataclass
class _Steps:
    """The inner steps of one learner, in order."""

    ends: list[Nanos] = field(default_factory=list)
    took: list[Nanos] = field(default_factory=list)

    def share(self, interval: int) -> float:
        """Over pairs of whole intervals, so that it does not matter where in them the run ended."""
        done = len(self.ends) - 1
        whole = done // (2 * interval) * 2 * interval or done // interval * interval or done
        if whole < 1:
            return 0.0
        return sum(self.took[-whole:]) / (self.ends[-1] - self.ends[-whole - 1])


class StepWatch:
    """Every learner's inner steps since the participants of outer step `since` were fixed."""

    def __init__(self, since: int) -> None:
        self._since, self._watching = since, False
        self.began: Nanos | None = None
        self.steps: dict[LearnerId, _Steps] = {}

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if worker == SYNCER:
            for effect in effects:
                if isinstance(effect, FixParticipants):
                    self.began = now if self.began is None else self.began
                    self._watching = self._watching or effect.outer_step > self._since
        elif self._watching and isinstance(event, StepDone):
            mine = self.steps.setdefault(worker, _Steps())
            mine.ends.append(now)
            mine.took.append(event.nanos)


def measure_steady(settings: Config, warm_up: int = WARM_UP, measured: int = MEASURED) -> SteadyEstimate:
    """`settings.total_steps` is replaced by the length that the measurement needs."""
    interval = settings.protocol.local_steps_per_round
    settings = msgspec.structs.replace(settings, total_steps=(warm_up + measured) * interval)
    since = warm_up * interval
    adopted, stepped = AdoptionWatch(since), StepWatch(since)
    VirtualCluster(settings, observers=[adopted, stepped]).run()
    return SteadyEstimate(
        tuple(stepped.steps[m].share(interval) if m in stepped.steps else 0.0 for m in range(settings.learners)),
        adopted.interval(settings.learners * settings.protocol.fragments), adopted.staleness(settings.cluster.step_seconds),
        seconds(stepped.began or 0),
    )  # fmt: skip


def measure_loss(settings: Config, steady: SteadyEstimate) -> LossCost | None:
    """The last learner is killed in the middle of an interval, and is back after a few steps. None: it did not train again
    within PATIENCE_STEPS. `steady`: the same settings without the loss."""
    interval, lost = settings.protocol.local_steps_per_round, settings.learners - 1
    settings = msgspec.structs.replace(settings, total_steps=PATIENCE_STEPS + 10 * interval)
    watch = StepWatch(interval + interval // 2)
    cluster = VirtualCluster(settings, observers=[watch])
    cluster.start()
    while not watch.steps.get(lost):
        if not cluster.world.step():
            return None
    killed_at, step = cluster.world.now, settings.cluster.step_seconds
    cluster.inject(Kill(0.0, lost, AWAY_STEPS * step))
    before, until = len(watch.steps[lost].ends), killed_at + round(PATIENCE_STEPS * step * 1e9)
    while len(watch.steps[lost].ends) < before + interval + 1:
        if not cluster.world.step() or cluster.world.now > until or cluster.syncer.finished:
            return None
    return _cost(watch, steady, killed_at, lost, AWAY_STEPS * step)


def _cost(watch: StepWatch, steady: SteadyEstimate, killed_at: Nanos, lost: LearnerId, away: float) -> LossCost:
    found = {}
    for learner, mine in watch.steps.items():
        done = [took for end, took in zip(mine.ends, mine.took, strict=True) if end > killed_at]
        trained = seconds(sum(done)) / max(steady.shares[learner], 1e-9)
        found[learner] = max(0.0, seconds(mine.ends[-1] - killed_at) - trained)
    others = [cost for learner, cost in found.items() if learner != lost]
    return LossCost(sum(others) / len(others) if others else 0.0, max(0.0, found[lost] - away))
