"""Rolling back, on stage: an outer step of its own, after which nothing trained before is merged."""

from __future__ import annotations

import pytest
from stage import JOINS, TOKENS, LearnerStage, SyncerStage, arrival, exact, of, sent

from atoll.config import Config
from atoll.ids import SYNCER
from atoll.protocol.ledger import Loss
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import (
    NO_VERSION,
    AbortRound,
    Adopt,
    Announce,
    AnswerRollback,
    ConnectionLost,
    CopyVersions,
    Effect,
    Enter,
    ForgetVersion,
    Goodbye,
    Hello,
    InnerStep,
    LeaveAsked,
    Loaded,
    LoadTheta,
    Pull,
    Recover,
    Refuse,
    Restored,
    RollbackAsked,
    RollbackPoint,
    SealSnapshot,
    Started,
    Store,
    SyncerState,
    TakeRollback,
    Ticket,
)  # fmt: skip

WHY = Reason(Why.ROLLED_BACK)


def asked(to: int, *, reset: bool = False, request: str = "a") -> RollbackAsked:
    return RollbackAsked(to, reset, request, "a test")


def config(**changes: object) -> Config:
    return arrival(2, **({"rollback_interval": 2, "limits": {"rollback_points": 2}} | changes))


def reached(outer_step: int, **changes: object) -> SyncerStage:
    """Both learners in sync, and so many full rounds."""
    s = SyncerStage(config(**changes), joined=2)
    while s.machine.outer_step < outer_step:
        s.full_round()
    return s


def rolled(s: SyncerStage, to: int, *, reset: bool = False) -> list[Effect]:
    """Asked, copied, stored: the effects of `Stored`."""
    (copy,) = of(s.on(asked(to, reset=reset)), CopyVersions)
    return s.stored(copy.outer_step)


# ---------------------------------------------------------------- points


def test_versions_of_a_point_stay_on_disk_until_newer_points_replace_it() -> None:
    s = reached(4)
    assert s.machine.rollback.steps() == (2, 4)
    of_two = s.machine.rollback.points()[0]
    assert of_two == RollbackPoint(2, (2, 1), 2 * TOKENS), "a quorum of one: one learner in each of two rounds"
    while s.machine.outer_step < 12:
        effects = s.effects_of_round(s.machine.outer_step + 1, (0, 1))
        forgotten = {(e.fragment, e.version) for e in of(effects, ForgetVersion)}
        kept = s.machine.rollback.points()
        assert not forgotten & {(p, v) for point in kept for p, v in enumerate(point.versions)}
    assert s.machine.rollback.steps() == (10, 12)


def test_version_of_a_point_alone_is_no_anchor() -> None:
    """A point keeps a file, not the right to send a difference against it."""
    s = reached(12, limits={"versions_max": 2, "rollback_points": 5})
    (oldest, *_) = s.machine.rollback.points()
    assert not s.machine.versions.has(0, oldest.versions[0])
    assert oldest.versions[0] in s.machine.stored_versions()[0]


def test_without_an_interval_there_is_no_point() -> None:
    assert reached(4, rollback_interval=0).machine.rollback.steps() == ()


# ---------------------------------------------------------------- the syncer's side


def test_rollback_is_the_next_outer_step_and_stores_every_fragment_again() -> None:
    s = reached(5)
    effects = s.on(asked(4))
    assert of(effects, CopyVersions, Store) == [CopyVersions(6, (4, 3)), Store(6, (0, 1))]
    done = s.stored(6)
    assert s.machine.outer_step == 6 and of(done, AnswerRollback)[0].outer_step == 6
    assert s.machine.versions.all_kept_versions() == ((6,), (6,))
    for learner in (0, 1):
        told = sent(done, learner)
        assert [m for m in told if isinstance(m, Announce)] == [Announce(6, p, NO_VERSION, ()) for p in (0, 1)]
        assert isinstance(told[-1], TakeRollback) and told[-1].outer_step == 6


def test_open_rounds_are_aborted_and_no_round_begins_before_it_is_stored() -> None:
    s = reached(5)
    s.steps(0)
    s.steps(1)
    assert s.machine.rounds[6].participants
    effects = s.on(asked(4))
    assert [e.reason.why for e in of(effects, AbortRound) if e.outer_step == 6] == [Why.ROLLED_BACK]
    late = s.contributes(0, 6, s.machine.schedule.due(6)[0])
    assert [e.reason.why for e in of(late, Refuse)] == [Why.LATE]
    assert not sent(s.steps(0), kind=Pull)


def test_merge_that_is_being_stored_counts_and_is_rolled_back_with_the_rest() -> None:
    s = reached(5)
    for learner in (0, 1):
        s.steps(learner)
    for learner in (0, 1):
        s.contributes(learner, 6, s.machine.schedule.due(6)[0])
    assert not of(s.on(asked(4)), CopyVersions)
    assert of(s.stored(6), CopyVersions) == [CopyVersions(7, (4, 3))]


def test_work_merged_since_and_in_flight_is_fated_rolled_back() -> None:
    s = reached(5)
    before = s.machine.rollback.points()[-1].merged
    s.steps(0)
    trained = s.machine.fates().trained
    rolled(s, 4)
    fates = s.machine.fates()
    assert (fates.merged, fates.in_flight) == (before, 0)
    assert fates.discarded[Loss.ROLLED_BACK] + sum(n for why, n in fates.discarded.items() if why != Loss.ROLLED_BACK) == (
        trained - before
    )


def test_what_is_trained_until_the_adoption_is_rolled_back_too() -> None:
    s = reached(5)
    done = rolled(s, 4)
    (told,) = sent(done, 0, TakeRollback)
    already = s.machine.fates().discarded[Loss.ROLLED_BACK]
    s.steps(0, adopts=False)
    s.loads(0, told.ticket)  # type: ignore[union-attr]
    s.cast[0].told += [Announce(6, p, NO_VERSION, ()) for p in (0, 1)]
    s.steps(0)
    assert s.machine.fates().discarded[Loss.ROLLED_BACK] == already + 2 * 2 * TOKENS


def test_learner_that_loaded_enters_and_the_next_round_is_of_the_new_past() -> None:
    s = reached(5)
    done = rolled(s, 4)
    for learner in (0, 1):
        (told,) = sent(done, learner, TakeRollback)
        assert isinstance(sent(s.loads(learner, told.ticket), learner)[-1], Enter)  # type: ignore[union-attr]
    assert s.full_round() == 7
    assert s.machine.versions.newest(s.machine.schedule.due(7)[0]) == 7


def test_difference_to_a_version_before_the_rollback_is_refused() -> None:
    s = reached(5)
    old = list(s.cast[0].held)
    done = rolled(s, 4)
    for learner in (0, 1):
        (told,) = sent(done, learner, TakeRollback)
        s.loads(learner, told.ticket)  # type: ignore[union-attr]
    for learner in (0, 1):
        s.steps(learner)
    due = s.machine.schedule.due(7)[0]
    refused = s.contributes(0, 7, due, anchor=old[due])
    assert [e.reason.why for e in of(refused, Refuse)] == [Why.VERSION_FORGOTTEN]


def test_learner_that_was_recovering_begins_again() -> None:
    """Its source's state is of the past that is gone."""
    s = reached(5)
    s.hello(2)
    s.full_round(who=[0, 1])
    assert s.machine.roster.get(2).ticket  # type: ignore[union-attr]
    done = rolled(s, 4)
    assert [type(m) for m in sent(done, 2)] == [Recover]


def test_learner_that_was_away_recovers_when_it_is_back() -> None:
    s = reached(5)
    s.on(ConnectionLost(1, "cable"))
    rolled(s, 4)
    assert sent(s.hello(1, held=s.cast[1].held), 1, Recover)


def test_step_that_is_not_kept_is_refused_with_those_that_are() -> None:
    s = reached(5)
    (answer,) = of(s.on(asked(3)), AnswerRollback)
    assert answer.outer_step == 0 and answer.reason.why is Why.NOT_KEPT and "2, 4" in answer.reason.detail
    assert s.full_round() == 6


def test_points_after_the_one_rolled_back_to_are_gone() -> None:
    s = reached(5)
    rolled(s, 2)
    assert s.machine.rollback.steps() == (2, 6)


def test_negative_step_counts_from_the_newest_point() -> None:
    s = reached(5)
    assert of(s.on(asked(-2)), CopyVersions) == [CopyVersions(6, (2, 1))]


def test_run_that_is_over_is_not_rolled_back() -> None:
    s = reached(6, total_steps=6)
    (answer,) = of(s.on(asked(4)), AnswerRollback)
    assert answer.outer_step == 0 and answer.reason.why is Why.RUN_OVER


def test_rollback_at_the_last_outer_step_ends_the_run() -> None:
    s = reached(5, total_steps=6)
    rolled(s, 4)
    assert s.machine.finished


def test_killed_while_it_is_stored_the_syncer_stores_it_again() -> None:
    s = reached(5)
    s.on(asked(4))
    assert of(s.on(Started(1)), CopyVersions, Store) == [CopyVersions(6, (4, 3)), Store(6, (0, 1))]
    s.stored(6)
    assert s.machine.outer_step == 6 and not of(s.on(Started(2)), CopyVersions)


def test_two_requests_are_carried_out_one_after_the_other() -> None:
    s = reached(5, limits={"rollback_points": 3})
    s.on(asked(4, request="a"))
    s.on(asked(2, request="b"))
    assert of(s.stored(6), CopyVersions) == [CopyVersions(7, (2, 1))]
    assert s.machine.rollback.last_request == "b"


def test_request_that_is_read_twice_is_carried_out_once() -> None:
    s = reached(5)
    s.on(asked(4, request="a"))
    s.on(asked(4, request="a"))
    assert not of(s.stored(6), CopyVersions) and not s.machine.rollback.pending


def test_open_snapshot_is_abandoned() -> None:
    s = reached(4, snapshot_interval=4)
    assert s.machine.snapshot.open
    (sealed,) = of(rolled(s, 4), SealSnapshot)
    assert not sealed.complete and sealed.reason.why is Why.ROLLED_BACK


def test_points_go_on_in_a_run_resumed_from_a_snapshot() -> None:
    s = SyncerStage(config())
    point = RollbackPoint(8, (8, 7), 500)
    s.on(Restored(SyncerState(9, ((8,), (9,)), (), (), (), (point,))))
    assert s.machine.rollback.points() == (RollbackPoint(8, (8, 7), 0),)
    assert s.machine.stored_versions() == ((8,), (7, 9))
    assert of(s.on(asked(8)), CopyVersions) == [CopyVersions(10, (8, 7))]


# ---------------------------------------------------------------- the learner's side


def training(preset: str = "decoupled") -> LearnerStage:
    s = LearnerStage(config() if preset == "decoupled" else exact(preset, interval=1 if preset == "ddp" else 2))
    s.enters()
    return s


def told(s: LearnerStage, *, outer_step: int = 6, reset: bool = False) -> list[Effect]:
    for fragment in range(s.config.protocol.fragments):
        s.announced(outer_step, fragment, merged=())
    return s.hears(TakeRollback(9, outer_step, reset, WHY))


def test_learner_loads_at_its_next_boundary_and_says_so() -> None:
    s = training()
    assert not of(told(s), Adopt, LoadTheta)
    effects = s.steps()
    assert [(e.fragment, e.version, e.alpha, e.merged) for e in of(effects, Adopt)] == [(0, 6, 0.0, False), (1, 6, 0.0, False)]
    assert of(effects, LoadTheta) == [LoadTheta(WHY, keep_optimizer=True)]
    assert sent(effects, SYNCER)[-1] == Loaded(9, SYNCER, 1, (6, 6)) and not of(effects, InnerStep)
    assert of(s.hears(Enter(2, 6)), InnerStep)


def test_moments_are_reset_where_that_is_asked_for() -> None:
    s = training()
    told(s, reset=True)
    assert of(s.steps(), LoadTheta) == [LoadTheta(WHY)]


@pytest.mark.parametrize("preset", ["diloco", "ddp"])
def test_learner_that_waited_loads_at_its_next_boundary(preset: str) -> None:
    s = training(preset)
    while s.machine.phase != "waiting":
        s.steps()
    told(s, outer_step=3)
    assert of(s.steps(), LoadTheta)
    assert of(s.hears(Enter(2, 3)), InnerStep) and s.machine.position == 3


def test_copies_made_before_are_not_sent_after() -> None:
    s = training()
    told(s)
    s.steps()
    s.hears(Enter(2, 6))
    s.hears(Pull(7, (0,)))
    (contribution,) = sent(s.steps(), SYNCER)[-1:]
    assert getattr(contribution, "anchor", 6) == 6


def test_lost_connection_ends_it_and_the_syncer_decides_anew() -> None:
    s = training()
    told(s)
    s.on(ConnectionLost(SYNCER, "cable"))
    assert not of(s.steps(), LoadTheta)
    (hello,) = sent(s.connects(), SYNCER, Hello)
    assert not hello.needs_state and hello.reason != JOINS  # type: ignore[union-attr]


def test_learner_that_is_leaving_goes() -> None:
    s = training()
    s.steps()
    s.on(LeaveAsked("spot instance"))
    effects = told(s)
    assert sent(effects, SYNCER, Goodbye) and not of(effects, LoadTheta)


def test_learner_that_is_recovering_ignores_it() -> None:
    s = training()
    s.hears(Recover(WHY))
    s.steps()
    s.hears(Ticket(4, 1, 5, 10**9))
    assert not of(s.hears(TakeRollback(9, 6, False, WHY)), LoadTheta)
    assert s.machine.phase == "joining"
