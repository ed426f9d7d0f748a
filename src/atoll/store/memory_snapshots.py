"""Snapshots in memory, for virtual runs and replays; live runs have theirs on disk (`snapshots.py`)."""

from __future__ import annotations

from typing import Any

from atoll.ids import LearnerId, OuterStep
from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import Envelope, LearnerState, StateWritten, SyncerState


class MemorySnapshot:
    """One snapshot: the syncer's state, each learner's, and the messages that were in flight."""

    def __init__(self, syncer_state: SyncerState, versions: Any) -> None:
        self.syncer_state = syncer_state
        self.versions = versions
        self.learners: dict[LearnerId, tuple[LearnerState, Any]] = {}
        self.in_flight: list[tuple[Envelope, Payload | None]] = []
        self.sealed: tuple[LearnerId, ...] | None = None


class MemorySnapshots:
    """Keeps the newest `keep` sealed snapshots. Parts of a snapshot that is sealed already, or was never begun, are ignored."""

    def __init__(self, versions: Any = None, keep: int = 2) -> None:
        self._versions = versions
        self._keep = keep
        self.kept: dict[OuterStep, MemorySnapshot] = {}

    def begin(self, snapshot: OuterStep, syncer_state: SyncerState) -> None:
        versions = self._versions.copy() if self._versions is not None else None
        self.kept[snapshot] = MemorySnapshot(syncer_state, versions)

    def _open(self, snapshot: OuterStep) -> MemorySnapshot | None:
        found = self.kept.get(snapshot)
        return found if found is not None and found.sealed is None else None

    def put_learner(self, snapshot: OuterStep, learner: LearnerId, learner_state: LearnerState, state: Any) -> StateWritten:
        found = self._open(snapshot)
        if found is not None:
            found.learners[learner] = (learner_state, state)
        return StateWritten(snapshot)

    def learner_state(self, snapshot: OuterStep, learner: LearnerId) -> Any:
        return self.kept[snapshot].learners[learner][1]

    def put_in_flight(self, snapshot: OuterStep, envelope: Envelope, payload: Payload | None) -> None:
        found = self._open(snapshot)
        if found is not None:
            found.in_flight.append((envelope, payload))

    def seal(
        self, snapshot: OuterStep, learners: tuple[LearnerId, ...], complete: bool, left_out: tuple[LearnerId, ...] = ()
    ) -> None:
        found = self._open(snapshot)
        if found is None:
            return
        if not complete:
            del self.kept[snapshot]
            return
        found.sealed = learners
        found.learners = {m: s for m, s in found.learners.items() if m in learners}
        sealed = sorted(t for t, each in self.kept.items() if each.sealed is not None)
        for old in sealed[: -self._keep]:
            del self.kept[old]
