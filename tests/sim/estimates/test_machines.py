"""Steady states and losses measured on the real machines, against what can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.config import Config, load
from atoll.sim.cluster import VirtualCluster
from atoll.sim.estimates.bandwidth import LinkSettings, Question, Star, shares_of_link
from atoll.sim.estimates.machines import measure_loss, measure_steady
from atoll.sim.estimates.published import MODELS
from atoll.sim.slices import SliceHardware
from atoll.views.run import RunView


def settings(preset: str, gbit: float = 1.0, **protocol: Any) -> Config:
    waits = {"start_wait_seconds": 1e6, "first_pull_seconds": 1e6, "recovery_intervals": 1e6}
    cluster = {"parameters": 10**9, "step_noise": 0.0, "up_gbit": gbit, "down_gbit": gbit, "latency_seconds": 0.05}
    return load(preset_name=preset, overrides={"learners": 2, "protocol": protocol, "cluster": cluster, "limits": waits})


def test_a_blocking_exchange_costs_its_transfers_and_four_latencies() -> None:
    """A report, a pull, a contribution and an announcement."""
    found = measure_steady(settings("diloco", 10.0, local_steps_per_round=20, codec_up="bf16", codec_down="bf16"))
    assert found.shares == pytest.approx([20 / (20 + 2 * 1.6 + 0.2)] * 2, abs=1e-4)
    assert found.startup_seconds == pytest.approx(3.2 + 1.25, abs=0.2)  # fp32 weights, and a first step


def test_a_fragment_that_needs_longer_than_tau_makes_streaming_wait() -> None:
    """9 fragments of 1e9 parameters, 4.125 bits up and 16 down, at 1 Gbit/s: 2.44 s, of which tau hides 1 s."""
    found = measure_steady(settings("streaming", local_steps_per_round=50, fragments=9, overlap=1, codec_down="bf16"))
    waits = 20.125 / 9 + 0.2 - 1
    assert found.shares[0] == pytest.approx(50 / (50 + 9 * waits), abs=0.003)


def test_a_lost_learner_needs_a_peers_state_and_decoupled_learners_do_not_wait() -> None:
    alone = settings("decoupled")
    cost = measure_loss(alone, measure_steady(alone))
    assert cost is not None
    assert cost.others == pytest.approx(0.0, abs=0.1)
    assert cost.itself > 96  # 12 bytes a parameter at 1 Gbit/s
    together = settings("streaming", local_steps_per_round=20, fragments=9, overlap=2, codec_down="bf16")
    cost = measure_loss(together, measure_steady(together))
    assert cost is not None
    assert cost.others > 1


def test_a_run_begins_in_the_steady_state_of_failures() -> None:
    """Rare failures leave everything up at the start; if learners are away half of the time, about half begin away."""
    def absent(mtbi_hours: float) -> int:
        cluster = {"chips": 200, "slice_chips": 1, "mtbi_hours": mtbi_hours, "repair_seconds": 3600.0, "resize_seconds": 0.0}
        config = load(preset_name="decoupled", overrides={"learners": 200, "cluster": cluster})
        hardware = SliceHardware.of_config(config)
        assert hardware is not None
        return sum(hardware.absent_at_start(m) > 0 for m in range(200))

    assert absent(1e6) == 0
    assert 70 <= absent(1.0) <= 130


def test_start_up_is_apart_from_the_goodput_after_it() -> None:
    config = settings("decoupled")
    view = RunView(config.learners)
    VirtualCluster(config, observers=[view]).run()
    assert view.startup / 1e9 == pytest.approx(33.25, abs=0.2)
    assert view.goodput < 0.9 < 0.99 < view.goodput_after_startup


def test_learners_and_shards_share_a_datacentres_link() -> None:
    def shares(star: Star, datacentres: int = 4) -> tuple[float, float]:
        return shares_of_link(Question("1B", MODELS["1B"], "decoupled", LinkSettings(datacentres=datacentres), star), 4.0, 16.0)

    assert shares(Star()) == (1.0, 1.0)
    assert shares(Star(per_datacentre=4)) == (0.25, 0.25)
    assert shares(Star(shards=4)) == shares(Star(shards=4, topology="ring"))  # with one learner each, the same bytes
    assert shares(Star(shards=4, topology="ring", per_datacentre=4)) == shares(Star(shards=4, topology="ring"))
    assert shares(Star(shards=4))[0] == pytest.approx(4 / (4 * 3 / 4 + 3 * 16 / 4))
