"""The constants of the quality model are those that the published tables give."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from atoll.planner import evidence, quality
from atoll.planner.site import Quality
from atoll.sim.estimates.published import COMPRESSION, QUALITY, SIZES

Q = Quality()


FITTED = (Q.size_exponent, Q.interval_exponent, Q.learners_doubling)
RESULTS = Path(__file__).parents[2] / "bench" / "quality" / "results"


def test_base_exponents_and_growth_are_the_least_squares_fit() -> None:
    """No step of the grid in any of them lowers the misfit."""
    best = evidence.misfit(*FITTED)
    for at, step in enumerate((0.02, 0.02, 0.1)):
        for side in (-step, step):
            moved = [value + side * (at == i) for i, value in enumerate(FITTED)]
            assert evidence.misfit(*moved) >= best - 1e-4, (at, side)
    assert pytest.approx(evidence.fitted_base(*FITTED), abs=0.005) == Q.base_percent


def test_residuals_are_those_that_are_printed() -> None:
    found = [r for _, r in evidence.residuals(Q.base_percent, *FITTED)]
    assert len(found) == 25 + 10
    assert pytest.approx(math.sqrt(sum(r * r for r in found) / len(found)), abs=0.005) == quality.RESIDUAL_POINTS
    assert max(map(abs, found)) < 0.61


def test_own_rows_are_those_of_the_results() -> None:
    for series in (*evidence.OWN, evidence.OWN_OVERLAP):
        rows = [json.loads(line) for line in (RESULTS / series.file).read_text(encoding="utf8").splitlines()]
        mean = {name: _mean([r["loss_final"] for r in rows if r["name"] == name]) for name in (series.reference, *series.runs)}
        for name, percent in zip(series.runs, series.percent, strict=True):
            assert 100 * (mean[name] / mean[series.reference] - 1) == pytest.approx(percent, abs=0.06), name


def _mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


def test_staleness_and_asynchrony_are_those_of_own_rows() -> None:
    assert pytest.approx(evidence.fitted_staleness(), abs=0.002) == Q.staleness_step
    assert pytest.approx(evidence.fitted_asynchrony(Q.interval_exponent, Q.staleness_step), abs=0.01) == Q.asynchrony


def test_every_constant_says_what_it_rests_on() -> None:
    assert set(quality.SUPPORT) == set(Quality.__struct_fields__)


def test_beyond_the_published_rows_the_band_is_wider() -> None:
    def width(learners: int, parameters: float) -> float:
        low, high = quality.loss_band(1.0, Q, parameters=parameters, learners=learners, codecs=("fp32", "fp32"))
        assert low <= 1.0 <= high
        return high - low

    assert width(8, 1e9) == pytest.approx(2 * quality.RESIDUAL_POINTS)
    assert width(8, 1e9) < width(16, 1e9) < width(64, 1e9)
    assert width(8, 1e9) < width(8, 1e11)
    assert quality.loss_band(0.0, Q, parameters=1e9, learners=1, codecs=("fp32", "fp32")) == (0.0, 0.0)


def test_the_slope_is_that_of_loss_over_compute_from_size_to_size() -> None:
    points = [
        (math.log(math.prod(SIZES[size])), math.log(loss)) for size, method, _, loss in QUALITY if method == "data_parallel"
    ]
    mx, my = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    slope = sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points)
    assert pytest.approx(-slope, abs=0.0005) == Q.loss_slope


def test_four_bits_cost_what_is_published() -> None:
    assert quality.codec_percent("int4", Q) == COMPRESSION[4]
    assert quality.codec_percent("bf16", Q) == COMPRESSION[16] == 0
    assert quality.codec_percent("int2", Q) == COMPRESSION[2]
    assert quality.codec_percent("int1", Q) == COMPRESSION[1]


def test_one_learner_costs_nothing_and_more_of_anything_costs_more() -> None:
    def loss(learners: int = 4, interval: float = 50, staleness: float = 1, parameters: float = 1e9) -> float:
        return quality.loss_percent(
            Q, parameters=parameters, learners=learners, interval=interval, staleness=staleness, asynchronous=True,
            codecs=("int4", "bf16"),
        )  # fmt: skip

    assert loss(learners=1) == 0
    assert quality.token_efficiency(0.0, Q) == 1
    assert loss() < min(loss(learners=5), loss(interval=60), loss(staleness=2), loss(parameters=5e8))
    assert quality.token_efficiency(1.0, Q) == pytest.approx(0.81, abs=0.01)
