"""Scavenged compute: learners that come at night and leave in the morning, on the real machines in virtual time.

A newcomer connects, gets its state from a peer, trains, and leaves politely; nobody waits for it. All of that is the protocol
itself, so what joining costs is measured here, not assumed.

The question is how long the same work takes. Half of it is done by day, half at night, when there are f times as many chips
more: ideally 0.5 + 0.5/(1+f) of the time the base needs alone.
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

FOR_EVER = 10**9
"""Outer steps: the run ends by its work."""
PATIENCE = 4.0
"""Times the base's own duration, after which the work will not be done."""


@dataclass(frozen=True)
class ScavengeEstimate:
    share: float
    """f: scavenged chips over base chips."""
    ideal: float
    """Relative to the base alone, like the next two."""
    decoupled: float
    data_parallel: float
    joins: int
    joining_seconds: float
    """From a scavenged learner's start to its first step, on average: dialling, recovery, the transfer of the state."""
    hours: float
    """Of virtual time that decoupled took."""


@dataclass(frozen=True)
class Scene:
    """`day_seconds`: what half of a cycle's work takes the base alone."""

    settings: Config
    day_seconds: float
    cycles: int
    layers: int = 24

    def __post_init__(self) -> None:
        if not 0 < self.day_seconds < math.inf:
            raise UserError(f"--day {self.day_seconds / 3600:g}: must be above 0 hours")
        if self.cycles < 1:
            raise UserError(f"--cycles {self.cycles}: must be at least 1")


def scavenge(scene: Scene, share: float, model: FailureModel, base_seconds: float | None = None) -> ScavengeEstimate:
    """`base_seconds`, where the base alone has been measured already (`alone`)."""
    extra = check_share(share, scene.settings.learners)
    base = base_seconds if base_seconds is not None else alone(scene)
    run = _Run(scene, nights(scene, extra, share))
    took = run.finish()
    ideal = 0.5 + 0.5 / (1 + share)
    joining = sum(run.joined) / len(run.joined)
    return ScavengeEstimate(
        share, ideal, took / base, data_parallel(scene, share, model), len(run.joined), joining, took / 3600
    )  # fmt: skip


def check_share(share: float, learners: int) -> int:
    """How many scavenged learners that is."""
    extra = round(share * learners) if math.isfinite(share) else 0
    if not (share > 0 and math.isclose(extra, share * learners, abs_tol=1e-9)):
        raise UserError(
            f"--extra {share:g}: times {learners} learners must be a whole number of scavenged learners, such as "
            f"{max(1, extra) / learners:g}"
        )
    if extra > SCAVENGED_MAX:
        raise UserError(f"--extra {share:g}: would be {extra} scavenged learners, above {SCAVENGED_MAX}")
    return extra


def alone(scene: Scene) -> float:
    """Seconds in which the base does the work by itself."""
    return _Run(scene, ChaosPlan()).finish()


def nights(scene: Scene, extra: int, share: float) -> ChaosPlan:
    """Day and night do the same work, so a night is shorter."""
    night = scene.day_seconds / (1 + share)
    begins = [scene.day_seconds + cycle * (scene.day_seconds + night) for cycle in range(scene.cycles)]
    first = scene.settings.learners
    return ChaosPlan(tuple(Scavenge(at, learner, night) for at in begins for learner in range(first, first + extra)))


def data_parallel(scene: Scene, share: float, model: FailureModel) -> float:
    """Elastic data-parallel over the same link: all stop for a resize at dusk and at dawn, and at night every step waits for
    the exchange with the scavenged chips. Where that would be slower than the base alone, it goes without them."""
    c = scene.settings.cluster
    compute = Compute(scene.layers, float(c.parameters), c.step_seconds)
    exchange = Exchange("data_parallel", bits=16.0, latency_seconds=c.latency_seconds)
    used = float(utilisation(compute, exchange, np.array([min(c.up_gbit, c.down_gbit)]))[0])
    gain = (1 + share) * used
    if gain <= 1:
        return 1.0
    return 0.5 + 0.5 / gain + (model.down_seconds + model.up_seconds) / (2 * scene.day_seconds)


class _Run:
    """A cluster that runs until its learners have trained on so many tokens."""

    def __init__(self, scene: Scene, plan: ChaosPlan) -> None:
        settings = msgspec.structs.replace(scene.settings, total_steps=FOR_EVER)
        per_second = settings.learners * settings.data.batch_size * settings.data.seq_len / settings.cluster.step_seconds
        self._work = per_second * 2 * scene.day_seconds * scene.cycles
        self._limit = PATIENCE * 2 * scene.day_seconds * scene.cycles
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
