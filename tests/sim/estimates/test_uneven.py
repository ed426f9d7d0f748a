"""Learners of uneven speed: a barrier at every step costs all of them, a lead the fast ones, a quorum of one nobody."""

from __future__ import annotations

import random

import pytest

from atoll.chaos import random_plan
from atoll.config import Config, load
from atoll.sim.checkers import Liveness, Safety
from atoll.sim.cluster import VirtualCluster
from atoll.sim.estimates.uneven import UnevenEstimate, measure_uneven, rules

OVERLAP = 2


def settings(**cluster: object) -> Config:
    uneven = {"slow_share": 0.5, "slow_factor": 1.3, "step_noise": 0.1} | cluster
    sizes = {"local_steps_per_round": 8, "fragments": 8, "overlap": OVERLAP}
    return load(preset_name="decoupled", overrides={"learners": 4, "total_steps": 80, "cluster": uneven, "protocol": sizes})


@pytest.fixture(scope="module")
def found() -> list[UnevenEstimate]:
    """K all with lead 2 and 0; K 1 bare; K 1 with grace and pace."""
    return [measure_uneven(settings(), name, keys) for name, keys in rules(OVERLAP, (OVERLAP, 0)).items()]


def test_a_lead_makes_the_fast_wait_and_a_barrier_everybody(found: list[UnevenEstimate]) -> None:
    ahead, barrier, bare, paced = found
    assert ahead.merged == barrier.merged == 4
    assert ahead.slow is not None and ahead.slow > 0.97
    assert ahead.fast == pytest.approx(ahead.slow / 1.3, abs=0.03)
    assert barrier.fast is not None and barrier.slow is not None and ahead.fast is not None
    assert barrier.fast < ahead.fast - 0.05 and barrier.slow < ahead.slow - 0.05
    assert barrier.seconds_a_round > ahead.seconds_a_round
    assert (bare.fast, bare.slow, paced.fast, paced.slow) == (1.0, 1.0, 1.0, 1.0)
    assert bare.merged < 1.6 and paced.merged > 3


def test_a_barrier_without_noise_waits_for_the_slowest_and_a_round_trip() -> None:
    """A round is the slow step, then report, pull, contribution and announcement, one latency each."""
    name, keys = next(iter(rules(OVERLAP, (0,)).items()))
    a = measure_uneven(settings(step_noise=0.0, latency_seconds=0.05), name, keys)
    assert a.seconds_a_round == pytest.approx(1.3 + 4 * 0.05, rel=0.01)
    assert a.slow == pytest.approx(1.3 / 1.5, rel=0.01)


def test_learners_that_are_all_alike_have_one_share() -> None:
    name, keys = next(iter(rules(OVERLAP, (OVERLAP,)).items()))
    assert measure_uneven(settings(slow_share=0.0), name, keys).slow is None
    assert measure_uneven(settings(slow_share=1.0), name, keys).fast is None


@pytest.mark.parametrize("quorum", ["all", 1])
def test_a_barrier_under_faults_violates_no_invariant_and_makes_progress(quorum: str | int) -> None:
    rules_of = {"lead": 0, "quorum": quorum, "local_steps_per_round": 8, "fragments": 8}
    config = load(preset_name="decoupled", overrides={"learners": 5, "total_steps": 200, "protocol": rules_of})
    plan = random_plan(random.Random(4), config.learners, count=12, span=90.0)
    safety = Safety(config)
    cluster = VirtualCluster(config, plan=plan, observers=[safety])
    safety.attach(cluster)
    cluster.run(until_seconds=plan.healed_at() + 2000)
    Liveness(cluster, healed_at=plan.healed_at()).check_end()
