"""What the index of a run holds: a row for each round, bins of several rounds for each zoom level, and a row for each event.

All numbers of a bin add up, so that a bin of bins equals the bin of their rounds. Times are nanoseconds of the run's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum, StrEnum

import msgspec

from atoll.ids import FragmentId, LearnerId, Nanos, OuterStep

FACTOR = 4
"""Bins of one level in a bin of the next."""


class LaneState(IntEnum):
    """What a learner did with its time. The first two divide the time in which it was in sync."""

    TRAINING = 0
    WAITING = 1
    JOINING = 2
    """Connected and on its way in: it waits for its place, or loads Theta or a peer's state."""
    SILENT = 3
    LOST = 4
    LEFT = 5
    """It said so, or was put out."""


class LearnerBin(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One learner in some rounds."""

    learner: LearnerId
    state: LaneState
    """At the end."""
    nanos: tuple[int, ...]
    """Time in each LaneState. What is missing in the sum was before its first Hello. A wait is known when the step after it is
    reported, so it may count in a round or two after the one in which it was."""
    steps: int = 0
    tokens: int = 0
    step_nanos: Nanos = 0
    """Of the inner steps that were reported, each by itself."""
    bytes_up: int = 0
    bytes_down: int = 0
    """Known where the learners' events are on the same tape."""
    announced: int = 0
    """Versions of fragments that were sent to it."""
    merged: int = 0
    """Rounds that merged an update of it."""
    loss: float | None = None
    """The last one that it reported."""


class TokenFates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """(token, fragment) pairs since the run began; see `protocol/ledger.py`."""

    trained: int = 0
    merged: int = 0
    in_flight: int = 0
    discarded: dict[str, int] = {}


class Discarded(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A participant that dropped out of its round."""

    learner: LearnerId
    at: Nanos
    why: str
    text: str


class Attempt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A try at a round that was given up; the same outer step was gathered again."""

    at: Nanos
    why: str
    text: str


class RoundRow(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """One outer step that is durable."""

    outer_step: OuterStep
    begins_at: Nanos
    """When the outer step before it became durable; `learners` counts from there."""
    opened_at: Nanos
    quorum_at: Nanos
    fixed_at: Nanos
    closed_at: Nanos
    fragments: tuple[FragmentId, ...]
    participants: tuple[LearnerId, ...]
    merged: tuple[LearnerId, ...]
    left_out: tuple[LearnerId, ...]
    """In sync when the participants were fixed, and not among them."""
    why: str
    text: str
    attempts: tuple[Attempt, ...] = ()
    discards: tuple[Discarded, ...] = ()
    refused: int = 0
    lost: int = 0
    recovered: int = 0
    loss: float | None = None
    """Mean of the learners' last losses."""
    fates: TokenFates = TokenFates()
    learners: tuple[LearnerBin, ...] = ()


class RoundBin(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """Consecutive outer steps."""

    first: OuterStep
    last: OuterStep
    begins_at: Nanos
    closed_at: Nanos
    rounds: int
    merging: int
    """Rounds with a fragment due."""
    merged_least: int
    merged_sum: int
    merged_most: int
    """Learners merged in a round with a fragment due: least, sum and most."""
    took_sum: Nanos
    took_most: Nanos
    """From the opening of a round until it is durable. Rounds may overlap."""
    grace_sum: Nanos
    grace_most: Nanos
    """From the quorum until the participants were fixed."""
    whys: dict[str, int]
    attempts: int
    discards: int
    refused: int
    lost: int
    recovered: int
    losses: int
    loss_least: float
    loss_sum: float
    loss_most: float
    fates: TokenFates
    learners: tuple[LearnerBin, ...]


class EventKind(StrEnum):
    STANDING = "standing"
    RECOVERED = "recovered"
    REFUSED = "refused"
    ABORTED = "aborted"
    ROLLBACK = "rollback"
    SNAPSHOT = "snapshot"
    SYNCER_STARTED = "syncer_started"
    FINISHED = "finished"


class EventRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something worth a line. It is written at once, before its round is durable."""

    at: Nanos
    kind: EventKind
    learner: LearnerId | None
    outer_step: OuterStep
    text: str
    state: LaneState | None = None
    """Of a changed standing: what the learner's lane shows from here on."""
    seconds: float = 0.0
    """Of a recovery: how long it took. Of a start of the syncer: how long it was away."""


def bin_of(row: RoundRow) -> RoundBin:
    merging, merged = int(bool(row.fragments)), len(row.merged) if row.fragments else 0
    took, grace = row.closed_at - row.opened_at, row.fixed_at - row.quorum_at
    loss = row.loss if row.loss is not None else 0.0
    return RoundBin(
        first=row.outer_step, last=row.outer_step, begins_at=row.begins_at, closed_at=row.closed_at, rounds=1, merging=merging,
        merged_least=merged, merged_sum=merged, merged_most=merged, took_sum=took, took_most=took, grace_sum=grace,
        grace_most=grace, whys={row.why: 1}, attempts=len(row.attempts), discards=len(row.discards), refused=row.refused,
        lost=row.lost, recovered=row.recovered, losses=int(row.loss is not None), loss_least=loss, loss_sum=loss,
        loss_most=loss, fates=row.fates, learners=row.learners,
    )  # fmt: skip


def join_bins(bins: Sequence[RoundBin]) -> RoundBin:
    """Of consecutive ones."""
    merging, lossy = [b for b in bins if b.merging], [b for b in bins if b.losses]
    whys: Counter[str] = Counter()
    for each in bins:
        whys.update(each.whys)
    return RoundBin(
        first=bins[0].first, last=bins[-1].last, begins_at=bins[0].begins_at, closed_at=bins[-1].closed_at,
        rounds=sum(b.rounds for b in bins), merging=sum(b.merging for b in bins),
        merged_least=min((b.merged_least for b in merging), default=0), merged_sum=sum(b.merged_sum for b in bins),
        merged_most=max(b.merged_most for b in bins), took_sum=sum(b.took_sum for b in bins),
        took_most=max(b.took_most for b in bins), grace_sum=sum(b.grace_sum for b in bins),
        grace_most=max(b.grace_most for b in bins), whys=dict(sorted(whys.items())), attempts=sum(b.attempts for b in bins),
        discards=sum(b.discards for b in bins), refused=sum(b.refused for b in bins), lost=sum(b.lost for b in bins),
        recovered=sum(b.recovered for b in bins), losses=sum(b.losses for b in bins),
        loss_least=min((b.loss_least for b in lossy), default=0.0), loss_sum=sum(b.loss_sum for b in lossy),
        loss_most=max((b.loss_most for b in lossy), default=0.0), fates=bins[-1].fates, learners=_join_learners(bins),
    )  # fmt: skip


def _join_learners(bins: Sequence[RoundBin]) -> tuple[LearnerBin, ...]:
    found: dict[LearnerId, list[LearnerBin]] = {}
    for each in bins:
        for lane in each.learners:
            found.setdefault(lane.learner, []).append(lane)
    return tuple(_join_lane(found[m]) for m in sorted(found))


def _join_lane(lanes: list[LearnerBin]) -> LearnerBin:
    """In one loop: the syncer does this for every learner in every fourth round."""
    nanos = [0] * len(LaneState)
    steps = tokens = step_nanos = up = down = announced = merged = 0
    for lane in lanes:
        for state, spent in enumerate(lane.nanos):
            if spent:
                nanos[state] += spent
        steps += lane.steps
        tokens += lane.tokens
        step_nanos += lane.step_nanos
        up += lane.bytes_up
        down += lane.bytes_down
        announced += lane.announced
        merged += lane.merged
    last = lanes[-1]
    return LearnerBin(
        last.learner, last.state, tuple(nanos), steps, tokens, step_nanos, up, down, announced, merged, last.loss
    )  # fmt: skip
