"""The graph of compute and reductions: small graphs by hand, then what must hold of all."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.sim.estimates.utilisation import Compute, Exchange, fragments_of, needed_gbit, utilisation

RATES = np.geomspace(0.01, 1e4, 25)
FAST = [1e18]


def at(compute: Compute, exchange: Exchange, gbit: float, steps: int | None = None, *, steady: bool = False) -> float:
    return float(utilisation(compute, exchange, [gbit], steps, steady=steady)[0])


def makespan(compute: Compute, exchange: Exchange, gbit: float, steps: int) -> float:
    return steps * compute.step_seconds / at(compute, exchange, gbit, steps)


# ---------------------------------------------------------------- by hand

ONE = Compute(layers=1, parameters=1e9, step_seconds=2.0)
"""Two nodes of 1 s: forward, backward to parameters. Sixteen bits a parameter at 16 Gbit/s cross in 1 s."""
TWO = Compute(layers=2, parameters=2e9, step_seconds=5.0)
"""Five nodes of 1 s: F1 F2 A2 P2 P1. A layer crosses in 1 s at 16 Gbit/s."""


def test_one_layer_data_parallel_adds_a_transfer_to_every_step() -> None:
    assert makespan(ONE, Exchange("data_parallel"), 16.0, 3) == pytest.approx(3 * (2 + 1))


def test_two_layers_data_parallel_hides_the_last_layer_behind_the_first() -> None:
    # step 1: P2 ends at 4, layer 2 crosses 4..5; P1 ends at 5, layer 1 crosses 5..6; F1 of step 2 starts at 6
    assert makespan(TWO, Exchange("data_parallel"), 16.0, 1) == pytest.approx(6)
    assert makespan(TWO, Exchange("data_parallel"), 16.0, 2) == pytest.approx(12)


def test_two_layers_on_a_slow_link_wait_for_the_queue_in_the_order_of_release() -> None:
    # at 8 Gbit/s: layer 2 crosses 4..6, layer 1 waits for the link and crosses 6..8; F1 waits for 8, F2 has its result by then
    assert makespan(TWO, Exchange("data_parallel"), 8.0, 1) == pytest.approx(8)
    assert makespan(TWO, Exchange("data_parallel"), 8.0, 2) == pytest.approx(16)


def test_diloco_pays_once_an_interval_and_the_trailing_reduction_counts() -> None:
    assert makespan(ONE, Exchange("diloco", interval=3), 16.0, 6) == pytest.approx(6 * 2 + 2 * 1)
    assert makespan(ONE, Exchange("diloco", interval=3), 16.0, 5) == pytest.approx(5 * 2 + 1)


def test_overlap_of_one_step_hides_a_transfer_of_up_to_one_step() -> None:
    exchange = Exchange("streaming", interval=3, overlap=1)
    assert makespan(ONE, exchange, 8.0, 5) == pytest.approx(5 * 2)  # 2 s, hidden behind step 4
    assert makespan(ONE, exchange, 4.0, 5) == pytest.approx(5 * 2 + 2)  # 4 s: released at 6, needed at 8, there at 10
    assert makespan(ONE, exchange, 8.0, 6) == pytest.approx(6 * 2 + 2)  # the one issued at the end has nothing to hide behind


def test_streaming_issues_each_fragment_at_its_own_offset() -> None:
    # layer 1 (fragment 0) after steps 4 and 8, layer 2 (fragment 1) after steps 2 and 6; each takes 1 s
    exchange = Exchange("streaming", interval=4, fragments=2)
    # step 2: layer 2 is released at 9, before P1 ends at 10: hidden. step 4: layer 1 is released at 20, F1 of 5 waits until 21.
    # step 6: hidden. step 8: trailing, from 41 to 42.
    assert makespan(TWO, exchange, 16.0, 8) == pytest.approx(42)


def test_async_diloco_is_bound_by_the_slower_of_interval_and_transfer() -> None:
    exchange = Exchange("async_diloco", interval=10)
    assert at(ONE, exchange, 16.0 / 19) == pytest.approx(1.0)  # 19 s within 10 steps of 2 s
    assert at(ONE, exchange, 16.0 / 40) == pytest.approx(0.5)  # 40 s


# ---------------------------------------------------------------- ring and latency


@pytest.mark.parametrize(("datacentres", "factor"), [(2, 1.0), (3, 4 / 3), (4, 1.5), (10, 1.8)])
def test_a_ring_of_d_sends_two_times_d_minus_one_over_d(datacentres: int, factor: float) -> None:
    exchange = Exchange("data_parallel", datacentres=datacentres)
    assert makespan(ONE, exchange, 16.0, 3) == pytest.approx(3 * (2 + factor))


def test_latency_is_paid_once_a_hop_of_the_ring_by_who_blocks() -> None:
    assert makespan(ONE, Exchange("diloco", interval=2, latency_seconds=0.25), 1e18, 2) == pytest.approx(4 + 2 * 0.25)
    assert makespan(ONE, Exchange("diloco", interval=2, latency_seconds=0.25, datacentres=4), 1e18, 2) == pytest.approx(4 + 1.5)


def test_latency_does_not_occupy_the_link() -> None:
    exchange = Exchange("data_parallel", latency_seconds=1.0)
    # as without latency layer 1 crosses 5..6, and is usable two hops later
    assert makespan(TWO, exchange, 16.0, 1) == pytest.approx(6 + 2.0)


def test_latency_that_the_overlap_covers_costs_nothing_in_steady_state() -> None:
    late = 0.4  # twice that is below a step of 2 s
    blocking = Exchange("streaming", interval=5, latency_seconds=late)
    assert at(ONE, blocking, 1e18, steady=True) < 1
    assert at(ONE, replace(blocking, overlap=1), 1e18, steady=True) == pytest.approx(1.0)
    assert at(ONE, replace(blocking, overlap=1, latency_seconds=1.2), 1e18, steady=True) < 1


# ---------------------------------------------------------------- fragments


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        (Exchange("diloco"), [[0, 1, 2, 3, 4, 5, 6]]),
        (Exchange("streaming"), [[0, 3, 6], [1, 4], [2, 5]]),
        (Exchange("streaming", pattern="sequential"), [[0, 1, 2], [3, 4, 5], [6]]),
        (Exchange("streaming", pattern="sequential", fragments=3), [[0, 1, 2], [3, 4], [5, 6]]),
        (Exchange("streaming", pattern="balanced"), [[0, 1], [2, 3], [4, 5, 6]]),
        (Exchange("streaming", fragments=7, pattern="balanced"), [[0], [1], [2], [3], [4], [5], [6]]),
        (Exchange("streaming", layers_per_fragment=99), [[0, 1, 2, 3, 4, 5, 6]]),
    ],
)
def test_seven_layers_in_fragments(exchange: Exchange, expected: list[list[int]]) -> None:
    assert fragments_of(7, exchange) == expected


PATTERNS = st.sampled_from(["strided", "sequential", "balanced"])


@given(layers=st.integers(1, 40), share=st.floats(0, 1), pattern=PATTERNS)
def test_every_layer_is_in_one_fragment_and_sizes_differ_by_at_most_one(layers: int, share: float, pattern: str) -> None:
    count = 1 + int(share * (layers - 1))
    fragments = fragments_of(layers, Exchange("streaming", fragments=count, pattern=pattern))  # type: ignore[arg-type]
    assert sorted(layer for fragment in fragments for layer in fragment) == list(range(layers))
    assert len(fragments) == count
    assert max(map(len, fragments)) - min(map(len, fragments)) <= 1


# ---------------------------------------------------------------- what holds of all

COMPUTES = st.builds(
    Compute, layers=st.integers(1, 12), parameters=st.floats(1e6, 1e11), step_seconds=st.floats(1e-3, 10),
)  # fmt: skip


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    interval = draw(st.integers(2, 12))
    return Exchange(
        draw(st.sampled_from(["data_parallel", "diloco", "async_diloco", "streaming"])), interval,
        draw(st.integers(0, interval - 1)), draw(st.integers(1, 5)), None, draw(PATTERNS), draw(st.floats(1, 32)),
        draw(st.integers(2, 6)), draw(st.sampled_from([0.0, 0.01, 0.5])),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(compute=COMPUTES, exchange=exchanges(), steady=st.booleans())
def test_utilisation_is_a_share_that_grows_with_bandwidth(compute: Compute, exchange: Exchange, steady: bool) -> None:
    curve = utilisation(compute, exchange, RATES, steady=steady)
    assert np.all(curve > 0)
    assert np.all(curve <= 1 + 1e-9)
    assert np.all(np.diff(curve) >= -1e-9)


@settings(max_examples=60, deadline=None)
@given(compute=COMPUTES, exchange=exchanges())
def test_an_infinite_link_without_latency_uses_all_of_the_time(compute: Compute, exchange: Exchange) -> None:
    assert utilisation(compute, replace(exchange, latency_seconds=0.0), FAST)[0] == pytest.approx(1.0, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(compute=COMPUTES, exchange=exchanges(), more=st.floats(1, 4))
def test_more_bits_datacentres_or_latency_are_never_better(compute: Compute, exchange: Exchange, more: float) -> None:
    base = utilisation(compute, exchange, RATES)
    for worse in (
        replace(exchange, bits=exchange.bits * more), replace(exchange, datacentres=exchange.datacentres + 1),
        replace(exchange, latency_seconds=exchange.latency_seconds * more + 0.01),
    ):  # fmt: skip
        assert np.all(utilisation(compute, worse, RATES) <= base + 1e-9)


@settings(max_examples=60, deadline=None)
@given(compute=COMPUTES, exchange=exchanges())
def test_more_overlap_is_never_worse(compute: Compute, exchange: Exchange) -> None:
    least = int(exchange.method == "async_diloco")  # whose tau of 0 stands for its interval
    curves = [utilisation(compute, replace(exchange, overlap=tau), RATES) for tau in range(least, min(4, exchange.interval))]
    for less, more in pairwise(curves):
        assert np.all(more >= less - 1e-9)


@settings(max_examples=30, deadline=None)
@given(compute=COMPUTES, exchange=exchanges(), factor=st.floats(0.1, 10))
def test_bits_and_step_time_trade_against_each_other(compute: Compute, exchange: Exchange, factor: float) -> None:
    """Why 13.33 bits are 16 bits with steps 1.2 times as long."""
    exchange = replace(exchange, latency_seconds=0.0)
    fewer = utilisation(compute, replace(exchange, bits=exchange.bits / factor), RATES)
    longer = utilisation(replace(compute, step_seconds=compute.step_seconds * factor), exchange, RATES)
    assert fewer == pytest.approx(longer)


@settings(max_examples=30, deadline=None)
@given(compute=COMPUTES, exchange=exchanges(), steps=st.integers(1, 40))
def test_the_walk_agrees_with_one_that_visits_every_node(compute: Compute, exchange: Exchange, steps: int) -> None:
    """A deliberately dumb second reading of the same rules, at one bandwidth."""
    if exchange.method == "async_diloco":
        exchange = replace(exchange, method="diloco")
    assert makespan(compute, exchange, 3.0, steps) == pytest.approx(dumb_makespan(compute, exchange, 3.0, steps))


def dumb_makespan(compute: Compute, exchange: Exchange, gbit: float, steps: int) -> float:
    node = compute.step_seconds / (3 * compute.layers - 1)
    factor = 2 * (exchange.datacentres - 1) / exchange.datacentres
    transfer = exchange.bits * compute.parameters / compute.layers * factor / (gbit * 1e9)
    late = 2 * (exchange.datacentres - 1) * exchange.latency_seconds
    every = 1 if exchange.method == "data_parallel" else exchange.interval
    tau = 0 if exchange.method == "data_parallel" else exchange.overlap
    fragments = fragments_of(compute.layers, exchange)
    ready: dict[tuple[int, int], float] = {}
    clock = link = end = 0.0
    for step in range(1, steps + 1):
        for layer in range(compute.layers):
            clock = max(clock, ready.get((layer, step), 0.0)) + node
        for layer in reversed(range(compute.layers)):
            clock += node if layer == 0 else 2 * node
            q = next(q for q, fragment in enumerate(fragments) if layer in fragment)
            if step % every == q * every // len(fragments):
                link = max(link, clock) + transfer
                ready[layer, step + 1 + tau] = end = link + late
    return max(clock, end)


def test_needed_bandwidth_is_the_first_grid_value_that_reaches_the_target_or_none() -> None:
    exchange = Exchange("data_parallel", latency_seconds=0.5)  # at best 2/3
    grid = [1.0, 16.0, 1e6]
    assert [round(float(u), 3) for u in utilisation(ONE, exchange, grid)] == [0.105, 0.5, 0.667]
    assert needed_gbit(ONE, exchange, [0.1, 0.5, 0.6, 0.9], grid) == [1.0, 16.0, 1e6, None]
