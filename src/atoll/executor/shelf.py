"""Where snapshots lie: the syncer's state, each learner's, and the messages that were in flight. `Shelf` is in memory, for
virtual runs; a live run's lie on disk (`snapshots.py`)."""

from __future__ import annotations

from typing import Any

from atoll.executor.hands import Blob
from atoll.ids import LearnerId, OuterStep
from atoll.protocol.vocabulary import Books, Envelope, Stance


class Picture:
    """One snapshot."""

    def __init__(self) -> None:
        self.books: Books | None = None
        self.versions: Any = None
        self.learners: dict[LearnerId, tuple[Stance, Any]] = {}
        self.in_flight: list[tuple[Envelope, Blob | None]] = []
        self.sealed: tuple[LearnerId, ...] | None = None


class Shelf:
    """Keeps the newest `keep` sealed snapshots. What comes for one that is over, or was never begun, is not taken."""

    def __init__(self, disk: Any = None, keep: int = 2) -> None:
        self._disk = disk
        self._keep = keep
        self.pictures: dict[OuterStep, Picture] = {}

    def begin(self, snapshot: OuterStep, books: Books) -> None:
        picture = self.pictures[snapshot] = Picture()
        picture.books = books
        picture.versions = self._disk.copy() if self._disk is not None else None

    def _open(self, snapshot: OuterStep) -> Picture | None:
        picture = self.pictures.get(snapshot)
        return picture if picture is not None and picture.sealed is None else None

    def put_learner(self, snapshot: OuterStep, learner: LearnerId, stance: Stance, state: Any) -> None:
        picture = self._open(snapshot)
        if picture is not None:
            picture.learners[learner] = (stance, state)

    def learner_state(self, snapshot: OuterStep, learner: LearnerId) -> Any:
        return self.pictures[snapshot].learners[learner][1]

    def put_in_flight(self, snapshot: OuterStep, envelope: Envelope, blob: Blob | None) -> None:
        picture = self._open(snapshot)
        if picture is not None:
            picture.in_flight.append((envelope, blob))

    def seal(self, snapshot: OuterStep, learners: tuple[LearnerId, ...], complete: bool) -> None:
        picture = self._open(snapshot)
        if picture is None:
            return
        if not complete:
            del self.pictures[snapshot]
            return
        picture.sealed = learners
        picture.learners = {m: s for m, s in picture.learners.items() if m in learners}
        sealed = sorted(t for t, p in self.pictures.items() if p.sealed is not None)
        for old in sealed[: -self._keep]:
            del self.pictures[old]
