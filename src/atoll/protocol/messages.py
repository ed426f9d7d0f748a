"""What workers say to each other.

A *message* travels inside an `Envelope` from one worker to another. All are frozen tagged Structs. None of them holds a
tensor: a message that moves weights names them, and the driver sends the bytes beside it.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import ClassVar, TypeAlias, get_args

import msgspec

from atoll.ids import FragmentId, Incarnation, LearnerId, LocalStep, Nanos, OuterStep, WorkerId
from atoll.protocol.reasons import Reason

NO_VERSION: OuterStep = -1


class Lane(IntEnum):
    """A channel has two lanes, each in order and numbered by itself (`causality.py`)."""

    CONTROL = 0
    BULK = 1
    """Messages with bytes beside them."""


class Direction(Enum):
    TO_SYNCER = "to_syncer"
    TO_LEARNER = "to_learner"
    """From the syncer."""
    BETWEEN_LEARNERS = "between_learners"


class Word(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Messages, events and effects."""


class Sent(Word, frozen=True):
    """A message. Its class says who may send it to whom, in which lane, and what it may do there."""

    direction: ClassVar[Direction]
    lane: ClassVar[Lane] = Lane.CONTROL
    opens: ClassVar[bool] = False
    """Opens a channel: after a broken connection the sequence goes on with a gap, and only such a message may jump it."""
    overtakes: ClassVar[bool] = False
    """Says only how things stand, so it may overtake a long transfer in the other lane."""


# ---------------------------------------------------------------- small values


class Unit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A lease: `index`-th run of consecutive positions in the data stream of learner `stream`."""

    stream: LearnerId
    index: int


class Adoption(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A learner took over a version of a fragment at a step boundary."""

    fragment: FragmentId
    version: OuterStep
    local_step: LocalStep
    tokens: int
    """Tokens this incarnation had trained by then."""
    kept: int = 0
    """With `keep_overlap`, how many of them it had trained since it was pulled from, and added to the version."""


class Share(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One learner's part in a merge."""

    learner: LearnerId
    weight: float
    anchor: OuterStep
    local_step: LocalStep


class Lease(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one learner holds of the data: units to draw, and units drawn whose work is not in Theta yet."""

    learner: LearnerId
    granted: tuple[Unit, ...]
    done: tuple[Unit, ...]


class RollbackPoint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An outer step that the run can be rolled back to."""

    outer_step: OuterStep
    versions: tuple[OuterStep, ...]
    """Of each fragment the version that was current then."""
    merged: int
    """(token, fragment) pairs that were merged by then, in this run."""


class SyncerState(msgspec.Struct, frozen=True, gc=False):
    """The syncer's side of a snapshot: with the tensors of the versions it names, a run goes on from here."""

    outer_step: OuterStep
    kept: tuple[tuple[OuterStep, ...], ...]
    own_next: tuple[tuple[LearnerId, int], ...]
    pool: tuple[Unit, ...]
    leases: tuple[Lease, ...]
    points: tuple[RollbackPoint, ...] = ()


class LearnerState(msgspec.Struct, frozen=True, gc=False):
    """A learner's side of a snapshot: where it stood, what it had adopted, and its place in the data."""

    held: tuple[OuterStep, ...]
    position: OuterStep
    outer_known: OuterStep
    left: tuple[Unit, ...]
    offset: int
    """Batches of the first unit left that are drawn."""
    own_next: int
    local_step: LocalStep = 0
    tokens: int = 0
    samples: int = 0
    since: tuple[tuple[int, int, int], ...] = ()
    """For each fragment the steps, tokens and samples since its last adoption: what its next contribution weighs."""


# ---------------------------------------------------------------- messages: learner to syncer


class Hello(Sent, frozen=True):
    """Opens a channel. `held` names the version of each fragment; all NO_VERSION means: I have nothing."""

    direction = Direction.TO_SYNCER
    opens = True

    held: tuple[OuterStep, ...]
    local_step: LocalStep
    tokens: int
    needs_state: bool
    left: tuple[Unit, ...]
    """Leased units not yet drawn to their end, the one being drawn first: lease accounting is reconciled against it."""
    own_next: int
    reason: Reason
    grants: int = 0
    """How many grants arrived in this incarnation: units of later ones are nobody's yet."""


class Report(Sent, frozen=True):
    """After every inner step, metadata only. Counters are cumulative, so a lost report loses nothing."""

    direction = Direction.TO_SYNCER
    overtakes = True

    session: int
    local_step: LocalStep
    position: OuterStep
    tokens: int
    samples: int
    step_nanos: Nanos
    waited_nanos: Nanos
    stream: LearnerId
    batch: int
    """Position in `stream` of the batch just trained. RNG is a function of (seed, stream, batch)."""
    adopted: tuple[Adoption, ...]
    snapshot: OuterStep
    """The newest marker this learner has recorded its state for. A `SnapshotPart` says whether the record is on its disk."""
    loss: float | None


class Contribution(Sent, frozen=True):
    """Answers a Pull; the encoded difference to `anchor` travels beside it."""

    direction = Direction.TO_SYNCER
    lane = Lane.BULK

    outer_step: OuterStep
    fragment: FragmentId
    local_step: LocalStep
    anchor: OuterStep
    c_steps: int
    c_tokens: int
    c_samples: int
    tokens: int
    """Cumulative tokens at staging: what this contribution covers."""


class Decline(Sent, frozen=True):
    """Answers a Pull that cannot be answered: the exact state asked for is not there any more."""

    direction = Direction.TO_SYNCER
    overtakes = True

    outer_step: OuterStep
    reason: Reason


class Loaded(Sent, frozen=True):
    """Recovery's bulk is in place."""

    direction = Direction.TO_SYNCER

    ticket: int
    source: WorkerId
    local_step: LocalStep
    held: tuple[OuterStep, ...]
    """Newest version known of each fragment, adopted or about to be."""


class RecoveryFailed(Sent, frozen=True):
    direction = Direction.TO_SYNCER

    ticket: int
    reason: Reason


class SnapshotPart(Sent, frozen=True):
    """This learner's part of a snapshot is on its disk and was checked there, or is not, and why."""

    direction = Direction.TO_SYNCER
    overtakes = True

    snapshot: OuterStep
    flaw: Reason | None


class Goodbye(Sent, frozen=True):
    direction = Direction.TO_SYNCER

    reason: Reason


# ---------------------------------------------------------------- messages: syncer to learner


class Welcome(Sent, frozen=True):
    """Opens the channel back."""

    direction = Direction.TO_LEARNER
    opens = True

    outer_step: OuterStep


class Pull(Sent, frozen=True):
    direction = Direction.TO_LEARNER
    overtakes = True

    outer_step: OuterStep
    fragments: tuple[FragmentId, ...]
    staged_only: bool = False
    """It did not report in time: it answers from what it has staged, or declines, and nobody waits for its next boundary."""


class Announce(Sent, frozen=True):
    """A stored version; its bytes travel beside it: in full, or as a difference to `previous`."""

    direction = Direction.TO_LEARNER
    lane = Lane.BULK

    outer_step: OuterStep
    fragment: FragmentId
    previous: OuterStep
    """NO_VERSION: in full."""
    merged: tuple[LearnerId, ...]
    local_steps: int = 0
    """Dynamic local updates: so many steps are to be trained on this version. 0: the config's H."""


class Tick(Sent, frozen=True):
    """An outer step with nothing due went by."""

    direction = Direction.TO_LEARNER
    overtakes = True

    outer_step: OuterStep


class Ticket(Sent, frozen=True):
    """Ask `peer` for its state; it will answer once it has seen `outer_step`."""

    direction = Direction.TO_LEARNER

    ticket: int
    peer: LearnerId
    outer_step: OuterStep
    patience: Nanos


class Serve(Sent, frozen=True):
    """Tells a healthy peer whom it may serve."""

    direction = Direction.TO_LEARNER

    ticket: int
    newcomer: LearnerId
    outer_step: OuterStep


class TakeTheta(Sent, frozen=True):
    """All fragments were announced in full: load them; inner moments start fresh."""

    direction = Direction.TO_LEARNER

    ticket: int
    reason: Reason


class TakeRollback(Sent, frozen=True):
    """The run was rolled back, and all fragments of `outer_step` were announced in full: load them at the next step boundary, and
    forget what was trained since."""

    direction = Direction.TO_LEARNER

    ticket: int
    outer_step: OuterStep
    reset_optimizer: bool
    """Inner moments start fresh; else they are kept."""
    reason: Reason


class Enter(Sent, frozen=True):
    """You are in sync: stand at `outer_step`, reports of `session` count from now on."""

    direction = Direction.TO_LEARNER

    session: int
    outer_step: OuterStep


class Recover(Sent, frozen=True):
    """Your state is of no more use: come back through Hello(needs_state)."""

    direction = Direction.TO_LEARNER

    reason: Reason


class Grant(Sent, frozen=True):
    direction = Direction.TO_LEARNER
    overtakes = True

    units: tuple[Unit, ...]
    own_next: int
    """First unit of the learner's own stream that nobody was granted: where it goes on while the syncer is away."""


class Finish(Sent, frozen=True):
    direction = Direction.TO_LEARNER

    outer_step: OuterStep


# ---------------------------------------------------------------- messages: learner to learner


class StateRequest(Sent, frozen=True):
    direction = Direction.BETWEEN_LEARNERS
    opens = True

    ticket: int


class StateTransfer(Sent, frozen=True):
    """Weights, anchors, inner optimiser and scheduler state travel beside it; never data position, RNG or residual."""

    direction = Direction.BETWEEN_LEARNERS
    lane = Lane.BULK
    opens = True

    ticket: int
    outer_step: OuterStep
    held: tuple[OuterStep, ...]
    pending: tuple[tuple[FragmentId, OuterStep], ...]
    """Announced versions the peer holds and has yet to adopt: from its first round the newcomer applies what the others apply."""


Message: TypeAlias = (
    Hello | Report | Contribution | Decline | Loaded | RecoveryFailed | SnapshotPart | Goodbye
    | Welcome | Pull | Announce | Tick | Ticket | Serve | TakeTheta | TakeRollback | Enter | Recover | Grant | Finish
    | StateRequest | StateTransfer
)  # fmt: skip
MESSAGES: tuple[type[Sent], ...] = get_args(Message)


def addressed(direction: Direction) -> tuple[type[Sent], ...]:
    """The messages that go that way."""
    return tuple(kind for kind in MESSAGES if kind.direction is direction)


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """`seq` counts per (sender, incarnation, receiver) and lane, so channels are FIFO (`causality.py`). `clock` is
    the sender's own count in this incarnation: the syncer's outer step, a learner's local step. What it knew of everybody else
    is no part of a message, because the tapes say it: a vector clock is a fold of these counts over what was received before."""

    sender: WorkerId
    incarnation: Incarnation
    receiver: WorkerId
    seq: int
    clock: int
    body: Message
    after: int = 0
    """How many messages of the other lane come before this one."""
