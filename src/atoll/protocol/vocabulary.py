"""All the words of the protocol: what workers say to each other, what happens to a worker, what a worker wants done.

A *message* travels inside an `Envelope` from one worker to another (`messages.py`). An *event* enters a machine with a
time. An *effect* leaves it, and whoever holds the machine carries it out. All are frozen tagged Structs: one definition
serves the wire, the tape and the tests. None of them holds a tensor.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from atoll.ids import FragmentId, Incarnation, LearnerId, LocalStep, Nanos, OuterStep, WorkerId
from atoll.protocol.messages import *  # noqa: F403  one import for all the words of the protocol
from atoll.protocol.messages import Envelope, LearnerState, Share, SyncerState, Unit, Word
from atoll.protocol.reasons import Reason

# ---------------------------------------------------------------- events


class Started(Word, frozen=True):
    """A worker's process began. A syncer that comes back is re-derived from its tape and then told so."""

    incarnation: Incarnation


class Measure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Norms (L2) of a contribution's difference and of the weights it is a difference to."""

    norm: float
    weights: float


class Connected(Word, frozen=True):
    peer: WorkerId


class ConnectionLost(Word, frozen=True):
    peer: WorkerId
    reason: str
    """The transport's words, for people."""


class Received(Word, frozen=True):
    envelope: Envelope
    payload_bytes: int
    flaw: Reason | None = None
    """What the executor found wrong with the bytes beside it: POISONED (NaN, Inf, another size). Of a peer's state: BAD_STATE
    or OTHER_OPTIMIZER."""
    measure: Measure | None = None
    """What the executor measured of a contribution; `norms.py` compares it."""


class Violated(Word, frozen=True):
    """A peer sent what is no message of this protocol, or not one of its own. It reached nobody."""

    peer: WorkerId
    detail: str


class StepDone(Word, frozen=True):
    """An inner optimiser step completed."""

    tokens: int
    samples: int
    nanos: Nanos
    loss: float | None


class Stored(Word, frozen=True):
    """The outer step is durable. `digest` is of the bytes of Theta that were stored: a replay with weights must meet it."""

    outer_step: OuterStep
    digest: str
    jumps: tuple[float, ...] = ()
    """How far each fragment moved (L2), in the order of `Store.fragments`."""
    spans: tuple[Nanos, ...] = ()
    """How long the merge took, and the storing; empty where nobody measures it. No decision depends on it."""


class MergeRejected(Word, frozen=True):
    """The merged Theta was not stored: it holds NaN or Inf, or moved farther than `Store.jump_limits` allow."""

    outer_step: OuterStep
    fragment: FragmentId
    jump: float


class StateWritten(Word, frozen=True):
    """What RecordState recorded is on disk and was checked there, or is not, and why."""

    snapshot: OuterStep
    flaw: Reason | None = None


class Poisoned(Word, frozen=True):
    """A tensor of this learner holds NaN or Inf: named, and never sent."""

    where: str


class LeaveAsked(Word, frozen=True):
    """The process was asked to stop politely. Asked twice, it goes at once."""

    reason: str
    """The caller's words, for people."""
    within: Nanos | None = None
    """How long it has, where the caller says so: a preemption notice does. None: `limits.leave_seconds`."""
    returns: bool = False
    """Its process keeps what it needs to come back to its place."""


class Restored(Word, frozen=True):
    """A new run's syncer goes on from a snapshot's books; the versions they name are in place."""

    syncer_state: SyncerState


class RollbackAsked(Word, frozen=True):
    """An operator wants Theta as it was after outer step `to`."""

    to: OuterStep
    """Below zero: counted from the newest rollback point, which is -1."""
    reset_optimizer: bool
    request: str
    """Names the request, so that one that was read twice is carried out once."""
    reason: str
    """The operator's words, for people."""


class Resumed(Word, frozen=True):
    """A new run's learner goes on from its own part of a snapshot."""

    snapshot: OuterStep
    learner_state: LearnerState


class Resized(Word, frozen=True):
    """Slices of this learner came or went: from its next step on its batch is this share of the full one."""

    share: float


class DeadlinePassed(Word, frozen=True):
    pass


Event: TypeAlias = (
    Started | Connected | ConnectionLost | Received | Violated | StepDone | Stored | MergeRejected | StateWritten | Poisoned
    | LeaveAsked | Restored | RollbackAsked | Resumed | Resized | DeadlinePassed
)  # fmt: skip

# ---------------------------------------------------------------- effects


class Send(Word, frozen=True):
    envelope: Envelope


class InnerStep(Word, frozen=True):
    """Draw the batch at (stream, batch), take one inner optimiser step. `outer_step` sets the learning rate."""

    local_step: LocalStep
    stream: LearnerId
    batch: int
    outer_step: OuterStep
    share: float = 1.0
    """Of the batch: below 1 while slices are out."""


class Stage(Word, frozen=True):
    """Copy and encode a fragment's difference to its anchor, at a step boundary."""

    fragment: FragmentId
    local_step: LocalStep
    slot: OuterStep
    """Exact: the outer step it is for. Arrival: NO_VERSION, the newest replaces the older."""
    restart: bool
    """The next difference is taken from here on (anchor = round start)."""


class ApplyOwnShare(Word, frozen=True):
    """Eager updates: add to the adopted version what the outer step would make of this learner's own newest outer gradient. The
    next difference is taken from there. Nothing to do if none was staged since the last time."""

    fragment: FragmentId


class Unstage(Word, frozen=True):
    fragment: FragmentId
    slot: OuterStep


class Keep(Word, frozen=True):
    """Keep the announced bytes just received until they are adopted."""

    fragment: FragmentId
    version: OuterStep
    previous: OuterStep


class Adopt(Word, frozen=True):
    fragment: FragmentId
    version: OuterStep
    alpha: float
    merged: bool
    """This learner's own packet was in it: the error-feedback residual is committed."""
    reason: Reason
    keeps: bool = False
    """Add to the version what was trained since the copy that went into it was staged."""


class LoadTheta(Word, frozen=True):
    """Start the inner moments afresh: the weights came from the syncer. Residuals start from zero."""

    reason: Reason
    keep_optimizer: bool = False
    """After a rollback the moments may be kept."""


class LoadState(Word, frozen=True):
    """Take over what a peer sent: weights, anchors, inner moments; residual zero."""

    source: LearnerId
    held: tuple[OuterStep, ...]


class LoadSnapshot(Word, frozen=True):
    """Take over this learner's own state of a snapshot: weights, anchors, inner moments, residuals."""

    snapshot: OuterStep


class RecordState(Word, frozen=True):
    """Record this learner's state for a snapshot; answer with `StateWritten`."""

    snapshot: OuterStep
    learner_state: LearnerState


class Wait(Word, frozen=True):
    """The preset makes this learner wait. From here on no inner step runs until `Resume`."""

    reason: Reason


class Resume(Word, frozen=True):
    waited_nanos: Nanos
    reason: Reason


class Accept(Word, frozen=True):
    """Decode the contribution just received and keep it for its round."""

    outer_step: OuterStep
    fragment: FragmentId
    learner: LearnerId
    anchor: OuterStep


class Discard(Word, frozen=True):
    """Forget an accepted contribution."""

    outer_step: OuterStep
    learner: LearnerId
    reason: Reason


class FixParticipants(Word, frozen=True):
    """The decision of a round."""

    outer_step: OuterStep
    fragments: tuple[FragmentId, ...]
    participants: tuple[LearnerId, ...]
    reason: Reason


class Merge(Word, frozen=True):
    """Merge the accepted contributions of one fragment in LearnerId order and take the outer step."""

    outer_step: OuterStep
    fragment: FragmentId
    shares: tuple[Share, ...]
    previous: OuterStep
    plain_average: bool


class Store(Word, frozen=True):
    """Make the outer step durable; answer with `Stored`, or with `MergeRejected` and store nothing."""

    outer_step: OuterStep
    fragments: tuple[FragmentId, ...]
    jump_limits: tuple[float, ...] = ()
    """How far each fragment may move; 0 is without a limit."""


class CopyVersions(Word, frozen=True):
    """Make `versions`, one of each fragment, the result of this outer step: weights, buffers and optimiser state."""

    outer_step: OuterStep
    versions: tuple[OuterStep, ...]


class AnswerRollback(Word, frozen=True):
    """What became of a `RollbackAsked`."""

    to: OuterStep
    outer_step: OuterStep
    """The outer step that has the weights of `to`; 0: it was refused."""
    reason: Reason


class AbortRound(Word, frozen=True):
    outer_step: OuterStep
    reason: Reason


class ForgetVersion(Word, frozen=True):
    fragment: FragmentId
    version: OuterStep


class RecordSyncer(Word, frozen=True):
    """Record the syncer's state for a snapshot; go on."""

    snapshot: OuterStep
    syncer_state: SyncerState


class RecordInFlight(Word, frozen=True):
    """The message just received was in flight when the snapshot began: it belongs to it."""

    snapshot: OuterStep
    envelope: Envelope


class SealSnapshot(Word, frozen=True):
    snapshot: OuterStep
    learners: tuple[LearnerId, ...]
    """Whose part is written."""
    complete: bool
    reason: Reason
    left_out: tuple[LearnerId, ...] = ()
    """In sync when it began, and not part of it."""


class Standing(StrEnum):
    """Where a learner stands with the syncer; `membership.py` has the transitions."""

    JOINING = "joining"
    IN_SYNC = "in_sync"
    SILENT = "silent"
    LOST = "lost"
    LEFT = "left"
    EXPELLED = "expelled"
    """It broke the rules too often: it is not admitted again under this id."""


class Membership(Word, frozen=True):
    """A learner's standing changed."""

    learner: LearnerId
    standing: Standing
    reason: Reason


class Refuse(Word, frozen=True):
    """What a peer sent is not taken, and why. `disconnect`: it also costs the peer its connection."""

    peer: WorkerId
    reason: Reason
    disconnect: bool


class Reissue(Word, frozen=True):
    """Units of a lost learner go to whoever asks next."""

    learner: LearnerId
    units: tuple[Unit, ...]
    repeats: int


class Recovered(Word, frozen=True):
    learner: LearnerId
    source: WorkerId
    nanos: Nanos
    reason: Reason


class Finished(Word, frozen=True):
    outer_step: OuterStep


Effect: TypeAlias = (
    Send | InnerStep | Stage | ApplyOwnShare | Unstage | Keep | Adopt | LoadTheta | LoadState | LoadSnapshot | RecordState
    | Wait | Resume | Accept | Discard | FixParticipants | Merge | Store | CopyVersions | AnswerRollback | AbortRound
    | ForgetVersion | RecordSyncer | RecordInFlight | SealSnapshot | Membership | Refuse | Reissue | Recovered | Finished
)  # fmt: skip
