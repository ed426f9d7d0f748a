"""The syncer's rounds: gather, grace, pace, pull, merge, store, announce. Events in, exact effects out."""

from __future__ import annotations

import copy

import pytest
from stage import MS, TOKENS, SyncerStage, arrival, exact, of, others, sent

from atoll.errors import PeerViolation
from atoll.ids import SECOND, SYNCER
from atoll.protocol.counters import Count
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.round import GATHERING, NEXT, PULLING, READY, STORING, Round
from atoll.protocol.vocabulary import (
    NO_VERSION,
    AbortRound,
    Accept,
    Adoption,
    Announce,
    Connected,
    ConnectionLost,
    Contribution,
    Decline,
    Discard,
    Envelope,
    Finish,
    Finished,
    FixParticipants,
    ForgetVersion,
    Merge,
    Pull,
    Received,
    Recover,
    Refuse,
    Share,
    Store,
    Stored,
    Tick,
)  # fmt: skip

# two fragments over two outer steps: fragment 1 is due at odd outer steps, fragment 0 at even ones

# ---------------------------------------------------------------- gathering


def test_quorum_of_one_met_by_the_first_report_fixes_and_pulls() -> None:
    s = SyncerStage(arrival(3), joined=3)
    effects = s.steps(2)
    closed = Reason(Why.WINDOW_CLOSED, "1 of 3: quorum 1 met, window closed after 0.000 s")
    assert others(effects) == [FixParticipants(1, (1,), (2,), closed)]
    assert sent(effects, 2, Pull) == [Pull(1, (1,))]
    assert sent(effects, 0) == sent(effects, 1) == []


def test_quorum_of_two_waits_for_the_second_report_and_sorts_participants() -> None:
    s = SyncerStage(arrival(3, quorum=2), joined=3)
    assert others(s.steps(2)) == []
    (fixed,) = of(s.steps(0), FixParticipants)
    assert fixed.participants == (0, 2)


def test_quorum_of_all_counts_members_in_sync_and_not_the_newcomer() -> None:
    s = SyncerStage(arrival(2, quorum="all"), joined=2)
    s.hello(2)  # joins, has not loaded
    s.steps(0)
    (fixed,) = of(s.steps(1), FixParticipants)
    assert fixed == FixParticipants(1, (1,), (0, 1), Reason(Why.ALL_REPORTED, "all 2 in sync reported"))


def test_report_repeated_for_the_same_local_step_is_not_fresh_twice() -> None:
    s = SyncerStage(arrival(3, quorum=2), joined=3)
    s.steps(0)
    assert of(s.hears(0, s.report(0)), FixParticipants) == []


def test_learner_counted_in_a_round_is_not_fresh_for_the_next_until_it_steps_again() -> None:
    s = SyncerStage(arrival(3, overlap=1), joined=3)
    s.full_round(who=[0])
    assert of(s.hears(0, s.report(0)), FixParticipants) == []
    assert [f.outer_step for f in of(s.steps(0), FixParticipants)] == [2]


def test_report_of_an_older_session_is_booked_and_not_counted() -> None:
    s = SyncerStage(arrival(3), joined=3)
    s.cast[1].session -= 1
    assert of(s.steps(1), FixParticipants) == []
    assert s.machine.fates().trained == 2 * TOKENS


def test_report_under_exact_adoption_counts_once_the_learner_is_at_the_outer_step() -> None:
    s = SyncerStage(exact("diloco", 2, interval=2), joined=2)
    s.steps(0)
    s.steps(0)  # stands at 2, and outer step 1 has nothing due
    effects = s.steps(1)
    assert of(effects, FixParticipants) == [FixParticipants(1, (), (0, 1), Reason(Why.ALL_REPORTED, "all 2 in sync reported"))]


# ---------------------------------------------------------------- start-up wait


def test_first_round_waits_for_the_declared_learners_until_the_start_up_wait_ends() -> None:
    s = SyncerStage(arrival(3, limits={"start_wait_seconds": 0.5}), joined=2)
    assert of(s.steps(0), FixParticipants) == []
    assert s.machine.deadline() == SECOND // 2
    (fixed,) = of(s.passes(SECOND // 2), FixParticipants)
    assert fixed.participants == (0,)


def test_first_round_with_everybody_here_does_not_wait() -> None:
    s = SyncerStage(arrival(2), joined=1)
    s.steps(0)
    effects = s.joins(1)
    assert [f.participants for f in of(effects, FixParticipants)] == [(0,)]


def test_later_rounds_have_no_start_up_wait() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.full_round(who=[0])
    s.on(ConnectionLost(1, "gone"))
    assert [f.outer_step for f in of(s.steps(0), FixParticipants)] == [2]


# ---------------------------------------------------------------- grace


def graced(quorum: int = 1) -> SyncerStage:
    """Three learners, tau = 2, steps of 100 ms; with K = 1 round 1 was fixed at 0 with learner 0, and round 2 is open."""
    s = SyncerStage(arrival(3, fragments=4, interval=4, overlap=2, grace="adaptive", quorum=quorum), joined=3)
    s.steps(0, 0)
    return s


def test_grace_with_quorum_met_holds_the_window_open_for_gamma_times_the_slack() -> None:
    s = graced()
    assert of(s.steps(1, 120 * MS), FixParticipants) == []
    # slack = 2 * 100 - (120 + 0) = 80 ms, window 0.8 * 80 = 64 ms
    assert s.machine.deadline() == 184 * MS


def test_grace_with_straggler_inside_the_window_includes_it() -> None:
    s = graced()
    s.steps(1, 120 * MS)
    assert of(s.steps(0, 180 * MS), FixParticipants) == []
    (fixed,) = of(s.passes(184 * MS), FixParticipants)
    closed = Reason(Why.WINDOW_CLOSED, "2 of 3: quorum 1 met, window closed after 0.064 s")
    assert fixed == FixParticipants(2, (2,), (0, 1), closed)


def test_grace_with_straggler_after_the_window_leaves_it_to_the_next_round() -> None:
    s = graced()
    s.steps(1, 120 * MS)
    (fixed,) = of(s.passes(184 * MS), FixParticipants)
    assert 2 not in fixed.participants
    s.steps(2, 185 * MS)
    assert 2 not in s.machine.rounds[2].participants
    assert s.machine.rounds[3].phase == "grace"


def test_grace_with_everybody_in_closes_at_once() -> None:
    s = graced()
    s.steps(1, 120 * MS)
    s.steps(2, 130 * MS)
    (fixed,) = of(s.steps(0, 140 * MS), FixParticipants)
    assert fixed == FixParticipants(2, (2,), (0, 1, 2), Reason(Why.ALL_REPORTED, "all 3 in sync reported"))


def test_grace_whose_only_fresh_learner_is_lost_goes_back_to_gathering() -> None:
    s = graced()
    s.steps(1, 120 * MS)
    s.on(ConnectionLost(1, "gone"), 130 * MS)
    assert s.machine.rounds[2].phase == GATHERING
    assert of(s.passes(184 * MS), FixParticipants) == []


# ---------------------------------------------------------------- learners in mid-step when the window closes


def test_learner_in_mid_step_is_asked_for_the_copy_of_its_last_boundary() -> None:
    s = graced()  # round 1 took fragment 1 of learner 0, which has trained fragment 2 as well
    s.steps(1, 120 * MS)
    effects = s.passes(184 * MS)
    assert [f.participants for f in of(effects, FixParticipants)] == [(0, 1)]
    assert [sent(effects, m, Pull) for m in (0, 1)] == [[Pull(2, (2,), staged_only=True)], [Pull(2, (2,))]]


def test_learner_in_mid_step_counts_for_no_quorum() -> None:
    s = graced(quorum=2)
    s.steps(1, 1 * MS)  # round 1 has its quorum
    assert of([*s.steps(2, 120 * MS), *s.passes(184 * MS)], FixParticipants) == []


def test_learner_in_mid_step_that_declines_is_dropped_and_nobody_waits() -> None:
    s = graced()
    s.contributes(0, 1, 1, 10 * MS)
    s.stored(1, 20 * MS)
    s.steps(1, 120 * MS)
    s.passes(200 * MS)
    s.contributes(1, 2, 2, 210 * MS)
    effects = s.hears(0, Decline(2, Reason(Why.NOT_STAGED, "fragment 2")), 220 * MS)
    assert [d.learner for d in of(effects, Discard)] == [0]
    assert [[share.learner for share in merge.shares] for merge in of(effects, Merge)] == [[1]]


def test_learner_without_new_work_on_a_fragment_is_not_asked_for_it_again() -> None:
    s = SyncerStage(arrival(3, grace="adaptive", grace_gamma=0.1), joined=3)
    s.steps(0, 0)  # round 1 takes fragment 1
    s.contributes(0, 1, 1)
    s.stored(1)
    s.steps(1, 40 * MS, adopts=False)  # round 2 takes fragment 0
    s.passes(50 * MS)
    for learner in (0, 1):
        s.contributes(learner, 2, 0)
    s.stored(2)
    s.steps(2, 70 * MS)  # round 3 takes fragment 1 again
    (fixed,) = of(s.passes(80 * MS), FixParticipants)
    assert fixed.participants == (1, 2)


def test_learner_in_mid_step_that_missed_its_last_deadline_is_not_asked() -> None:
    s = graced()
    s.passes(5 * SECOND)  # it owed fragment 1 for round 1
    (fixed,) = of([*s.steps(1, 6 * SECOND), *s.passes(7 * SECOND)], FixParticipants)
    assert fixed.participants == (1,)


# ---------------------------------------------------------------- pace


def test_pace_one_holds_rounds_a_step_apart_even_with_everybody_fresh() -> None:
    s = SyncerStage(arrival(2, fragments=4, interval=4, overlap=2, pace=1.0), joined=2)
    s.steps(0, 0)  # fixed at 0: step time 100 ms from now on
    s.steps(0, 30 * MS)
    assert of(s.steps(1, 40 * MS), FixParticipants) == []
    assert s.machine.deadline() == 100 * MS
    assert [f.participants for f in of(s.passes(100 * MS), FixParticipants)] == [(0, 1)]


def test_pace_zero_fixes_as_soon_as_the_quorum_is_met() -> None:
    s = SyncerStage(arrival(2, fragments=4, interval=4, overlap=2, pace=0.0), joined=2)
    s.steps(0, 0)
    assert [f.outer_step for f in of(s.steps(1, 1 * MS), FixParticipants)] == [2]


# ---------------------------------------------------------------- pull, merge, store, announce


def test_contribution_that_completes_a_round_is_accepted_then_merged_then_stored() -> None:
    s = SyncerStage(arrival(3), joined=3)
    s.steps(0)
    assert s.contributes(0, 1, 1, c_tokens=60) == [
        Accept(1, 1, 0, 0),
        Merge(1, 1, (Share(0, 60 * 60.0, 0, 1),), 0, False),
        Store(1, (1,)),
    ]


def test_contributions_are_merged_in_learner_order_whatever_order_they_came_in() -> None:
    s = SyncerStage(arrival(3, quorum=3), joined=3)
    for learner in (2, 0, 1):
        s.steps(learner)
    s.contributes(1, 1, 1)
    s.contributes(2, 1, 1)
    (merge,) = of(s.contributes(0, 1, 1), Merge)
    assert [share.learner for share in merge.shares] == [0, 1, 2]


def test_contributions_of_nothing_trained_weigh_alike() -> None:
    s = SyncerStage(arrival(2, quorum=2), joined=2)
    s.steps(0)
    s.steps(1)
    s.contributes(0, 1, 1, c_steps=0, c_tokens=0, c_samples=0)
    (merge,) = of(s.contributes(1, 1, 1, c_steps=0, c_tokens=0, c_samples=0), Merge)
    assert [share.weight for share in merge.shares] == [1.0, 1.0]


def test_contribution_of_nothing_trained_weighs_zero_beside_one_that_trained() -> None:
    s = SyncerStage(arrival(2, quorum=2), joined=2)
    s.steps(0)
    s.steps(1)
    s.contributes(0, 1, 1, c_steps=0, c_tokens=0, c_samples=0)
    (merge,) = of(s.contributes(1, 1, 1), Merge)
    assert [share.weight for share in merge.shares] == [0.0, 10_000.0]


def test_stored_round_is_announced_to_every_connected_learner_and_only_then() -> None:
    s = SyncerStage(arrival(3), joined=3)
    s.steps(1)
    assert sent(s.contributes(1, 1, 1)) == []
    effects = s.stored(1)
    assert [sent(effects, m, Announce) for m in range(3)] == [[Announce(1, 1, 0, (1,))]] * 3
    assert s.machine.outer_step == 1


def test_round_with_several_fragments_due_merges_each_and_stores_once() -> None:
    s = SyncerStage(arrival(1, fragments=4, interval=2), joined=1)  # fragments 2 and 3 are due at 1
    assert sent(s.steps(0), 0, Pull) == [Pull(1, (2, 3))]
    assert others(s.contributes(0, 1, 3)) == [Accept(1, 3, 0, 0)]
    effects = s.contributes(0, 1, 2)
    assert [type(e) for e in effects] == [Accept, Merge, Merge, Store]
    assert [m.fragment for m in of(effects, Merge)] == [2, 3]
    assert of(effects, Store) == [Store(1, (2, 3))]


def test_empty_outer_step_consumes_a_quorum_of_fresh_reports_and_ticks() -> None:
    s = SyncerStage(arrival(2, fragments=1, interval=2, quorum=2), joined=2)  # nothing is due at 1
    assert sent(s.steps(0), kind=Tick) == []
    effects = s.steps(1)
    assert of(effects, FixParticipants) == [FixParticipants(1, (), (0, 1), Reason(Why.ALL_REPORTED, "all 2 in sync reported"))]
    assert [sent(effects, m, (Tick, Pull)) for m in (0, 1)] == [[Tick(1)]] * 2
    assert of(effects, Merge, Store) == []
    assert s.machine.outer_step == 1


def test_empty_outer_step_behind_one_in_flight_waits_its_turn() -> None:
    s = SyncerStage(arrival(2, fragments=2, interval=4, overlap=2), joined=2)  # due: 2 -> fragment 1, 4 -> fragment 0
    s.steps(0)  # outer step 1, empty
    s.steps(1)  # outer step 2, pulls fragment 1
    s.steps(0)  # outer step 3, empty, fixed behind it
    assert s.machine.outer_step == 1
    s.contributes(1, 2, 1)
    assert sent(s.stored(2), 0) == [Announce(2, 1, 0, (1,)), Tick(3)]
    assert s.machine.outer_step == 3


# ---------------------------------------------------------------- overlapping rounds


def overlapped() -> SyncerStage:
    """tau = 2: round 1 (fragment 1) awaits learner 0, round 2 (fragment 2) awaits learner 1."""
    s = SyncerStage(arrival(3, fragments=4, interval=4, overlap=2), joined=3)
    s.steps(0)
    s.steps(1)
    assert [r.phase for r in s.machine.rounds.values()] == [PULLING, PULLING, GATHERING]
    return s


def test_overlapping_rounds_commit_in_order_though_the_later_is_ready_first() -> None:
    s = overlapped()
    assert s.contributes(1, 2, 2) == [Accept(2, 2, 1, 0)]
    assert s.machine.rounds[2].phase == READY
    assert [type(e) for e in s.contributes(0, 1, 1)] == [Accept, Merge, Store]
    effects = s.stored(1)
    assert sent(effects, 2, Announce) == [Announce(1, 1, 0, (0,))]
    assert of(effects, Merge, Store) == [Merge(2, 2, (Share(1, 10_000.0, 0, 1),), 0, False), Store(2, (2,))]


def test_overlapping_rounds_beyond_tau_wait_until_one_is_stored() -> None:
    s = overlapped()
    assert of(s.steps(2), FixParticipants) == []
    s.contributes(0, 1, 1)
    assert [f.outer_step for f in of(s.stored(1), FixParticipants)] == [3]


def test_overlapping_rounds_on_the_same_fragment_wait_for_each_other() -> None:
    s = SyncerStage(arrival(3, fragments=1, interval=3, overlap=2), joined=3)  # fragment 0 is due at 3, 6, ...
    for _ in range(2):
        s.steps(0)
    s.steps(0)  # outer step 3 pulls
    s.steps(1)  # 4 is empty and may fly behind it
    assert [r.phase for r in s.machine.rounds.values()] == [PULLING, READY, GATHERING]
    assert of(s.steps(2), FixParticipants) == []  # tau is reached


def test_round_that_gathers_again_is_kept_when_an_earlier_one_does_too() -> None:
    s = SyncerStage(arrival(3, fragments=4, interval=4, overlap=3), joined=3)
    for learner in range(3):
        s.steps(learner)  # a quorum of one: a round each
    assert [r.participants for r in s.machine.rounds.values()][:3] == [(0,), (1,), (2,)]
    assert of(s.on(ConnectionLost(1, "gone")), AbortRound) == [AbortRound(2, Reason(Why.BELOW_QUORUM, "0 left of a quorum of 1"))]
    assert of(s.on(ConnectionLost(0, "gone")), AbortRound) == [AbortRound(1, Reason(Why.BELOW_QUORUM, "0 left of a quorum of 1"))]
    assert [(t, r.phase) for t, r in s.machine.rounds.items()] == [(1, GATHERING), (2, GATHERING), (3, PULLING)]
    assert [f.outer_step for f in of(s.steps(2), FixParticipants)] == [1]
    s.contributes(2, 1, 1)
    s.stored(1)
    assert [f.outer_step for f in of(s.steps(2), FixParticipants)] == [2]
    s.contributes(2, 3, 3)
    s.contributes(2, 2, 2)
    s.stored(2)
    s.stored(3)
    assert s.machine.outer_step == 3


def test_answer_is_timed_from_its_own_pull_though_others_came_after() -> None:
    s = SyncerStage(arrival(2, fragments=4, interval=4, overlap=2, quorum=2), joined=2)
    for learner in (0, 1):
        s.steps(learner, 0)
    for learner in (0, 1):
        s.steps(learner, 90 * MS)  # the second pull, 90 ms after the first
    s.contributes(0, 1, 1, 100 * MS)
    s.contributes(1, 1, 1, 100 * MS)
    s.stored(1, 100 * MS)
    for learner in (0, 1):
        s.steps(learner, 100 * MS)
    (third,) = (r for r in s.machine.rounds.values() if r.outer_step == 3)
    assert third.pull_deadline - third.fixed_at >= 4 * 100 * MS + 4 * s.machine.pulse.step_time


# ---------------------------------------------------------------- who misses its pull


def test_pull_deadline_passed_by_one_of_three_drops_it_and_merges_the_others() -> None:
    s = SyncerStage(arrival(3, fragments=4, interval=4, overlap=2, quorum=2, pace=1.0), joined=3)
    s.steps(0, 0)
    s.steps(1, 0)
    for learner in (0, 1):  # pulls are answered after 10 ms: patience is 4 * 10 + 4 * 100 ms from now on
        s.contributes(learner, 1, 1, 10 * MS)
    s.stored(1, 10 * MS)
    for learner in range(3):
        s.steps(learner, 50 * MS)
    s.passes(100 * MS)
    assert s.machine.rounds[2].participants == (0, 1, 2)
    s.contributes(0, 2, 2, 110 * MS)
    s.contributes(2, 2, 2, 110 * MS)
    assert s.machine.rounds[2].pull_deadline == 540 * MS
    effects = s.passes(540 * MS)
    assert of(effects, Discard) == [Discard(2, 1, Reason(Why.MISSED_DEADLINE))]
    assert [[share.learner for share in m.shares] for m in of(effects, Merge)] == [[0, 2]]
    assert of(effects, AbortRound) == []


def test_pull_deadline_that_leaves_fewer_than_k_gathers_the_same_outer_step_again() -> None:
    s = SyncerStage(arrival(2, quorum=2, limits={"first_pull_seconds": 0.5}), joined=2)
    s.steps(0)
    s.steps(1)
    s.contributes(0, 1, 1)
    effects = s.passes(SECOND // 2)
    assert of(effects, Discard, AbortRound, Merge) == [
        Discard(1, 1, Reason(Why.MISSED_DEADLINE)),
        AbortRound(1, Reason(Why.BELOW_QUORUM, "1 left of a quorum of 2")),
    ]
    assert s.machine.outer_step == 0
    # both reports were given back and count again: the same outer step, the same two, pulled anew
    assert [(f.outer_step, f.participants) for f in of(effects, FixParticipants)] == [(1, (0, 1))]
    assert [sent(effects, m, Pull) for m in (0, 1)] == [[Pull(1, (1,))]] * 2


def test_participant_lost_below_k_aborts_and_the_next_report_completes_the_quorum() -> None:
    s = SyncerStage(arrival(3, quorum=2), joined=3)
    s.steps(0)
    s.steps(1)
    s.contributes(0, 1, 1)
    effects = s.on(ConnectionLost(1, "gone"))
    assert of(effects, Discard, AbortRound, FixParticipants) == [
        Discard(1, 1, Reason(Why.GONE)),
        AbortRound(1, Reason(Why.BELOW_QUORUM, "1 left of a quorum of 2")),
    ]
    (fixed,) = of(s.steps(2), FixParticipants)
    assert (fixed.outer_step, fixed.participants) == (1, (0, 2))


def test_participant_lost_with_enough_left_is_discarded_with_what_it_sent() -> None:
    s = SyncerStage(arrival(2, quorum="all"), joined=2)
    s.steps(0)
    s.steps(1)
    s.contributes(1, 1, 1)
    assert of(s.on(ConnectionLost(1, "gone")), Discard) == [Discard(1, 1, Reason(Why.GONE))]
    (merge,) = of(s.contributes(0, 1, 1), Merge)
    assert [share.learner for share in merge.shares] == [0]


def test_participant_that_declines_is_dropped_from_that_round_alone() -> None:
    s = SyncerStage(arrival(2, quorum=1), joined=2)
    s.steps(0)
    effects = s.hears(0, Decline(1, Reason(Why.NOT_TRAINING, "is joining")))
    assert of(effects, Discard, AbortRound)[:2] == [
        Discard(1, 0, Reason(Why.DECLINED, "is joining")),
        AbortRound(1, Reason(Why.BELOW_QUORUM, "0 left of a quorum of 1")),
    ]


# ---------------------------------------------------------------- a stored round never reopens


def test_stored_round_refuses_what_comes_late() -> None:
    s = SyncerStage(arrival(3), joined=3)
    s.full_round(who=[0])
    assert s.contributes(0, 1, 1) == [Refuse(0, Reason(Why.LATE, "round 1 is not open"), False)]
    assert s.machine.outer_step == 1


def test_round_being_stored_is_not_shaken_by_the_loss_of_its_participants() -> None:
    s = SyncerStage(arrival(2, quorum=2), joined=2)
    s.steps(0)
    s.steps(1)
    s.contributes(0, 1, 1)
    s.contributes(1, 1, 1)
    assert s.machine.rounds[1].phase == STORING
    effects = [*s.on(ConnectionLost(0, "gone")), *s.on(ConnectionLost(1, "gone"))]
    assert of(effects, Discard, AbortRound) == []
    s.stored(1)
    assert s.machine.outer_step == 1


def test_stored_twice_raises_and_changes_nothing() -> None:
    s = SyncerStage(arrival(3), joined=3)
    s.full_round(who=[0])
    before = (s.machine.outer_step, list(s.machine.rounds), s.machine.versions.all_newest(), s.machine.fates())
    with pytest.raises(PeerViolation, match="outer step 1 was stored, but it is not being stored"):
        s.machine.on(Stored(1, "digest"), s.now)
    assert (s.machine.outer_step, list(s.machine.rounds), s.machine.versions.all_newest(), s.machine.fates()) == before
    assert s.on(Connected(0)) == []


def test_stored_before_everything_is_in_raises() -> None:
    s = SyncerStage(arrival(3), joined=3)
    s.steps(0)
    with pytest.raises(PeerViolation, match="is not being stored"):
        s.machine.on(Stored(1, "digest"), s.now)
    assert s.machine.rounds[1].phase == PULLING


def test_round_takes_only_the_arrows_of_its_picture() -> None:
    policy = SyncerStage(arrival(1)).machine.schedule.policy(1)
    for phase in (GATHERING, "grace", PULLING, READY, STORING):
        for trigger in ("quorum_met", "quorum_lost", "fixed", "all_in", "turn"):
            round_ = Round(1, (0,), policy, 0)
            round_.phase = phase
            if (phase, trigger) in NEXT:
                round_.move(trigger)
                assert round_.phase == NEXT[phase, trigger]
            else:
                with pytest.raises(AssertionError, match=f"{trigger} makes no sense"):
                    round_.move(trigger)
                assert round_.phase == phase


def test_round_that_takes_what_it_objects_to_raises_and_changes_nothing() -> None:
    s = SyncerStage(arrival(3), joined=3)
    s.steps(0)
    round_ = s.machine.rounds[1]
    before = copy.deepcopy((round_.phase, round_.participants, round_.awaited, round_.accepted))
    with pytest.raises(PeerViolation, match=r"learner 2: .*not a participant of round 1"):
        round_.take(2, s.contribution(2, 1, 1), Count(1, 1, 1))
    assert (round_.phase, round_.participants, round_.awaited, round_.accepted) == before


# ---------------------------------------------------------------- refusals


def test_contribution_by_one_not_in_the_round_is_refused() -> None:
    s = SyncerStage(arrival(3), joined=3)
    s.steps(0)
    assert of(s.contributes(1, 1, 1), Refuse) == [Refuse(1, Reason(Why.LATE, "not a participant of round 1"), False)]


def test_contribution_of_a_fragment_not_due_is_refused() -> None:
    s = SyncerStage(arrival(3), joined=3)
    s.steps(0)
    (refused,) = s.contributes(0, 1, 0)
    assert refused == Refuse(0, Reason(Why.LATE, "fragment 0 of round 1 is not awaited from it"), False)


def test_contribution_sent_twice_is_refused_the_second_time() -> None:
    s = SyncerStage(arrival(2, quorum=2), joined=2)
    s.steps(0)
    s.steps(1)
    s.contributes(0, 1, 1)
    (refused,) = s.contributes(0, 1, 1)
    assert refused == Refuse(0, Reason(Why.LATE, "fragment 1 of round 1 is not awaited from it"), False)


@pytest.mark.parametrize(
    "claim",
    [
        {"c_tokens": 101, "tokens": 100},
        {"tokens": 101},
        {"local_step": 2},
        {"c_tokens": -1},
        {"c_steps": -1},
        {"c_steps": 2},
        {"c_samples": -5},
        {"c_samples": 5},
    ],
    ids=str,
)
def test_contribution_that_claims_what_was_not_reported_is_refused_and_cut_off(claim: dict[str, int]) -> None:
    s = SyncerStage(arrival(1, fragments=2), joined=1)
    s.steps(0)
    effects = s.contributes(0, 1, 1, **claim)
    impossible = any(value < 0 for value in claim.values())
    (refused,) = effects
    assert isinstance(refused, Refuse) and refused.disconnect
    assert refused.reason.why is (Why.IMPOSSIBLE if impossible else Why.UNEARNED)


def test_contribution_against_a_forgotten_version_is_refused_and_means_recovery() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.steps(0)
    effects = s.contributes(0, 1, 1, anchor=7)
    gone = Reason(Why.VERSION_FORGOTTEN, "fragment 1 is against version 7, which is gone")
    assert of(effects, Refuse) == [Refuse(0, gone, False)]
    assert sent(effects, 0, Recover) == [Recover(Reason(Why.NOT_REBASED))]
    assert of(effects, Accept) == []
    assert of(effects, Discard) == [Discard(1, 0, Reason(Why.GONE))]


def test_poisoned_contribution_is_discarded_and_its_learner_recovers() -> None:
    s = SyncerStage(arrival(2, quorum=2), joined=2)
    s.steps(0)
    s.steps(1)
    effects = s.hears(0, s.contribution(0, 1, 1), flaw=Reason(Why.POISONED, "fragment 1 holds NaN or Inf"))
    assert of(effects, Accept) == []
    assert of(effects, Refuse, Discard) == [
        Refuse(0, Reason(Why.POISONED, "fragment 1 holds NaN or Inf"), False),
        Discard(1, 0, Reason(Why.GONE)),
    ]
    assert sent(effects, 0, Recover) == [Recover(Reason(Why.POISONED, "fragment 1 holds NaN or Inf"))]


def test_message_before_hello_is_refused_and_cut_off() -> None:
    s = SyncerStage(arrival(2), joined=1)
    s.on(ConnectionLost(0, "gone"))
    assert of(s.hears(0, s.report(0)), Refuse) == [Refuse(0, Reason(Why.NO_HELLO), True)]


def test_message_of_a_first_timer_that_is_no_hello_is_refused() -> None:
    s = SyncerStage(arrival(2))
    (refused,) = s.hears(1, Contribution(1, 0, 1, 0, 1, 1, 1, 1))
    assert refused == Refuse(1, Reason(Why.CHANNEL_NOT_OPENED, "incarnation 0 did not open its channel"), True)


def test_message_that_only_a_syncer_sends_is_refused() -> None:
    s = SyncerStage(arrival(2), joined=1)
    assert s.hears(0, Tick(3)) == [Refuse(0, Reason(Why.WRONG_RECEIVER, "Tick is not for the syncer"), True)]


@pytest.mark.parametrize("sender", [SYNCER, 4096, -7])
def test_message_from_nobody_that_could_be_a_learner_is_refused(sender: int) -> None:
    s = SyncerStage(arrival(2))
    effects = s.on(Received(Envelope(sender, 0, SYNCER, 0, 0, Tick(1)), 0))
    assert effects == [Refuse(sender, Reason(Why.NOT_A_LEARNER), True)]


def test_hello_that_names_versions_that_never_were_is_refused() -> None:
    s = SyncerStage(arrival(2))
    assert s.hello(0, held=(3, 0)) == [Refuse(0, Reason(Why.UNEARNED, "Hello names versions that never were"), True)]
    assert s.hello(0, held=(0,)) == [Refuse(0, Reason(Why.IMPOSSIBLE, "Hello names versions that never were"), True)]
    assert len(s.machine.roster) == 0


@pytest.mark.parametrize(("fragment", "version"), [(2, 0), (-1, 0), (0, 5), (0, -3)])
def test_report_of_an_adoption_that_never_could_be_is_refused_and_cut_off(fragment: int, version: int) -> None:
    s = SyncerStage(arrival(2), joined=2)
    held = [list(m.held) for m in s.machine.roster]
    effects = s.hears(0, s.report(0, adopted=(Adoption(fragment, version, 0, 0),)))
    assert [(r.peer, r.disconnect) for r in of(effects, Refuse)] == [(0, True)]
    assert [list(m.held) for m in s.machine.roster] == held


# ---------------------------------------------------------------- versions


def test_announcement_to_one_that_holds_the_version_before_is_a_difference() -> None:
    s = SyncerStage(arrival(1, fragments=1, interval=2), joined=1)
    s.full_round()
    s.full_round()  # outer step 2: version 2
    assert s.cast[0].told == [Announce(2, 0, 0, (0,))]
    s.full_round()
    s.full_round()
    assert s.cast[0].told == [Announce(4, 0, 2, (0,))]


def test_announcement_with_a_lossless_codec_is_in_full() -> None:
    s = SyncerStage(arrival(1, fragments=1, interval=2, codec_down="fp32"), joined=1)
    s.full_round()
    s.full_round()
    assert s.cast[0].told == [Announce(2, 0, NO_VERSION, (0,))]


def test_announcement_to_one_that_lacks_the_version_before_is_in_full() -> None:
    s = SyncerStage(arrival(2, fragments=1, interval=2), joined=2)
    for _ in range(4):
        s.full_round(who=[0])
    # learner 1 was sent version 2 and has not adopted it: version 4 waits
    assert s.cast[1].told == [Announce(2, 0, 0, (0,))]
    for _ in range(2):
        s.full_round(who=[0])
    effects = s.steps(1)  # adopts 2
    assert sent(effects, 1, Announce) == [Announce(6, 0, NO_VERSION, (0,))]


def test_announcements_of_a_fragment_to_a_slow_learner_are_one_at_a_time() -> None:
    s = SyncerStage(arrival(2, fragments=1, interval=2), joined=2)
    for _ in range(10):
        s.full_round(who=[0])
    member = s.machine.roster.get(1)
    assert member is not None
    assert (member.sent, member.deferred) == ([2], {0: 10})
    assert sent(s.steps(1), 1, Announce) == [Announce(10, 0, NO_VERSION, (0,))]
    assert member.deferred == {}


def test_announcement_next_after_an_adopted_one_is_a_difference_again() -> None:
    s = SyncerStage(arrival(2, fragments=1, interval=2), joined=2)
    for _ in range(4):
        s.full_round(who=[0])
    assert sent(s.steps(1), 1, Announce) == [Announce(4, 0, 2, (0,))]


def test_version_is_forgotten_once_every_member_adopted_a_newer_one() -> None:
    s = SyncerStage(arrival(2, fragments=1, interval=2, quorum=2), joined=2)
    for _ in range(3):
        s.full_round()
    assert [s.machine.versions.has(0, v) for v in (0, 2)] == [True, True]  # both hold 2; one older always stays
    s.steps(0)
    s.steps(1)
    s.contributes(0, 4, 0)
    s.contributes(1, 4, 0)
    assert of(s.stored(4), ForgetVersion) == [ForgetVersion(0, 0)]
    assert [s.machine.versions.has(0, v) for v in (0, 2, 4)] == [False, True, True]


def test_version_held_by_a_laggard_is_kept() -> None:
    s = SyncerStage(arrival(2, fragments=1, interval=2), joined=2)
    for _ in range(8):
        s.full_round(who=[0])
    assert s.machine.versions.has(0, 0)


def test_versions_of_a_fragment_never_exceed_the_limit_and_the_laggard_recovers() -> None:
    s = SyncerStage(arrival(2, fragments=1, interval=2, limits={"versions_max": 3}), joined=2)
    for _ in range(8):
        s.full_round(who=[0])
    assert s.machine.versions.count(0) == 3
    assert not s.machine.versions.has(0, 0)
    s.steps(1, adopts=False)  # outer step 9, empty
    assert sent(s.steps(1, adopts=False), 1, Pull) == [Pull(10, (0,))]
    effects = s.contributes(1, 10, 0)
    assert sent(effects, 1, Recover) == [Recover(Reason(Why.NOT_REBASED))]


# ---------------------------------------------------------------- the end


def test_last_outer_step_finishes_the_run_and_tells_everybody() -> None:
    s = SyncerStage(arrival(2, total_steps=2), joined=2)
    s.full_round(who=[0])
    s.steps(0)
    s.contributes(0, 2, 0)
    effects = s.stored(2)
    assert of(effects, Finished) == [Finished(2)]
    assert [sent(effects, m, Finish) for m in (0, 1)] == [[Finish(2)]] * 2
    assert s.machine.finished and s.machine.deadline() is None


def test_finished_syncer_opens_no_round_and_says_so_to_newcomers() -> None:
    s = SyncerStage(arrival(2, total_steps=2), joined=2)
    s.full_round(who=[0])
    s.full_round(who=[0])
    assert of(s.steps(0), FixParticipants) == []
    s.on(ConnectionLost(1, "gone"))
    assert sent(s.comes_back(1), 1, Finish) == [Finish(2)]


def test_version_is_kept_while_the_answer_to_a_pull_may_be_a_difference_to_it() -> None:
    """On a slow link a report of a newer adoption overtakes the contribution that was staged before it."""
    s = SyncerStage(arrival(2), joined=2)
    for _ in range(4):
        s.full_round(who=[1])  # learner 0 still holds version 0 of both fragments
    fixed = of(s.steps(0, adopts=False), FixParticipants)
    assert [(f.outer_step, f.participants) for f in fixed] == [(5, (0,))]
    adopting = s.steps(0)
    assert ForgetVersion(1, 0) not in adopting
    assert of(s.contributes(0, 5, 1, anchor=0, local_step=1, tokens=TOKENS), Accept)
    assert ForgetVersion(1, 0) in s.stored(5)
