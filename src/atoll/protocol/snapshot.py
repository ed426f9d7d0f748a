"""Chandy-Lamport on the star: the syncer's side of a consistent, non-blocking snapshot.

The syncer records its state and goes on; its clock value is the marker. A learner that first sees it records its own
state and returns the marker with its next report. What arrives from a learner between the syncer's record and that
learner's marker was in flight, belongs to the snapshot and is delivered again on resume.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.ids import LearnerId, OuterStep
from atoll.protocol.effects import Effects
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Envelope, RecordInFlight, RecordSyncer, Report, SealSnapshot, SyncerState


def marker_of(outer_step: OuterStep, interval: int) -> OuterStep:
    """The newest marker at or below an outer step; 0 is none."""
    return outer_step - outer_step % interval if interval else 0


class Snapshot:
    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._marker: OuterStep = 0
        self._waiting: set[LearnerId] = set()
        self._recorded: set[LearnerId] = set()

    @property
    def open(self) -> bool:
        return bool(self._marker)

    def begin(self, marker: OuterStep, learners: Iterable[LearnerId], syncer_state: SyncerState) -> None:
        if self._marker:
            due = Reason(Why.NEXT_SNAPSHOT_DUE, f"snapshot {marker} is due and this one is not complete")
            self._seal(complete=False, reason=due)
        self._marker, self._waiting, self._recorded = marker, set(learners), set()
        self._effects.emit(RecordSyncer(marker, syncer_state))
        self._maybe_seal(Reason(Why.NOBODY_TO_WAIT_FOR))

    def saw(self, envelope: Envelope) -> None:
        """Called for every message in order, before it takes effect."""
        if not self._marker or envelope.sender not in self._waiting:
            return
        body = envelope.body
        if isinstance(body, Report) and body.snapshot >= self._marker:
            self._waiting.discard(envelope.sender)
            self._recorded.add(envelope.sender)
            self._maybe_seal(Reason(Why.MARKERS_RETURNED))
        else:
            self._effects.emit(RecordInFlight(self._marker, envelope))

    def leave_out(self, learner: LearnerId) -> None:
        """Dead learners are left out: on resume they recover."""
        if self._marker:
            self._waiting.discard(learner)
            self._recorded.discard(learner)
            self._maybe_seal(Reason(Why.LEARNER_LEFT_OUT, f"learner {learner} is gone and left out"))

    def abandon(self, reason: Reason) -> None:
        if self._marker:
            self._seal(complete=False, reason=reason)

    def _maybe_seal(self, reason: Reason) -> None:
        if self._marker and not self._waiting:
            self._seal(complete=True, reason=reason)

    def _seal(self, *, complete: bool, reason: Reason) -> None:
        self._effects.emit(SealSnapshot(self._marker, tuple(sorted(self._recorded)), complete, reason))
        self._marker, self._waiting, self._recorded = 0, set(), set()
