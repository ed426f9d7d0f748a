"""The constants of the quality model are those that the published tables give."""

from __future__ import annotations

import itertools
import math

import pytest

from atoll.planner import quality
from atoll.planner.site import Quality
from atoll.sim.estimates.published import COMPRESSION, QUALITY, SIZES

Q = Quality()


def published() -> list[tuple[float, float, float]]:
    """(parameters, H, per cent over data-parallel) of every row that has an H."""
    alone = {size: loss for size, method, _, loss in QUALITY if method == "data_parallel"}
    return [(SIZES[size][0], h, 100 * (loss / alone[size] - 1)) for size, _, h, loss in QUALITY if h is not None]


def two(parameters: float, interval: float) -> float:
    return quality.loss_percent(
        Q, parameters=parameters, learners=2, interval=interval, staleness=0.0, asynchronous=False, codecs=("fp32", "fp32")
    )


def test_base_and_exponents_are_the_least_squares_fit() -> None:
    points = published()

    def error(size: float, interval: float) -> tuple[float, float]:
        shape = [(n / 35e6) ** -size * (h / 30) ** interval for n, h, _ in points]
        base = sum(s * p for s, (_, _, p) in zip(shape, points, strict=True)) / sum(s * s for s in shape)
        return sum((base * s - p) ** 2 for s, (_, _, p) in zip(shape, points, strict=True)), base

    best = min((error(a / 100, b / 100), a / 100, b / 100) for a, b in itertools.product(range(20, 80, 2), range(20, 100, 2)))
    (_, base), size, interval = best
    assert (Q.base_percent, Q.size_exponent, Q.interval_exponent) == (
        pytest.approx(base, abs=0.01), pytest.approx(size, abs=0.02), pytest.approx(interval, abs=0.02),
    )  # fmt: skip
    assert max(abs(two(n, h) - p) for n, h, p in points) < 0.6
    assert sum(abs(two(n, h) - p) for n, h, p in points) / len(points) < 0.2


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


def test_eight_learners_cost_as_published_against_two() -> None:
    assert quality.learners_factor(1, Q) == 0
    assert quality.learners_factor(2, Q) == 1
    assert quality.learners_factor(8, Q) == pytest.approx(3.9 / 0.7, rel=0.01)


def test_asynchrony_is_what_published_decoupled_costs_over_the_fit() -> None:
    """+0.7 % for two decoupled learners of 35M at H = 24."""
    assert pytest.approx(0.7 / two(35e6, 24), abs=0.03) == Q.asynchrony


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
