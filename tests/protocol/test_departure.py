"""A learner that is asked to stop delivers every fragment once, within a limit; and what the syncer makes of its Goodbye."""

from __future__ import annotations

from stage import TOKENS, LearnerStage, SyncerStage, arrival, exact, of, others, sent

from atoll.ids import SYNCER, nanos
from atoll.protocol.departure import Departure
from atoll.protocol.phases import DONE
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import (
    AbortRound,
    ConnectionLost,
    Contribution,
    DeadlinePassed,
    Finish,
    Finished,
    FixParticipants,
    Goodbye,
    InnerStep,
    LeaveAsked,
    Membership,
    Pull,
    Recover,
    Refuse,
    Reissue,
    Resume,
    Unit,
    Wait,
)  # fmt: skip

ASK = LeaveAsked("asked to stop")
BYE = [Goodbye(Reason(Why.LEAVES, "asked to stop"))]


def training(steps: int = 2) -> LearnerStage:
    """Two fragments, both trained, a step running."""
    stage = LearnerStage(arrival(2))
    stage.enters()
    for _ in range(steps):
        stage.steps()
    return stage


# ---------------------------------------------------------------- the learner


def test_learner_asked_to_leave_goes_on_until_every_fragment_was_merged_once() -> None:
    stage = training()
    assert stage.on(ASK) == []
    assert sent(stage.hears(Pull(1, (1,))), kind=Contribution) != []
    assert sent(stage.announced(1, 1, previous=0), kind=Goodbye) == []
    assert of(stage.steps(), InnerStep) != []
    stage.hears(Pull(2, (0,)))
    effects = stage.announced(2, 0, previous=0)
    assert sent(effects) == BYE
    assert stage.machine.phase == DONE


def test_round_without_its_contribution_does_not_let_it_go() -> None:
    stage = training()
    stage.on(ASK)
    stage.announced(1, 1, previous=0, merged=(1,))
    assert sent(stage.announced(2, 0, previous=0, merged=(0,)), kind=Goodbye) == []
    stage.steps()
    assert sent(stage.announced(3, 1, previous=1, merged=(0, 1)), kind=Goodbye) == BYE


def test_learner_with_nothing_to_deliver_leaves_at_once() -> None:
    stage = training(0)
    assert sent(stage.on(ASK)) == BYE
    assert stage.machine.phase == DONE


def test_fragment_not_trained_since_its_adoption_need_not_be_delivered() -> None:
    stage = training()
    stage.announced(1, 1, previous=0)
    stage.steps()  # adopts it
    stage.on(ASK)
    assert sent(stage.announced(2, 0, previous=0)) == BYE


def test_asked_twice_it_leaves_at_once() -> None:
    stage = training()
    stage.on(ASK)
    assert sent(stage.on(LeaveAsked("asked again"))) == [Goodbye(Reason(Why.LEAVES, "asked again"))]


def test_leave_takes_at_most_its_limit() -> None:
    stage = training()
    limit = nanos(stage.config.limits.leave_seconds)
    stage.on(ASK, at=5)
    assert stage.machine.deadline() == 5 + limit
    assert stage.on(DeadlinePassed(), at=4 + limit) == []
    assert sent(stage.on(DeadlinePassed(), at=5 + limit)) == BYE
    assert stage.machine.deadline() is None


def test_notice_that_says_how_long_there_is_overrides_the_runs_limit() -> None:
    for within in (0, 3, nanos(3600.0)):
        stage = training()
        stage.on(LeaveAsked("preempted", within), at=5)
        assert stage.machine.deadline() == 5 + within
        assert sent(stage.on(DeadlinePassed(), at=5 + within)) == [Goodbye(Reason(Why.LEAVES, "preempted"))]


def test_learner_that_means_to_return_says_so() -> None:
    stage = training(0)
    assert sent(stage.on(LeaveAsked("preempted", returns=True))) == [Goodbye(Reason(Why.LEAVES_FOR_A_WHILE, "preempted"))]


def test_learner_without_a_syncer_leaves_at_once_and_says_nothing() -> None:
    stage = training()
    stage.on(ConnectionLost(SYNCER, "gone"))
    assert stage.on(ASK) == []
    assert stage.machine.phase == DONE


def test_learner_whose_syncer_goes_while_it_leaves_is_gone_by_the_limit() -> None:
    stage = training()
    stage.on(ASK, at=0)
    stage.on(ConnectionLost(SYNCER, "gone"))
    stage.on(DeadlinePassed(), at=nanos(stage.config.limits.leave_seconds))
    assert stage.machine.phase == DONE


def test_joining_learner_leaves_at_once() -> None:
    stage = LearnerStage(arrival(2))
    stage.connects()
    assert sent(stage.on(ASK)) == BYE


def test_learner_told_to_recover_while_it_leaves_has_nothing_worth_delivering() -> None:
    stage = training()
    stage.on(ASK)
    assert sent(stage.hears(Recover(Reason(Why.POISONED, "poisoned update")))) == BYE


def test_run_that_ends_while_a_learner_leaves_ends_for_it_too() -> None:
    stage = training()
    stage.on(ASK)
    stage.hears(Finish(40))
    assert of(stage.steps(), Finished) != []
    assert stage.machine.phase == DONE


def test_learner_that_waits_delivers_and_leaves() -> None:
    stage = LearnerStage(exact(interval=2))
    stage.enters()
    stage.steps()
    assert of(stage.steps(), Wait) != []
    stage.on(ASK)
    assert sent(stage.hears(Pull(2, (0,))), kind=Contribution) != []
    effects = stage.announced(2, 0)
    assert sent(effects) == BYE
    assert of(effects, Resume) != []
    assert of(effects, InnerStep) == []


def test_nothing_happens_to_one_that_left() -> None:
    stage = training()
    stage.on(ASK)
    stage.on(ASK)
    assert stage.steps() == []
    assert stage.hears(Pull(1, (1,))) == []


def test_goodbye_does_not_overtake_the_last_contribution() -> None:
    stage = training()
    stage.hears(Pull(1, (1,)))
    effects = stage.on(ASK) + stage.on(ASK)
    (goodbye,) = [e.envelope for e in effects if hasattr(e, "envelope")]
    assert goodbye.after == 1


def test_departure_forgets_nothing_when_asked_again() -> None:
    departure = Departure()
    assert not departure.asked
    assert not departure.ask("a", (0, 1), 10)
    assert not departure.merged(0)
    assert departure.merged(1)
    assert not departure.is_due(9)
    assert departure.is_due(10)
    assert departure.ask("b", (0,), 20)


# ---------------------------------------------------------------- the syncer


def test_goodbye_frees_the_leases_and_the_round() -> None:
    s = SyncerStage(exact(learners=2), joined=2)
    for m in (0, 1, 0, 1):
        s.steps(m)
    s.contributes(0, 2, 0)
    effects = s.hears(1, BYE[0])
    assert of(effects, Membership) == [Membership(1, "left", Reason(Why.LEAVES, "asked to stop"))]
    assert of(effects, Reissue) == [Reissue(1, (Unit(1, 0), Unit(1, 1), Unit(1, 2)), 1)]
    assert [type(e).__name__ for e in others(effects)][-2:] == ["Merge", "Store"]
    assert s.machine.fates().discarded == {"left": 2 * TOKENS}


def test_goodbye_of_the_last_participant_gathers_again() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.steps(0)
    effects = s.hears(0, BYE[0])
    assert [e.outer_step for e in of(effects, AbortRound)] == [1]
    assert of(s.steps(1), FixParticipants)[0].participants == (1,)


def test_nothing_is_sent_to_one_that_left() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.steps(1)
    s.hears(0, BYE[0])
    assert sent(s.contributes(1, 1, 1) + s.stored(1), 0) == []


def test_what_one_says_after_its_goodbye_costs_its_connection_and_changes_nothing() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.steps(0)
    s.hears(0, BYE[0])
    fates = s.machine.fates()
    assert of(s.steps(0), Refuse) == [Refuse(0, Reason(Why.NO_HELLO), True)]
    assert of(s.contributes(0, 1, 1), Refuse)[0].disconnect
    poisoned = s.hears(0, s.contribution(0, 1, 1), flaw=Reason(Why.POISONED, "fragment 1 holds NaN or Inf"))
    assert of(poisoned, Refuse)[0].disconnect
    assert s.machine.fates() == fates
    assert s.machine.leases.by_learner.keys() == {1}


def test_one_that_left_may_come_back_as_a_new_process() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.hears(0, BYE[0])
    s.on(ConnectionLost(0, "closed"))
    assert of(s.hello(0, held=(0, 0)), Refuse)[0].reason == Reason(Why.ALREADY_LEFT)
    assert Membership(0, "joining", Reason(Why.JOINS)) in s.comes_back(0)
