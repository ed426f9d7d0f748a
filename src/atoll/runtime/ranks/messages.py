"""What the ranks of one learner say to each other. Rank 0 holds the machine; the others do what it says, in order."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from atoll.ids import FragmentId, OuterStep
from atoll.protocol.vocabulary import Effect, InnerStep, StepDone
from atoll.runtime.syncer.places import Placement


class Note(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# ---------------------------------------------------------------- joining


class RankHello(Note, frozen=True):
    """The first message of every connection of a rank."""

    key: str
    rank: int
    bulk: bool


class Profile(Note, frozen=True):
    """What a rank wants to train. Ranks must agree on all but the boxes."""

    rank: int
    model: str
    """A digest of names, shapes and dtypes."""
    optimizer: str
    boxes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """By name the start and the shape of what it holds, where it does not hold the whole tensor."""


class Agreed(Note, frozen=True):
    boxes: tuple[dict[str, tuple[tuple[int, ...], tuple[int, ...]]], ...]


class PlaceGiven(Note, frozen=True):
    """The learner's place, without its keys: only rank 0 talks to the syncer."""

    placement: Placement


class ReadWeights(Note, frozen=True):
    """Send what you own of a range of a fragment's weights: the first learner of a run uploads its model."""

    request: int
    fragment: FragmentId
    start: int
    stop: int


# ---------------------------------------------------------------- steps


class StepReached(Note, frozen=True):
    """A rank is at a step boundary. Its own tokens, samples and loss; None: its scaler skipped the step."""

    number: int
    done: StepDone | None
    poisoned: str = ""


class GradientsReady(Note, frozen=True):
    """This rank has the gradients of its next step, of all ranks, and needs no other rank to take it. What it counted for it."""

    number: int
    done: StepDone


class TakeStep(Note, frozen=True):
    """All ranks have their gradients: take the step. From here on the loss of a rank does not undo it."""

    number: int


class StepFailed(Note, frozen=True):
    """The gradients of this rank's step could not be computed: another rank may be gone."""

    attempt: int
    reason: str


class Reform(Note, frozen=True):
    """Ranks were lost. Leave torch's group; the ranks in `order` form a smaller one, in this order, and begin their step anew.
    A rank that is not named ends."""

    attempt: int
    number: int
    order: tuple[int, ...]
    host: str
    port: int


class GroupFormed(Note, frozen=True):
    attempt: int
    digest: str
    """Of this rank's weights and optimiser state."""


class Counted(Note, frozen=True):
    """All ranks are at the boundary. False: the step was skipped by all of them."""

    number: int
    counted: bool


class Go(Note, frozen=True):
    """Leave the boundary. None: the run is over, or the learner has left it."""

    step: InnerStep | None


class Do(Note, frozen=True):
    """Carry out an effect. Of `Keep`: on the bytes that came as this arrival."""

    effect: Effect
    arrival: int = 0


class EncodePart(Note, frozen=True):
    """Send your part of the packet that is staged for this outer step."""

    request: int
    fragment: FragmentId
    slot: OuterStep


class EncodeAgain(Note, frozen=True):
    """Send your part of the packet of `request` as the smaller group divides it."""

    request: int
    again: int


class Assembled(Note, frozen=True):
    """The packet is assembled: it will not be asked for again."""

    request: int


class SeamResidual(Note, frozen=True):
    """The numbers beside it are what the assembled packet did not carry of your seams."""

    fragment: FragmentId
    generation: int = 0
    """Of the group that divided the packet."""


class DropArrival(Note, frozen=True):
    arrival: int


class ReadState(Note, frozen=True):
    """Send your part of the learner's state, for a peer."""

    request: int


class WritePart(Note, frozen=True):
    """Write your part of the learner's state into this folder, for a snapshot."""

    request: int
    snapshot: OuterStep
    folder: str


# ---------------------------------------------------------------- bulk


class Arrival(Note, frozen=True):
    """Your pieces of an announced version, or of the difference to the one before it."""

    arrival: int
    fragment: FragmentId
    difference: bool
    sizes: tuple[int, ...]
    """Elements of the parameters, then of the buffers, in the bytes beside it."""


class StateArrival(Note, frozen=True):
    """Your part of a peer's state, in the bytes beside it."""

    arrival: int


class ArrivalTaken(Note, frozen=True):
    arrival: int


class Part(Note, frozen=True):
    """The answer to `EncodePart` or `ReadWeights`. Without sizes: there is nothing finite to send."""

    request: int
    sizes: tuple[int, ...]
    """Bytes of the codes, the scales and the seams; or of the weights."""


class PartOfState(Note, frozen=True):
    """The answer to `ReadState`, in the bytes beside it."""

    request: int


class PartWritten(Note, frozen=True):
    """The answer to `WritePart`."""

    request: int
    path: str
    nbytes: int
    sha256: str
    flaw: str = ""
    """Why it is not written."""


# ---------------------------------------------------------------- the end


class RankLeaves(Note, frozen=True):
    """This rank's loop ended; `failed`: by an exception."""

    reason: str
    failed: bool


class LeaveWanted(Note, frozen=True):
    """`learner.leave` was called on a rank other than 0."""

    reason: str
    within_seconds: float | None
    returns: bool


class Ended(Note, frozen=True):
    """The learner ends; `failed` tells whether in order."""

    reason: str
    failed: bool


ToRank: TypeAlias = (
    Agreed | PlaceGiven | ReadWeights | Counted | Go | Do | EncodePart | SeamResidual | DropArrival | ReadState | WritePart
    | Arrival | StateArrival | Ended | TakeStep | Reform | EncodeAgain | Assembled
)  # fmt: skip
ToLead: TypeAlias = (
    RankHello | Profile | StepReached | ArrivalTaken | Part | PartOfState | PartWritten | RankLeaves | LeaveWanted
    | GradientsReady | StepFailed | GroupFormed
)  # fmt: skip
