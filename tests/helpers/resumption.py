"""Runs that stop and go on from a snapshot: null executors that record snapshots, and the newest that was sealed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.chaos import ChaosPlan
from atoll.config import Config, load
from atoll.executor.null import NullDisk, NullLearner, NullSyncer
from atoll.ids import SYNCER, Incarnation, LearnerId, OuterStep, WorkerId
from atoll.protocol.interface import Executor, Payload
from atoll.protocol.vocabulary import (
    Effect,
    Event,
    InnerStep,
    LoadSnapshot,
    RecordInFlight,
    RecordState,
    RecordSyncer,
    Reissue,
    SealSnapshot,
    Started,
    StepDone,
)
from atoll.sim.checkers import Liveness, Safety
from atoll.sim.cluster import ExecutorFor, VirtualCluster
from atoll.store.memory_snapshots import MemorySnapshot, MemorySnapshots

Batch = tuple[LearnerId, int]


class RecordingDisk(NullDisk):
    def copy(self) -> RecordingDisk:
        made = RecordingDisk(0)
        made.versions = [dict(versions) for versions in self.versions]
        return made


class RecordingLearner(NullLearner):
    def __init__(self, config: Config, learner: LearnerId, snapshots: MemorySnapshots) -> None:
        super().__init__(config, learner)
        self._me, self._snapshots = learner, snapshots

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        if isinstance(effect, RecordState):
            self._snapshots.put_learner(effect.snapshot, self._me, effect.learner_state, list(self.anchors))
        elif isinstance(effect, LoadSnapshot):
            self.anchors = list(self._snapshots.learner_state(effect.snapshot, self._me))
        return super().execute(effect, payload)


class RecordingSyncer(NullSyncer):
    def __init__(self, config: Config, disk: NullDisk, snapshots: MemorySnapshots) -> None:
        super().__init__(config, disk)
        self._snapshots = snapshots

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        match effect:
            case RecordSyncer():
                self._snapshots.begin(effect.snapshot, effect.syncer_state)
            case RecordInFlight():
                self._snapshots.put_in_flight(effect.snapshot, effect.envelope, payload)
            case SealSnapshot():
                self._snapshots.seal(effect.snapshot, effect.learners, effect.complete)
            case _:
                pass
        return super().execute(effect, payload)


class RecordingExecutor:
    """Digests in the place of weights, and snapshots of them. Those of an earlier run are kept beside its own."""

    def __init__(self, config: Config, disk: RecordingDisk | None = None, snapshots: MemorySnapshots | None = None) -> None:
        self.config = config
        self.disk = disk or RecordingDisk(config.protocol.fragments)
        self.snapshots = MemorySnapshots(self.disk)
        self.snapshots.kept.update(snapshots.kept if snapshots else {})

    def __call__(self, worker: WorkerId, incarnation: Incarnation) -> Executor:
        if worker == SYNCER:
            return RecordingSyncer(self.config, self.disk, self.snapshots)
        return RecordingLearner(self.config, worker, self.snapshots)


class Drawn:
    """Which batches were trained to their end, by whom, in order; and which units were handed out again."""

    def __init__(self) -> None:
        self.by: dict[LearnerId, list[Batch]] = {}
        self.reissued: set[tuple[int, int]] = set()
        self._drawing: dict[LearnerId, Batch] = {}
        self._recorded: dict[tuple[LearnerId, OuterStep], int] = {}

    def __call__(self, now: int, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, StepDone):
            self.by.setdefault(worker, []).append(self._drawing.pop(worker))
        if isinstance(event, Started):
            self._drawing.pop(worker, None)
        for effect in effects:
            if isinstance(effect, InnerStep):
                self._drawing[worker] = (effect.stream, effect.batch)
            elif isinstance(effect, RecordState):
                self._recorded[worker, effect.snapshot] = len(self.by.get(worker, ()))
            elif isinstance(effect, Reissue):
                self.reissued.update((u.stream, u.index) for u in effect.units)

    def all(self) -> list[Batch]:
        return [batch for batches in self.by.values() for batch in batches]

    def until_recorded(self, snapshot: OuterStep) -> dict[LearnerId, list[Batch]]:
        """What each learner had trained when it recorded its state."""
        return {m: self.by.get(m, [])[:count] for (m, marker), count in self._recorded.items() if marker == snapshot}


class Run:
    """One virtual run with every invariant watched, whole or up to an outer step."""

    def __init__(
        self, config: Config, executor: ExecutorFor, *, resume: MemorySnapshot | None = None, plan: ChaosPlan | None = None
    ) -> None:
        self.config, self.executor = config, executor
        self.drawn = Drawn()
        self.log: list[tuple[int, WorkerId, Event, Sequence[Effect]]] = []
        safety = Safety(config)
        watching = [safety, self.drawn, self._see]
        self.cluster = VirtualCluster(config, plan=plan, executor_for=executor, observers=watching, resume=resume)
        safety.attach(self.cluster)

    def _see(self, now: int, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        self.log.append((now, worker, event, effects))

    def until(self, done: Callable[[VirtualCluster], bool]) -> Run:
        """Then it is killed, syncer and learners at once."""
        self.cluster.start()
        while not done(self.cluster):
            assert self.cluster.world.step()
        return self

    def until_outer_step(self, outer_step: OuterStep) -> Run:
        return self.until(lambda cluster: cluster.syncer.outer_step >= outer_step)

    def whole(self) -> Run:
        self.cluster.run(until_seconds=60 * self.config.total_steps + 2000)
        return self

    def effects(self, *kinds: type) -> list[Effect]:
        return [e for _, _, _, effects in self.log for e in effects if isinstance(e, kinds)]


def newest_sealed(snapshots: MemorySnapshots) -> MemorySnapshot:
    sealed = [t for t, snapshot in snapshots.kept.items() if snapshot.sealed is not None]
    assert sealed, "no snapshot was sealed"
    return snapshots.kept[max(sealed)]


CASES: dict[str, dict[str, Any]] = {
    "decoupled": {"fragments": 6, "local_steps_per_round": 6},
    "streaming": {"fragments": 3, "local_steps_per_round": 6, "fragmentation": "balanced"},
    "diloco": {"local_steps_per_round": 6},
    "async_diloco": {"local_steps_per_round": 6, "overlap": 6},
    "eager": {"local_steps_per_round": 6, "overlap": 6},
    "dylu": {"local_steps_per_round": 6},
    "fedavg": {"local_steps_per_round": 6},
    "ddp": {},
}


def config_for(
    preset: str, learners: int, *, every: int = 10, total_steps: int = 60, protocol: Mapping[str, Any] | None = None,
    **cluster: Any,
) -> Config:  # fmt: skip
    return load(preset_name=preset, overrides={
        "learners": learners, "total_steps": total_steps,
        "protocol": CASES[preset] | {"snapshot_interval": every} | dict(protocol or {}),
        "cluster": {"slow_share": 0.34} | cluster, "data": {"batch_size": 2, "seq_len": 16, "max_bytes": 400_000},
        "model": {"numbers": {"width": 16, "layers": 2, "mlp": 32}}, "limits": {"start_wait_seconds": 20.0},
    })  # fmt: skip


class Story:
    """Two runs: one killed at an outer step, one that goes on from its newest snapshot."""

    def __init__(
        self, preset: str, learners: int, *, had: int = 4, stop: int = 37, plan: ChaosPlan | None = None, **cluster: Any
    ) -> None:
        first = config_for(preset, had, **cluster)
        executor = RecordingExecutor(first)
        self.before = Run(first, executor).until_outer_step(stop)
        self.stored = newest_sealed(executor.snapshots)
        assert self.stored.syncer_state is not None
        self.snapshot = self.stored.syncer_state.outer_step
        config = config_for(preset, learners, **cluster)
        again = RecordingExecutor(config, self.stored.versions.copy(), executor.snapshots)
        self.after = Run(config, again, resume=self.stored, plan=plan).whole()
        Liveness(self.after.cluster).check_end()

    def trained_before(self) -> set[tuple[int, int]]:
        return {batch for batches in self.before.drawn.until_recorded(self.snapshot).values() for batch in batches}

    def may_repeat(self) -> set[tuple[int, int]]:
        """Batches of units that were handed out again: some of them were trained before, and not known to be merged."""
        steps = self.after.config.protocol.local_steps_per_round
        return {(stream, index * steps + k) for stream, index in self.after.drawn.reissued for k in range(steps)}
