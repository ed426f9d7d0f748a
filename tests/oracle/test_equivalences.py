"""The family is one table: with the right numbers one preset is another. And what must not matter does not."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from task import Net, assert_same_bits, atoll_run, configured, relative, theta
from tiers import mostly_soak

from atoll.chaos import ChaosPlan, Clog, Slow
from atoll.config import Config, load
from atoll.executor.virtual_run import TensorExecutor
from atoll.ids import SYNCER
from atoll.sim.cluster import VirtualCluster
from atoll.tasks.task import language_task

STEPS = 24
QUIET = {"latency_seconds": 0.0, "step_noise": 0.0}
STREAMINGS = {"outer_learning_rate": 0.4, "outer_momentum": 0.9}
LAYERS = {"numbers": {"layers": 4}}


def trained(preset: str, **sections: Any) -> dict[str, Any]:
    return theta(atoll_run(configured(preset, total_steps=STEPS, **sections)))


# ---------------------------------------------------------------- one preset is another


def test_diloco_with_outer_sgd_1_and_sample_weights_is_fedavg() -> None:
    data = {"samples_by_learner": [2, 7, 4]}
    fedavg = trained("fedavg", protocol={"local_steps_per_round": 5}, data=data)
    protocol = {"local_steps_per_round": 5, "aggregation_weighting": "num_samples"}
    outer = {"outer_optimizer": "sgd", "outer_learning_rate": 1.0}
    assert_same_bits(trained("diloco", protocol=protocol, outer=outer, data=data), fedavg)


def test_streaming_of_one_fragment_without_overlap_or_mixing_is_diloco() -> None:
    diloco = trained("diloco", protocol={"local_steps_per_round": 6})
    protocol = {
        "local_steps_per_round": 6, "fragmentation": "whole", "fragments": 1, "overlap": 0, "alpha": 0.0, "codec_up": "fp32",
    }  # fmt: skip
    assert_same_bits(trained("streaming", protocol=protocol, outer={"outer_learning_rate": 0.7}), diloco)


def test_streaming_with_its_own_outer_rate_is_not_diloco() -> None:
    """The comparison above can fail."""
    protocol = {"local_steps_per_round": 6, "fragmentation": "whole", "fragments": 1, "overlap": 0, "alpha": 0.0}
    found = trained("streaming", protocol=protocol | {"codec_up": "fp32"})
    assert relative(found, trained("diloco", protocol={"local_steps_per_round": 6})) > 1e-3


STREAMED = {"local_steps_per_round": 7, "layers_per_fragment": 2, "overlap": 2, "alpha": 0.0, "codec_up": "fp32"}
DECOUPLED_IN_STEP = STREAMED | {
    "fragmentation": "layer", "fragments": 3, "quorum": 3, "grace": "none", "pace": 0.0, "aggregation_weighting": "uniform",
    "merge": "mean", "codec_down": "fp32",
}  # fmt: skip
ONE_RATE = {"schedule": "constant", "warmup_share": 0.0}


@pytest.mark.parametrize("anchor", ["adopted", "present"])
def test_decoupled_with_all_in_step_and_exact_adoption_is_streaming(anchor: str) -> None:
    """`present` is `adopted` where nothing else moved the fragment in between."""
    streaming = trained("streaming", protocol=STREAMED, model=LAYERS)
    protocol = DECOUPLED_IN_STEP | {"adopt": "exact", "anchor": anchor}
    found = trained("decoupled", protocol=protocol, outer=STREAMINGS, cluster=QUIET)
    assert_same_bits(found, streaming)


@pytest.mark.parametrize("anchor", ["adopted", "present"])
def test_decoupled_in_step_with_adoption_on_arrival_is_streaming_with_overlap_1(anchor: str) -> None:
    """Without latency a result is there at the next boundary. One constant rate, because on arrival the rate follows the
    outer step last heard of, which lies one behind."""
    streaming = trained("streaming", protocol=STREAMED | {"overlap": 1}, model=LAYERS, inner=ONE_RATE)
    protocol = DECOUPLED_IN_STEP | {"overlap": 1, "adopt": "arrival", "anchor": anchor}
    found = trained("decoupled", protocol=protocol, outer=STREAMINGS, cluster=QUIET, inner=ONE_RATE)
    assert_same_bits(found, streaming)


def test_diloco_of_one_sgd_step_with_outer_sgd_1_is_ddp_up_to_rounding() -> None:
    # Theta - mean(Theta - (Theta - lr*g_m)) and Theta - lr*mean(g_m) are one number with two roundings. Clipping is off:
    # DiLoCo would clip each learner's gradient, data-parallel the mean.
    inner = ONE_RATE | {"optimizer": "SGD", "clip_norm": 0.0, "weight_decay": 0.01}
    ddp = trained("ddp", inner=inner)
    outer = {"outer_optimizer": "sgd", "outer_learning_rate": 1.0}
    diloco = trained("diloco", protocol={"local_steps_per_round": 1}, inner=inner, outer=outer)
    assert relative(diloco, ddp) < 1e-6
    assert relative(Net().state_dict(), ddp) > 1e-2, "training must have moved the weights for this to say anything"


# ---------------------------------------------------------------- what must not matter


SYNCHRONOUS = {
    "ddp": {},
    "fedavg": {"local_steps_per_round": 6},
    "diloco": {"local_steps_per_round": 6},
    "async_diloco": {"local_steps_per_round": 6, "overlap": 6},
    "streaming": {"local_steps_per_round": 6, "layers_per_fragment": 2, "overlap": 2},
}
CALM = {"latency_seconds": 0.0, "step_noise": 0.0, "up_gbit": 1.0, "down_gbit": 1.0}
WEATHERS = {
    "noise": {"latency_seconds": 0.4, "step_noise": 0.6, "up_gbit": 0.0005},
    "a learner five times slower": {"latency_seconds": 0.01, "step_noise": 0.3, "slow_share": 0.34, "slow_factor": 5.0},
    "a round trip of five steps": {"latency_seconds": 2.5, "step_noise": 0.6},
}


@cache
def calm(preset: str) -> dict[str, Any]:
    return trained(preset, protocol=SYNCHRONOUS[preset], cluster=CALM, model=LAYERS)


@pytest.mark.parametrize(
    ("preset", "weather"),
    mostly_soak(
        product(SYNCHRONOUS, WEATHERS),
        keep=[*product(SYNCHRONOUS, ["noise"]), *product(["diloco"], WEATHERS)],
    ),
)
def test_synchronous_preset_with_other_latencies_and_orders_gives_the_same_theta(preset: str, weather: str) -> None:
    rough = trained(preset, protocol=SYNCHRONOUS[preset], cluster=WEATHERS[weather], model=LAYERS)
    assert_same_bits(rough, calm(preset))


def test_diloco_with_a_learner_silent_inside_an_interval_gives_the_same_theta() -> None:
    """It went on training while nobody heard of it and runs ahead of the others: its interval is still H steps."""
    config = configured("diloco", total_steps=30, protocol={"local_steps_per_round": 30}, cluster=CALM)
    slow = [Slow(0.0, learner, 2.0, 1_000.0) for learner in (1, 2)]
    plan = ChaosPlan((*slow, Clog(2.5, 0, SYNCER, 24.0)))
    assert_same_bits(theta(atoll_run(config, plan)), theta(atoll_run(config)))


def language_run(tmp_path: Path, seed: int, **protocol: Any) -> str:
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(f"{n} squared is {n * n}, and its half is {n / 2}." * 3 for n in range(300)))
    model = {"numbers": {"layers": 2, "width": 32, "heads": 2}}
    config = load(preset_name="decoupled", overrides={
        "seed": seed, "learners": 3, "total_steps": 12, "model": model,
        "protocol": {"local_steps_per_round": 4, "fragments": 4, **protocol},
        "data": {"corpus": str(text), "seq_len": 16, "batch_size": 2, "heldout_batches": 1},
    })  # fmt: skip
    return _sha256(config)


def _sha256(config: Config) -> str:
    executor = TensorExecutor(language_task(config))
    VirtualCluster(config, executor_for=executor).run(until_seconds=10_000.0)
    return executor.disk.theta_sha256()


@pytest.mark.parametrize("rounding", mostly_soak([False, True], keep=[True]))
def test_decoupled_run_gives_the_same_theta_for_the_same_seed_only(
    tmp_path: Path, rounding: bool
) -> None:
    first = language_run(tmp_path, 1, stochastic_rounding=rounding)
    assert language_run(tmp_path, 1, stochastic_rounding=rounding) == first
    assert language_run(tmp_path, 2, stochastic_rounding=rounding) != first
