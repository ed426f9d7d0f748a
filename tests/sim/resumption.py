"""Runs that stop and go on from a snapshot: null hands with a shelf, and the newest sealed picture of a run that was cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.config import Config
from atoll.executor.hands import Blob, Hands
from atoll.executor.null import NullDisk, NullLearner, NullSyncer
from atoll.executor.shelf import Picture, Shelf
from atoll.ids import SYNCER, Incarnation, LearnerId, OuterStep, WorkerId
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
    StepDone,
)
from atoll.sim.checkers import Safety
from atoll.sim.cluster import Cluster, HandsFor

Batch = tuple[LearnerId, int]


class ShelvingDisk(NullDisk):
    def copy(self) -> ShelvingDisk:
        made = ShelvingDisk(0)
        made.versions = [dict(versions) for versions in self.versions]
        return made


class ShelvingLearner(NullLearner):
    def __init__(self, config: Config, learner: LearnerId, shelf: Shelf) -> None:
        super().__init__(config, learner)
        self._me, self._shelf = learner, shelf

    def execute(self, effect: Effect, blob: Blob | None) -> Sequence[Event]:
        if isinstance(effect, RecordState):
            self._shelf.put_learner(effect.snapshot, self._me, effect.stance, list(self.anchors))
        elif isinstance(effect, LoadSnapshot):
            self.anchors = list(self._shelf.learner_state(effect.snapshot, self._me))
        return super().execute(effect, blob)


class ShelvingSyncer(NullSyncer):
    def __init__(self, config: Config, disk: NullDisk, shelf: Shelf) -> None:
        super().__init__(config, disk)
        self._shelf = shelf

    def execute(self, effect: Effect, blob: Blob | None) -> Sequence[Event]:
        match effect:
            case RecordSyncer():
                self._shelf.begin(effect.snapshot, effect.books)
            case RecordInFlight():
                self._shelf.put_in_flight(effect.snapshot, effect.envelope, blob)
            case SealSnapshot():
                self._shelf.seal(effect.snapshot, effect.learners, effect.complete)
            case _:
                pass
        return super().execute(effect, blob)


class ShelvingHands:
    """Digests in the place of weights, and a shelf for snapshots of them."""

    def __init__(self, config: Config, disk: ShelvingDisk | None = None, shelf: Shelf | None = None) -> None:
        self.config = config
        self.disk = disk or ShelvingDisk(config.protocol.fragments)
        self.shelf = shelf or Shelf(self.disk)

    def __call__(self, worker: WorkerId, incarnation: Incarnation) -> Hands:
        if worker == SYNCER:
            return ShelvingSyncer(self.config, self.disk, self.shelf)
        return ShelvingLearner(self.config, worker, self.shelf)


class Drawn:
    """Which batches were trained to their end, by whom, in order; and which units were handed out again."""

    def __init__(self) -> None:
        self.by: dict[LearnerId, list[Batch]] = {}
        self.reissued: set[tuple[int, int]] = set()
        self._drawing: dict[LearnerId, Batch] = {}

    def __call__(self, now: int, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, StepDone):
            self.by.setdefault(worker, []).append(self._drawing.pop(worker))
        for effect in effects:
            if isinstance(effect, InnerStep):
                self._drawing[worker] = (effect.stream, effect.batch)
            elif isinstance(effect, Reissue):
                self.reissued.update((u.stream, u.index) for u in effect.units)

    def all(self) -> list[Batch]:
        return [batch for batches in self.by.values() for batch in batches]


class Run:
    """One virtual run with every invariant watched, whole or up to an outer step."""

    def __init__(self, config: Config, hands: HandsFor, *, resume: Picture | None = None) -> None:
        self.config, self.hands = config, hands
        self.drawn = Drawn()
        self.log: list[tuple[int, WorkerId, Event, Sequence[Effect]]] = []
        safety = Safety(config)
        self.cluster = Cluster(config, hands_for=hands, observers=[safety, self.drawn, self._see], resume=resume)
        safety.attach(self.cluster)

    def _see(self, now: int, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        self.log.append((now, worker, event, effects))

    def until(self, done: Callable[[Cluster], bool]) -> Run:
        """Then it is killed, syncer and learners at once."""
        self.cluster.start()
        while not done(self.cluster):
            assert self.cluster.world.step()
        return self

    def until_outer_step(self, outer_step: OuterStep) -> Run:
        return self.until(lambda cluster: cluster.syncer.outer_step >= outer_step)

    def whole(self) -> Run:
        self.cluster.run(until_seconds=60 * self.config.outer_steps + 2000)
        return self

    def effects(self, *kinds: type) -> list[Effect]:
        return [e for _, _, _, effects in self.log for e in effects if isinstance(e, kinds)]


def newest_sealed(shelf: Shelf) -> Picture:
    sealed = [t for t, picture in shelf.pictures.items() if picture.sealed is not None]
    assert sealed, "no snapshot was sealed"
    return shelf.pictures[max(sealed)]
