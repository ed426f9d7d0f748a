"""A run's rounds, lanes and events, folded from the syncer's records as they come.

The fold asks the syncer's machine for what the machine alone knows: the fates of tokens, when a quorum was met, which outer
step is durable. The live syncer has that machine; whoever builds the index from a tape feeds the tape to a new one. So nothing
of the protocol is written here a second time, and both ways give the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from atoll.views.index.rows import Attempt, Discarded, EventKind, EventRow, LaneState, RoundRow, TokenFates
from atoll.views.index.sums import STATE_OF, FoldState, LaneSum, OpenRound

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


def _text(reason: Reason) -> str:
    return str(reason)[:TEXT_MAX]


def _refused(effects: Sequence[Effect]) -> bool:
    """In a plain loop: it is asked for every report."""
    for effect in effects:  # noqa: SIM110
        if isinstance(effect, Refuse):
            return True
    return False


class IndexFold:
    """An observer of a run. The machine has processed each event before the fold is called with it."""

    def __init__(self, machine: SyncerMachine, sink: RowSink, state: FoldState | None = None) -> None:
        """`state`: of a fold of this run, which this one continues. Without it the run begins here."""
        self._machine, self._sink = machine, sink
        self.state = state if state is not None else FoldState()
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
        state = self.state
        before, state.now = state.now, now
        if isinstance(event, Received):
            self._received(event, effects)
        elif isinstance(event, Started):
            self._on_started(now - before)
        elif isinstance(event, Restored):
            state.committed, state.closed_at = self._machine.outer_step, now
        handlers = self._handlers
        for effect in effects:
            handler = handlers.get(type(effect))
            if handler is not None:
                handler(effect)
        self._note_gathering()
        while state.committed < self._machine.outer_step:
            self._commit(state.committed + 1)

    def _lane(self, learner: LearnerId) -> LaneSum:
        lane = self.state.lanes.get(learner)
        if lane is None:
            lane = self.state.lanes[learner] = LaneSum(learner, self.state.now)
        return lane

    def _event(
        self, kind: EventKind, text: str, learner: LearnerId | None = None, state: LaneState | None = None, took: float = 0.0
    ) -> None:
        self._sink.put_event(EventRow(self.state.now, kind, learner, self._machine.outer_step, text[:TEXT_MAX], state, took))

    # ------------------------------------------------------------ events

    def _received(self, event: Received, effects: Sequence[Effect]) -> None:
        envelope = event.envelope
        learner, body = envelope.sender, envelope.body
        lane = self.state.lanes.get(learner)
        if lane is None:
            if self._machine.roster.get(learner) is None:
                return  # a stranger, whom the machine refused
            lane = self._lane(learner)
        lane.bytes_up += event.payload_bytes
        if isinstance(body, Report):
            if not _refused(effects):
                lane.reported(body)
        elif isinstance(body, Hello) and not _refused(effects):
            lane.greeted(envelope.incarnation, body)
            self._on_hello(learner, body.reason, effects)

    def _on_hello(self, learner: LearnerId, reason: Reason, effects: Sequence[Effect]) -> None:
        """A newcomer's Hello changes no standing, so it has no effect; but the lane is of one that joins from here on."""
        member = self._machine.roster.get(learner)
        said = any(isinstance(effect, Membership) and effect.learner == learner for effect in effects)
        if not said and member is not None and member.standing == Standing.JOINING:
            self._change(learner, member.standing, reason)

    def _change(self, learner: LearnerId, standing: Standing, reason: Reason) -> None:
        lane = self._lane(learner)
        lane.spend(self.state.now)
        lane.state = STATE_OF[standing]
        said = f"{worker_name(learner)} {WORDS[standing]}: {_text(reason)}"
        self._event(EventKind.STANDING, said, learner, lane.state)

    def _on_started(self, away: Nanos) -> None:
        if self.state.started:
            self._event(EventKind.SYNCER_STARTED, f"the syncer was started again after {seconds(away):.1f} s", took=seconds(away))
        self.state.started = True

    # ------------------------------------------------------------ effects

    def _of(self, outer_step: OuterStep) -> OpenRound:
        return self.state.open.setdefault(outer_step, OpenRound(self.state.now))

    def _note_gathering(self) -> None:
        """A round without a fragment due is gone from the machine when it is fixed: what it knows of it is noted before."""
        gathering = self._machine.rounds.gathering()
        if gathering is not None:
            round_ = self.state.open.get(gathering.outer_step)
            if round_ is None:
                round_ = self.state.open[gathering.outer_step] = OpenRound(gathering.opened_at)
            round_.quorum_at = gathering.quorum_at if gathering.phase == GRACE else None

    def _on_fixed(self, effect: FixParticipants) -> None:
        round_ = self._of(effect.outer_step)
        flying = self._machine.rounds.get(effect.outer_step)
        if flying is not None:
            round_.quorum_at = flying.quorum_at
        round_.fixed_at, round_.fix = self.state.now, effect
        present = {m for m, lane in self.state.lanes.items() if lane.state is LaneState.TRAINING}
        round_.left_out = tuple(sorted(present - set(effect.participants)))

    def _on_aborted(self, effect: AbortRound) -> None:
        round_ = self._of(effect.outer_step)
        if round_.fixed_at is None and effect.reason.why is Why.NOT_STORED:
            return  # nothing was decided in it yet
        round_.attempts.append(Attempt(self.state.now, effect.reason.why.value, _text(effect.reason)))
        round_.fixed_at, round_.fix = None, None
        round_.merged.clear()
        self._event(EventKind.ABORTED, f"round {effect.outer_step} is gathered again: {_text(effect.reason)}")

    def _on_discard(self, effect: Discard) -> None:
        reason = effect.reason
        self._of(effect.outer_step).discards.append(Discarded(effect.learner, self.state.now, reason.why.value, _text(reason)))

    def _on_merge(self, effect: Merge) -> None:
        self._of(effect.outer_step).merged.update(share.learner for share in effect.shares)

    def _on_membership(self, effect: Membership) -> None:
        was = self._lane(effect.learner).state
        lost = effect.standing == Standing.LOST and was is not LaneState.LOST
        self.state.lost += lost and effect.reason.why is not Why.RUN_OVER
        self._change(effect.learner, effect.standing, effect.reason)

    def _on_recovered(self, effect: Recovered) -> None:
        if not self._machine.outer_step:
            return  # it loads what the run begins with
        self.state.recovered += 1
        took = seconds(effect.nanos)
        said = f"{worker_name(effect.learner)} recovered from {worker_name(effect.source)} in {took:.2f} s"
        self._event(EventKind.RECOVERED, said, effect.learner, took=took)

    def _on_refuse(self, effect: Refuse) -> None:
        """Of each peer and reason one line a round: a peer may send nonsense as fast as it likes."""
        self.state.refused += 1
        if (key := (effect.peer, effect.reason.why)) not in self.state.refusals:
            self.state.refusals.add(key)
            self._event(EventKind.REFUSED, f"{worker_name(effect.peer)} is refused: {_text(effect.reason)}", effect.peer)

    def _on_send(self, effect: Send) -> None:
        if isinstance(effect.envelope.body, Announce):
            self._lane(effect.envelope.receiver).announced += 1

    def _on_rollback(self, effect: AnswerRollback) -> None:
        self.state.rollback = effect.reason
        self._event(EventKind.ROLLBACK, _text(effect.reason))

    def _on_snapshot(self, effect: SealSnapshot) -> None:
        state = "complete" if effect.complete else "incomplete"
        self._event(EventKind.SNAPSHOT, f"snapshot of outer step {effect.snapshot} is {state}: {_text(effect.reason)}")

    def _on_finished(self, effect: Finished) -> None:
        self._event(EventKind.FINISHED, f"the run is finished at outer step {effect.outer_step}")

    # ------------------------------------------------------------ rows

    def _commit(self, outer_step: OuterStep) -> None:
        """This outer step is durable. One that a rollback made has had no participants."""
        state, now = self.state, self.state.now
        round_ = state.open.pop(outer_step, None) or OpenRound(now)
        fix, fates = round_.fix, self._machine.fates()
        for learner in round_.merged:
            self._lane(learner).merged += 1
        rolled_back = state.rollback if state.rollback is not None else Reason(Why.ROLLED_BACK)
        reason = fix.reason if fix is not None else rolled_back
        lanes = tuple(state.lanes[m].take(now) for m in sorted(state.lanes))
        losses = [lane.loss for lane in lanes if lane.loss is not None]
        fixed_at = round_.fixed_at if round_.fixed_at is not None else now
        self._sink.put_round(RoundRow(
            outer_step=outer_step, begins_at=state.closed_at, opened_at=min(round_.opened_at, fixed_at),
            quorum_at=round_.quorum_at if round_.quorum_at is not None else fixed_at, fixed_at=fixed_at, closed_at=now,
            fragments=fix.fragments if fix is not None else (), participants=fix.participants if fix is not None else (),
            merged=tuple(sorted(round_.merged)), left_out=round_.left_out,
            why=reason.why.value if fix is not None else Why.ROLLED_BACK.value, text=_text(reason),
            attempts=tuple(round_.attempts), discards=tuple(round_.discards), refused=state.refused, lost=state.lost,
            recovered=state.recovered, loss=sum(losses) / len(losses) if losses else None,
            fates=TokenFates(fates.trained, fates.merged, fates.in_flight, {k.value: n for k, n in fates.discarded.items()}),
            learners=lanes,
        ))  # fmt: skip
        state.committed, state.closed_at = outer_step, now
        state.refused = state.lost = state.recovered = 0
        state.refusals.clear()
