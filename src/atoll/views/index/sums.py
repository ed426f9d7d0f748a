"""What the fold of an index holds between two rows. All of it can be written and read back, so that a syncer which goes on from
a checkpoint goes on with its index too."""

from __future__ import annotations

import math

import msgspec

from atoll.ids import LearnerId, Nanos, OuterStep, WorkerId
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import FixParticipants, Hello, Report, Standing
from atoll.views.index.rows import Attempt, Discarded, LaneState, LearnerBin

STATE_OF: dict[Standing, LaneState] = {
    Standing.JOINING: LaneState.JOINING,
    Standing.IN_SYNC: LaneState.TRAINING,
    Standing.SILENT: LaneState.SILENT,
    Standing.LOST: LaneState.LOST,
    Standing.LEFT: LaneState.LEFT,
    Standing.EXPELLED: LaneState.LEFT,
}
UNKNOWN = -1


def _no_time() -> list[int]:
    return [0] * len(LaneState)


class LaneSum(msgspec.Struct):
    """A learner since the last row."""

    learner: LearnerId
    since: Nanos
    state: LaneState = LaneState.JOINING
    incarnation: int = -1
    local_step: int = 0
    tokens_seen: int = 0
    waited_seen: Nanos = 0
    """UNKNOWN: the fold began behind its last report, and counts from its next one."""
    waited: Nanos = 0
    """Reported, and not yet counted in a row: no row counts more of it than the learner was in sync."""
    loss: float | None = None
    nanos: list[int] = msgspec.field(default_factory=_no_time)
    steps: int = 0
    tokens: int = 0
    step_nanos: Nanos = 0
    bytes_up: int = 0
    bytes_down: int = 0
    announced: int = 0
    merged: int = 0

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
        if self.waited_seen != UNKNOWN:
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
        self.nanos = _no_time()
        self.steps = self.tokens = self.step_nanos = self.bytes_up = self.bytes_down = self.announced = self.merged = 0
        return row


class OpenRound(msgspec.Struct):
    opened_at: Nanos
    quorum_at: Nanos | None = None
    fixed_at: Nanos | None = None
    fix: FixParticipants | None = None
    merged: set[LearnerId] = msgspec.field(default_factory=set)
    left_out: tuple[LearnerId, ...] = ()
    attempts: list[Attempt] = msgspec.field(default_factory=list)
    discards: list[Discarded] = msgspec.field(default_factory=list)


class FoldState(msgspec.Struct):
    now: Nanos = 0
    lanes: dict[LearnerId, LaneSum] = msgspec.field(default_factory=dict)
    open: dict[OuterStep, OpenRound] = msgspec.field(default_factory=dict)
    committed: OuterStep = 0
    closed_at: Nanos = 0
    started: bool = False
    refused: int = 0
    lost: int = 0
    recovered: int = 0
    refusals: set[tuple[WorkerId, Why]] = msgspec.field(default_factory=set)
    """Of each peer and reason one line a round."""
    rollback: Reason | None = None


def state_behind(machine: SyncerMachine) -> FoldState:
    """Of a machine that was loaded from a checkpoint, where the events before it are not kept."""
    now = machine.now
    lanes = {
        member.learner: LaneSum(member.learner, now, STATE_OF[member.standing], member.incarnation, waited_seen=UNKNOWN)
        for member in machine.roster
    }
    return FoldState(now=now, lanes=lanes, committed=machine.outer_step, closed_at=now, started=True)
