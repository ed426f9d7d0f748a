"""Learners that come and go by plan: joining, leaving, coming back, and what they are worth."""

from __future__ import annotations

import msgspec
import pytest
from tiers import mostly_soak

from atoll.chaos import ChaosPlan, Kill, Scavenge, check_plan
from atoll.config import Config, load
from atoll.errors import PlanError, UserError
from atoll.protocol.vocabulary import Started, StepDone
from atoll.sim.checkers import Safety
from atoll.sim.cluster import VirtualCluster
from atoll.sim.estimates.failures import FailureModel
from atoll.sim.estimates.scavenge import ScavengeScenario, base_alone_seconds, elastic_data_parallel, scavenge


def settings(**cluster: object) -> Config:
    numbers = {"step_seconds": 6.0, "step_noise": 0.02, "parameters": 10**9, "up_gbit": 10.0, "down_gbit": 10.0} | cluster
    return load(preset_name="decoupled", overrides={"learners": 4, "cluster": numbers, "limits": {"leave_seconds": 60.0}})


SCENARIO = ScavengeScenario(settings(), day_seconds=3600.0, cycles=1)


@pytest.fixture(scope="module")
def base() -> float:
    return base_alone_seconds(SCENARIO)


@pytest.mark.parametrize("share", mostly_soak([0.25, 0.5, 1.0, 3.0], keep=[0.25]))
def test_scavenging_reaches_the_ideal_time(share: float, base: float) -> None:
    a = scavenge(SCENARIO, share, FailureModel(), base)
    assert a.ideal == 0.5 + 0.5 / (1 + share)
    assert a.decoupled == pytest.approx(a.ideal, rel=0.02)
    assert a.joins == 4 * share and a.joining_seconds > 12e9 * 8 / 10e9, "the state's own transfer is part of joining"
    assert a.decoupled <= a.data_parallel


def test_slow_link_makes_joining_cost_what_its_transfer_takes(base: float) -> None:
    """12 bytes a parameter at 0.2 Gbit/s: eight minutes of every night."""
    slow = ScavengeScenario(settings(up_gbit=0.2, down_gbit=0.2), day_seconds=3600.0, cycles=1)
    a = scavenge(slow, 1.0, FailureModel(), base)
    assert a.joining_seconds > 480.0
    assert a.decoupled > a.ideal


def test_data_parallel_goes_without_chips_that_would_slow_it_down() -> None:
    slow = ScavengeScenario(settings(up_gbit=0.5, down_gbit=0.5), day_seconds=3600.0, cycles=1)
    assert elastic_data_parallel(slow, 1.0, FailureModel()) == 1.0
    assert 0.75 < elastic_data_parallel(SCENARIO, 1.0, FailureModel()) < 0.8


def test_scavenged_learner_joins_leaves_and_comes_back() -> None:
    config = msgspec.structs.replace(settings(), total_steps=300)
    plan = ChaosPlan((Scavenge(200.0, 4, 400.0), Scavenge(200.0, 5, 400.0), Scavenge(1000.0, 4, 300.0), Kill(1100.0, 4, 500.0)))
    check_plan(ChaosPlan(plan.faults[:3]), 4)
    steps: list[tuple[float, int]] = []
    started: list[tuple[float, int]] = []

    def watch(now: int, worker: int, event: object, effects: object) -> None:
        if worker >= 4 and isinstance(event, StepDone):
            steps.append((now / 1e9, worker))
        if worker >= 4 and isinstance(event, Started):
            started.append((now / 1e9, worker))

    safety = Safety(config)
    cluster = VirtualCluster(config, plan=plan, observers=[safety, watch])
    safety.attach(cluster)
    cluster.run(until_seconds=20_000)
    assert started == [(200.0, 4), (200.0, 5), (1000.0, 4)], "and it does not come back after its time, whatever killed it"
    for first, last, worker in ((200.0, 662.0, 4), (200.0, 662.0, 5), (1000.0, 1100.0, 4)):
        assert len([at for at, who in steps if who == worker and first < at <= last]) > 10
    assert not [at for at, who in steps if 662.0 < at < 1000.0 or at > 1100.0]


@pytest.mark.parametrize("learner", [-1, 0, 3, 4 + 1024])
def test_plan_scavenges_only_learners_beyond_the_declared_ones(learner: int) -> None:
    with pytest.raises(PlanError, match="beyond the declared ones"):
        check_plan(ChaosPlan((Scavenge(1.0, learner, 5.0),)), 4)


@pytest.mark.parametrize(("share", "words"), [(0.3, "whole number"), (-1.0, "--extra -1"), (0.0, "--extra 0")])
def test_impossible_shares_are_refused(share: float, words: str) -> None:
    with pytest.raises(UserError, match=words):
        scavenge(SCENARIO, share, FailureModel(), 1.0)
