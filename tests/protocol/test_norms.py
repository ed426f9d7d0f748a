"""Which norms are usual, by whose count, and from the first contribution on (TRUST.md, rows 2 and 12)."""

from __future__ import annotations

import math

import pytest

from atoll.config import Config, load
from atoll.protocol.accounts import Account, StepMost, bounded_counts, capped, credit_while_away
from atoll.protocol.counters import Count
from atoll.protocol.norms import Judged, Norms
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Contribution, Measure

MOST = StepMost(tokens=100, samples=4)


def config(**limits: float) -> Config:
    return load(preset_name="decoupled", overrides={"limits": limits, "total_steps": 1000, "inner": {"warmup_share": 0.2}})


def claim(local_step: int, steps: int, tokens: int, samples: int) -> Contribution:
    return Contribution(1, 0, local_step, 0, steps, tokens, samples, tokens)


def why(reason: Reason | None) -> Why | None:
    return None if reason is None else reason.why


# ---------------------------------------------------------------- what was counted


def test_claim_above_the_account_is_lowered_and_one_below_it_stands() -> None:
    account = Account(2)
    account.begins(2**40)  # a new incarnation may name any step: nothing before it counts
    assert account.count(claim(2**40 + 5, 2**40, 2**50, 2**44), MOST) == Count(5, 500, 20)
    assert account.count(claim(2**40 + 5, 3, 200, 12), MOST) == Count(3, 200, 12)
    assert account.count(claim(2**40, 1, 100, 4), MOST) == Count(0, 0, 0)


def test_work_counts_from_the_adoption_and_not_from_an_earlier_one_that_is_claimed() -> None:
    account = Account(1)
    account.announced(0, 7, 30)  # version 7 was sent when 30 steps were reported: it cannot have been adopted at step 2
    account.adopted(0, 7, 2)
    assert account.count(claim(34, 32, 3200, 128), MOST).steps == 4
    account.adopted(0, 8, 33)
    assert account.count(claim(34, 4, 400, 16), MOST) == Count(1, 100, 4), "fewer steps hold fewer of the tokens"


def test_report_of_an_adoption_that_overtakes_an_answer_does_not_shorten_it() -> None:
    account = Account(1)
    account.asked((0,), 0)
    account.adopted(0, 5, 9)
    assert account.count(claim(8, 8, 800, 32), MOST).steps == 8
    account.answered((0,))
    assert account.count(claim(8, 8, 800, 32), MOST).steps == 0


def test_steps_claimed_after_an_absence_count_as_far_as_the_time_allows() -> None:
    account = Account(1)
    credit = credit_while_away(10_000, 100, interval=5)
    assert credit == 2 * 5 + 200
    account.returns(claimed=50 + 10**6, reported=50, credit=credit)
    assert account.count(claim(50 + 10**6, 10**6, 10**8, 10**6), MOST).steps == 50 + credit


def test_share_counts_at_most_eight_times_the_median_of_the_others() -> None:
    honest = {m: Count(10, 1000, 40) for m in range(3)}
    assert bounded_counts(honest, own_data=True) == honest
    liar = honest | {3: Count(10, 10**12, 10**12)}
    assert bounded_counts(liar, own_data=True)[3] == Count(10, 8000, 320)
    fast = honest | {3: Count(10**6, 10**8, 4 * 10**6)}
    assert bounded_counts(fast, own_data=False)[3] == Count(80, 8000, 320)


@pytest.mark.parametrize(
    ("weights", "largest"), [((1, 1, 1, 9), 3.0), ((1, 1, 1, 2), 2.0), ((1, 1, 9), 9.0), ((0, 0, 0, 5), 5.0)]
)
def test_one_share_of_a_merge_of_four_is_capped(weights: tuple[float, ...], largest: float) -> None:
    assert max(capped(dict(enumerate(weights)), 0.5).values()) == largest


# ---------------------------------------------------------------- what is usual


def test_a_warming_learner_that_moves_further_is_no_outlier_and_poison_as_large_is() -> None:
    """A fragment first sent after two steps of the warm-up and next after 48 has honestly moved hundreds of times as far."""
    norms = Norms(config())
    norms.merged(0, 2, {m: Judged(2 * 1.5e-5, 2) for m in range(4)})
    assert norms.objection(0, Measure(48 * 26e-5, 0.0), norms.scale(48, 50)) is None, "416 times as far"
    assert why(norms.objection(0, Measure(2 * 1.6e-3, 0.0), norms.scale(2, 2))) is Why.OUTLIER


def test_the_first_contribution_is_judged_by_the_weights_it_moves() -> None:
    norms = Norms(config())
    assert why(norms.objection(0, Measure(1e4, 10.0), 1.0)) is Why.OUTLIER
    assert norms.objection(0, Measure(9.0, 10.0), 1.0) is None
    assert why(norms.objection(0, Measure(math.inf, 10.0), 1.0)) is Why.POISONED


def test_one_learner_cannot_move_what_is_usual() -> None:
    norms = Norms(config())
    for _ in range(50):
        norms.merged(0, 500, {m: Judged(1.0, 10) for m in range(3)} | {3: Judged(90.0, 10)})
    assert why(norms.objection(0, Measure(101.0, 0.0), norms.scale(10, 500))) is Why.OUTLIER
    assert norms.objection(0, Measure(99.0, 0.0), norms.scale(10, 500)) is None


def test_contributions_of_a_round_are_judged_against_each_other() -> None:
    norms = Norms(config(peer_factor=10.0))
    alike = {m: Judged(1.0 + m, 10) for m in range(3)}
    assert norms.outliers(0, alike) == {}
    assert set(norms.outliers(0, alike | {3: Judged(26.0, 10)})) == {3}
    assert norms.outliers(0, alike | {3: Judged(26.0, 40)}) == {}, "four times the steps may go four times as far"
    assert set(norms.outliers(0, alike | {3: Judged(200.0, 10**6)})) == {3}, "but no number of steps excuses everything"
    assert norms.outliers(0, {0: Judged(1.0, 10), 1: Judged(1e6, 10)}) == {}, "two cannot say which of them is wrong"


def test_theta_may_not_jump_a_hundred_times_as_far_as_it_used_to() -> None:
    norms = Norms(config())
    assert norms.jump_limit(0, 1.0) == 0.0
    for jump in (1.0, 2.0, 3.0, 50.0):
        norms.moved(0, jump, 1.0)
    assert norms.jump_limit(0, 2.0) == 100 * 2 * 2.5


def test_majority_that_sends_next_to_nothing_does_not_make_honest_norms_unusual() -> None:
    """Found by `bench/hostile_messages.py`: "the norm 0.0596 is 614445023 times the usual 9.71e-11"."""
    norms = Norms(config())
    scale = norms.scale(1, 500)
    for outer_step in range(500, 508):
        judged = {0: Judged(0.06, 1)} | {m: Judged(1e-10, 1) for m in range(1, 6)}
        norms.merged(0, outer_step, judged)
        norms.moved(0, 0.01, scale)  # a sixth of the honest one's: RDA takes the mean of the norms
    assert norms.objection(0, Measure(0.06, 1.0), scale) is None
    assert why(norms.objection(0, Measure(1.0, 1.0), scale)) is Why.OUTLIER
