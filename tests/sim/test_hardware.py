"""Virtual hardware: distributions are those of the config, and streams do not disturb each other."""

from __future__ import annotations

import statistics

import pytest

from atoll.config import load
from atoll.protocol.vocabulary import Recovered
from atoll.sim.checkers import Safety
from atoll.sim.cluster import VirtualCluster
from atoll.sim.hardware import Hardware


def hardware(seed: int = 0, **cluster: object) -> Hardware:
    return Hardware(load(preset_name="decoupled", overrides={"seed": seed, "learners": 4, "cluster": cluster}))


@pytest.mark.parametrize("distribution", ["normal", "lognormal"])
def test_step_times_have_the_mean_and_deviation_of_the_config(distribution: str) -> None:
    h = hardware(step_seconds=2.0, step_noise=0.2, step_distribution=distribution)
    times = [h.step_nanos(1) / 1e9 for _ in range(20_000)]
    assert statistics.mean(times) == pytest.approx(2.0, rel=0.01)
    assert statistics.stdev(times) == pytest.approx(0.4, rel=0.03)
    median = statistics.median(times)
    assert (median < 1.98) == (distribution == "lognormal"), "a long tail pulls the mean above the median"


def test_slow_share_and_slow_faults_multiply() -> None:
    h = hardware(step_noise=0.0, slow_share=0.5, slow_factor=1.5)
    assert [h.step_nanos(m) for m in range(4)] == [1_500_000_000, 1_500_000_000, 1_000_000_000, 1_000_000_000]
    h.slow(0, 2.0)
    h.slow(0, 3.0)
    assert h.step_nanos(0) == 9_000_000_000
    h.slow(0, 1 / 2.0)
    assert h.step_nanos(0) == 4_500_000_000


def test_one_learners_draws_do_not_reshuffle_anothers() -> None:
    alone, together = hardware(seed=3), hardware(seed=3)
    for _ in range(50):
        together.step_nanos(0)
        together.time_to_failure(1)
    assert [alone.step_nanos(1) for _ in range(20)] == [together.step_nanos(1) for _ in range(20)]
    assert hardware(seed=4).step_nanos(1) != hardware(seed=3).step_nanos(1)


def test_failures_and_repairs_are_exponential_with_their_means() -> None:
    h = hardware(mtbf_seconds=500.0, repair_seconds=30.0)
    failures = [(h.time_to_failure(0) or 0) / 1e9 for _ in range(20_000)]
    repairs = [h.repair_seconds(0) for _ in range(20_000)]
    assert statistics.mean(failures) == pytest.approx(500.0, rel=0.03)
    assert statistics.stdev(failures) == pytest.approx(500.0, rel=0.03)
    assert statistics.mean(repairs) == pytest.approx(30.0, rel=0.03)
    assert hardware().time_to_failure(0) is None


def test_cluster_on_failing_hardware_goes_on_and_its_learners_recover() -> None:
    config = load(preset_name="decoupled", overrides={
        "learners": 6, "total_steps": 300, "cluster": {"mtbf_seconds": 80.0, "repair_seconds": 10.0},
    })  # fmt: skip
    safety, recovered = Safety(config), []

    def observe(now: int, worker: int, event: object, effects: object) -> None:
        recovered.extend(e for e in effects if isinstance(e, Recovered) and now > 10**10)  # type: ignore[attr-defined]

    cluster = VirtualCluster(config, observers=[safety, observe])
    safety.attach(cluster)
    cluster.run(until_seconds=2000)
    assert len(recovered) > 10
    assert any(e.source >= 0 for e in recovered), "most through a peer"
