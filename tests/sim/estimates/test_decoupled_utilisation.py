"""Decoupled against bandwidth, measured on the real machines in virtual time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll.config import Config
from atoll.sim.estimates.bandwidth import LinkSettings, Question, Star, config_for, row
from atoll.sim.estimates.decoupled import (
    DecoupledEstimate,
    at_bandwidth,
    first_reaching_by_bisection,
    measure_decoupled,
    settings_for,
)
from atoll.sim.estimates.utilisation import Compute

H, P = 20, 4
SMALL = Compute(layers=8, parameters=1e9, step_seconds=1.0)
"""Sixteen bits of all of it in 20 s are 0.8 Gbit/s."""


def small(preset: str = "decoupled", learners: int = 2, latency: float = 0.0, **protocol: Any) -> Config:
    cluster = {"step_seconds": 1.0, "parameters": 10**9, "latency_seconds": latency}
    keys = {"local_steps_per_round": H, "fragments": P, **protocol}
    return settings_for(preset, {"learners": learners, "protocol": keys, "cluster": cluster})


def answer(settings: Config, gbit: float, down: float | None = None) -> DecoupledEstimate:
    return measure_decoupled(at_bandwidth(settings, gbit, gbit if down is None else down))


def test_a_fast_link_keeps_the_schedule_and_all_of_the_compute() -> None:
    found = answer(small(), 1e6)
    assert (found.compute_share, found.schedule_kept, found.interval_kept) == (1.0, 1.0, H)
    assert found.staleness == pytest.approx(1.0, abs=0.01)
    assert found.utilisation == 1.0


def test_a_slow_link_never_stops_the_learner_but_stretches_the_interval() -> None:
    found = answer(small(), 0.3)
    assert found.compute_share == 1.0
    assert found.interval_kept > 1.5 * H
    assert found.schedule_kept == pytest.approx(H / found.interval_kept)
    assert found.utilisation == found.schedule_kept < 0.7
    assert found.staleness > 5


def test_either_direction_can_be_the_one_that_is_too_slow() -> None:
    assert answer(small(), 1e3, down=0.3).schedule_kept < 0.7
    assert answer(small(), 0.05, down=1e3).schedule_kept < 0.7
    assert answer(small(), 0.5, down=1e3).schedule_kept == 1.0  # a quarter of 4.1 Gbit within two steps: int4 goes up


def test_a_down_link_short_of_the_mean_load_keeps_no_more_than_its_share() -> None:
    for gbit in (0.2, 0.4, 0.6):
        assert answer(small(), 1e3, down=gbit).schedule_kept <= 1.1 * gbit / 0.8


def test_more_bandwidth_is_not_worse() -> None:
    kept = [answer(small(), float(gbit)).utilisation for gbit in np.geomspace(0.1, 10, 9)]
    assert kept == sorted(kept)
    assert kept[0] < 0.3
    assert kept[-1] == 1.0


def test_fewer_bits_down_need_less_bandwidth() -> None:
    assert answer(small(codec_down="int4"), 0.5).utilisation > answer(small(), 0.5).utilisation


def test_waits_in_the_ramp_count_against_compute() -> None:
    ramped = answer(small("decoupled_ramp", ramp=0.2), 4.0)
    assert 0.3 < ramped.compute_share < 0.95
    assert ramped.schedule_kept == 1.0
    assert answer(small(), 4.0).compute_share == 1.0


def test_latency_within_the_overlap_costs_staleness_and_nothing_else() -> None:
    near, far = answer(small(), 100.0), answer(small(latency=0.4), 100.0)
    assert far.utilisation == near.utilisation == 1.0
    assert far.staleness > near.staleness


def test_joining_over_a_slow_link_is_not_measured() -> None:
    """The whole model in fp32 takes 320 s to arrive: half as long as the run itself."""
    settings = small(codec_up="int1", codec_down="int1")
    assert answer(settings, 0.1).compute_share == 1.0


def test_a_quorum_of_all_is_possible_and_measured() -> None:
    assert answer(small(learners=3, quorum=3), 100.0).utilisation == pytest.approx(1.0, abs=0.01)


def test_the_table_searches_the_same_grid_and_takes_the_smaller_share() -> None:
    axis = np.geomspace(0.1, 10, 13)
    link = LinkSettings(interval=H, fragments=P, calibration="plain")
    question = Question("small", SMALL, "decoupled", link)
    found = row(question, [50, 95], axis, at=[0.3], curve=True)
    by_hand = [answer(config_for(question), float(gbit)).utilisation for gbit in axis]
    expected = [next(float(g) for g, u in zip(axis, by_hand, strict=True) if u >= t) for t in (0.5, 0.95)]
    assert list(found.found) == expected
    assert found.published is None
    assert found.at[0].utilisation == answer(config_for(question), 0.3).utilisation
    assert "instead of 20" in found.at[0].remark
    assert [u for _, u in found.curve] == by_hand  # a grid this short is drawn whole


def test_settings_reach_the_machines() -> None:
    star = Star(learners=5, quorum=3, grace=False, ramp=0.25, codec_up="int2", codec_down="int8")
    link = LinkSettings(interval=30, overlap=3, datacentres=4, latency_seconds=0.1)
    settings = config_for(Question("small", SMALL, "decoupled", link, star))
    p = settings.protocol
    assert (settings.learners, p.quorum, p.grace, p.ramp, p.codec_up, p.codec_down) == (5, 3, "none", 0.25, "int2", "int8")
    assert (p.local_steps_per_round, p.overlap, p.fragments) == (30, 3, 3)
    assert (settings.cluster.latency_seconds, settings.cluster.step_noise) == (0.1, 0.0)
    assert settings.cluster.parameters == round(1e9 / 1.2)
    assert config_for(Question("small", SMALL, "decoupled", LinkSettings(datacentres=4))).learners == 4


def test_bisection_finds_the_first_value_that_reaches() -> None:
    axis = [1.0, 2.0, 3.0, 4.0, 5.0]
    for target in (0.0, 1.0, 2.5, 5.0):
        assert first_reaching_by_bisection(lambda gbit: gbit, axis, target) == next(value for value in axis if value >= target)
    assert first_reaching_by_bisection(lambda gbit: gbit, axis, 5.1) is None
