"""Where a virtual run's snapshots lie: the syncer's state, each learner's, and the messages that were in flight."""

from __future__ import annotations

from typing import Any

from atoll.ids import LearnerId, OuterStep
from atoll.protocol.vocabulary import Envelope


class Picture:
    """One snapshot."""

    def __init__(self) -> None:
        self.syncer: Any = None
        self.learners: dict[LearnerId, Any] = {}
        self.in_flight: list[Envelope] = []
        self.sealed: tuple[LearnerId, ...] | None = None


class Shelf:
    """Keeps the newest `keep` sealed snapshots."""

    def __init__(self, keep: int = 2) -> None:
        self._keep = keep
        self.pictures: dict[OuterStep, Picture] = {}

    def picture(self, snapshot: OuterStep) -> Picture:
        return self.pictures.setdefault(snapshot, Picture())

    def put_learner(self, snapshot: OuterStep, learner: LearnerId, state: Any) -> None:
        self.picture(snapshot).learners[learner] = state

    def seal(self, snapshot: OuterStep, learners: tuple[LearnerId, ...], complete: bool) -> None:
        if not complete:
            self.pictures.pop(snapshot, None)
            return
        picture = self.picture(snapshot)
        picture.sealed = learners
        picture.learners = {m: s for m, s in picture.learners.items() if m in learners}
        sealed = sorted(t for t, p in self.pictures.items() if p.sealed is not None)
        for old in sealed[: -self._keep]:
            del self.pictures[old]
