"""Where a round's time went: folded from the syncer's events, and measured by its merging thread."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.ids import SYNCER
from atoll.protocol.reasons import DUE
from atoll.protocol.vocabulary import AbortRound, DeadlinePassed, Effect, Event, FixParticipants, Merge, Share, Store, Stored
from atoll.runtime.syncer.stages import StageTimes
from atoll.tape.format import Record
from atoll.views.stages import RoundClock, timing_lines

MS = 1_000_000


def record(now: int, event: Event, *effects: Effect, worker: int = SYNCER) -> Record:
    return Record(0, now * MS, worker, event, effects)


def merge(t: int, fragment: int = 0) -> Merge:
    return Merge(t, fragment, (Share(0, 1.0, 0, 4), Share(3, 1.0, 0, 4)), 0, False)


def round_of(t: int, at: int, spans: tuple[int, ...]) -> Sequence[Record]:
    return [
        record(at, DeadlinePassed(), FixParticipants(t, (1, 2), (0, 3), DUE)),
        record(at + 40, DeadlinePassed(), merge(t, 1), merge(t, 2), Store(t, (1, 2))),
        record(at + 100, Stored(t, "", (), spans)),
    ]  # fmt: skip


def test_each_stage_of_a_round_is_told_apart() -> None:
    clock = RoundClock()
    for r in (*round_of(1, 0, (30 * MS, 20 * MS)), *round_of(2, 500, (30 * MS, 20 * MS))):
        clock(r.now, r.worker, r.event, r.effects)
    first, second = clock.rounds
    assert (first.gather, first.queue, first.merge, first.store, first.between) == (40 * MS, 10 * MS, 30 * MS, 20 * MS, None)
    assert (second.between, second.learners, second.fragments) == (500 * MS, 2, (1, 2))
    assert clock.medians() == {"gather": 0.04, "queue": 0.01, "merge": 0.03, "store": 0.02, "between_commits": 0.5}


def test_aborted_rounds_empty_rounds_and_other_workers_leave_no_line() -> None:
    records = [
        record(0, DeadlinePassed(), FixParticipants(1, (0,), (0,), DUE)), record(1, DeadlinePassed(), AbortRound(1, DUE)),
        record(2, Stored(1, "")),
        record(3, DeadlinePassed(), FixParticipants(2, (), (), DUE)), record(4, Stored(2, "")),
        record(5, DeadlinePassed(), FixParticipants(3, (0,), (0,), DUE), worker=4),
    ]  # fmt: skip
    header, *rest = timing_lines(records)
    assert header.split() == ["step", "learners", "gather", "queue", "merge", "store", "between", "fragments"] and not rest


def test_table_has_a_line_for_each_round_and_the_medians() -> None:
    _, one, two, medians = timing_lines([*round_of(1, 0, (30 * MS, 20 * MS)), *round_of(2, 500, ())])
    assert one.split() == ["1", "2", "40.0ms", "10.0ms", "30.0ms", "20.0ms", "1,2"]
    assert two.split() == ["2", "2", "40.0ms", "60.0ms", "0.0ms", "0.0ms", "500.0ms", "1,2"], "a virtual run measures none"
    assert medians.split() == ["median", "40.0ms", "35.0ms", "15.0ms", "10.0ms", "500.0ms"]


def test_merges_of_a_round_add_up_and_those_of_an_aborted_one_are_forgotten() -> None:
    times = StageTimes()
    times.timed(merge(7, 0), tuple)
    times.timed(AbortRound(7, DUE), tuple)
    (nothing,) = times.timed(Store(7, (0,)), lambda: (Stored(7, "x"),))
    assert isinstance(nothing, Stored) and nothing.spans[0] == 0 and nothing.digest == "x"
    for fragment in (0, 1):
        times.timed(merge(8, fragment), lambda: [Stored(n, "") for n in range(100)])
    (stored,) = times.timed(Store(8, (0, 1)), lambda: (Stored(8, "y"),))
    assert isinstance(stored, Stored) and stored.spans[0] > 0 and stored.spans[1] > 0
