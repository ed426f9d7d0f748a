"""The learner's loop: report, adopt what is due, inner step. Events in, exact effects out."""

from __future__ import annotations

import pytest
from stage import MS, TOKENS, LearnerStage, arrival, exact, of, others, sent

from atoll.ids import SYNCER
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import (
    NO_VERSION,
    Adopt,
    Adoption,
    Announce,
    ApplyOwnShare,
    Connected,
    ConnectionLost,
    Contribution,
    DeadlinePassed,
    Decline,
    Enter,
    Envelope,
    Event,
    Finish,
    Finished,
    Goodbye,
    Grant,
    Hello,
    InnerStep,
    Keep,
    LeaveAsked,
    Loaded,
    LoadState,
    LoadTheta,
    Poisoned,
    Pull,
    Received,
    RecordState,
    Recover,
    RecoveryFailed,
    Refuse,
    Report,
    Resized,
    Resume,
    Serve,
    Stage,
    StateRequest,
    StateTransfer,
    StepDone,
    Stored,
    TakeTheta,
    Tick,
    Ticket,
    Unit,
    Unstage,
    Wait,
    Welcome,
)  # fmt: skip

# arrival(): fragment 1 is due at odd outer steps, fragment 0 at even ones; tau = 1

# ---------------------------------------------------------------- joining


def test_learner_that_connects_first_says_hello_with_nothing() -> None:
    stage = LearnerStage(arrival())
    assert sent(stage.on(Connected(SYNCER))) == [Hello((NO_VERSION, NO_VERSION), 0, 0, True, (), 0, Reason(Why.JOINS))]


def test_learner_given_all_of_theta_adopts_it_and_starts_its_moments_afresh() -> None:
    stage = LearnerStage(arrival())
    stage.connects()
    assert stage.announced(0, 0, merged=()) == [Keep(0, 0, NO_VERSION)]
    stage.announced(0, 1, merged=())
    effects = stage.hears(TakeTheta(7, Reason(Why.NOTHING_MERGED)))
    assert others(effects) == [
        Adopt(0, 0, 0.0, False, Reason(Why.NOTHING_MERGED)),
        Adopt(1, 0, 0.0, False, Reason(Why.NOTHING_MERGED)),
        LoadTheta(Reason(Why.NOTHING_MERGED)),
    ]
    assert sent(effects) == [Loaded(7, SYNCER, 0, (0, 0))]


def test_learner_promised_theta_that_did_not_come_whole_says_hello_again() -> None:
    stage = LearnerStage(arrival())
    stage.connects()
    stage.announced(0, 0, merged=())
    assert [b.reason for b in sent(stage.hears(TakeTheta(7, Reason(Why.NOTHING_MERGED, "x"))))] == [Reason(Why.THETA_INCOMPLETE)]  # type: ignore[union-attr]


def test_learner_let_in_reports_its_adoptions_and_takes_its_first_step() -> None:
    effects = LearnerStage(arrival()).enters()
    (report,) = sent(effects, kind=Report)
    assert isinstance(report, Report)
    assert (report.session, report.local_step, report.position) == (1, 0, 0)
    assert report.adopted == (Adoption(0, 0, 0, 0), Adoption(1, 0, 0, 0))
    assert effects[-1] == InnerStep(1, 0, 0, 0)


def test_learner_let_in_before_it_has_any_state_does_not_start() -> None:
    stage = LearnerStage(arrival())
    stage.connects()
    assert stage.hears(Enter(1, 0)) == []
    assert stage.machine.phase == "joining"


def test_learner_buffers_only_the_newest_version_of_each_fragment_while_joining() -> None:
    stage = LearnerStage(arrival())
    stage.connects()
    kept = [stage.announced(t, 1) for t in (3, 5, 4)]
    assert kept == [[Keep(1, 3, NO_VERSION)], [Keep(1, 5, NO_VERSION)], []]


# ---------------------------------------------------------------- the boundary on arrival


def test_boundary_on_arrival_stages_what_is_due_next_then_reports_then_steps() -> None:
    stage = LearnerStage(arrival(fragments=4, interval=4))
    stage.enters()
    effects = stage.steps()
    assert others(effects) == [Stage(1, 1, NO_VERSION, False), Stage(2, 1, NO_VERSION, False), InnerStep(2, 0, 1, 0)]
    assert [type(e) for e in effects][2].__name__ == "Send"
    (report,) = sent(effects)
    assert report == Report(1, 1, 1, TOKENS, 1, 100 * MS, 0, 0, 0, (), 0, None)


def test_boundary_on_arrival_adopts_before_it_stages_and_reports_the_adoption() -> None:
    stage = LearnerStage(arrival(fragments=4, interval=4))
    stage.enters()
    stage.steps()
    assert stage.announced(1, 1, previous=0) == [Keep(1, 1, 0)]
    effects = stage.steps()
    assert others(effects) == [
        Adopt(1, 1, 0.0, True, Reason(Why.DUE)),
        Unstage(1, NO_VERSION),
        Stage(2, 2, NO_VERSION, False),
        Stage(3, 2, NO_VERSION, False),
        InnerStep(3, 0, 2, 1),
    ]
    (report,) = sent(effects, kind=Report)
    assert report.adopted == (Adoption(1, 1, 2, 2 * TOKENS),)  # type: ignore[union-attr]


def test_boundary_on_arrival_adopts_everything_missed_in_fragment_order() -> None:
    stage = LearnerStage(arrival())
    stage.enters()
    for t in (1, 2, 3, 4):
        stage.announced(t, t % 2)
    adopted = of(stage.steps(), Adopt)
    assert [(a.fragment, a.version) for a in adopted] == [(0, 4), (1, 3)]


def test_learner_on_arrival_never_waits_however_far_the_syncer_is_behind() -> None:
    stage = LearnerStage(arrival())
    stage.enters()
    for n in range(1, 50):
        effects = stage.steps()
        assert of(effects, Wait) == []
        assert of(effects, InnerStep) == [InnerStep(n + 1, 0, n, 0)]


def test_staging_ahead_covers_the_tau_rounds_in_flight_and_the_next() -> None:
    stage = LearnerStage(arrival(fragments=8, interval=8, overlap=3))
    stage.enters()
    assert [s.fragment for s in of(stage.steps(), Stage)] == [1, 2, 3, 4]
    stage.hears(Tick(1))
    effects = stage.steps()
    assert of(effects, Unstage) == [Unstage(1, NO_VERSION)]
    assert [s.fragment for s in of(effects, Stage)] == [2, 3, 4, 5]


def test_staging_ahead_covers_as_many_more_rounds_as_passed_during_a_recent_step() -> None:
    stage = LearnerStage(arrival(fragments=16, interval=16, overlap=2))
    stage.enters()
    assert [s.fragment for s in of(stage.steps(), Stage)] == [1, 2, 3]
    for outer_step in (1, 2, 3):
        stage.hears(Tick(outer_step))
    assert [s.fragment for s in of(stage.steps(), Stage)] == [4, 5, 6, 7, 8]
    assert [len(of(stage.steps(), Stage)) for _ in range(60)][::12] == [5, 4, 3, 3, 3], "a long step is forgotten slowly"
    stage.hears(Tick(103))
    assert [s.fragment for s in of(stage.steps(), Stage)] == list(range(16)), "never more than all"
    assert len(of(stage.steps(), Stage)) == 2 + 8, "a stall is no long step"


def test_learning_rate_follows_the_outer_step_last_seen() -> None:
    stage = LearnerStage(arrival())
    stage.enters()
    stage.hears(Tick(9))
    (step,) = of(stage.steps(), InnerStep)
    assert step.outer_step == 9


def test_adoption_zeroes_the_counters_of_its_fragment_alone() -> None:
    stage = LearnerStage(arrival())
    stage.enters()
    stage.steps()
    stage.steps()
    stage.announced(1, 1, previous=0)
    stage.steps()
    assert stage.machine.counters.since(1) == (0, 0, 0)
    assert stage.machine.counters.since(0) == (3, 3 * TOKENS, 3)


def test_adoption_mixes_by_alpha_only_where_its_own_work_was_merged() -> None:
    stage = LearnerStage(exact("streaming", interval=4, overlap=1, fragmentation="balanced", fragments=2))
    stage.enters()
    stage.steps()
    stage.steps()  # stands at 2: fragment 1 is due and staged
    stage.announced(2, 1, merged=(0, 1))
    assert of(stage.steps(), Adopt) == [Adopt(1, 2, 0.5, True, Reason(Why.DUE))]
    stage.steps()
    stage.announced(4, 0, merged=(1,))
    assert of(stage.steps(), Adopt) == [Adopt(0, 4, 0.0, False, Reason(Why.DUE))]


def test_difference_against_a_version_it_lacks_starts_the_channel_over() -> None:
    stage = LearnerStage(arrival())
    stage.enters()
    effects = stage.announced(5, 1, previous=3)
    assert of(effects, Keep) == []
    assert [b.reason.why for b in sent(effects, kind=Hello)] == [Why.VERSION_MISSING]  # type: ignore[union-attr]


# ---------------------------------------------------------------- pulls on arrival


def test_pull_in_mid_step_is_answered_at_once_from_the_staged_copy() -> None:
    stage = LearnerStage(arrival())
    stage.enters()
    stage.steps()
    effects = stage.hears(Pull(1, (1,)))
    assert effects == [e for e in effects if sent([e])]
    assert sent(effects) == [Contribution(1, 1, 1, 0, 1, TOKENS, 1, TOKENS)]


def test_pull_in_mid_step_of_what_is_not_staged_waits_for_the_boundary() -> None:
    stage = LearnerStage(arrival(fragments=4, interval=4))
    stage.enters()
    stage.steps()
    assert stage.hears(Pull(3, (3,))) == []
    effects = stage.steps()
    assert sent(effects, kind=Contribution) == [Contribution(3, 3, 2, 0, 2, 2 * TOKENS, 2, 2 * TOKENS)]
    assert Stage(3, 2, NO_VERSION, False) in effects


def test_pull_for_staged_copies_only_is_answered_or_declined_in_mid_step() -> None:
    stage = LearnerStage(arrival(fragments=4, interval=4))
    stage.enters()
    stage.steps()
    assert sent(stage.hears(Pull(1, (1,), staged_only=True))) == [Contribution(1, 1, 1, 0, 1, TOKENS, 1, TOKENS)]
    assert sent(stage.hears(Pull(3, (3,), staged_only=True))) == [Decline(3, Reason(Why.NOT_STAGED, "fragment 3"))]
    assert sent(stage.steps(), kind=Contribution) == []


def test_pull_tells_the_counters_and_anchor_of_the_staged_copy_not_of_now() -> None:
    stage = LearnerStage(arrival())
    stage.enters()
    stage.steps()
    stage.announced(1, 1, previous=0)  # newer, kept until the boundary: the staged copy is against 0
    (body,) = sent(stage.hears(Pull(1, (1,))))
    assert isinstance(body, Contribution) and (body.anchor, body.local_step) == (0, 1)


def test_pull_of_several_fragments_is_answered_for_each() -> None:
    stage = LearnerStage(arrival(fragments=4, interval=2))  # 2 and 3 are due at 1
    stage.enters()
    stage.steps()
    assert [b.fragment for b in sent(stage.hears(Pull(1, (2, 3))))] == [2, 3]  # type: ignore[union-attr]


def test_pull_while_joining_is_declined() -> None:
    stage = LearnerStage(arrival())
    stage.connects()
    assert sent(stage.hears(Pull(1, (1,)))) == [Decline(1, Reason(Why.NOT_TRAINING, "is joining"))]


def test_pull_waiting_is_forgotten_with_the_connection() -> None:
    stage = LearnerStage(arrival())
    stage.enters()
    stage.hears(Pull(2, (0,)))
    stage.on(ConnectionLost(SYNCER, "gone"))
    assert sent(stage.steps()) == []


# ---------------------------------------------------------------- the boundary under exact adoption


def waiting() -> LearnerStage:
    """DiLoCo with H = 2: two steps, then it waits for outer step 2."""
    stage = LearnerStage(exact("diloco", interval=2))
    stage.enters()
    stage.steps(100 * MS)
    return stage


def test_boundary_under_exact_adoption_stages_then_reports_then_waits() -> None:
    stage = waiting()
    effects = stage.steps(200 * MS)
    assert [type(e).__name__ for e in effects] == ["Stage", "Send", "Wait"]
    assert others(effects) == [Stage(0, 2, 2, False), Wait(Reason(Why.VERSION_AWAITED, "outer step 2 of fragment 0 is not back"))]


def test_waiting_learner_adopts_what_arrives_and_resumes_with_the_time_it_waited() -> None:
    stage = waiting()
    stage.steps(200 * MS)
    assert sent(stage.hears(Pull(2, (0,)), at=210 * MS)) == [Contribution(2, 0, 2, 0, 2, 2 * TOKENS, 2, 2 * TOKENS)]
    assert stage.announced(2, 0, merged=(0, 1), at=250 * MS) == [
        Keep(0, 2, NO_VERSION),
        Adopt(0, 2, 0.0, True, Reason(Why.DUE)),
        Unstage(0, 2),
        Resume(50 * MS, Reason(Why.VERSION_AWAITED, "outer step 2 of fragment 0 is not back")),
        InnerStep(3, 0, 2, 2),
    ]
    assert stage.machine.waited == 50 * MS


def test_waiting_learner_reports_what_it_waited_with_its_next_step() -> None:
    stage = waiting()
    stage.steps(200 * MS)
    stage.announced(2, 0, at=250 * MS)
    (report,) = sent(stage.steps(350 * MS), kind=Report)
    assert report.waited_nanos == 50 * MS  # type: ignore[union-attr]


def test_exact_adoption_with_overlap_goes_on_tau_steps_past_the_pull_and_then_adopts() -> None:
    config = exact("streaming", interval=4, overlap=2, fragmentation="whole", fragments=1)
    stage = LearnerStage(config)
    stage.enters()
    for _ in range(4):
        stage.steps()
    stage.announced(4, 0, merged=(0,))
    assert of(stage.steps(), Adopt) == []  # stands at 5
    assert of(stage.steps(), Adopt) == [Adopt(0, 4, 0.5, True, Reason(Why.DUE))]  # at 6 = 4 + tau


def test_exact_adoption_with_the_result_missing_waits_tau_steps_past_the_pull() -> None:
    stage = LearnerStage(exact("streaming", interval=4, overlap=2, fragmentation="whole", fragments=1))
    stage.enters()
    waits = [of(stage.steps(), Wait) for _ in range(6)]
    assert waits == [[], [], [], [], [], [Wait(Reason(Why.VERSION_AWAITED, "outer step 4 of fragment 0 is not back"))]]


def test_exact_adoption_takes_exactly_the_last_outer_step_and_no_local_step_beyond() -> None:
    stage = LearnerStage(exact("diloco", interval=2, total_steps=3))
    stage.enters()
    stage.steps()
    stage.steps()
    stage.announced(2, 0)
    effects = stage.steps()
    assert of(effects, InnerStep) == []
    assert of(effects, Wait) == [Wait(Reason(Why.LAST_STEP_DONE))]


def test_bounded_lead_on_arrival_makes_a_learner_wait_when_it_is_that_far_ahead() -> None:
    stage = LearnerStage(arrival(quorum="all", fragments=2, interval=2, overlap=1))
    stage.enters()
    assert of(stage.steps(), Wait) == []  # stands at 1, needs 0
    assert of(stage.steps(), Wait) == [Wait(Reason(Why.VERSION_AWAITED, "outer step 1 of fragment 1 is not back"))]


def test_lead_of_none_on_arrival_is_a_barrier_at_every_step() -> None:
    stage = LearnerStage(arrival(quorum="all", lead=0, fragments=2, interval=2, overlap=1))
    stage.enters()
    assert of(stage.steps(), Wait) == [Wait(Reason(Why.VERSION_AWAITED, "outer step 1 of fragment 1 is not back"))]
    assert of(stage.announced(1, 1), InnerStep)
    assert of(stage.steps(), Wait) == [Wait(Reason(Why.VERSION_AWAITED, "outer step 2 of fragment 0 is not back"))]


def test_exact_pull_of_a_state_that_is_not_there_is_declined() -> None:
    stage = waiting()
    assert sent(stage.hears(Pull(4, (0,)))) == [Decline(4, Reason(Why.OUT_OF_STEP, "stands at outer step 1"))]


def test_round_start_anchor_restarts_the_difference_when_it_stages() -> None:
    config = exact("async_diloco", interval=2, overlap=2)
    stage = LearnerStage(config)
    stage.enters()
    stage.steps()
    assert of(stage.steps(), Stage) == [Stage(0, 2, 2, True)]
    assert stage.machine.counters.since(0) == (0, 0, 0)


def test_eager_learner_applies_its_own_share_after_it_adopted_and_before_it_trains() -> None:
    stage = LearnerStage(exact("eager", interval=2, overlap=2))
    stage.enters()
    assert not of(stage.steps(), ApplyOwnShare)
    first = [type(e) for e in stage.steps()]  # nothing has come back yet
    assert first.index(Stage) < first.index(ApplyOwnShare) < first.index(InnerStep) and Adopt not in first
    assert not of(stage.steps(), ApplyOwnShare)
    waits = stage.steps()
    assert of(waits, Stage) and of(waits, Wait) and not of(waits, ApplyOwnShare), "it rests until version 2 is back"
    late = stage.hears(Announce(2, 0, NO_VERSION, (0,)))
    assert [type(e) for e in late if isinstance(e, Adopt | ApplyOwnShare | InnerStep)] == [Adopt, ApplyOwnShare, InnerStep]


# ---------------------------------------------------------------- position


def test_position_is_taken_from_enter_by_one_that_stands_elsewhere() -> None:
    stage = LearnerStage(arrival())
    stage.enters(outer_step=7)
    assert stage.machine.position == 7


def test_position_is_kept_by_one_that_already_stands_where_a_member_may() -> None:
    stage = LearnerStage(exact("diloco", interval=2))
    stage.enters()
    stage.steps()
    stage.hears(Enter(2, 1))  # in mid-step; taken at the boundary
    effects = stage.steps()
    assert stage.machine.position == 2  # it has trained that step
    (report,) = sent(effects, kind=Report)
    assert report.session == 2  # type: ignore[union-attr]


def test_enter_in_mid_step_is_taken_at_the_boundary_and_counts_from_its_report() -> None:
    stage = LearnerStage(arrival())
    stage.enters()
    assert stage.hears(Enter(2, 5)) == []
    effects = stage.steps()
    (report,) = sent(effects, kind=Report)
    assert (report.session, report.position) == (2, 5)  # type: ignore[union-attr]


def test_enter_unstages_copies_for_outer_steps_that_went_by() -> None:
    stage = waiting()
    stage.steps()  # staged for outer step 2, waits
    effects = stage.hears(Enter(2, 6))
    assert Unstage(0, 2) in effects
    assert stage.machine.position == 6


# ---------------------------------------------------------------- data


def test_batches_are_drawn_in_the_order_of_grant_and_then_on_in_its_own_stream() -> None:
    stage = LearnerStage(arrival(interval=2))
    stage.connects()
    for fragment in (0, 1):
        stage.announced(0, fragment, merged=())
    stage.hears(TakeTheta(1, Reason(Why.NOTHING_MERGED, "x")))
    stage.hears(Grant((Unit(3, 5), Unit(0, 0)), 1))
    drawn = of(stage.hears(Enter(1, 0)), InnerStep)
    for _ in range(6):
        drawn += of(stage.steps(), InnerStep)
    assert [(d.stream, d.batch) for d in drawn] == [(3, 10), (3, 11), (0, 0), (0, 1), (0, 2), (0, 3), (0, 4)]


def test_batches_go_on_while_the_syncer_is_away_and_hello_tells_what_is_left() -> None:
    stage = LearnerStage(arrival(interval=2))
    stage.enters()
    stage.hears(Grant((Unit(0, 0), Unit(0, 1)), 2))
    stage.on(ConnectionLost(SYNCER, "gone"))
    for _ in range(4):
        assert len(of(stage.steps(), InnerStep)) == 1
    (hello,) = sent(stage.on(Connected(SYNCER)), kind=Hello)
    assert isinstance(hello, Hello)
    assert (hello.needs_state, hello.held, hello.local_step, hello.tokens) == (False, (0, 0), 4, 4 * TOKENS)
    assert hello.reason == Reason(Why.RECONNECTED)
    assert (hello.left, hello.own_next) == ((Unit(0, 2),), 3)


def test_grant_of_a_unit_it_drew_by_itself_meanwhile_is_not_drawn_again() -> None:
    stage = LearnerStage(arrival(interval=2))
    drawn = of(stage.enters(), InnerStep)  # nothing granted: on in its own stream, unit 0
    stage.hears(Grant((Unit(0, 0), Unit(0, 1)), 2))
    for _ in range(4):
        drawn += of(stage.steps(), InnerStep)
    assert [(d.stream, d.batch) for d in drawn] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4)]


# ---------------------------------------------------------------- recovery: the newcomer


def newcomer() -> LearnerStage:
    stage = LearnerStage(arrival(), learner=2)
    stage.connects()
    stage.announced(5, 1)
    return stage


def test_newcomer_with_a_ticket_asks_its_peer() -> None:
    stage = newcomer()
    effects = stage.hears(Ticket(9, 1, 5, 300 * MS))
    assert sent(effects, 1) == [StateRequest(9)]
    assert stage.machine.deadline() == 300 * MS


def test_newcomer_takes_over_a_peers_state_and_says_what_it_knows() -> None:
    stage = newcomer()
    stage.hears(Ticket(9, 1, 5, 300 * MS))
    stage.announced(6, 0)
    effects = stage.hears(StateTransfer(9, 6, (4, 3), ((1, 5),)), sender=1)
    assert others(effects) == [LoadState(1, (4, 3))]
    assert sent(effects, SYNCER) == [Loaded(9, 1, 0, (4, 3))], "what it has yet to adopt it does not hold"
    assert stage.machine.deadline() is None


def test_newcomer_applies_what_it_buffered_when_it_enters() -> None:
    stage = newcomer()
    stage.hears(Ticket(9, 1, 5, 300 * MS))
    stage.announced(6, 0)
    stage.hears(StateTransfer(9, 5, (4, 3), ()), sender=1)
    effects = stage.hears(Enter(1, 6))
    assert [(a.fragment, a.version) for a in of(effects, Adopt)] == [(0, 6), (1, 5)]


def test_newcomer_drops_buffered_versions_that_the_peer_had_adopted_already() -> None:
    stage = newcomer()
    stage.hears(Ticket(9, 1, 5, 300 * MS))
    stage.hears(StateTransfer(9, 7, (6, 5), ()), sender=1)
    assert of(stage.hears(Enter(1, 7)), Adopt) == []


def test_newcomer_takes_no_data_position_counter_or_local_step_from_its_peer() -> None:
    stage = newcomer()
    stage.hears(Ticket(9, 1, 5, 300 * MS))
    stage.hears(StateTransfer(9, 6, (6, 5), ()), sender=1)
    stage.hears(Grant((Unit(2, 4),), 5))
    (step,) = of(stage.hears(Enter(1, 6)), InnerStep)
    assert (step.local_step, step.stream, step.batch) == (1, 2, 8)
    assert stage.machine.counters.tokens == 0
    assert not {"batch", "stream", "units", "own_next", "rng", "residual"} & set(StateTransfer.__struct_fields__)


def test_newcomer_ignores_state_of_another_ticket_or_another_sender() -> None:
    stage = newcomer()
    stage.hears(Ticket(9, 1, 5, 300 * MS))
    assert stage.hears(StateTransfer(8, 6, (6, 5), ()), sender=1) == []
    assert stage.hears(StateTransfer(9, 6, (6, 5), ()), sender=0) == []
    assert stage.machine.phase == "joining"


def test_newcomer_out_of_patience_says_so() -> None:
    stage = newcomer()
    stage.hears(Ticket(9, 1, 5, 300 * MS))
    assert stage.on(DeadlinePassed(), 299 * MS) == []
    assert sent(stage.on(DeadlinePassed(), 300 * MS)) == [RecoveryFailed(9, Reason(Why.TRANSFER_LATE))]
    assert stage.machine.deadline() is None


def test_newcomer_hears_how_far_the_run_is_from_the_syncer_and_not_from_its_peer() -> None:
    stage = newcomer()
    stage.hears(Ticket(9, 1, 5, 300 * MS))
    stage.hears(StateTransfer(9, 40, (6, 5), ()), sender=1)
    assert of(stage.hears(Enter(1, 6)), InnerStep)[0].outer_step == 6


def test_newcomer_sent_a_bad_state_loads_nothing_and_says_why() -> None:
    stage = newcomer()
    stage.hears(Ticket(9, 1, 5, 300 * MS))
    flaw = Reason(Why.BAD_STATE, "tensor embed is missing")
    effects = stage.hears(StateTransfer(9, 6, (6, 5), ()), sender=1, flaw=flaw)
    assert of(effects, LoadState) == [] and sent(effects, SYNCER) == [RecoveryFailed(9, flaw)]
    assert stage.machine.phase == "joining" and stage.machine.deadline() is None


def test_newcomer_whose_source_is_lost_says_so() -> None:
    stage = newcomer()
    stage.hears(Ticket(9, 1, 5, 300 * MS))
    assert sent(stage.on(ConnectionLost(1, "gone"))) == [RecoveryFailed(9, Reason(Why.SOURCE_LOST, "its source was lost: gone"))]


def test_newcomer_with_a_second_ticket_forgets_the_first() -> None:
    stage = newcomer()
    stage.hears(Ticket(9, 1, 5, 300 * MS))
    stage.hears(Ticket(10, 0, 5, 300 * MS))
    assert stage.hears(StateTransfer(9, 6, (6, 5), ()), sender=1) == []
    assert of(stage.hears(StateTransfer(10, 6, (6, 5), ()), sender=0), LoadState) == [LoadState(0, (6, 5))]


# ---------------------------------------------------------------- recovery: the peer


def serving() -> LearnerStage:
    stage = LearnerStage(arrival())
    stage.enters()
    stage.steps()
    return stage


def test_peer_serves_at_a_boundary_once_it_has_seen_the_outer_step_of_the_ticket() -> None:
    stage = serving()
    stage.hears(Serve(9, 2, 2))
    assert stage.hears(StateRequest(9), sender=2) == []  # in mid-step
    assert sent(stage.steps(), 2) == []  # has seen outer step 0 only
    stage.announced(1, 1, previous=0)
    assert sent(stage.steps(), 2) == []
    stage.announced(2, 0, previous=0)
    assert sent(stage.steps(), 2) == [StateTransfer(9, 2, (2, 1), ())]


def test_peer_goes_on_training_while_it_serves() -> None:
    stage = serving()
    stage.hears(Serve(9, 2, 0))
    stage.hears(StateRequest(9), sender=2)
    effects = stage.steps()
    assert len(sent(effects, 2, StateTransfer)) == 1
    assert len(of(effects, InnerStep)) == 1 and of(effects, Wait) == []


def test_peer_serves_whichever_comes_first_the_syncers_word_or_the_request() -> None:
    stage = serving()
    stage.hears(StateRequest(9), sender=2)
    assert sent(stage.steps(), 2) == []
    stage.hears(Serve(9, 2, 0))
    assert len(sent(stage.steps(), 2, StateTransfer)) == 1


def test_peer_does_not_serve_one_whom_the_syncer_did_not_name() -> None:
    stage = serving()
    stage.hears(Serve(9, 2, 0))
    stage.hears(StateRequest(9), sender=1)
    assert sent(stage.steps(), 1) == []


def test_peer_serves_a_ticket_once() -> None:
    stage = serving()
    stage.hears(Serve(9, 2, 0))
    stage.hears(StateRequest(9), sender=2)
    stage.steps()
    stage.hears(StateRequest(9), sender=2)
    assert sent(stage.steps(), 2) == []


def test_peer_forgets_a_newcomer_that_was_lost() -> None:
    stage = serving()
    stage.hears(StateRequest(9), sender=2)
    stage.on(ConnectionLost(2, "gone"))
    stage.hears(Serve(9, 2, 0))
    assert sent(stage.steps(), 2) == []


def test_peer_that_waits_serves_at_once() -> None:
    stage = waiting()
    stage.steps()
    stage.hears(Serve(9, 1, 0))
    assert sent(stage.hears(StateRequest(9), sender=1), 1) == [StateTransfer(9, 0, (0,), ())]


def test_peer_under_exact_adoption_sends_along_what_it_has_yet_to_adopt() -> None:
    stage = LearnerStage(exact("streaming", interval=4, overlap=3, fragmentation="whole", fragments=1))
    stage.enters()
    for _ in range(4):
        stage.steps()
    stage.announced(4, 0, merged=(0,))
    stage.hears(Serve(9, 1, 4))
    stage.hears(StateRequest(9), sender=1)
    assert sent(stage.steps(), 1) == [StateTransfer(9, 4, (0,), ((0, 4),))]


# ---------------------------------------------------------------- told to recover


def test_recover_in_mid_step_lets_the_step_end_and_then_starts_over() -> None:
    stage = serving()
    assert stage.hears(Recover(Reason(Why.VERSION_FORGOTTEN, "its versions were forgotten"))) == []
    effects = stage.steps()
    assert of(effects, InnerStep, Report) == []
    assert of(effects, Unstage) == [Unstage(0, NO_VERSION), Unstage(1, NO_VERSION)]
    (hello,) = sent(effects)
    assert isinstance(hello, Hello)
    assert (hello.needs_state, hello.held, hello.reason.why) == (True, (NO_VERSION, NO_VERSION), Why.VERSION_FORGOTTEN)
    assert hello.tokens == 2 * TOKENS  # what it trained stays in the accounts


def test_recover_while_waiting_starts_over_at_once() -> None:
    stage = waiting()
    stage.steps(200 * MS)
    effects = stage.hears(Recover(Reason(Why.POISONED, "x")), at=230 * MS)
    assert of(effects, Resume) == [Resume(30 * MS, Reason(Why.VERSION_AWAITED, "outer step 2 of fragment 0 is not back"))]
    assert len(sent(effects, kind=Hello)) == 1


def test_poisoned_learner_recovers_with_the_tensors_name() -> None:
    stage = serving()
    stage.on(Poisoned("tensor first.weight"))
    (hello,) = sent(stage.steps(), kind=Hello)
    assert hello.reason == Reason(Why.POISONED, "tensor first.weight holds NaN or Inf")  # type: ignore[union-attr]


# ---------------------------------------------------------------- snapshots


def snapped() -> LearnerStage:
    stage = LearnerStage(arrival(snapshot_interval=2))
    stage.enters()
    stage.steps()
    return stage


def test_marker_is_recorded_at_the_boundary_before_adopting_and_returned() -> None:
    stage = snapped()
    stage.announced(2, 0, previous=0)
    effects = stage.steps()
    assert [type(e).__name__ for e in effects][:2] == ["RecordState", "Adopt"]
    assert [e.snapshot for e in of(effects, RecordState)] == [2]
    (report,) = sent(effects, kind=Report)
    assert report.snapshot == 2  # type: ignore[union-attr]


def test_marker_is_recorded_once() -> None:
    stage = snapped()
    stage.announced(2, 0, previous=0)
    stage.steps()
    stage.announced(3, 1, previous=0)
    assert of(stage.steps(), RecordState) == []


def test_pull_after_a_snapshot_began_is_not_answered_before_the_state_is_recorded() -> None:
    stage = snapped()
    stage.syncer_clock = 2
    assert stage.hears(Pull(3, (1,))) == []
    effects = stage.steps()
    names = [type(e).__name__ for e in effects]
    assert names[0] == "RecordState"
    assert len(sent(effects, kind=Contribution)) == 1


def test_marker_seen_while_waiting_is_recorded_before_the_adoption() -> None:
    stage = LearnerStage(exact("diloco", interval=2, snapshot_interval=2))
    stage.enters()
    stage.steps()
    stage.steps()
    effects = stage.announced(2, 0)
    names = [type(e).__name__ for e in effects]
    assert names.index("RecordState") < names.index("Adopt")


def test_newcomer_is_not_of_the_snapshot_that_was_open_when_it_loaded() -> None:
    stage = LearnerStage(arrival(snapshot_interval=2), learner=2)
    stage.connects()
    stage.announced(5, 1)
    stage.hears(Ticket(9, 1, 5, 300 * MS))
    stage.hears(StateTransfer(9, 5, (4, 5), ()), sender=1)
    effects = stage.hears(Enter(1, 5))
    assert of(effects, RecordState) == []


# ---------------------------------------------------------------- the end, and what is refused


def test_finish_in_mid_step_ends_at_the_boundary() -> None:
    stage = serving()
    assert stage.hears(Finish(40)) == []
    effects = stage.steps()
    assert effects == [Finished(0)]
    assert stage.machine.phase == "done"


def test_finish_while_waiting_ends_at_once_with_the_wait_closed() -> None:
    stage = waiting()
    stage.steps(200 * MS)
    awaited = Reason(Why.VERSION_AWAITED, "outer step 2 of fragment 0 is not back")
    assert stage.hears(Finish(40), at=260 * MS) == [Resume(60 * MS, awaited), Finished(0)]


@pytest.mark.parametrize("late", [LeaveAsked("twice"), Connected(SYNCER), Poisoned("tensor a"), StepDone(1, 1, 1, None)])
def test_whatever_happens_after_the_end_changes_nothing(late: Event) -> None:
    stage = serving()
    stage.hears(Finish(40))
    stage.steps()
    assert stage.on(late) == []
    assert stage.hears(Pull(41, (1,))) == stage.hears(Recover(Reason(Why.POISONED, "x"))) == []


def test_asked_to_leave_with_nothing_to_deliver_says_goodbye_at_once() -> None:
    stage = LearnerStage(arrival())
    stage.enters()
    assert sent(stage.on(LeaveAsked("asked to stop"))) == [Goodbye(Reason(Why.LEAVES, "asked to stop"))]


def test_asked_to_leave_goes_once_every_fragment_was_merged_again() -> None:
    stage = serving()
    fragments = range(stage.config.protocol.fragments)
    assert sent(stage.on(LeaveAsked("asked to stop"))) == []
    assert of(stage.steps(), InnerStep)
    known = stage.machine.outer_known
    told = [sent(stage.announced(known + 1 + p, p, merged=(stage.learner,))) for p in fragments]
    assert told == [[]] * (len(told) - 1) + [[Goodbye(Reason(Why.LEAVES, "asked to stop"))]]


def test_asked_to_leave_goes_after_its_time_is_up_and_not_before() -> None:
    stage = serving()
    stage.on(LeaveAsked("asked to stop"), 10 * MS)
    by = 10 * MS + 20_000 * MS
    assert stage.machine.deadline() == by
    assert sent(stage.on(DeadlinePassed(), by - 1)) == []
    assert sent(stage.on(DeadlinePassed(), by)) == [Goodbye(Reason(Why.LEAVES, "asked to stop"))]
    assert stage.machine.deadline() is None


def test_asked_twice_goes_at_once() -> None:
    stage = serving()
    stage.on(LeaveAsked("asked to stop"))
    assert sent(stage.on(LeaveAsked("asked again"))) == [Goodbye(Reason(Why.LEAVES, "asked again"))]


def test_leaving_learner_that_should_recover_goes() -> None:
    stage = serving()
    stage.on(LeaveAsked("asked to stop"))
    assert sent(stage.hears(Recover(Reason(Why.VERSION_FORGOTTEN)))) == [Goodbye(Reason(Why.LEAVES, "asked to stop"))]


def test_step_that_ends_after_goodbye_neither_reports_nor_steps_on() -> None:
    stage = serving()
    stage.on(LeaveAsked("asked to stop"))
    stage.on(LeaveAsked("asked to stop"))
    effects = stage.steps()
    assert of(effects, InnerStep) == [] and sent(effects) == []


def test_message_that_only_a_learner_sends_is_refused() -> None:
    stage = serving()
    misled = Reason(Why.WRONG_RECEIVER, "Goodbye is not for a learner")
    assert stage.hears(Goodbye(Reason(Why.LEAVES, "x"))) == [Refuse(SYNCER, misled, True)]


def test_message_out_of_sequence_is_refused_and_changes_nothing() -> None:
    stage = serving()
    before = stage.machine.outer_known
    effects = stage.on(Received(Envelope(SYNCER, 0, 0, 99, (7,), Tick(7)), 0))
    assert [type(e) for e in effects] == [Refuse]
    assert stage.machine.outer_known == before


def test_message_from_an_older_incarnation_of_the_syncer_is_refused() -> None:
    stage = serving()
    stage.on(Received(Envelope(SYNCER, 3, 0, 0, (0,), Welcome(0)), 0))
    effects = stage.on(Received(Envelope(SYNCER, 0, 0, 50, (0,), Tick(1)), 0))
    assert effects == [Refuse(SYNCER, Reason(Why.OLD_INCARNATION, "incarnation 0 is older than 3"), True)]


def test_event_that_is_no_learners_raises_and_changes_nothing() -> None:
    stage = serving()
    with pytest.raises(AssertionError, match="no learner expects"):
        stage.machine.on(Stored(1, ""), 0)
    assert stage.on(Connected(1)) == []
    assert len(of(stage.steps(), InnerStep)) == 1


def test_announcement_seen_twice_is_kept_once() -> None:
    stage = serving()
    assert stage.announced(1, 1) == [Keep(1, 1, NO_VERSION)]
    assert stage.announced(1, 1) == []


# ---------------------------------------------------------------- slices that come and go


def test_learner_that_lost_slices_takes_its_next_steps_with_as_much_less_of_a_batch() -> None:
    stage = LearnerStage(arrival())
    (first,) = of(stage.enters(), InnerStep)
    assert first.share == 1.0
    assert stage.on(Resized(0.75)) == []  # the step that runs is what it was
    (second,) = of(stage.steps(), InnerStep)
    assert second.share == 0.75
    (third,) = of(stage.steps(), InnerStep)
    assert third.share == 0.75
    stage.on(Resized(1.0))
    assert of(stage.steps(), InnerStep)[0].share == 1.0
