"""Goodput and uptime: the published table, and what must hold for any cluster."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from atoll.errors import UserError
from atoll.sim.estimates.failures import FailureModel
from atoll.sim.estimates.goodput import GoodputEstimate, closed_form, simulate
from atoll.sim.estimates.pattern import RECOVERS, STEPS, STOPPED, patterns
from atoll.sim.estimates.published import GOODPUT, UPTIME

MODEL = FailureModel()


SIZES = tuple(GOODPUT[1, True])


@pytest.mark.parametrize("sizes", [SIZES[:: len(SIZES) - 1], pytest.param(SIZES, marks=pytest.mark.soak)], ids=["ends", "all"])
def test_published_table_with_one_set_of_constants(sizes: tuple[int, ...]) -> None:
    """Of all 60 cells each within 3.5 points, 95 % within 3, and more learners never lose."""
    found: dict[tuple[int, bool, int], GoodputEstimate] = {
        (m, e, n): simulate(n, m, MODEL, elastic=e, precision=0.2) for m, e in GOODPUT for n in sizes
    }
    apart = [abs(a.goodput - GOODPUT[m, e][n]) for (m, e, n), a in found.items()]
    apart += [abs(a.uptime - UPTIME[m, e][n]) for (m, e, n), a in found.items()]
    assert len(apart) == 12 * len(sizes)
    assert max(apart) <= 3.5
    assert sum(d <= 3.0 for d in apart) >= 0.95 * len(apart)
    assert all(a.standard_error <= 0.2 for a in found.values())
    for n in sizes:
        by_learners = [found[m, True, n].goodput for m in (1, 2, 4, 8, 16)]
        assert by_learners == sorted(by_learners)
        assert found[1, False, n].goodput < by_learners[0]


@pytest.mark.parametrize("k", [pytest.param(2, marks=pytest.mark.soak), 4, pytest.param(16, marks=pytest.mark.soak)])
def test_goodput_depends_on_chips_a_learner_only(k: int) -> None:
    once = simulate(300_000, 2, MODEL)
    many = simulate(k * 300_000, k * 2, MODEL)
    assert many.goodput == pytest.approx(once.goodput, abs=0.8)


def test_learners_down_to_one_slice_never_lose() -> None:
    """128 slices in 1, 2, 4, ... 128 learners."""
    model = FailureModel(mtbi_seconds=2e7)
    goodputs = [simulate(128 * 128, m, model, days=60).goodput for m in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert all(b > a - 0.1 for a, b in pairwise(goodputs)), goodputs


def test_cluster_that_never_fails_is_always_up() -> None:
    a = simulate(1000, 2, FailureModel(mtbi_seconds=1e15), days=1)
    assert (a.goodput, a.uptime, a.effective_batch) == pytest.approx((100.0, 100.0, 100.0))


@pytest.mark.parametrize(("chips", "elastic"), [
    (50_000, True), (600_000, False), *(pytest.param(*case, marks=pytest.mark.soak)
    for case in ((50_000, False), (200_000, True), (200_000, False), (600_000, True))),
])  # fmt: skip
def test_closed_form_agrees_where_it_holds(chips: int, elastic: bool) -> None:
    expected = closed_form(chips, 1, MODEL, elastic=elastic)
    assert simulate(chips, 1, MODEL, elastic=elastic).goodput == pytest.approx(expected, abs=1.0)


def test_uptime_is_that_of_learners_that_fail_apart() -> None:
    one = simulate(300_000, 1, MODEL).uptime / 100
    for learners in (2, 3):
        together = simulate(300_000 * learners, learners, MODEL).uptime / 100
        assert together == pytest.approx(1 - (1 - one) ** learners, abs=0.005)


def test_standard_error_is_what_seeds_scatter_by() -> None:
    answers = [simulate(150_000, 2, MODEL, days=10, seed=seed) for seed in range(12)]
    scatter = float(np.std([a.goodput for a in answers], ddof=1))
    told = float(np.mean([a.standard_error for a in answers]))
    assert 0.5 * told < scatter < 2.0 * told


def test_same_seed_same_answer() -> None:
    assert simulate(150_000, 2, MODEL, days=3, seed=5) == simulate(150_000, 2, MODEL, days=3, seed=5)
    assert simulate(150_000, 2, MODEL, days=3, seed=5) != simulate(150_000, 2, MODEL, days=3, seed=6)


def test_effective_batch_and_live_slices_follow_from_absences() -> None:
    """A slice of 128 chips loses one in 1/128 of a year, for an hour: 1.4 % are out."""
    a = simulate(50_000, 1, MODEL, days=200)
    out = MODEL.slice_chips * MODEL.return_seconds / MODEL.mtbi_seconds
    assert 100 - a.effective_batch == pytest.approx(100 * out / (1 + out), abs=0.15)
    assert a.live == tuple(sorted(a.live)) and a.live[0] < a.effective_batch < 100


@pytest.mark.parametrize(
    ("chips", "learners", "words"), [(0, 1, "--chips 0"), (1000, 0, "--learners 0"), (1000, 9, "more than the 8 slices")]
)
def test_impossible_clusters_are_refused(chips: int, learners: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        simulate(chips, learners, MODEL)


# ---------------------------------------------------------------- stepping patterns


def test_data_parallel_stops_together_and_decoupled_learners_recover_alone() -> None:
    together, apart = patterns(1_200_000, 8, MODEL, 1800.0)
    assert len(together) == len(apart) == 8
    steps = [[(b.start, b.end) for b in row if b.state == STEPS] for row in together]
    assert all(row == steps[0] for row in steps)
    assert any(b.state == STOPPED for row in together for b in row)
    assert {b.state for row in apart for b in row} == {STEPS, RECOVERS}
    for row in (*together, *apart):
        assert row[0].start == 0.0 and row[-1].end == pytest.approx(1800.0)
        assert all(a.end == pytest.approx(b.start) for a, b in pairwise(row))
