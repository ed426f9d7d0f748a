"""Who comes, falls silent, is lost, recovers and leaves, as the syncer sees it. Events in, exact effects out."""

from __future__ import annotations

import pytest
from stage import MS, TOKENS, SyncerStage, arrival, exact, of, others, sent

from atoll.errors import PeerViolation
from atoll.ids import SECOND, SYNCER
from atoll.protocol.membership import IN_SYNC, JOINING, LEFT, LOST, NEXT, SILENT, Member, Roster
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import (
    NO_VERSION,
    AbortRound,
    Announce,
    ConnectionLost,
    Contribution,
    Decline,
    Discard,
    Enter,
    Envelope,
    FixParticipants,
    Goodbye,
    Grant,
    Loaded,
    Membership,
    Pull,
    Received,
    Recover,
    Recovered,
    RecoveryFailed,
    Refuse,
    Reissue,
    Serve,
    Started,
    TakeTheta,
    Ticket,
    Unit,
    Welcome,
)  # fmt: skip

# ---------------------------------------------------------------- standings


@pytest.mark.parametrize("standing", [JOINING, IN_SYNC, SILENT, LOST, LEFT])
@pytest.mark.parametrize("trigger", ["entered", "unheard", "recover", "hello", "lost", "left"])
def test_standing_moves_only_along_the_arrows_and_else_raises_and_stays(standing: str, trigger: str) -> None:
    member = Member(0, 1)
    member.standing = standing
    if (standing, trigger) in NEXT:
        member.move(trigger)
        assert member.standing == NEXT[standing, trigger]
    else:
        with pytest.raises(PeerViolation, match=f"learner 0 is {standing}: {trigger} makes no sense"):
            member.move(trigger)
        assert member.standing == standing


def test_arrows_are_those_of_the_picture() -> None:
    assert {pair for pair in NEXT if pair[1] == "unheard"} == {(IN_SYNC, "unheard")}
    assert {pair[0] for pair in NEXT if pair[1] == "hello"} == {JOINING, IN_SYNC, SILENT, LOST, LEFT}
    assert NEXT[LEFT, "lost"] == LEFT  # who said goodbye is not lost when its connection closes
    assert (LOST, "entered") not in NEXT and (LEFT, "entered") not in NEXT


def test_roster_is_walked_in_learner_order_whatever_order_they_came_in() -> None:
    roster = Roster(1)
    for learner in (3, 0, 2):
        roster.admit(learner)
    assert [m.learner for m in roster] == [0, 2, 3]
    assert roster.admit(2) is roster.get(2)
    assert len(roster) == 3


# ---------------------------------------------------------------- joining at the start


def test_join_before_anything_was_merged_sends_all_of_theta() -> None:
    s = SyncerStage(arrival(2))
    assert sent(s.hello(0), 0) == [
        Welcome(0),
        Announce(0, 0, NO_VERSION, ()),
        Announce(0, 1, NO_VERSION, ()),
        TakeTheta(1, Reason(Why.NOTHING_MERGED)),
    ]


def test_join_completed_enters_with_leases_and_a_session() -> None:
    s = SyncerStage(arrival(2))
    s.hello(0, at=0)
    effects = s.on(Received(Envelope(0, 0, SYNCER, 1, 0, loaded(1)), 0), 7 * MS)
    assert others(effects) == [
        Recovered(0, SYNCER, 7 * MS, Reason(Why.JOINS)),
        Membership(0, IN_SYNC, Reason(Why.ENTERED, "stands at outer step 0")),
    ]
    assert sent(effects, 0) == [Grant((Unit(0, 0), Unit(0, 1)), 2), Enter(1, 0)]


def loaded(ticket: int, held: tuple[int, ...] = (0, 0)) -> Loaded:
    return Loaded(ticket, SYNCER, 0, held)


def test_join_with_the_wrong_ticket_is_not_let_in() -> None:
    s = SyncerStage(arrival(2))
    s.hello(0)
    assert s.hears(0, loaded(99)) == []
    assert s.hears(0, loaded(1, held=(0,))) == [Refuse(0, Reason(Why.IMPOSSIBLE, "Loaded names what cannot be"), True)]
    member = s.machine.roster.get(0)
    assert member is not None and member.standing == JOINING


def test_join_naming_versions_that_never_were_is_not_let_in() -> None:
    s = SyncerStage(arrival(2))
    s.hello(0)
    effects = s.hears(0, loaded(1, held=(9, 9)))
    assert sent(effects, 0, Enter) == []


# ---------------------------------------------------------------- joining later: tickets


def running(learners: int = 3, **protocol: object) -> SyncerStage:
    """All learners joined, one round was stored, and the last learner died."""
    s = SyncerStage(arrival(learners, **protocol), joined=learners)  # type: ignore[arg-type]
    s.full_round(who=[0])
    s.on(ConnectionLost(learners - 1, "the process died"))
    return s


def test_newcomer_gets_a_ticket_for_the_lowest_peer_at_once() -> None:
    s = running()
    effects = s.comes_back(2)
    assert sent(effects, 2) == [Welcome(1), Ticket(1 + 3, 0, 1, sent(effects, 2, Ticket)[0].patience)]  # type: ignore[union-attr]
    assert sent(effects, 0, Serve) == [Serve(4, 2, 1)]


def test_newcomer_is_sent_in_full_what_is_announced_after_its_hello() -> None:
    s = running()
    s.comes_back(2)
    s.steps(0)
    s.contributes(0, 2, 0)
    assert sent(s.stored(2), 2) == [Announce(2, 0, NO_VERSION, (0,))]


def test_ticket_lasts_no_shorter_than_the_least_patience() -> None:
    s = running(limits={"patience_seconds": 5.0})
    (ticket,) = sent(s.comes_back(2), 2, Ticket)
    assert ticket.patience == 5 * SECOND  # type: ignore[union-attr]


def with_ticket(learners: int = 3, **protocol: object) -> SyncerStage:
    s = running(learners, **protocol)
    s.comes_back(learners - 1)
    s.full_round(who=[0])
    return s


def test_newcomer_that_loaded_from_a_peer_enters_and_is_sent_what_it_misses() -> None:
    s = with_ticket()
    effects = s.loads(2, 4, source=0, held=(0, 1))
    assert of(effects, Recovered) == [Recovered(2, 0, 0, Reason(Why.JOINS))]
    assert sent(effects, 2) == [Announce(2, 0, 0, (0,)), Grant((Unit(2, 0), Unit(2, 1)), 2), Enter(2, 2)]


def test_newcomer_whose_source_dies_is_given_the_next_peer_and_then_theta() -> None:
    s = with_ticket()
    effects = s.on(ConnectionLost(0, "gone"))
    assert [(t.ticket, t.peer) for t in sent(effects, 2, Ticket)] == [(5, 1)]  # type: ignore[union-attr]
    assert sent(effects, 1, Serve) == [Serve(5, 2, 1)]
    effects = s.on(ConnectionLost(1, "gone"))
    assert sent(effects, 2, TakeTheta) == [TakeTheta(6, Reason(Why.NO_PEER_LEFT))]
    assert sent(effects, 2, Announce) == [Announce(1, 1, NO_VERSION, (0,))]  # fragment 0 it was sent already


def test_newcomer_whose_transfer_failed_is_given_another_peer() -> None:
    s = with_ticket()
    effects = s.hears(2, RecoveryFailed(4, Reason(Why.TRANSFER_LATE)))
    assert [(t.ticket, t.peer) for t in sent(effects, 2, Ticket)] == [(5, 1)]  # type: ignore[union-attr]


def test_newcomer_whose_old_ticket_failed_keeps_the_new_one() -> None:
    s = with_ticket()
    s.hears(2, RecoveryFailed(4, Reason(Why.SOURCE_LOST, "late")))
    assert s.hears(2, RecoveryFailed(4, Reason(Why.SOURCE_LOST, "late"))) == []


BAD = Reason(Why.BAD_STATE, "tensor embed is missing")


def test_newcomer_of_whom_two_sources_failed_gets_theta_though_peers_are_left() -> None:
    s = with_ticket(5)
    assert [t.peer for t in sent(s.hears(4, RecoveryFailed(6, BAD)), 4, Ticket)] == [1]  # type: ignore[union-attr]
    effects = s.hears(4, RecoveryFailed(7, BAD))
    assert sent(effects, 4, Ticket) == []
    assert [take.reason.why for take in sent(effects, 4, TakeTheta)] == [Why.SOURCES_FAILED]  # type: ignore[union-attr]


def source_of(s: SyncerStage, newcomer: int) -> int:
    """The peer that a learner is sent to when it comes back as a new process."""
    s.comes_back(newcomer)
    s.full_round(who=[0])
    member = s.machine.roster.admit(newcomer)
    chosen = member.peer
    s.hears(newcomer, RecoveryFailed(member.ticket, BAD))
    return chosen


def test_bad_source_is_not_chosen_again_by_its_victim_and_after_two_victims_by_none() -> None:
    s = SyncerStage(arrival(6), joined=6)
    s.full_round(who=[0])
    assert source_of(s, 5) == 0
    assert source_of(s, 5) == 1, "also as its next incarnation"
    assert source_of(s, 4) == 0, "one accuser could be lying, so others still ask"
    assert source_of(s, 3) == 1


def test_source_whose_state_turns_to_nan_within_a_round_is_remembered() -> None:
    s = with_ticket()
    s.loads(2, 4, source=0, held=(0, 1))
    s.hello(2, reason=Reason(Why.POISONED, "tensor embed holds NaN or Inf"))
    s.full_round(who=[0])
    assert s.machine.roster.admit(0).accusers == {2}
    assert s.machine.roster.admit(2).peer == 1


def test_source_of_a_learner_that_trained_on_for_long_is_not_blamed_for_its_nan() -> None:
    s = with_ticket()
    s.loads(2, 4, source=0, held=(0, 1))
    for _ in range(5):
        s.steps(2)
    s.hello(2, reason=Reason(Why.POISONED, "tensor embed holds NaN or Inf"))
    assert s.machine.roster.admit(0).accusers == set()


def test_newcomer_whose_source_falls_silent_is_given_the_next_peer() -> None:
    s = with_ticket()
    s.steps(1, 100 * MS)
    for at in range(200, 1600, 100):  # learner 1 goes on, 0 says nothing for 8 of its steps
        s.steps(1, at * MS)
        effects = s.passes(at * MS)
        if tickets := sent(effects, 2, Ticket):
            assert [t.peer for t in tickets] == [1]  # type: ignore[union-attr]
            return
    pytest.fail("the source was never replaced")


def test_newcomer_of_whose_transfer_nobody_hears_gets_theta() -> None:
    s = running()
    (ticket,) = sent(s.comes_back(2, at=10 * MS), 2, Ticket)
    member = s.machine.roster.get(2)
    assert member is not None and member.join_deadline == 10 * MS + 2 * ticket.patience  # type: ignore[union-attr]
    s.steps(0, member.join_deadline - MS)  # its source trains on, and is not given up
    effects = s.passes(member.join_deadline)
    assert sent(effects, 2, TakeTheta) == [TakeTheta(5, Reason(Why.TRANSFER_SILENT))]
    assert {(a.outer_step, a.fragment, a.previous) for a in sent(effects, 2, Announce)} == {(0, 0, -1), (1, 1, -1)}  # type: ignore[union-attr]


def test_newcomer_with_no_peer_in_sync_gets_theta_at_once() -> None:
    s = running()
    s.on(ConnectionLost(0, "gone"))
    s.on(ConnectionLost(1, "gone"))
    assert sent(s.comes_back(2), 2, TakeTheta) == [TakeTheta(4, Reason(Why.NO_PEER))]


def test_newcomers_are_shared_out_over_the_peers() -> None:
    s = SyncerStage(arrival(4), joined=4)
    s.full_round(who=[0])
    for m in (2, 3):
        s.on(ConnectionLost(m, "gone"))
    assert [sent(s.comes_back(m), m, Ticket)[0].peer for m in (2, 3)] == [0, 1]  # type: ignore[union-attr]


def test_peer_serves_no_more_newcomers_than_the_limit() -> None:
    s = SyncerStage(arrival(4, limits={"serves_max": 1}), joined=4)
    s.full_round(who=[0])
    for m in (1, 2, 3):
        s.on(ConnectionLost(m, "gone"))
    assert [t.peer for t in sent(s.comes_back(2), 2, Ticket)] == [0]  # type: ignore[union-attr]
    assert sent(s.comes_back(3), 3, TakeTheta) == [TakeTheta(5 + 1, Reason(Why.NO_PEER_LEFT))]


# ---------------------------------------------------------------- a short stall


def test_reconnected_member_whose_versions_are_kept_catches_up_without_recovery() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.steps(0)
    s.on(ConnectionLost(1, "gone"))
    s.contributes(0, 1, 1)
    s.stored(1)
    effects = s.hello(1, held=(0, 0), left=(Unit(1, 0), Unit(1, 1)), own_next=2, reason=Reason(Why.RECONNECTED))
    assert others(effects) == [
        Membership(1, JOINING, Reason(Why.RECONNECTED)),
        Membership(1, IN_SYNC, Reason(Why.ENTERED, "stands at outer step 1")),
    ]
    bodies = sent(effects, 1)
    assert bodies[0] == Welcome(1) and bodies[1] == Announce(1, 1, 0, (0,)) and bodies[-1] == Enter(2, 1)


def test_reconnected_member_whose_versions_were_forgotten_recovers() -> None:
    s = SyncerStage(arrival(2, fragments=1, interval=2, limits={"versions_max": 2}), joined=2)
    s.full_round(who=[0])
    s.on(ConnectionLost(1, "gone"))
    for _ in range(5):
        s.full_round(who=[0])
    effects = s.hello(1, held=(0,), reason=Reason(Why.RECONNECTED))
    forgotten = Reason(Why.VERSION_FORGOTTEN, "its versions were forgotten while it was away")
    assert sent(effects, 1) == [Welcome(6), Recover(forgotten)]


def test_hello_on_a_standing_connection_starts_over_and_drops_it_from_rounds() -> None:
    s = SyncerStage(arrival(2, quorum="all"), joined=2)
    s.steps(0)
    s.steps(1)
    effects = s.hello(1, held=(0, 0), reason=Reason(Why.VERSION_MISSING, "fragment 1 came against version 3, which I lack"))
    assert of(effects, Discard) == [Discard(1, 1, Reason(Why.GONE))]


def test_member_entering_under_no_overlap_waits_until_no_round_is_in_flight() -> None:
    s = SyncerStage(exact("diloco", 3, interval=1), joined=2)
    s.now = 61 * SECOND
    s.cast[0].position = s.cast[1].position = 0
    s.steps(0)
    s.steps(1)
    assert s.machine.rounds[1].phase == "pulling"
    (take,) = sent(s.hello(2), 2, TakeTheta)
    assert sent(s.loads(2, take.ticket), 2, Enter) == []  # type: ignore[union-attr]
    s.contributes(0, 1, 0)
    s.contributes(1, 1, 0)
    assert sent(s.stored(1), 2, Enter) == [Enter(1, 1)]


# ---------------------------------------------------------------- silence


def silent() -> SyncerStage:
    """Learner 1 stepped once (100 ms) at 0 and was not heard of for more than eight of its steps."""
    s = SyncerStage(arrival(2), joined=2)
    s.steps(1, 0)
    s.contributes(1, 1, 1)
    s.stored(1)
    for at in range(100, 800, 100):
        s.steps(0, at * MS)
    return s


def test_member_unheard_of_for_eight_of_its_steps_and_the_measured_trip_is_silent() -> None:
    s = silent()
    assert of(s.passes(SECOND), Membership) == [], "eight steps, but a trip there and back was measured too"
    s.steps(0, 1900 * MS)
    assert of(s.passes(2 * SECOND), Membership) == [Membership(1, SILENT, Reason(Why.SILENT, "silent for 2.0 s"))]


def test_member_heard_of_within_eight_of_its_steps_is_not_silent() -> None:
    s = silent()
    s.steps(1, 300 * MS)
    assert of(s.passes(SECOND), Membership) == []


def test_silent_member_is_not_counted_and_not_pulled_from() -> None:
    s = SyncerStage(arrival(2, quorum="all"), joined=2)
    s.steps(0, 0)
    s.steps(1, 0)
    s.contributes(0, 1, 1)
    s.contributes(1, 1, 1)
    s.stored(1)
    s.steps(0, 10 * MS)
    effects = s.passes(2 * SECOND)  # 0 is fresh and waited for nobody's sake but 1's
    assert of(effects, Membership) == [Membership(1, SILENT, Reason(Why.SILENT, "silent for 2.0 s"))]
    assert [(f.outer_step, f.participants) for f in of(effects, FixParticipants)] == [(2, (0,))]


def test_silent_member_heard_again_enters_and_gets_what_it_missed() -> None:
    s = silent()
    s.passes(2 * SECOND)
    effects = s.steps(1, 2 * SECOND)  # round 2 is being pulled from learner 0, round 3 gathers
    assert of(effects, Membership) == [Membership(1, IN_SYNC, Reason(Why.ENTERED, "stands at outer step 2"))]
    assert sent(effects, 1, Enter) == [Enter(2, 2)]


def test_silent_member_whose_versions_were_forgotten_recovers_when_heard_again() -> None:
    s = SyncerStage(arrival(2, fragments=1, interval=2, limits={"versions_max": 2}), joined=2)
    s.steps(1, 0)  # outer step 1, empty
    for n in range(8):
        s.full_round((n + 1) * 200 * MS, who=[0])
    s.passes(2 * SECOND)
    member = s.machine.roster.get(1)
    assert member is not None and member.standing == SILENT
    effects = s.steps(1, 2 * SECOND, adopts=False)
    assert sent(effects, 1) == [Recover(Reason(Why.VERSION_FORGOTTEN, "its versions were forgotten while it was silent"))]


def test_participant_under_exact_adoption_that_declines_must_enter_again() -> None:
    s = SyncerStage(exact("diloco", 2, interval=1), joined=2)
    s.steps(0)
    s.steps(1)
    effects = s.hears(1, Decline(1, Reason(Why.OUT_OF_STEP, "stands at outer step 3")))
    assert of(effects, Discard, Membership) == [
        Discard(1, 1, Reason(Why.DECLINED, "stands at outer step 3")),
        Membership(1, SILENT, Reason(Why.DECLINED, "stands at outer step 3")),
    ]
    s.contributes(0, 1, 0)
    assert sent(s.stored(1), 1, Enter) == [Enter(2, 1)]


# ---------------------------------------------------------------- lost, left


def test_lost_member_keeps_its_leases_until_it_is_given_up() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.steps(1, 0)
    assert of(s.on(ConnectionLost(1, "gone")), Reissue) == []
    effects = [e for at in range(100, 3000, 100) for e in (*s.steps(0, at * MS), *s.passes(at * MS))]
    assert of(effects, Reissue) == [Reissue(1, (Unit(1, 0), Unit(1, 1), Unit(1, 2)), 1)]


def test_lost_member_back_as_a_new_process_loses_leases_and_tokens_in_flight() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.steps(1)
    s.on(ConnectionLost(1, "gone"))
    effects = s.comes_back(1)
    assert of(effects, Reissue) == [Reissue(1, (Unit(1, 0), Unit(1, 1), Unit(1, 2)), 1)]
    assert s.machine.fates().discarded == {"lost": 2 * TOKENS}


def test_lost_member_that_had_trained_nothing_repeats_nothing() -> None:
    """It entered and reported so, with local step 0: its first unit was not begun."""
    s = SyncerStage(arrival(2), joined=2)
    s.hears(1, s.report(1))
    s.on(ConnectionLost(1, "gone"))
    (reissued,) = of(s.comes_back(1), Reissue)
    assert reissued.repeats == 0


def test_member_that_says_goodbye_left_and_its_leases_go_to_others() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.steps(1)
    effects = s.hears(1, Goodbye(Reason(Why.LEAVES, "asked to stop")))
    assert of(effects, Membership) == [Membership(1, LEFT, Reason(Why.LEAVES, "asked to stop"))]
    assert of(effects, Reissue) == [Reissue(1, (Unit(1, 0), Unit(1, 1), Unit(1, 2)), 1)]
    assert s.machine.fates().discarded == {"left": 2 * TOKENS}
    assert of(s.on(ConnectionLost(1, "closed")), Membership) == []


def test_member_that_left_is_not_announced_to_after_its_connection_closed() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.steps(0)
    s.hears(1, Goodbye(Reason(Why.LEAVES, "asked to stop")))
    s.on(ConnectionLost(1, "closed"))
    s.contributes(0, 1, 1)
    assert sent(s.stored(1), 1) == []


def test_member_that_left_and_still_talks_is_refused() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.hears(1, Goodbye(Reason(Why.LEAVES, "asked to stop")))
    s.cast[1].local_step = 5
    s.hears(1, s.report(1))
    assert s.machine.fates().add_up()
    member = s.machine.roster.get(1)
    assert member is not None and member.standing == LEFT


def test_inelastic_quorum_waits_for_a_lost_member() -> None:
    s = SyncerStage(exact("ddp", 2, interval=1), joined=2)
    s.full_round()
    s.on(ConnectionLost(1, "gone"))
    assert of(s.steps(0), FixParticipants) == []


def test_elastic_quorum_of_all_goes_on_without_a_lost_member() -> None:
    s = SyncerStage(exact("diloco", 2, interval=1), joined=2)
    s.full_round()
    s.on(ConnectionLost(1, "gone"))
    assert [f.participants for f in of(s.steps(0), FixParticipants)] == [(0,)]


def test_older_incarnation_of_a_learner_is_refused() -> None:
    s = SyncerStage(arrival(2), joined=2)
    old = s.cast[1]
    s.on(ConnectionLost(1, "gone"))
    s.comes_back(1)
    new, s.cast[1] = s.cast[1], old
    (refused,) = s.steps(1)
    assert refused == Refuse(1, Reason(Why.OLD_INCARNATION, "incarnation 0 is older than 1"), True)
    assert s.machine.roster.get(1).incarnation == new.incarnation == 1  # type: ignore[union-attr]


# ---------------------------------------------------------------- the syncer's own return


def test_restarted_syncer_aborts_what_was_not_stored_and_keeps_what_was() -> None:
    s = SyncerStage(arrival(3, fragments=4, interval=4, overlap=2), joined=3)
    s.full_round(who=[0])
    s.steps(1)
    s.steps(2)
    assert sorted(s.machine.rounds) == [2, 3, 4]
    effects = s.on(Started(1))
    aborted = of(effects, AbortRound)
    assert [a.outer_step for a in aborted] == [2, 3, 4]
    assert {a.reason for a in aborted} == {Reason(Why.NOT_STORED)}
    assert of(effects, Membership) == [Membership(m, LOST, Reason(Why.SYNCER_RESTARTED)) for m in range(3)]
    assert s.machine.outer_step == 1


def test_restarted_syncer_has_a_new_incarnation_and_gathers_the_same_outer_step() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.full_round(who=[0])
    s.steps(1)  # round 2 pulls from 1
    s.on(Started(1))
    effects = s.hello(1, held=(0, 0), reason=Reason(Why.RECONNECTED))
    assert {e.envelope.incarnation for e in effects if hasattr(e, "envelope")} == {1}
    assert sent(effects, 1, (Welcome, Enter)) == [Welcome(1), Enter(2, 1)]
    (fixed,) = of(s.steps(1), FixParticipants)
    assert (fixed.outer_step, fixed.participants) == (2, (1,))


def test_restarted_syncer_refuses_contributions_to_the_rounds_it_aborted() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.steps(0)
    s.on(Started(1))
    s.hello(0, held=(0, 0), reason=Reason(Why.RECONNECTED))
    effects = s.hears(0, Contribution(1, 1, 1, 0, 1, TOKENS, 1, TOKENS))
    assert [type(r) for r in of(effects, Refuse)] == [Refuse]


def test_first_start_of_a_syncer_changes_nothing() -> None:
    machine = SyncerMachine(arrival(2))
    assert list(machine.on(Started(0), 0)) == []
    assert machine.outer_step == 0


def test_pull_goes_only_to_participants_and_never_to_newcomers() -> None:
    s = with_ticket()
    s.steps(0)
    s.steps(1)
    assert sent([*s.steps(0), *s.steps(1)], 2, Pull) == []
