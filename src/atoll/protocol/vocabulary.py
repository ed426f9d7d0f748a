"""All the words of the protocol: what workers say to each other, what happens to a worker, what a worker wants done.

A *message* travels inside an `Envelope` from one worker to another. An *event* enters a machine with a time. An
*effect* leaves it, and whoever holds the machine carries it out. All are frozen tagged Structs: one definition serves
the wire, the tape and the tests. None of them holds a tensor: a message that moves weights names them, and the driver
sends the bytes beside it.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from atoll.ids import FragmentId, Incarnation, LearnerId, LocalStep, Nanos, OuterStep, WorkerId

NO_VERSION: OuterStep = -1


class _Word(msgspec.Struct, frozen=True, tag=True, gc=False):
    pass


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


class Share(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One learner's part in a merge."""

    learner: LearnerId
    weight: float
    anchor: OuterStep
    local_step: LocalStep


# ---------------------------------------------------------------- messages: learner to syncer


class Hello(_Word, frozen=True):
    """Opens a channel. `held` names the version of each fragment; all NO_VERSION means: I have nothing."""

    held: tuple[OuterStep, ...]
    local_step: LocalStep
    tokens: int
    needs_state: bool
    left: tuple[Unit, ...]
    """Leased units not yet drawn to their end, the one being drawn first: the books are squared against it."""
    own_next: int
    reason: str
    grants: int = 0
    """How many grants arrived in this incarnation: units of later ones are nobody's yet."""


class Report(_Word, frozen=True):
    """After every inner step, metadata only. Counters are cumulative, so a lost report loses nothing."""

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
    """The newest marker this learner has recorded its state for."""
    loss: float | None


class Contribution(_Word, frozen=True):
    """Answers a Pull; the encoded difference to `anchor` travels beside it."""

    outer_step: OuterStep
    fragment: FragmentId
    local_step: LocalStep
    anchor: OuterStep
    c_steps: int
    c_tokens: int
    c_samples: int
    tokens: int
    """Cumulative tokens at staging: what this contribution covers."""


class Decline(_Word, frozen=True):
    """Answers a Pull that cannot be answered: the exact state asked for is not there any more."""

    outer_step: OuterStep
    reason: str


class Loaded(_Word, frozen=True):
    """Recovery's bulk is in place."""

    ticket: int
    source: WorkerId
    local_step: LocalStep
    held: tuple[OuterStep, ...]
    """Newest version known of each fragment, adopted or about to be."""


class RecoveryFailed(_Word, frozen=True):
    ticket: int
    reason: str


class Goodbye(_Word, frozen=True):
    reason: str


# ---------------------------------------------------------------- messages: syncer to learner


class Welcome(_Word, frozen=True):
    """Opens the channel back."""

    outer_step: OuterStep


class Pull(_Word, frozen=True):
    outer_step: OuterStep
    fragments: tuple[FragmentId, ...]


class Announce(_Word, frozen=True):
    """A stored version; its bytes travel beside it: in full, or as a difference to `previous`."""

    outer_step: OuterStep
    fragment: FragmentId
    previous: OuterStep
    """NO_VERSION: in full."""
    merged: tuple[LearnerId, ...]


class Tick(_Word, frozen=True):
    """An outer step with nothing due went by."""

    outer_step: OuterStep


class Ticket(_Word, frozen=True):
    """Ask `peer` for its state; it will answer once it has seen `outer_step`."""

    ticket: int
    peer: LearnerId
    outer_step: OuterStep
    patience: Nanos


class Serve(_Word, frozen=True):
    """Tells a healthy peer whom it may serve."""

    ticket: int
    newcomer: LearnerId
    outer_step: OuterStep


class TakeTheta(_Word, frozen=True):
    """All fragments were announced in full: load them; inner moments start fresh."""

    ticket: int
    reason: str


class Enter(_Word, frozen=True):
    """You are in sync: stand at `outer_step`, reports of `session` count from now on."""

    session: int
    outer_step: OuterStep


class Recover(_Word, frozen=True):
    """Your state is of no more use: come back through Hello(needs_state)."""

    reason: str


class Grant(_Word, frozen=True):
    units: tuple[Unit, ...]
    own_next: int
    """First unit of the learner's own stream that nobody was granted: where it goes on while the syncer is away."""


class Finish(_Word, frozen=True):
    outer_step: OuterStep


# ---------------------------------------------------------------- messages: learner to learner


class StateRequest(_Word, frozen=True):
    ticket: int


class StateTransfer(_Word, frozen=True):
    """Weights, anchors, inner optimiser and scheduler state travel beside it; never data position, RNG or residual."""

    ticket: int
    outer_step: OuterStep
    held: tuple[OuterStep, ...]
    pending: tuple[tuple[FragmentId, OuterStep], ...]
    """Announced versions the peer holds and has yet to adopt: from its first round the newcomer applies what the others apply."""


Message: TypeAlias = (
    Hello | Report | Contribution | Decline | Loaded | RecoveryFailed | Goodbye
    | Welcome | Pull | Announce | Tick | Ticket | Serve | TakeTheta | Enter | Recover | Grant | Finish
    | StateRequest | StateTransfer
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """`seq` counts per (sender, incarnation, receiver), so channels are FIFO. `clock[0]` is the syncer's outer step,
    `clock[1 + m]` learner m's local step: one's own count and the latest known of everybody else."""

    sender: WorkerId
    incarnation: Incarnation
    receiver: WorkerId
    seq: int
    clock: tuple[int, ...]
    body: Message


# ---------------------------------------------------------------- events


class Started(_Word, frozen=True):
    """A worker's process began. A syncer that comes back is re-derived from its tape and then told so."""

    incarnation: Incarnation


class Connected(_Word, frozen=True):
    peer: WorkerId


class ConnectionLost(_Word, frozen=True):
    peer: WorkerId
    reason: str


class Received(_Word, frozen=True):
    envelope: Envelope
    payload_bytes: int
    flaw: str = ""
    """What the driver found wrong with the bytes beside it (NaN, Inf, another size): the machine decides what follows."""


class StepDone(_Word, frozen=True):
    """An inner optimiser step completed."""

    tokens: int
    samples: int
    nanos: Nanos
    loss: float | None


class Stored(_Word, frozen=True):
    """The outer step is durable. `digest` is of the bytes of Theta that were stored: a replay with weights must meet it."""

    outer_step: OuterStep
    digest: str


class Poisoned(_Word, frozen=True):
    """A tensor of this learner holds NaN or Inf: named, and never sent."""

    where: str


class LeaveAsked(_Word, frozen=True):
    """The process was asked to stop politely."""

    reason: str


class DeadlinePassed(_Word, frozen=True):
    pass


Event: TypeAlias = (
    Started | Connected | ConnectionLost | Received | StepDone | Stored | Poisoned | LeaveAsked | DeadlinePassed
)  # fmt: skip

# ---------------------------------------------------------------- effects


class Send(_Word, frozen=True):
    envelope: Envelope


class InnerStep(_Word, frozen=True):
    """Draw the batch at (stream, batch), take one inner optimiser step. `outer_step` sets the learning rate."""

    local_step: LocalStep
    stream: LearnerId
    batch: int
    outer_step: OuterStep


class Stage(_Word, frozen=True):
    """Copy and encode a fragment's difference to its anchor, at a step boundary."""

    fragment: FragmentId
    local_step: LocalStep
    slot: OuterStep
    """Exact: the outer step it is for. Arrival: NO_VERSION, the newest replaces the older."""
    restart: bool
    """The next difference is taken from here on (anchor = round start)."""


class Unstage(_Word, frozen=True):
    fragment: FragmentId
    slot: OuterStep


class Keep(_Word, frozen=True):
    """Keep the announced bytes just received until they are adopted."""

    fragment: FragmentId
    version: OuterStep
    previous: OuterStep


class Adopt(_Word, frozen=True):
    fragment: FragmentId
    version: OuterStep
    alpha: float
    merged: bool
    """This learner's own packet was in it: the error-feedback residual is committed."""
    reason: str


class LoadTheta(_Word, frozen=True):
    """Start the inner moments afresh: the weights came from the syncer."""

    reason: str


class LoadState(_Word, frozen=True):
    """Take over what a peer sent: weights, anchors, inner moments; residual zero."""

    source: LearnerId
    held: tuple[OuterStep, ...]


class RecordState(_Word, frozen=True):
    """Record this learner's state for a snapshot."""

    snapshot: OuterStep


class Wait(_Word, frozen=True):
    """The preset makes this learner wait. From here on no inner step runs until `Resume`."""

    reason: str


class Resume(_Word, frozen=True):
    waited_nanos: Nanos
    reason: str


class Accept(_Word, frozen=True):
    """Decode the contribution just received and keep it for its round."""

    outer_step: OuterStep
    fragment: FragmentId
    learner: LearnerId
    anchor: OuterStep


class Discard(_Word, frozen=True):
    """Forget an accepted contribution."""

    outer_step: OuterStep
    learner: LearnerId
    reason: str


class FixParticipants(_Word, frozen=True):
    """The decision of a round."""

    outer_step: OuterStep
    fragments: tuple[FragmentId, ...]
    participants: tuple[LearnerId, ...]
    reason: str


class Merge(_Word, frozen=True):
    """Merge the accepted contributions of one fragment in LearnerId order and take the outer step."""

    outer_step: OuterStep
    fragment: FragmentId
    shares: tuple[Share, ...]
    previous: OuterStep
    plain_average: bool


class Store(_Word, frozen=True):
    """Make the outer step durable; answer with `Stored`."""

    outer_step: OuterStep
    fragments: tuple[FragmentId, ...]


class AbortRound(_Word, frozen=True):
    outer_step: OuterStep
    reason: str


class ForgetVersion(_Word, frozen=True):
    fragment: FragmentId
    version: OuterStep


class RecordSyncer(_Word, frozen=True):
    """Record the syncer's state for a snapshot; go on."""

    snapshot: OuterStep


class RecordInFlight(_Word, frozen=True):
    """The message just received was in flight when the snapshot began: it belongs to it."""

    snapshot: OuterStep
    envelope: Envelope


class SealSnapshot(_Word, frozen=True):
    snapshot: OuterStep
    learners: tuple[LearnerId, ...]
    complete: bool
    reason: str


class Membership(_Word, frozen=True):
    """A learner's standing changed."""

    learner: LearnerId
    standing: str
    reason: str


class Refuse(_Word, frozen=True):
    """What a peer sent is not taken, and why. `disconnect`: it also costs the peer its connection."""

    peer: WorkerId
    reason: str
    disconnect: bool


class Reissue(_Word, frozen=True):
    """Units of a lost learner go to whoever asks next."""

    learner: LearnerId
    units: tuple[Unit, ...]
    repeats: int


class Recovered(_Word, frozen=True):
    learner: LearnerId
    source: WorkerId
    nanos: Nanos
    reason: str


class Finished(_Word, frozen=True):
    outer_step: OuterStep


Effect: TypeAlias = (
    Send | InnerStep | Stage | Unstage | Keep | Adopt | LoadTheta | LoadState | RecordState | Wait | Resume
    | Accept | Discard | FixParticipants | Merge | Store | AbortRound | ForgetVersion
    | RecordSyncer | RecordInFlight | SealSnapshot | Membership | Refuse | Reissue | Recovered | Finished
)  # fmt: skip
