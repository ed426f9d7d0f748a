"""The protocol's arithmetic as plain numbers: schedule, ramp, weight, freshness, grace, pacing, averages, learning rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config import Config, load
from atoll.rules import (
    Schedule,
    contribution_weight,
    ema,
    fresh,
    grace_window,
    learner_overlap,
    learning_rate,
    median_nanos,
    offsets,
    paced_until,
    ramp_intervals,
)


def decoupled(fragments: int, interval: int, **more: object) -> Config:
    protocol = {"fragments": fragments, "local_steps_per_round": interval, "overlap": 1, **more}
    return load(preset_name="decoupled", overrides={"protocol": protocol})


sizes = st.tuples(st.integers(1, 60), st.integers(2, 60))

# ---------------------------------------------------------------- schedule


def test_offsets_of_four_fragments_over_eight_steps_are_two_apart() -> None:
    assert offsets(4, 8) == (0, 2, 4, 6)


def test_offsets_of_three_fragments_over_eight_steps_round_down() -> None:
    assert offsets(3, 8) == (0, 2, 5)


def test_offsets_of_more_fragments_than_steps_share_steps() -> None:
    assert offsets(5, 2) == (0, 0, 0, 1, 1)


@settings(deadline=None)
@given(sizes)
def test_offsets_are_spread_as_evenly_as_integers_allow(size: tuple[int, int]) -> None:
    fragments, interval = size
    found = offsets(fragments, interval)
    gaps = [b - a for a, b in zip(found, (*found[1:], found[0] + interval), strict=True)]
    assert found[0] == 0
    assert set(gaps) <= {interval // fragments, -(-interval // fragments)}


def test_due_fragments_of_three_over_four_steps_follow_their_offsets() -> None:
    schedule = Schedule(decoupled(3, 4))  # offsets 0, 1, 2
    assert [schedule.due(t) for t in range(1, 9)] == [(1,), (2,), (), (0,), (1,), (2,), (), (0,)]


def test_due_before_the_first_outer_step_is_nothing() -> None:
    schedule = Schedule(decoupled(2, 2))
    assert schedule.due(0) == schedule.due(-3) == ()


def test_due_of_more_fragments_than_steps_is_several_at_once() -> None:
    assert [Schedule(decoupled(5, 2)).due(t) for t in (1, 2)] == [(3, 4), (0, 1, 2)]


@settings(deadline=None)
@given(sizes, st.integers(1, 500))
def test_every_fragment_is_due_exactly_once_in_any_interval_of_h_outer_steps(size: tuple[int, int], first: int) -> None:
    fragments, interval = size
    schedule = Schedule(decoupled(fragments, interval))
    due = [p for t in range(first, first + interval) for p in schedule.due(t)]
    assert sorted(due) == list(range(fragments))


@settings(deadline=None)
@given(sizes, st.integers(1, 500))
def test_fragment_is_due_when_the_outer_step_less_its_offset_is_a_multiple_of_h(size: tuple[int, int], t: int) -> None:
    fragments, interval = size
    expected = tuple(p for p in range(fragments) if (t - p * interval // fragments) % interval == 0)
    assert Schedule(decoupled(fragments, interval)).due(t) == expected


# ---------------------------------------------------------------- policy and ramp


def test_policy_without_a_ramp_is_the_same_at_every_outer_step() -> None:
    schedule = Schedule(load(preset_name="decoupled"))
    policy = schedule.policy(1)
    assert all(schedule.policy(t) == policy for t in (0, 2, 17, 240, 10_000))
    assert (policy.start, policy.interval, policy.overlap, policy.quorum, policy.quorum_all) == (0, 24, 2, 1, False)
    assert (policy.exact, policy.lead, policy.plain_average) == (False, -1, False)


@pytest.mark.parametrize(
    ("preset", "lead"), [("diloco", 0), ("streaming", 1), ("async_diloco", 100), ("decoupled", -1), ("ddp", 0)]
)
def test_lead_is_tau_where_everybody_counts_and_unlimited_elsewhere(preset: str, lead: int) -> None:
    assert Schedule(load(preset_name=preset)).policy(1).lead == lead


@pytest.mark.parametrize(("quorum", "lead"), [("3", -1), ("all", 2)])
def test_only_a_quorum_of_all_by_name_bounds_the_lead(quorum: str, lead: int) -> None:
    config = load(assignments=["learners=3", f"protocol.quorum={quorum}"])
    assert Schedule(config).policy(1).lead == lead


def test_ramp_intervals_double_from_one_and_stay_below_h() -> None:
    assert ramp_intervals(24) == (1, 2, 4, 8, 16)
    assert ramp_intervals(16) == (1, 2, 4, 8)
    assert ramp_intervals(1) == ()


def test_ramp_over_a_tenth_of_240_outer_steps_changes_interval_at_5_10_14_19_and_24() -> None:
    schedule = Schedule(load(preset_name="decoupled_ramp"))
    changes = [t for t in range(2, 241) if schedule.policy(t).interval != schedule.policy(t - 1).interval]
    assert [(t - 1, schedule.policy(t).interval) for t in changes] == [(5, 2), (10, 4), (14, 8), (19, 16), (24, 24)]
    assert schedule.policy(1).interval == 1


def test_ramp_is_synchronous_while_its_interval_is_at_most_tau() -> None:
    schedule = Schedule(load(preset_name="decoupled_ramp"))  # tau 2: intervals 1 and 2
    for t in range(1, 11):
        p = schedule.policy(t)
        assert (p.overlap, p.quorum_all, p.exact, p.lead, p.plain_average) == (0, True, True, 0, True)
    for t in range(11, 241):
        p = schedule.policy(t)
        assert (p.overlap, p.quorum_all, p.quorum, p.exact, p.lead, p.plain_average) == (2, False, 1, False, -1, False)


def test_ramp_with_interval_one_makes_every_fragment_due_at_every_outer_step() -> None:
    schedule = Schedule(load(preset_name="decoupled_ramp"))
    assert all(schedule.due(t) == tuple(range(24)) for t in range(1, 6))


def test_ramp_phases_count_offsets_from_their_own_start() -> None:
    schedule = Schedule(load(preset_name="decoupled_ramp"))
    by_offset = {k: tuple(p for p in range(24) if p * 2 // 24 == k) for k in (0, 1)}
    assert [schedule.due(t) for t in (6, 7)] == [by_offset[1], by_offset[0]]


def test_ramp_shorter_than_its_phases_skips_the_ones_without_an_outer_step() -> None:
    schedule = Schedule(load(preset_name="decoupled_ramp", overrides={"total_steps": 20}))  # two steps for five phases
    assert [schedule.policy(t).interval for t in (1, 2, 3)] == [2, 8, 24]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(2, 40), st.floats(0.0, 0.9), st.integers(1, 400))
def test_ramp_never_leaves_an_outer_step_without_a_policy(p: int, h: int, ramp: float, steps: int) -> None:
    config = load(overrides={
        "total_steps": steps, "protocol": {"fragments": p, "local_steps_per_round": h, "overlap": 1, "ramp": ramp},
    })  # fmt: skip
    schedule = Schedule(config)
    intervals = [schedule.policy(t).interval for t in range(1, steps + 1)]
    assert intervals == sorted(intervals)
    assert schedule.policy(steps + 1).interval == h
    assert all(schedule.policy(t).start < t for t in range(1, steps + 1))


# ---------------------------------------------------------------- freshness


@pytest.mark.parametrize(("reported", "counted", "expected"), [(5, 4, True), (5, 5, False), (4, 5, False), (1, 0, True)])
def test_fresh_on_arrival_is_a_local_step_beyond_the_one_last_counted(reported: int, counted: int, expected: bool) -> None:
    assert fresh(False, 9, 0, reported, counted) is expected


@pytest.mark.parametrize(("position", "expected"), [(6, False), (7, True), (8, True)])
def test_fresh_under_exact_adoption_is_standing_at_the_outer_step(position: int, expected: bool) -> None:
    assert fresh(True, 7, position, reported=1, counted=100) is expected


# ---------------------------------------------------------------- weight


def test_weight_by_tokens_is_quantity_times_quality() -> None:
    assert contribution_weight("tokens", c_steps=4, c_tokens=2000, c_samples=1) == 2000 * 500.0


def test_weight_by_tokens_of_twice_the_batch_is_four_times_as_much() -> None:
    assert contribution_weight("tokens", 4, 4000, 1) == 4 * contribution_weight("tokens", 4, 2000, 1)


def test_weight_by_samples_counts_samples() -> None:
    assert contribution_weight("num_samples", 4, 2000, 32) == 32.0


def test_weight_uniform_is_one_whatever_was_trained() -> None:
    assert contribution_weight("uniform", 1, 1, 1) == contribution_weight("uniform", 100, 9999, 77) == 1.0


@pytest.mark.parametrize("weighting", ["uniform", "num_samples", "tokens"])
def test_weight_of_nothing_trained_is_zero(weighting: str) -> None:
    assert contribution_weight(weighting, 0, 0, 0) == 0.0


# ---------------------------------------------------------------- grace


def test_grace_is_gamma_times_the_slack() -> None:
    # slack = 2 * 1000 - (500 + 700) = 800
    assert grace_window(2, step_time=1000, quorum_time=500, sync_time=700, gamma=0.8) == 640


def test_grace_is_never_longer_than_a_step() -> None:
    assert grace_window(5, step_time=1000, quorum_time=0, sync_time=0, gamma=0.8) == 1000


def test_grace_without_slack_is_nothing() -> None:
    assert grace_window(2, step_time=1000, quorum_time=1500, sync_time=700, gamma=0.8) == 0


def test_grace_before_anything_was_measured_is_nothing() -> None:
    assert grace_window(2, 0, 0, 0, 0.8) == 0


@settings(deadline=None)
@given(st.integers(0, 100), *[st.integers(0, 10**12)] * 3, st.floats(0.0, 1.0))
def test_grace_stays_between_nothing_and_a_step(tau: int, step: int, quorum: int, sync: int, gamma: float) -> None:
    assert 0 <= grace_window(tau, step, quorum, sync, gamma) <= step


# ---------------------------------------------------------------- pace and averages


def test_pace_holds_the_next_round_for_its_share_of_a_step() -> None:
    assert paced_until(10_000, pace=1.0, step_time=300) == 10_300
    assert paced_until(10_000, pace=0.5, step_time=300) == 10_150


def test_pace_zero_holds_nothing() -> None:
    assert paced_until(10_000, 0.0, 300) == 10_000


def test_pace_before_the_first_round_holds_nothing() -> None:
    assert paced_until(None, 5.0, 300) == 0


def test_ema_starts_at_the_first_value_and_moves_a_tenth_of_the_way() -> None:
    assert ema(None, 1000, 0.1) == 1000
    assert ema(1000, 2000, 0.1) == 1100
    assert ema(1000, 500, 0.1) == 950


@settings(deadline=None)
@given(st.integers(0, 10**12), st.integers(0, 10**12), st.floats(0.01, 1.0))
def test_ema_stays_between_old_and_new(old: int, new: int, weight: float) -> None:
    assert min(old, new) - 1 <= ema(old, new, weight) <= max(old, new)


def test_median_leaves_out_the_unknown_and_is_zero_of_nothing() -> None:
    assert median_nanos([None, 10, 30, None, 20]) == 20
    assert median_nanos([10, 21]) == 15
    assert median_nanos([None]) == median_nanos([]) == 0


def test_overlap_per_learner_holds_for_exact_adoption() -> None:
    config = load(preset_name="streaming", assignments=["learners=2", "protocol.overlap_by_learner=[1, 4]"])
    policy = Schedule(config).policy(1)
    assert [learner_overlap(config, policy, m) for m in (0, 1, 2)] == [1, 4, 1]


# ---------------------------------------------------------------- learning rate


def rated(*assignments: str) -> Config:
    return load(assignments=["total_steps=100", "inner.learning_rate=1.0", *assignments])


def test_learning_rate_warms_up_linearly_and_starts_above_zero() -> None:
    config = rated("inner.warmup_share=0.1", "inner.schedule=constant")
    assert [learning_rate(config, t) for t in (0, 4, 9)] == [1 / 11, 5 / 11, 10 / 11]
    assert learning_rate(config, 10) == 1.0


def test_learning_rate_constant_after_the_warm_up_stays() -> None:
    config = rated("inner.schedule=constant", "inner.warmup_share=0.0")
    assert {learning_rate(config, t) for t in (0, 50, 100, 150)} == {1.0}


def test_learning_rate_cosine_is_halfway_in_the_middle_and_final_share_at_the_end() -> None:
    config = rated("inner.warmup_share=0.0", "inner.final_share=0.1")
    assert learning_rate(config, 0) == 1.0
    assert learning_rate(config, 50) == pytest.approx(0.1 + 0.9 * 0.5)
    assert learning_rate(config, 25) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert learning_rate(config, 100) == pytest.approx(0.1)


def test_learning_rate_beyond_the_end_stays_at_the_final_share() -> None:
    config = rated("inner.warmup_share=0.0", "inner.final_share=0.25")
    assert learning_rate(config, 130) == pytest.approx(0.25)


@settings(deadline=None)
@given(st.integers(1, 1000), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.sampled_from(["cosine", "constant"]))
def test_learning_rate_lies_between_zero_and_its_peak(steps: int, warm: float, final: float, kind: str) -> None:
    config = load(overrides={
        "total_steps": steps, "inner": {"warmup_share": warm, "final_share": final, "schedule": kind, "learning_rate": 2.0},
    })  # fmt: skip
    rates = [learning_rate(config, t) for t in range(0, steps + 1, max(1, steps // 20))]
    assert all(0.0 <= rate <= 2.0 + 1e-12 for rate in rates)
