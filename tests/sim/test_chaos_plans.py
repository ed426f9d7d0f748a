"""Random chaos plans: no invariant is violated, and once healed the run makes progress. A failure prints its seed.

`make test` runs 8 seeds, every preset among them, `make soak` the other 492 of 500.
"""

from __future__ import annotations

from functools import cache

import pytest
from scenario import OUTER_STEPS, PRESETS, Scenario, verdict, verdict_of

from atoll.errors import AtollError

QUICK = (2, 3, 7, 10, 12, 29, 73, 132)
LONG = [seed for seed in range(500) if seed not in QUICK]
STRUCK = (7, 10)
"""Both have ambushes on recoveries and on snapshots."""


@cache
def judged(seed: int) -> tuple[Scenario, AtollError | AssertionError | None]:
    scenario = Scenario(seed)
    return scenario, verdict_of(scenario)


@pytest.mark.parametrize("seed", QUICK)
def test_random_plan_violates_no_invariant_and_makes_progress(seed: int) -> None:
    _, failure = judged(seed)
    assert failure is None, str(failure)


@pytest.mark.soak
@pytest.mark.parametrize("seed", LONG)
def test_random_plan_of_the_long_soak_violates_no_invariant(seed: int) -> None:
    failure = verdict(seed)
    assert failure is None, str(failure)


def test_scenarios_are_as_hard_as_they_claim() -> None:
    """At least 200 outer steps and 10 faults each, 2 to 16 learners, and ambushes on recoveries and snapshots."""
    assert {Scenario(seed).config.preset for seed in QUICK} == set(PRESETS)
    scenarios = [Scenario(seed) for seed in range(50)]
    assert all(s.config.total_steps >= 200 for s in scenarios)
    assert OUTER_STEPS >= 200
    assert all(len(s.plan.faults) >= 10 for s in scenarios)
    sizes = {s.config.learners for s in scenarios}
    assert min(sizes) == 2
    assert max(sizes) >= 15
    close = [b.at - a.at < 1.0 for s in scenarios for a, b in zip(s.plan.faults, s.plan.faults[1:], strict=False)]
    assert sum(close) > 50, "pairs of faults come close together"
    struck = {"recovery": 0, "snapshot": 0}
    for s, failure in map(judged, STRUCK):
        assert failure is None, str(failure)
        for when, count in s.ambush.struck.items():
            struck[when] += count
    assert struck["recovery"] > 0
    assert struck["snapshot"] > 0
