"""Scavenged compute: learners that join at night and leave in the morning, on the real machines in virtual time.

A new learner connects, gets its state from a peer, trains, and leaves by a goodbye; the others do not wait for it. The
protocol itself does all of that, so the cost of joining is measured here and not assumed.

The estimate is the time that a fixed amount of work takes. Half of the work is done by day and half at night, when there are
1+f times as many chips: ideally in 0.5 + 0.5/(1+f) of the time that the base needs alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from atoll.chaos import SCAVENGED_MAX, ChaosPlan, Scavenge
from atoll.config import Config
from atoll.errors import RunFailed, UserError
from atoll.ids import Nanos, WorkerId, seconds
from atoll.protocol.vocabulary import Effect, Event, Started, StepDone
from atoll.sim.cluster import VirtualCluster
from atoll.sim.estimates.failures import FailureModel
from atoll.sim.estimates.utilisation import Compute, Exchange, utilisation

ENDLESS_STEPS = 10**9
"""The amount of work ends the run, not the number of outer steps."""
PATIENCE = 4.0
"""The run fails after this many times the duration of the base alone."""


@dataclass(frozen=True)
class ScavengeEstimate:
    share: float
    """f: scavenged chips over base chips."""
    ideal: float
    """Time relative to the base alone, like the next two."""
    decoupled: float
    data_parallel: float
    joins: int
    joining_seconds: float
    """Mean time from a scavenged learner's start to its first step: dialling, recovery, transfer of the state."""
    hours: float
    """Virtual time of the decoupled run."""


@dataclass(frozen=True)
class ScavengeScenario:
    """`day_seconds`: time in which the base alone does half of a cycle's work."""

    settings: Config
    day_seconds: float
    cycles: int
    layers: int = 24

    def __post_init__(self) -> None:
        if not 0 < self.day_seconds < math.inf:
            raise UserError(f"--day {self.day_seconds / 3600:g}: must be above 0 hours")
        if self.cycles < 1:
            raise UserError(f"--cycles {self.cycles}: must be at least 1")


def scavenge(
    scenario: ScavengeScenario, share: float, model: FailureModel, base_seconds: float | None = None
) -> ScavengeEstimate:
    """`base_seconds`: what `base_alone_seconds` has measured already."""
    extra = check_share(share, scenario.settings.learners)
    base = base_seconds if base_seconds is not None else base_alone_seconds(scenario)
    run = _Run(scenario, night_plan(scenario, extra, share))
    took = run.finish()
    ideal = 0.5 + 0.5 / (1 + share)
    joining = sum(run.joined) / len(run.joined)
    return ScavengeEstimate(
        share, ideal, took / base, elastic_data_parallel(scenario, share, model), len(run.joined), joining, took / 3600
    )  # fmt: skip


def check_share(share: float, learners: int) -> int:
    """The number of scavenged learners."""
    extra = round(share * learners) if math.isfinite(share) else 0
    if not (share > 0 and math.isclose(extra, share * learners, abs_tol=1e-9)):
        raise UserError(
            f"--extra {share:g}: times {learners} learners must be a whole number of scavenged learners, such as "
            f"{max(1, extra) / learners:g}"
        )
    if extra > SCAVENGED_MAX:
        raise UserError(f"--extra {share:g}: would be {extra} scavenged learners, above {SCAVENGED_MAX}")
    return extra


def base_alone_seconds(scenario: ScavengeScenario) -> float:
    """Seconds in which the base alone does the work."""
    return _Run(scenario, ChaosPlan()).finish()


def night_plan(scenario: ScavengeScenario, extra: int, share: float) -> ChaosPlan:
    """A night does the same work as a day with more chips, so it is shorter."""
    night = scenario.day_seconds / (1 + share)
    begins = [scenario.day_seconds + cycle * (scenario.day_seconds + night) for cycle in range(scenario.cycles)]
    first = scenario.settings.learners
    return ChaosPlan(tuple(Scavenge(at, learner, night) for at in begins for learner in range(first, first + extra)))


def elastic_data_parallel(scenario: ScavengeScenario, share: float, model: FailureModel) -> float:
    """Elastic data-parallel over the same link. All chips stop for a resize at dusk and at dawn, and at night every step waits
    for the exchange with the scavenged chips. Where that would be slower than the base alone, the base trains without them."""
    c = scenario.settings.cluster
    compute = Compute(scenario.layers, float(c.parameters), c.step_seconds)
    exchange = Exchange("data_parallel", bits=16.0, latency_seconds=c.latency_seconds)
    used = float(utilisation(compute, exchange, np.array([min(c.up_gbit, c.down_gbit)]))[0])
    gain = (1 + share) * used
    if gain <= 1:
        return 1.0
    return 0.5 + 0.5 / gain + (model.down_seconds + model.up_seconds) / (2 * scenario.day_seconds)


class _Run:
    """A cluster that runs until its learners have trained on a given number of tokens."""

    def __init__(self, scenario: ScavengeScenario, plan: ChaosPlan) -> None:
        settings = msgspec.structs.replace(scenario.settings, total_steps=ENDLESS_STEPS)
        per_second = settings.learners * settings.data.batch_size * settings.data.seq_len / settings.cluster.step_seconds
        self._work = per_second * 2 * scenario.day_seconds * scenario.cycles
        self._limit = PATIENCE * 2 * scenario.day_seconds * scenario.cycles
        self._base = settings.learners
        self._tokens = 0
        self._since: dict[WorkerId, Nanos] = {}
        self.joined: list[float] = []
        self._cluster = VirtualCluster(settings, plan=plan, observers=[self._watch])

    def _watch(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, StepDone):
            self._tokens += event.tokens
            if worker in self._since:
                self.joined.append(seconds(now - self._since.pop(worker) - event.nanos))
        elif isinstance(event, Started) and worker >= self._base:
            self._since[worker] = now

    def finish(self) -> float:
        self._cluster.start()
        step: Callable[[], bool] = self._cluster.world.step
        while self._tokens < self._work:
            if not step() or self._cluster.virtual_seconds() > self._limit:
                done = f"{self._tokens / self._work:.0%} of the work"
                raise RunFailed(f"only {done} after {self._cluster.virtual_seconds():.0f} virtual seconds")
        return self._cluster.virtual_seconds()
