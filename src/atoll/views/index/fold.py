"""A run's rounds, lanes and events, folded from the syncer's records as they come.

The fold asks the syncer's machine for what the machine alone knows: the fates of tokens, when a quorum was met, which outer
step is durable. The live syncer has that machine; whoever builds the index from a tape feeds the tape to a new one. So nothing
of the protocol is written here a second time, and both ways give the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from atoll.ids import SYNCER, LearnerId, Nanos, OuterStep, WorkerId, seconds, worker_name
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.round import GRACE
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import (
    AbortRound,
    Announce,
    AnswerRollback,
    Discard,
    Effect,
    Event,
    Finished,
    FixParticipants,
    Hello,
    Membership,
    Merge,
    Received,
    Recovered,
    Refuse,
    Report,
    Restored,
    SealSnapshot,
    Send,
    Standing,
    Started,
)  # fmt: skip
from atoll.views.index.rows import Attempt, Discarded, EventKind, EventRow, LaneState, LearnerBin, RoundRow, TokenFates

STATE_OF: dict[Standing, LaneState] = {
    Standing.JOINING: LaneState.JOINING,
    Standing.IN_SYNC: LaneState.TRAINING,
    Standing.SILENT: LaneState.SILENT,
    Standing.LOST: LaneState.LOST,
    Standing.LEFT: LaneState.LEFT,
    Standing.EXPELLED: LaneState.LEFT,
}
WORDS: dict[Standing, str] = {
    Standing.JOINING: "is joining",
    Standing.IN_SYNC: "is in sync",
    Standing.SILENT: "is silent",
    Standing.LOST: "is lost",
    Standing.LEFT: "has left",
    Standing.EXPELLED: "is expelled",
}
TEXT_MAX = 300
"""Characters of a sentence: a peer may have written part of it."""


class RowSink(Protocol):
    def put_round(self, row: RoundRow) -> None: ...
    def put_event(self, row: EventRow) -> None: ...


class _LaneSum:
    """A learner since the last row."""

    def __init__(self, learner: LearnerId, now: Nanos) -> None:
        self.learner = learner
        self.state = LaneState.JOINING
        self.since = now
        self.incarnation = -1
        self.local_step = self.tokens_seen = self.waited_seen = 0
        self.waited: Nanos = 0
        """Reported, and not yet counted in a row: no row counts more of it than the learner was in sync."""
        self.loss: float | None = None
        self.clear()

    def clear(self) -> None:
        self.nanos = [0] * len(LaneState)
        self.steps = self.tokens = self.step_nanos = self.bytes_up = self.bytes_down = self.announced = self.merged = 0

    def spend(self, now: Nanos) -> None:
        self.nanos[self.state] += max(0, now - self.since)
        self.since = max(now, self.since)

    def greeted(self, incarnation: int, body: Hello) -> None:
        if incarnation != self.incarnation:  # one that was resumed counts on from the run before
            self.incarnation = incarnation
            self.local_step, self.tokens_seen, self.waited_seen = body.local_step, body.tokens, 0

    def reported(self, body: Report) -> None:
        if body.local_step <= self.local_step:
            return
        self.steps += body.local_step - self.local_step
        self.step_nanos += body.step_nanos
        self.tokens += max(0, body.tokens - self.tokens_seen)
        self.waited += max(0, body.waited_nanos - self.waited_seen)
        self.local_step, self.tokens_seen, self.waited_seen = body.local_step, body.tokens, body.waited_nanos
        if body.loss is not None and math.isfinite(body.loss):
            self.loss = body.loss

    def take(self, now: Nanos) -> LearnerBin:
        self.spend(now)
        waited = min(self.waited, self.nanos[LaneState.TRAINING])
        self.waited -= waited
        self.nanos[LaneState.TRAINING] -= waited
        self.nanos[LaneState.WAITING] += waited
        row = LearnerBin(
            self.learner, self.state, tuple(self.nanos), self.steps, self.tokens, self.step_nanos, self.bytes_up, self.bytes_down,
            self.announced, self.merged, self.loss,
        )  # fmt: skip
        self.clear()
        return row


@dataclass
class _OpenRound:
    opened_at: Nanos
    quorum_at: Nanos | None = None
    fixed_at: Nanos | None = None
    fix: FixParticipants | None = None
    merged: set[LearnerId] = field(default_factory=set)
    left_out: tuple[LearnerId, ...] = ()
    attempts: list[Attempt] = field(default_factory=list)
    discards: list[Discarded] = field(default_factory=list)


def _text(reason: Reason) -> str:
    return str(reason)[:TEXT_MAX]


class IndexFold:
    """An observer of a run. The machine has processed each event before the fold is called with it."""

    def __init__(self, machine: SyncerMachine, sink: RowSink) -> None:
        self._machine, self._sink = machine, sink
        self._now: Nanos = 0
        self._lanes: dict[LearnerId, _LaneSum] = {}
        self._open: dict[OuterStep, _OpenRound] = {}
        self._committed: OuterStep = 0
        self._closed_at: Nanos = 0
        self._started = False
        self._refused = self._lost = self._recovered = 0
        self._refusals: set[tuple[WorkerId, Why]] = set()
        self._rollback: Reason | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            FixParticipants: self._on_fixed, AbortRound: self._on_aborted, Discard: self._on_discard, Merge: self._on_merge,
            Membership: self._on_membership, Recovered: self._on_recovered, Refuse: self._on_refuse, Send: self._on_send,
            AnswerRollback: self._on_rollback, SealSnapshot: self._on_snapshot, Finished: self._on_finished,
        }  # fmt: skip

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if worker != SYNCER:
            if isinstance(event, Received) and event.envelope.sender == SYNCER and event.payload_bytes:
                self._lane(worker).bytes_down += event.payload_bytes
            return
        before, self._now = self._now, now
        if isinstance(event, Received):
            self._received(event, effects)
        elif isinstance(event, Started):
            self._on_started(now - before)
        elif isinstance(event, Restored):
            self._committed, self._closed_at = self._machine.outer_step, now
        for effect in effects:
            handler = self._handlers.get(type(effect))
            if handler is not None:
                handler(effect)
        self._note_gathering()
        while self._committed < self._machine.outer_step:
            self._commit(self._committed + 1)

    def _lane(self, learner: LearnerId) -> _LaneSum:
        lane = self._lanes.get(learner)
        if lane is None:
            lane = self._lanes[learner] = _LaneSum(learner, self._now)
        return lane

    def _event(
        self, kind: EventKind, text: str, learner: LearnerId | None = None, state: LaneState | None = None, took: float = 0.0
    ) -> None:
        self._sink.put_event(EventRow(self._now, kind, learner, self._machine.outer_step, text[:TEXT_MAX], state, took))

    # ------------------------------------------------------------ events

    def _received(self, event: Received, effects: Sequence[Effect]) -> None:
        envelope = event.envelope
        learner = envelope.sender
        if learner not in self._lanes and self._machine.roster.get(learner) is None:
            return  # a stranger, whom the machine refused
        lane, body = self._lane(learner), envelope.body
        lane.bytes_up += event.payload_bytes
        if isinstance(body, Hello | Report) and not any(isinstance(effect, Refuse) for effect in effects):
            if isinstance(body, Hello):
                lane.greeted(envelope.incarnation, body)
                self._on_hello(learner, body.reason, effects)
            else:
                lane.reported(body)

    def _on_hello(self, learner: LearnerId, reason: Reason, effects: Sequence[Effect]) -> None:
        """A newcomer's Hello changes no standing, so it has no effect; but the lane is of one that joins from here on."""
        member = self._machine.roster.get(learner)
        said = any(isinstance(effect, Membership) and effect.learner == learner for effect in effects)
        if not said and member is not None and member.standing == Standing.JOINING:
            self._change(learner, member.standing, reason)

    def _change(self, learner: LearnerId, standing: Standing, reason: Reason) -> None:
        lane = self._lane(learner)
        lane.spend(self._now)
        lane.state = STATE_OF[standing]
        said = f"{worker_name(learner)} {WORDS[standing]}: {_text(reason)}"
        self._event(EventKind.STANDING, said, learner, lane.state)

    def _on_started(self, away: Nanos) -> None:
        if self._started:
            self._event(EventKind.SYNCER_STARTED, f"the syncer was started again after {seconds(away):.1f} s", took=seconds(away))
        self._started = True

    # ------------------------------------------------------------ effects

    def _of(self, outer_step: OuterStep) -> _OpenRound:
        return self._open.setdefault(outer_step, _OpenRound(self._now))

    def _note_gathering(self) -> None:
        """A round without a fragment due is gone from the machine when it is fixed: what it knows of it is noted before."""
        gathering = self._machine.rounds.gathering()
        if gathering is not None:
            round_ = self._open.get(gathering.outer_step)
            if round_ is None:
                round_ = self._open[gathering.outer_step] = _OpenRound(gathering.opened_at)
            round_.quorum_at = gathering.quorum_at if gathering.phase == GRACE else None

    def _on_fixed(self, effect: FixParticipants) -> None:
        round_ = self._of(effect.outer_step)
        flying = self._machine.rounds.get(effect.outer_step)
        if flying is not None:
            round_.quorum_at = flying.quorum_at
        round_.fixed_at, round_.fix = self._now, effect
        present = {m for m, lane in self._lanes.items() if lane.state is LaneState.TRAINING}
        round_.left_out = tuple(sorted(present - set(effect.participants)))

    def _on_aborted(self, effect: AbortRound) -> None:
        round_ = self._of(effect.outer_step)
        if round_.fixed_at is None and effect.reason.why is Why.NOT_STORED:
            return  # nothing was decided in it yet
        round_.attempts.append(Attempt(self._now, effect.reason.why.value, _text(effect.reason)))
        round_.fixed_at, round_.fix = None, None
        round_.merged.clear()
        self._event(EventKind.ABORTED, f"round {effect.outer_step} is gathered again: {_text(effect.reason)}")

    def _on_discard(self, effect: Discard) -> None:
        reason = effect.reason
        self._of(effect.outer_step).discards.append(Discarded(effect.learner, self._now, reason.why.value, _text(reason)))

    def _on_merge(self, effect: Merge) -> None:
        self._of(effect.outer_step).merged.update(share.learner for share in effect.shares)

    def _on_membership(self, effect: Membership) -> None:
        was = self._lane(effect.learner).state
        lost = effect.standing == Standing.LOST and was is not LaneState.LOST
        self._lost += lost and effect.reason.why is not Why.RUN_OVER
        self._change(effect.learner, effect.standing, effect.reason)

    def _on_recovered(self, effect: Recovered) -> None:
        if not self._machine.outer_step:
            return  # it loads what the run begins with
        self._recovered += 1
        took = seconds(effect.nanos)
        said = f"{worker_name(effect.learner)} recovered from {worker_name(effect.source)} in {took:.2f} s"
        self._event(EventKind.RECOVERED, said, effect.learner, took=took)

    def _on_refuse(self, effect: Refuse) -> None:
        """Of each peer and reason one line a round: a peer may send nonsense as fast as it likes."""
        self._refused += 1
        if (key := (effect.peer, effect.reason.why)) not in self._refusals:
            self._refusals.add(key)
            self._event(EventKind.REFUSED, f"{worker_name(effect.peer)} is refused: {_text(effect.reason)}", effect.peer)

    def _on_send(self, effect: Send) -> None:
        if isinstance(effect.envelope.body, Announce):
            self._lane(effect.envelope.receiver).announced += 1

    def _on_rollback(self, effect: AnswerRollback) -> None:
        self._rollback = effect.reason
        self._event(EventKind.ROLLBACK, _text(effect.reason))

    def _on_snapshot(self, effect: SealSnapshot) -> None:
        state = "complete" if effect.complete else "incomplete"
        self._event(EventKind.SNAPSHOT, f"snapshot of outer step {effect.snapshot} is {state}: {_text(effect.reason)}")

    def _on_finished(self, effect: Finished) -> None:
        self._event(EventKind.FINISHED, f"the run is finished at outer step {effect.outer_step}")

    # ------------------------------------------------------------ rows

    def _commit(self, outer_step: OuterStep) -> None:
        """This outer step is durable. One that a rollback made has had no participants."""
        now, round_ = self._now, self._open.pop(outer_step, None) or _OpenRound(self._now)
        fix, fates = round_.fix, self._machine.fates()
        for learner in round_.merged:
            self._lane(learner).merged += 1
        reason = fix.reason if fix is not None else self._rollback or Reason(Why.ROLLED_BACK)
        lanes = tuple(self._lanes[m].take(now) for m in sorted(self._lanes))
        losses = [lane.loss for lane in lanes if lane.loss is not None]
        fixed_at = round_.fixed_at if round_.fixed_at is not None else now
        self._sink.put_round(RoundRow(
            outer_step=outer_step, begins_at=self._closed_at, opened_at=min(round_.opened_at, fixed_at),
            quorum_at=round_.quorum_at if round_.quorum_at is not None else fixed_at, fixed_at=fixed_at, closed_at=now,
            fragments=fix.fragments if fix is not None else (), participants=fix.participants if fix is not None else (),
            merged=tuple(sorted(round_.merged)), left_out=round_.left_out,
            why=reason.why.value if fix is not None else Why.ROLLED_BACK.value, text=_text(reason),
            attempts=tuple(round_.attempts), discards=tuple(round_.discards), refused=self._refused, lost=self._lost,
            recovered=self._recovered, loss=sum(losses) / len(losses) if losses else None,
            fates=TokenFates(fates.trained, fates.merged, fates.in_flight, {k.value: n for k, n in fates.discarded.items()}),
            learners=lanes,
        ))  # fmt: skip
        self._committed, self._closed_at = outer_step, now
        self._refused = self._lost = self._recovered = 0
        self._refusals.clear()
