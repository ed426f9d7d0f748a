"""Chandy-Lamport on the star: the syncer's side of a consistent, non-blocking snapshot.

The syncer records its state and goes on; its clock value is the marker. A learner that first sees it records its own
state and returns the marker with its next report. What arrives from a learner between the syncer's record and that
learner's marker was in flight and belongs to the snapshot. The marker says where the cut is, not that the state is on disk:
that is what a `SnapshotPart` says, and a learner whose part is not written is left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.ids import LearnerId, OuterStep
from atoll.protocol.effects import Effects
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Envelope, RecordInFlight, RecordSyncer, Report, SealSnapshot, SnapshotPart, SyncerState

IN_FLIGHT_MAX = 1000
"""Messages of one learner that one snapshot records. A learner returns the marker with the first report after it arrived: a few
messages, or as many as it has steps while the way to it is blocked. One that sends more withholds it."""


def marker_of(outer_step: OuterStep, interval: int) -> OuterStep:
    """The newest marker at or below an outer step; 0 is none."""
    return outer_step - outer_step % interval if interval else 0


class Snapshot:
    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self.marker: OuterStep = 0
        """Of the snapshot that is open; 0: none is."""
        self._awaited: dict[LearnerId, int] = {}
        """Who has not returned the marker, with its messages in flight."""
        self._writing: set[LearnerId] = set()
        self._written: set[LearnerId] = set()
        self._left_out: set[LearnerId] = set()

    @property
    def open(self) -> bool:
        return bool(self.marker)

    def begin(self, marker: OuterStep, learners: Iterable[LearnerId], syncer_state: SyncerState) -> None:
        if self.marker:
            self._end_before(marker)
        self.marker, self._awaited = marker, dict.fromkeys(learners, 0)
        self._effects.emit(RecordSyncer(marker, syncer_state))
        self._maybe_seal(Reason(Why.NOBODY_TO_WAIT_FOR))

    def saw(self, envelope: Envelope) -> None:
        """Called for every message in order, before it takes effect, while a snapshot is open."""
        learner, body = envelope.sender, envelope.body
        if isinstance(body, SnapshotPart) and body.snapshot == self.marker:
            self._part(learner, body.flaw)
        if learner not in self._awaited:
            return
        if isinstance(body, Report) and body.snapshot >= self.marker:
            del self._awaited[learner]
            self._writing.add(learner)
        elif self._awaited[learner] == IN_FLIGHT_MAX:
            self._exclude(learner, f"learner {learner} is left out: {IN_FLIGHT_MAX} messages and no marker")
        else:
            self._awaited[learner] += 1
            self._effects.emit(RecordInFlight(self.marker, envelope))

    def leave_out(self, learner: LearnerId) -> None:
        """Dead learners are left out: on resume they recover."""
        self._exclude(learner, f"learner {learner} is gone and left out")

    def abandon(self, reason: Reason) -> None:
        if self.marker:
            self._seal(complete=False, reason=reason)

    def _part(self, learner: LearnerId, flaw: Reason | None) -> None:
        if flaw is not None:
            self._exclude(learner, f"learner {learner} is left out: {flaw}")
        elif learner in self._writing:
            self._writing.discard(learner)
            self._written.add(learner)
            self._maybe_seal(Reason(Why.PARTS_WRITTEN))

    def _exclude(self, learner: LearnerId, sentence: str) -> None:
        if self.marker and learner in (self._awaited.keys() | self._writing | self._written):
            self._awaited.pop(learner, None)
            self._writing.discard(learner)
            self._written.discard(learner)
            self._left_out.add(learner)
            self._maybe_seal(Reason(Why.LEARNER_LEFT_OUT, sentence))

    def _end_before(self, following: OuterStep) -> None:
        """Whoever is late by a whole interval is left out, so that no single learner prevents every snapshot. Where most are
        late the interval is too short, and a snapshot without them is of little use."""
        late = sorted(self._awaited.keys() | self._writing)
        due = f"snapshot {following} is due"
        if len(self._written) <= len(late) + len(self._left_out):
            self._seal(complete=False, reason=Reason(Why.NEXT_SNAPSHOT_DUE, f"{due} and this one is not complete"))
            return
        self._left_out.update(late)
        named = ", ".join(map(str, late))
        self._seal(complete=True, reason=Reason(Why.NEXT_SNAPSHOT_DUE, f"{due}; learners not done and left out: {named}"))

    def _maybe_seal(self, reason: Reason) -> None:
        if self.marker and not self._awaited and not self._writing:
            self._seal(complete=True, reason=reason)

    def _seal(self, *, complete: bool, reason: Reason) -> None:
        written, left_out = tuple(sorted(self._written)), tuple(sorted(self._left_out))
        self._effects.emit(SealSnapshot(self.marker, written, complete, reason, left_out))
        self.marker, self._awaited = 0, {}
        self._writing, self._written, self._left_out = set(), set(), set()
