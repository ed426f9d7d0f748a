"""Data leases: granted ahead, settled when covered, re-issued after a death, squared after an absence."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.batches import Batches
from atoll.protocol.leases import Leases
from atoll.protocol.vocabulary import Grant, Unit


def draw(leases: Leases, learner: int, first: int, count: int, *, stream: int | None = None, step: int = 0) -> None:
    """Reports of `count` batches from position `first`, at local steps from `step` + 1."""
    for k in range(count):
        leases.drew(learner, learner if stream is None else stream, first + k, step + k + 1)


def test_grant_reaches_at_least_two_intervals_ahead() -> None:
    leases = Leases(fragments=2, interval=4)
    assert leases.top_up(0) == (Unit(0, 0), Unit(0, 1))
    assert leases.top_up(0) == ()
    assert leases.own_next(0) == 2


def test_grant_is_low_as_soon_as_fewer_than_two_intervals_lie_ahead() -> None:
    leases = Leases(2, 4)
    assert leases.is_low(0)
    leases.top_up(0)
    assert not leases.is_low(0)
    leases.drew(0, 0, 0, 1)
    assert leases.is_low(0)
    assert leases.top_up(0) == (Unit(0, 2),)


def test_unit_is_settled_when_every_fragment_was_pulled_at_a_step_that_covers_it() -> None:
    leases = Leases(2, 4)
    leases.top_up(0)
    draw(leases, 0, 0, 4)  # unit 0 is done at local step 4
    leases.pulled(0, 0, 4)
    assert leases.settled == 0
    leases.pulled(0, 1, 3)
    assert leases.settled == 0
    leases.pulled(0, 1, 5)
    assert leases.settled == 1


def test_learner_that_went_on_before_a_grant_came_draws_earlier_units_afterwards() -> None:
    """It issued itself the second unit of a grant that was still on its way, and draws the first after it."""
    leases, batches = Leases(1, 4), Batches(0, 4)
    leases.top_up(1)
    draw(leases, 1, 0, 4)
    leases.pulled(1, 0, 4)
    assert leases.release(1)[0] == (Unit(1, 1),)
    leases.square(0, [Unit(0, 0)], 1, 0, 0)
    batches.restore([Unit(0, 0)], 0, 1)
    grant = Grant(leases.top_up(0), leases.own_next(0))
    assert grant.units == (Unit(1, 1), Unit(0, 1))
    drawn: list[Unit] = []
    for step in range(1, 21):
        stream, batch = batches.draw()
        assert leases.may_draw(0, stream, batch), f"step {step} draws batch {batch} of {stream}"
        leases.drew(0, stream, batch, step)
        drawn.append(Unit(stream, batch // 4))
        done = {unit for unit, _ in leases.by_learner[0].done}
        assert done <= set(drawn), "nothing is done before it was drawn"
        if step == 5:  # into the unit that it gave itself
            assert drawn[-1] == Unit(0, 1)
            batches.granted(grant)
    assert drawn[::4] == [Unit(0, 0), Unit(0, 1), Unit(1, 1), Unit(0, 2), Unit(0, 3)]


def test_units_of_a_lost_learner_are_reissued_and_begun_ones_counted_as_repeats() -> None:
    leases = Leases(1, 2)
    leases.top_up(0)
    draw(leases, 0, 0, 3)  # unit 0 done, unit 1 begun
    leases.top_up(0)
    units, repeats = leases.release(0)
    assert (units, repeats, leases.repeats) == (tuple(Unit(0, i) for i in range(4)), 2, 2)
    assert leases.top_up(1) == (Unit(0, 0), Unit(0, 1))
    leases.drew(1, 0, 0, 1)
    assert leases.top_up(1) == (Unit(0, 2),)
    assert leases.top_up(2) == (Unit(0, 3), Unit(2, 0))


def test_settled_units_of_a_lost_learner_are_not_issued_again() -> None:
    leases = Leases(1, 2)
    leases.top_up(0)
    draw(leases, 0, 0, 2)
    leases.pulled(0, 0, 2)
    units, repeats = leases.release(0)
    assert (units, repeats) == ((Unit(0, 1),), 0)


def test_release_of_one_that_was_granted_nothing_is_nothing() -> None:
    assert Leases(1, 2).release(7) == ((), 0)


def test_learner_that_went_on_by_itself_is_followed_by_the_books() -> None:
    leases = Leases(1, 2)
    leases.top_up(0)  # units 0 and 1
    draw(leases, 0, 0, 4)
    leases.drew(0, 0, 4, 5)  # unit 2, which nobody granted
    assert leases.own_next(0) == 3
    units, repeats = leases.release(0)
    assert (units, repeats) == ((Unit(0, 0), Unit(0, 1), Unit(0, 2)), 3)


def test_report_of_the_same_last_batch_again_changes_nothing() -> None:
    leases = Leases(1, 2)
    leases.top_up(0)
    draw(leases, 0, 0, 2)
    leases.drew(0, 0, 1, 2)
    assert leases.release(0) == ((Unit(0, 0), Unit(0, 1)), 1)


def test_square_takes_the_learners_word_for_what_is_left() -> None:
    leases = Leases(1, 2)
    leases.top_up(0)
    leases.square(0, (Unit(0, 1),), own_next=4, local_step=3, grants=1)
    assert leases.own_next(0) == 4
    units, _ = leases.release(0)
    assert units == (Unit(0, 0), Unit(0, 1))


def test_square_takes_units_the_learner_still_holds_out_of_the_pool() -> None:
    leases = Leases(1, 2)
    leases.top_up(0)
    leases.release(0)  # given up for lost
    leases.square(0, (Unit(0, 0), Unit(0, 1)), own_next=2, local_step=1, grants=1)
    assert leases.top_up(1) == (Unit(1, 0), Unit(1, 1))


def test_square_gives_units_of_a_grant_that_never_arrived_back_to_the_pool() -> None:
    """They were lost on the way, not trained: nobody would ever draw them."""
    leases = Leases(1, 2)
    assert leases.top_up(0) == (Unit(0, 0), Unit(0, 1))
    leases.drew(0, 0, 0, 1)
    leases.drew(0, 0, 1, 2)
    assert leases.top_up(0) == (Unit(0, 2),)  # the second grant is lost with its connection
    leases.square(0, (Unit(0, 1),), own_next=2, local_step=2, grants=1)
    assert leases.top_up(1) == (Unit(0, 2), Unit(1, 0))


def test_square_with_a_unit_reported_done_and_still_listed_settles_it_once() -> None:
    leases = Leases(1, 2)
    leases.top_up(0)
    leases.drew(0, 0, 0, 1)
    leases.drew(0, 0, 1, 2)
    leases.square(0, (Unit(0, 0), Unit(0, 1)), own_next=2, local_step=2, grants=1)
    leases.drew(0, 0, 2, 3)
    leases.pulled(0, 0, 3)
    assert leases.settled == 1


def test_unit_still_training_at_reconciliation_is_not_settled_by_an_earlier_pull() -> None:
    """It is settled by a pull at a local step that covers it: the step that is running is not covered yet."""
    leases, batches = Leases(1, 2), Batches(0, 2)
    batches.granted(Grant(leases.top_up(0), leases.own_next(0)))
    for step in (1, 2):
        stream, batch = batches.draw()
        if step == 1:
            leases.drew(0, stream, batch, 1)
    # the second batch of unit 0 trains; the connection breaks and comes back
    leases.square(0, batches.left(), batches.own_next, local_step=1, grants=batches.grants)
    leases.pulled(0, 0, 1)
    assert leases.settled == 0


# ---------------------------------------------------------------- the learner's side


def test_batches_without_a_grant_go_on_in_the_learners_own_stream() -> None:
    batches = Batches(3, 2)
    assert [batches.draw() for _ in range(5)] == [(3, 0), (3, 1), (3, 2), (3, 3), (3, 4)]
    assert batches.left() == (Unit(3, 2),)


def test_batches_granted_from_another_stream_are_drawn_from_there() -> None:
    batches = Batches(3, 2)
    batches.granted(Grant((Unit(1, 7),), 0))
    assert [batches.draw() for _ in range(3)] == [(1, 14), (1, 15), (3, 0)]


def test_batches_self_issued_start_where_nobody_was_granted() -> None:
    batches = Batches(3, 2)
    batches.granted(Grant((), 5))
    assert batches.draw() == (3, 10)


def test_batches_self_issued_and_then_granted_are_drawn_once() -> None:
    batches = Batches(3, 1)
    assert [batches.draw() for _ in range(2)] == [(3, 0), (3, 1)]
    batches.granted(Grant((Unit(3, 0), Unit(3, 1), Unit(3, 2)), 3))
    assert [batches.draw() for _ in range(2)] == [(3, 2), (3, 3)]


class Life:
    """Learners that draw, report now and then, die and come back. The accounting must never lose a batch."""

    def __init__(self, learners: int, interval: int) -> None:
        self.leases = Leases(1, interval)
        self.interval = interval
        self.batches: dict[int, Batches] = {}
        self.steps: dict[int, int] = {}
        self.merged: set[tuple[int, int]] = set()
        self.unmerged: dict[int, list[tuple[int, tuple[int, int]]]] = {m: [] for m in range(learners)}

    def grant(self, m: int) -> None:
        units = self.leases.top_up(m)
        if units:
            self.batches[m].granted(Grant(units, self.leases.own_next(m)))

    def forked(self, m: int) -> None:
        self.leases.release(m)
        self.batches[m], self.steps[m], self.unmerged[m] = Batches(m, self.interval), 0, []
        self.grant(m)

    def step(self, m: int) -> None:
        drawn = self.batches[m].draw()
        self.steps[m] += 1
        self.unmerged[m].append((self.steps[m], drawn))
        self.leases.drew(m, *drawn, self.steps[m])
        if self.leases.is_low(m):
            self.grant(m)

    def pull(self, m: int) -> None:
        self.leases.pulled(m, 0, self.steps[m])
        self.merged.update(batch for _, batch in self.unmerged[m])
        self.unmerged[m].clear()


@settings(deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("sssssspd"), st.integers(0, 2)), max_size=150))
def test_every_batch_drawn_is_merged_or_in_flight_or_issued_again(interval: int, acts: list[tuple[str, int]]) -> None:
    life = Life(3, interval)
    for m in range(3):
        life.forked(m)
    for act, m in acts:
        {"s": life.step, "p": life.pull, "d": life.forked}[act](m)
    for m in range(3):  # everybody dies; what was not merged must be in the pool
        life.leases.release(m)
    pool = set(life.leases._pool)
    issued = {Unit(m, i) for m in range(3) for i in range(life.leases.own_next(m))}
    covered = {u for u in issued if all((u.stream, u.index * interval + k) in life.merged for k in range(interval))}
    assert issued <= pool | covered
    assert len(pool) == len(life.leases._pool)  # and nothing is issued twice at a time
