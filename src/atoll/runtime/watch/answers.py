"""What the page, the terminal and programs are told of a run, as JSON. Times are seconds of the run's clock."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from atoll.ids import LearnerId, Nanos, OuterStep, seconds
from atoll.views.index.rows import EventRow, LaneState, LearnerBin, RoundBin, RoundRow, bin_of


class RunState(StrEnum):
    STARTING = "starting"
    """Its processes are being started; there is nothing to show yet."""
    LIVE = "live"
    STOPPED = "stopped"
    """Its syncer does not run now; the run may go on."""
    FINISHED = "finished"
    CUT = "cut"
    """Its tape has no end: the run was given up, or it goes on from there later."""


class LanePresent(msgspec.Struct, frozen=True, array_like=True):
    learner: LearnerId
    state: LaneState
    since: float
    loss: float | None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    preset: str
    learners: int
    total_steps: int
    fragments: int
    quorum: str
    model: str
    seed: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands."""

    name: str
    state: RunState
    settings: Settings | None
    rounds: int = 0
    events: int = 0
    first_step: OuterStep = 0
    last_step: OuterStep = 0
    ends: float = 0.0
    """The time of the newest thing known; while the run is live, now."""
    epoch: float = 0.0
    """Where the run's time goes on as the wall clock does: the Unix time of its time 0."""
    virtual: bool = False
    """Its time is a simulator's."""
    lanes: tuple[LanePresent, ...] = ()
    loss: float | None = None
    heldout: int = 0
    chaos: tuple[str, ...] = ()
    """Faults that may be asked for."""


class LaneAnswer(msgspec.Struct, frozen=True, array_like=True):
    learner: LearnerId
    state: LaneState
    permille: tuple[int, ...]
    """Of the bin's time, in each LaneState."""
    steps: int
    tokens: int
    step_seconds: float
    bytes_up: int
    bytes_down: int
    announced: int
    merged: int
    loss: float | None


class BinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    first: OuterStep
    last: OuterStep
    begins: float
    ends: float
    rounds: int
    merging: int
    merged: tuple[int, float, int]
    """Learners merged in a round: least, mean, most."""
    took: tuple[float, float]
    """Seconds of a round: mean and most."""
    grace: tuple[float, float]
    whys: dict[str, int]
    attempts: int
    discards: int
    refused: int
    lost: int
    recovered: int
    loss: tuple[float, float, float] | None
    """Least, mean and most."""
    fates: dict[str, int]
    """Since the run began: trained, merged, in_flight, and `discarded_` with each reason."""
    lanes: tuple[LaneAnswer, ...]


class EventsAnswer(msgspec.Struct, frozen=True):
    count: int
    """In the span that was asked for; `events` has the last of them."""
    events: tuple[dict[str, Any], ...]


def bin_answer(b: RoundBin) -> BinAnswer:
    span = max(1, b.closed_at - b.begins_at)
    fates = {"trained": b.fates.trained, "merged": b.fates.merged, "in_flight": b.fates.in_flight}
    fates |= {f"discarded_{reason}": count for reason, count in b.fates.discarded.items()}
    return BinAnswer(
        first=b.first, last=b.last, begins=seconds(b.begins_at), ends=seconds(b.closed_at), rounds=b.rounds, merging=b.merging,
        merged=(b.merged_least, round(b.merged_sum / max(1, b.merging), 3), b.merged_most),
        took=(seconds(b.took_sum // b.rounds), seconds(b.took_most)),
        grace=(seconds(b.grace_sum // b.rounds), seconds(b.grace_most)),
        whys=b.whys, attempts=b.attempts, discards=b.discards, refused=b.refused, lost=b.lost, recovered=b.recovered,
        loss=(b.loss_least, b.loss_sum / b.losses, b.loss_most) if b.losses else None, fates=fates,
        lanes=tuple(_lane_answer(lane, span) for lane in b.learners),
    )  # fmt: skip


def _lane_answer(lane: LearnerBin, span: Nanos) -> LaneAnswer:
    permille = tuple(1000 * part // span for part in lane.nanos)
    step = seconds(lane.step_nanos // max(1, lane.steps))
    return LaneAnswer(
        lane.learner, lane.state, permille, lane.steps, lane.tokens, round(step, 6), lane.bytes_up, lane.bytes_down,
        lane.announced, lane.merged, lane.loss,
    )  # fmt: skip


def round_answer(row: RoundRow) -> dict[str, Any]:
    """Everything that is known of one round."""
    whole = msgspec.to_builtins(bin_answer(bin_of(row)))
    return {
        "outer_step": row.outer_step, "begins": seconds(row.begins_at), "opened": seconds(row.opened_at),
        "quorum": seconds(row.quorum_at), "fixed": seconds(row.fixed_at), "closed": seconds(row.closed_at),
        "fragments": row.fragments, "participants": row.participants, "merged": row.merged, "left_out": row.left_out,
        "why": row.why, "text": row.text, "loss": row.loss, "fates": whole["fates"], "lanes": whole["lanes"],
        "attempts": [{"at": seconds(a.at), "why": a.why, "text": a.text} for a in row.attempts],
        "discards": [{"learner": d.learner, "at": seconds(d.at), "why": d.why, "text": d.text} for d in row.discards],
        "refused": row.refused, "lost": row.lost, "recovered": row.recovered,
    }  # fmt: skip


def events_answer(count: int, events: Sequence[EventRow]) -> EventsAnswer:
    return EventsAnswer(count, tuple(
        {"at": seconds(e.at), "kind": e.kind, "learner": e.learner, "outer_step": e.outer_step, "text": e.text, "state": e.state,
         "seconds": e.seconds}
        for e in events
    ))  # fmt: skip
