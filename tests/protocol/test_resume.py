"""A run goes on from a snapshot: syncer and learner states in, exact effects out; no data lost, none handed out twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import MS, TOKENS, Cast, LearnerStage, SyncerStage, arrival, exact, of, others, sent

from atoll.ids import SYNCER
from atoll.protocol.batches import Batches
from atoll.protocol.leases import Leases
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import (
    NO_VERSION,
    Announce,
    Connected,
    Contribution,
    Enter,
    FixParticipants,
    Grant,
    Hello,
    InnerStep,
    LearnerState,
    Lease,
    LoadSnapshot,
    Membership,
    Pull,
    RecordState,
    RecordSyncer,
    Recover,
    Recovered,
    Reissue,
    Report,
    Restored,
    Resumed,
    Stage,
    SyncerState,
    TakeTheta,
    Tick,
    Ticket,
    Unit,
    Welcome,
)  # fmt: skip

LOST = Reason(Why.RESUMED)


def units(stream: int, *indices: int) -> tuple[Unit, ...]:
    return tuple(Unit(stream, i) for i in indices)


def syncer_state(*leases: Lease, outer_step: int = 10, pool: tuple[Unit, ...] = (), fragments: int = 2) -> SyncerState:
    """Every stream was granted up to unit 6; two versions of each fragment are kept."""
    kept = tuple((outer_step - 3 + p % 2, outer_step - 1 + p % 2) for p in range(fragments))
    return SyncerState(outer_step, kept, tuple((lease.learner, 6) for lease in leases), pool, leases)


def resumed(syncer_state: SyncerState, learners: int = 2, **changes: Any) -> SyncerStage:
    s = SyncerStage(arrival(learners, **changes))
    s.on(Restored(syncer_state))
    return s


NEWEST = (9, 10)
TWO = (Lease(0, units(0, 3, 4, 5), ()), Lease(1, units(1, 4, 5), units(1, 3)))


def back(s: SyncerStage, m: int, left: tuple[Unit, ...], *, held: tuple[int, ...] = NEWEST, own_next: int = 6) -> list[Any]:
    return s.hello(m, held=held, left=left, own_next=own_next, reason=Reason(Why.RECONNECTED))


def holdings(leases: Leases) -> Counter[Unit]:
    """Every unit that somebody holds or that waits in the pool."""
    found = Counter(leases._pool)
    for held in leases.by_learner.values():
        found.update(held.granted)
        found.update(unit for unit, _ in held.done)
    return found


# ---------------------------------------------------------------- the syncer


def test_restored_syncer_awaits_the_learners_of_the_snapshot_and_says_nothing_else() -> None:
    s = SyncerStage(arrival(2))
    assert s.on(Restored(syncer_state(*TWO))) == [Membership(0, "lost", LOST), Membership(1, "lost", LOST)]
    assert s.machine.outer_step == 10
    assert list(s.machine.rounds) == [11]  # not the first round of a new run, which had begun to gather


def test_first_round_of_a_resumed_run_follows_the_snapshot() -> None:
    s = resumed(syncer_state(*TWO))
    for m in (0, 1):
        back(s, m, units(m, 4, 5))
        s.cast[m].held, s.cast[m].batch = list(NEWEST), 7
    assert [(f.outer_step, f.participants) for f in of(s.steps(0), FixParticipants)] == [(11, (0,))]


def test_hello_of_a_resumed_learner_claims_its_own_leases() -> None:
    s = resumed(syncer_state(*TWO))
    effects = back(s, 1, units(1, 4, 5))
    entered = Reason(Why.ENTERED, "stands at outer step 10")
    assert others(effects) == [Membership(1, "joining", Reason(Why.RECONNECTED)), Membership(1, "in_sync", entered)]
    assert sent(effects) == [Welcome(10), Grant(units(1, 6), 7), Enter(1, 10)]
    held = s.machine.leases.by_learner[1]
    assert list(held.granted) == list(units(1, 4, 5, 6))
    assert [u for u, _ in held.done] == list(units(1, 3))


def test_unit_drawn_after_the_syncers_cut_and_before_the_learners_is_done() -> None:
    s = resumed(syncer_state(*TWO))
    back(s, 0, units(0, 5), own_next=6)
    assert [u for u, _ in s.machine.leases.by_learner[0].done] == list(units(0, 3, 4))


def test_resumed_learner_behind_the_newest_version_is_sent_it_before_it_enters() -> None:
    s = resumed(syncer_state(*TWO))
    effects = back(s, 0, units(0, 4, 5), held=(7, 10))
    assert [type(b) for b in sent(effects, 0)] == [Welcome, Announce, Grant, Enter]
    assert sent(effects, 0, Announce) == [Announce(9, 0, 7, ())] or sent(effects, 0, Announce) == [Announce(9, 0, -1, ())]


def test_resumed_learner_whose_versions_were_forgotten_recovers_and_keeps_its_leases() -> None:
    s = resumed(syncer_state(*TWO))
    effects = back(s, 0, units(0, 4, 5), held=(3, 10))
    assert sent(effects, 0, Recover) == [Recover(Reason(Why.VERSION_FORGOTTEN, "its versions were forgotten while it was away"))]
    assert of(effects, Reissue) == []
    assert set(s.machine.leases.by_learner[0].granted) == set(units(0, 4, 5))


def test_resumed_learner_that_comes_with_nothing_gives_its_leases_back() -> None:
    s = resumed(syncer_state(*TWO))
    effects = s.hello(1)
    assert of(effects, Reissue) == [Reissue(1, units(1, 3, 4, 5), 1)]


def test_leases_are_claimed_once() -> None:
    """A second process in the learner's name does not hold what the first one holds."""
    s = resumed(syncer_state(*TWO))
    back(s, 1, units(1, 4, 5))
    effects = s.comes_back(1)
    assert set(of(effects, Reissue)[0].units) == set(units(1, 3, 4, 5, 6))
    assert max(holdings(s.machine.leases).values()) == 1


def test_missing_learners_units_are_issued_again_after_a_while_and_not_before() -> None:
    s = resumed(syncer_state(*TWO), learners=1)
    back(s, 0, units(0, 4, 5))
    s.cast[0].held, s.cast[0].batch = list(NEWEST), 6
    start_wait = 60_000 * MS
    reissued: list[tuple[int, Reissue]] = []
    for k in range(1, 800):
        effects = s.steps(0, at=k * 100 * MS) + s.passes(s.now)
        round_ = s.machine.rounds.get(s.machine.outer_step + 1)
        if round_ is not None and round_.participants and round_.due:
            for fragment in round_.due:
                effects += s.contributes(0, round_.outer_step, fragment)
            effects += s.stored(round_.outer_step)
        reissued += [(s.now, e) for e in of(effects, Reissue)]
    ((at, reissue),) = reissued
    assert at > start_wait
    assert reissue == Reissue(1, units(1, 3, 4, 5), 1)
    assert s.machine.outer_step == 40


def test_learner_more_than_the_snapshot_had_joins_by_a_peer_that_is_in_sync() -> None:
    s = resumed(syncer_state(*TWO), learners=3)
    back(s, 0, units(0, 4, 5))
    back(s, 1, units(1, 4, 5))
    s.cast[0].held = s.cast[1].held = list(NEWEST)
    (ticket,) = sent(s.hello(2), 2, Ticket)
    assert (ticket.peer, ticket.outer_step) == (0, 10), "before the first round, which waits for it"  # type: ignore[union-attr]


def test_learner_more_than_the_snapshot_had_takes_theta_where_nobody_is_in_sync() -> None:
    s = resumed(syncer_state(*TWO), learners=3)
    (take,) = sent(s.hello(2), 2, TakeTheta)
    assert take == TakeTheta(1, Reason(Why.NO_PEER))
    assert of(s.loads(2, 1), Recovered) != []


def test_quorum_of_all_does_not_wait_for_learners_that_never_came_to_a_resumed_run() -> None:
    """A dead rank stops data-parallel training; one that was not started again never was a rank of this run."""
    three = tuple(Lease(m, units(m, 4, 5), ()) for m in range(3))
    s = SyncerStage(exact("ddp", learners=2, interval=1))
    s.on(Restored(SyncerState(10, ((9, 10),), tuple((m, 6) for m in range(3)), (), three)))
    for m in (0, 1):
        s.hello(m, held=(10,), left=units(m, 4, 5), own_next=6)
        s.cast[m].held, s.cast[m].batch = [10], 9
    s.steps(0)
    assert [f.participants for f in of(s.steps(1), FixParticipants)] == [(0, 1)]


def test_tokens_trained_before_the_snapshot_are_not_counted_again() -> None:
    s = resumed(syncer_state(*TWO), learners=1)
    s.cast[0] = actor = Cast(s.config)
    actor.local_step, actor.batch, actor.held = 24, 8, list(NEWEST)
    back(s, 0, units(0, 4, 5))
    assert s.machine.fates().trained == 0
    s.steps(0)
    assert s.machine.fates().trained == TOKENS * 2


# ---------------------------------------------------------------- the learner

LEARNER_STATE = LearnerState((9, 10), 11, 10, units(0, 4, 5), 1, 6, 24, 2400, 24, ((3, 300, 3), (1, 100, 1)))


def resumed_learner(learner_state: LearnerState = LEARNER_STATE, **changes: Any) -> LearnerStage:
    stage = LearnerStage(arrival(2, **changes))
    assert stage.on(Resumed(10, learner_state)) == [LoadSnapshot(10)]
    stage.syncer_clock = 10
    return stage


def test_resumed_learner_says_hello_with_its_state_and_its_place_in_the_data() -> None:
    stage = resumed_learner()
    (hello,) = sent(stage.connects())
    assert hello == Hello((9, 10), 24, 2400, False, units(0, 4, 5), 6, Reason(Why.RECONNECTED), 0)


def test_resumed_learner_goes_on_with_the_batch_after_the_last_one() -> None:
    stage = resumed_learner()
    stage.connects()
    effects = stage.hears(Enter(1, 10))
    assert of(effects, InnerStep) == [InnerStep(25, 0, 9, 10)]  # one of unit 4's two batches was drawn
    (report,) = sent(effects, kind=Report)
    assert isinstance(report, Report)
    assert (report.local_step, report.tokens, report.samples) == (24, 2400, 24)


def test_resumed_learner_weighs_what_it_trained_since_its_last_adoption() -> None:
    stage = resumed_learner()
    stage.connects()
    stage.hears(Enter(1, 10))
    stage.steps()
    (contribution,) = sent(stage.hears(Pull(11, (1,))), kind=Contribution)
    assert contribution == Contribution(11, 1, 25, 10, 2, 200, 2, 2500)


def test_contribution_of_a_resumed_learner_weighs_its_whole_interval() -> None:
    """Counted from zero it would weigh nothing, and all it trained since the last round would be thrown away."""
    stage = LearnerStage(exact(interval=4))
    stage.on(Resumed(10, LearnerState((8,), 12, 10, units(0, 3), 0, 5, 12, 1200, 12, ((4, 400, 4),))))
    stage.syncer_clock = 10
    stage.connects()
    effects = stage.hears(Enter(1, 10))
    assert of(effects, Stage) == [Stage(0, 12, 12, False)]
    (contribution,) = sent(stage.hears(Pull(12, (0,))), kind=Contribution)
    assert contribution == Contribution(12, 0, 12, 8, 4, 400, 4, 1200)


def test_resumed_learner_does_not_record_the_snapshot_it_came_from_again() -> None:
    stage = resumed_learner(snapshot_interval=5)
    stage.connects()
    effects = stage.hears(Enter(1, 10)) + stage.steps()
    assert of(effects, RecordState) == []


def test_unit_drawn_to_its_end_is_not_part_of_a_stance() -> None:
    stage = LearnerStage(arrival(2, snapshot_interval=2))
    stage.enters()
    stage.hears(Grant(units(0, 0, 1), 2))
    stage.steps()
    stage.steps()
    stage.syncer_clock = 2
    stage.hears(Tick(2))
    (record,) = of(stage.steps(), RecordState)
    # the learner drew two batches of its own before the grant came: units 0 (self-issued), then 1
    assert (record.learner_state.left, record.learner_state.offset) == (units(0, 1), 1)
    stage.syncer_clock = 4
    stage.hears(Tick(4))
    (record,) = of(stage.steps(), RecordState)
    assert (record.learner_state.left, record.learner_state.offset) == ((), 0)


def test_grant_from_after_the_cut_is_not_part_of_a_stance() -> None:
    """The syncer's state knows nothing of it: on resume it would be granted to the first that asks, and held by two."""
    stage = LearnerStage(arrival(2, snapshot_interval=2))
    stage.enters()
    stage.hears(Grant(units(0, 0, 1), 2))
    stage.syncer_clock = 2
    stage.hears(Grant(units(1, 7), 2))
    effects = stage.steps()
    (record,) = of(effects, RecordState)
    assert Unit(1, 7) not in record.learner_state.left
    learner_state_left = [stage.machine._batches.draw() for _ in range(4)]
    assert (1, 14) in learner_state_left  # but it is there for the steps that follow


def test_grant_held_back_for_a_snapshot_is_in_the_hello_of_a_broken_connection() -> None:
    stage = LearnerStage(arrival(2, snapshot_interval=2))
    stage.enters()
    stage.hears(Grant(units(0, 0, 1), 2))
    stage.syncer_clock = 2
    stage.hears(Grant(units(1, 7), 2))
    stage.on(Connected(SYNCER))
    assert stage.machine._batches.grants == 2
    assert Unit(1, 7) in stage.machine._batches.left()


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_stance_of_a_learner_without_a_grant_goes_on_in_its_own_stream(interval: int) -> None:
    batches = Batches(3, interval)
    drawn = [batches.draw() for _ in range(7)]
    again = Batches(3, interval)
    again.restore(*batches.place())
    assert again.draw() == (3, 7)
    assert drawn == [(3, i) for i in range(7)]


# ---------------------------------------------------------------- random states


class Past:
    """A run up to a snapshot, as far as data goes: learners draw, are granted units, die and are pulled from."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.leases = Leases(2, interval)
        self.batches = {m: Batches(m, interval) for m in range(3)}
        self.steps = dict.fromkeys(range(3), 0)
        for m in range(3):
            self._grant(m)

    def _grant(self, m: int) -> None:
        given = self.leases.top_up(m)
        if given:
            self.batches[m].granted(Grant(given, self.leases.own_next(m)))

    def draw(self, m: int, *, reports: bool = True) -> None:
        drawn = self.batches[m].draw()
        self.steps[m] += 1
        if reports:
            self.leases.drew(m, *drawn, self.steps[m])
            if self.leases.is_low(m):
                self._grant(m)

    def die(self, m: int) -> None:
        self.leases.release(m)
        self.batches[m], self.steps[m] = Batches(m, self.interval), 0
        self._grant(m)

    def act(self, what: str, m: int) -> None:
        if what == "d":
            self.die(m)
        elif what == "s":
            self.draw(m)
        else:
            self.leases.pulled(m, int(what), self.steps[m])


@settings(deadline=None, max_examples=150)
@given(
    interval=st.integers(1, 4),
    acts=st.lists(st.tuples(st.sampled_from("sssssss01d"), st.integers(0, 2)), max_size=80),
    after_the_cut=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    comes=st.permutations([0, 1, 2, 3, 4]),
    how=st.lists(st.sampled_from(["back", "back", "back", "bare", "missing"]), min_size=5, max_size=5),
)
def test_no_unit_is_held_twice_or_lost_in_any_order_of_return(
    interval: int, acts: list[tuple[str, int]], after_the_cut: list[int], comes: list[int], how: list[str]
) -> None:
    past = Past(interval)
    for act in acts:
        past.act(*act)
    before = holdings(past.leases)
    own_next, pool, leases = past.leases.record()
    for m, count in enumerate(after_the_cut):  # steps between the syncer's record and the learner's
        for _ in range(count):
            past.draw(m, reports=False)
    s = SyncerStage(arrival(5, interval=interval) if interval > 1 else exact("ddp", 5, interval=1))
    fragments = s.config.protocol.fragments
    s.on(Restored(SyncerState(10, ((9, 10),) * fragments, own_next, pool, leases)))
    for m in comes:
        if m < 3 and how[m] == "back":
            left, _, mine = past.batches[m].place()
            s.hello(m, held=(10,) * fragments, left=left, own_next=mine)
        elif how[m] != "missing":
            s.hello(m)
    leases_now = s.machine.leases
    held = holdings(leases_now)
    assert set(before) <= set(held), "lost"
    assert max(held.values(), default=0) <= 1, "held twice"
    for m in range(3):  # nothing that is granted from here on was trained before by the same learner
        if how[m] == "back":
            place = past.batches[m].place()
            mine = Batches(m, interval)
            mine.restore(*place)
            granted = leases_now.by_learner[m].granted
            assert tuple(granted)[: len(place[0])] == place[0]


def test_books_of_a_snapshot_are_those_of_the_moment() -> None:
    s = SyncerStage(arrival(2, snapshot_interval=2), joined=2)
    s.full_round(who=[0])
    s.steps(0)
    s.contributes(0, 2, 0)
    (record,) = of(s.stored(2), RecordSyncer)
    assert record.syncer_state == SyncerState(
        2, ((0, 2), (0, 1)), ((0, 3), (1, 2)), (),
        (Lease(0, units(0, 1, 2), units(0, 0)), Lease(1, units(1, 0, 1), ())),
    )  # fmt: skip


def test_stage_holds_no_version_for_learners_that_have_not_come_back() -> None:
    s = resumed(syncer_state(*TWO))
    member = s.machine.roster.get(0)
    assert member is not None
    assert member.held == [NO_VERSION] * 2
    assert not of(s.passes(1), Ticket)
