"""The failure model, clause by clause: chips fail while they execute, slices go and come back, resizes cost time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import UserError
from atoll.sim.estimates.failures import Delays, FailureModel, SlicedLearner, Stretch

SOON = FailureModel(mtbi_seconds=1e5, slice_chips=16, return_seconds=300.0)
"""A chip fails about once a day, so that short histories hold many failures."""


def learner(chips: int = 512, model: FailureModel = SOON, seed: int = 0, elastic: bool = True) -> SlicedLearner:
    return SlicedLearner(chips, model, np.random.default_rng(seed), elastic=elastic)


def test_failures_of_executed_steps_are_poisson() -> None:
    history = learner(chips=20_000, elastic=False).advance(1e6)
    steps = sum(s.steps for s in history)
    assert steps > 10_000
    mean = 20_000 * SOON.step_seconds / SOON.mtbi_seconds
    for count in range(4):
        share = math.exp(-mean) * mean**count / math.factorial(count)
        seen = sum(len(s.moved) == count for s in history) if count else steps - len(history)
        assert seen / steps == pytest.approx(share, abs=4 * math.sqrt(share / steps))


def test_delay_of_return_is_exponentiated_weibull_with_the_mean_it_was_given() -> None:
    delays = Delays(mean=3600.0, shape=0.8, exponent=2.0).draw(np.random.default_rng(1), 400_000)
    assert np.mean(delays) == pytest.approx(3600.0, rel=0.01)
    median = float(np.median(delays))
    # F(x) = (1 - exp(-(x/scale)^shape))^exponent: from the median follow the scale and every other quantile
    scale = median / (-math.log(1 - 0.5 ** (1 / 2.0))) ** (1 / 0.8)
    for x in (0.3 * median, 2 * median, 5 * median):
        assert np.mean(delays <= x) == pytest.approx((1 - math.exp(-((x / scale) ** 0.8))) ** 2.0, abs=0.004)


@settings(max_examples=30, deadline=None)
@given(chips=st.integers(1, 300), slice_chips=st.integers(1, 64), seed=st.integers(0, 10**6), elastic=st.booleans())
def test_history_adds_up(chips: int, slice_chips: int, seed: int, elastic: bool) -> None:
    """Stretches follow each other without a gap, and who is live follows from which slices moved."""
    model = FailureModel(mtbi_seconds=2e4, slice_chips=slice_chips, return_seconds=100.0)
    one = learner(chips, model, seed, elastic)
    history = one.advance(20_000.0)
    now, out = 0.0, set[int]()
    for s in history:
        assert s.start == pytest.approx(now) and s.live == chips - sum(map(one.size, out))
        now = s.end
        if elastic:
            for slice_ in s.moved:
                out ^= {slice_}
        assert 0 <= s.last_live <= s.live and (s.stop > 0) == bool(s.moved)
    assert one.live == chips - sum(map(one.size, out))
    assert sum(map(one.size, range(one.slices))) == chips


def test_one_resize_serves_all_that_failed_and_returned_since_the_last() -> None:
    model = FailureModel(mtbi_seconds=1e4, slice_chips=1, return_seconds=60.0, down_seconds=7.0, up_seconds=11.0)
    history = learner(chips=5000, model=model).advance(20_000.0)
    crowded = [s for s in history if len(s.moved) > 3]
    assert len(crowded) > 100
    assert {s.stop for s in crowded} <= {7.0, 11.0}
    assert all(s.steps >= 1 for s in history), "a step lies between two resizes"


def test_without_elasticity_a_spare_takes_the_place_and_everybody_restarts() -> None:
    history = learner(elastic=False).advance(20_000.0)
    assert {s.live for s in history} == {512} and {s.stop for s in history} == {SOON.restart_seconds}


def test_learner_that_lost_its_only_slice_stands_until_the_slice_is_back() -> None:
    history = learner(chips=16).advance(200_000.0)
    assert len(history) > 20
    assert all(s.last_live == 0 and s.stop > SOON.up_seconds for s in history)
    absences = [s.stop - SOON.up_seconds for s in history]
    assert np.mean(absences) == pytest.approx(SOON.return_seconds, rel=0.5)


def test_step_in_which_a_chip_fails_counts_for_the_slices_that_are_left() -> None:
    s = Stretch(start=0.0, steps=10, seconds=60.0, live=100, last_live=90, stop=12.0)
    assert s.useful == pytest.approx(9 * 6.0 * 100 + 6.0 * 90)


def test_stepping_one_by_one_is_the_same_history() -> None:
    """A driver with its own clock asks step by step; the simulator jumps from event to event."""
    model = FailureModel(mtbi_seconds=1e5, slice_chips=16, return_seconds=300.0, step_noise=0.0)
    jumped = learner(model=model).advance(30_000.0)
    walker, now, walked = learner(model=model), 0.0, []
    while now < 30_000.0:
        now += model.step_seconds
        s = walker.step(now)
        if s.moved:
            walked.append((now, s.moved, s.stop))
            now += s.stop
    flat = [(s.start + s.seconds, s.moved, s.stop) for s in jumped if s.moved]
    both = min(len(walked), len(flat))  # the last one may end beyond the time asked for
    assert both > 100
    assert [moved for _, moved, _ in walked[:both]] == [moved for _, moved, _ in flat[:both]]
    assert [at for at, _, _ in walked[:both]] == pytest.approx([at for at, _, _ in flat[:both]])


@pytest.mark.parametrize(
    ("field", "value"), [("mtbi_seconds", -1.0), ("slice_chips", 0), ("step_noise", 1.0), ("down_seconds", math.nan)]
)
def test_nonsense_is_refused(field: str, value: float) -> None:
    with pytest.raises(UserError, match=field):
        FailureModel(**{field: value})  # type: ignore[arg-type]
