"""Random scenarios from a seed: a preset, a cluster, a plan of faults, and an ambusher that strikes at bad moments."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from atoll.chaos import ATTACKS, ChaosPlan, Clog, Fault, Hostile, Kill, KillSyncer, Partition, Pause, Rollback, random_plan
from atoll.config import Config, changed, load
from atoll.errors import AtollError
from atoll.ids import SYNCER, Incarnation, LearnerId, Nanos, WorkerId, nanos
from atoll.protocol.learner import LearnerMachine
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import Effect, Event, RecordSyncer, Send, Ticket
from atoll.sim.checkers import Liveness, Safety
from atoll.sim.cluster import VirtualCluster

OUTER_STEPS = 340
HOSTILE_FROM = 1000
"""From this seed on every odd one of four learners or more has a hostile learner among its faults, and every third is rolled
back a few times."""
PRESETS = ("decoupled",) * 4 + ("decoupled_ramp", "streaming", "diloco", "async_diloco", "fedavg", "ddp")


def config_for(rng: random.Random, seed: int) -> Config:
    preset = rng.choice(PRESETS)
    learners = rng.randint(2, 16)
    protocol: dict[str, object] = {"snapshot_interval": rng.choice([0, 7, 25])}
    if preset in ("diloco", "fedavg", "async_diloco"):
        protocol["local_steps_per_round"] = rng.choice([5, 20])
    if preset == "async_diloco":
        protocol["overlap"] = protocol["local_steps_per_round"]
    if preset.startswith("decoupled"):
        fragments = rng.choice([4, 8, 24])
        quorum = rng.choice([1, 1, max(1, learners // 2)])
        protocol |= {"fragments": fragments, "local_steps_per_round": rng.choice([fragments, 24]), "quorum": quorum}
        protocol["keep_overlap"] = seed % 3 == 0
    if preset == "ddp":
        protocol["elastic"] = rng.random() < 0.7
    cluster = {"latency_seconds": rng.choice([0.0, 0.02, 0.3]), "slow_share": rng.choice([0.0, 0.5])}
    limits = {"versions_max": rng.choice([2, 3, 8])}
    size = {"total_steps": OUTER_STEPS, "learners": learners, "seed": seed}
    return load(preset_name=preset, overrides=size | {"protocol": protocol, "cluster": cluster, "limits": limits})


class Ambush:
    """Strikes while a learner recovers (the newcomer, its source, or the syncer) and while a snapshot is open."""

    def __init__(self, rng: random.Random, learners: int, most: int = 6) -> None:
        self._rng = rng
        self._learners = learners
        self._left = most
        self.struck: Counter[str] = Counter()
        self.last_ends: Nanos = 0
        self.cluster: VirtualCluster | None = None

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if worker != SYNCER:
            return
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.envelope.body, Ticket):
                victim = self._rng.choice([effect.envelope.receiver, effect.envelope.body.peer, SYNCER])
                self._inject(now, victim, "recovery", 0.25)
            elif isinstance(effect, RecordSyncer):
                self._inject(now, self._rng.randrange(-1, self._learners), "snapshot", 0.1)

    def _inject(self, now: Nanos, victim: WorkerId, when: str, probability: float) -> None:
        if self._left == 0 or self._rng.random() > probability:
            return
        assert self.cluster is not None
        self._left -= 1
        self.struck[when] += 1
        delay = nanos(self._rng.random() * 0.2)
        fault = self._fault(victim)
        self.last_ends = max(self.last_ends, now + delay + nanos(fault.lasts))
        self.cluster.world.after(delay, self.cluster.inject, fault)

    def _fault(self, victim: WorkerId) -> Kill | KillSyncer | Pause | Partition | Clog:
        lasts = 0.2 + self._rng.expovariate(1 / 4.0)
        if victim == SYNCER:
            return KillSyncer(0.0, lasts)
        kinds: list[Callable[[], Kill | Pause | Partition | Clog]] = [
            lambda: Kill(0.0, victim, lasts), lambda: Pause(0.0, victim, lasts),
            lambda: Partition(0.0, victim, SYNCER, lasts, False), lambda: Clog(0.0, victim, SYNCER, lasts),
        ]  # fmt: skip
        return self._rng.choice(kinds)()


def hostile(rng: random.Random, learners: int) -> Hostile:
    attack = rng.choice(ATTACKS)
    size = rng.choice([0.5, 2.0, 10.0]) if attack == "dawdle" else rng.choice([1.0, 9.0, 1e4])
    return Hostile(rng.random() * 60, rng.randrange(learners), attack, size, 20 + rng.expovariate(1 / 40.0))


def rollbacks(rng: random.Random) -> list[Rollback]:
    return [Rollback(20 + rng.random() * 120, rng.choice([1, 1, 2]), rng.random() < 0.3) for _ in range(rng.randint(1, 4))]


class Scenario:
    def __init__(
        self, seed: int, *,
        syncer_machine: Callable[[Config], SyncerMachine] = SyncerMachine,
        learner_machine: Callable[[Config, LearnerId, Incarnation], LearnerMachine] = LearnerMachine,
    ) -> None:  # fmt: skip
        rng = random.Random(seed)
        self.seed = seed
        self.config = config_for(rng, seed)
        self.plan = random_plan(rng, self.config.learners, count=rng.randint(10, 18), span=110.0)
        if seed >= HOSTILE_FROM and seed % 2 and self.config.learners >= 4:
            self.plan = plan_of(*self.plan.faults, hostile(rng, self.config.learners))
        if seed >= HOSTILE_FROM and seed % 3 == 2:
            interval = rng.choice([1, 10, 40])
            self.config = changed(self.config, [f"protocol.rollback_interval={interval}"])
            self.plan = plan_of(*self.plan.faults, *rollbacks(rng))
        self.ambush = Ambush(rng, self.config.learners)
        safety = Safety(self.config)
        self.cluster = VirtualCluster(
            self.config, plan=self.plan, observers=[safety, self.ambush],
            syncer_machine=syncer_machine, learner_machine=learner_machine,
        )  # fmt: skip
        safety.attach(self.cluster)
        self.ambush.cluster = self.cluster

    def run(self) -> None:
        """Raises whatever a checker caught; liveness is bounded by virtual time."""
        self.cluster.run(until_seconds=self.plan.healed_at() + OUTER_STEPS * 6 + 900)
        Liveness(self.cluster, healed_at=max(self.plan.healed_at(), self.ambush.last_ends / 1e9)).check_end()

    def story(self) -> str:
        p = self.config.protocol
        return (
            f"seed {self.seed}: {self.config.preset}, {self.config.learners} learners, K={p.quorum}, P={p.fragments}, "
            f"H={p.local_steps_per_round}, ambushes {dict(self.ambush.struck)}\n{self.plan}"
        )


def verdict(seed: int, **machines: Callable[..., object]) -> AtollError | AssertionError | None:
    return verdict_of(Scenario(seed, **machines))  # type: ignore[arg-type]


def verdict_of(scenario: Scenario) -> AtollError | AssertionError | None:
    try:
        scenario.run()
    except (AtollError, AssertionError, KeyError, IndexError) as error:
        note = AssertionError(f"{type(error).__name__}: {error}\n{scenario.story()}")
        note.__cause__ = error
        return note
    return None


def plan_of(*faults: Fault) -> ChaosPlan:
    return ChaosPlan(tuple(sorted(faults, key=lambda f: f.at)))
