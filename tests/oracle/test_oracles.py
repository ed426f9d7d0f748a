"""Each preset against a loop that a reader can hold against the paper. Bits agree where the order of operations does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import async_loop
import ddp_loop
import diloco_loop
import fedavg_loop
import pytest
import streaming_loop
import torch
from task import (
    CLIP,
    FRAGMENTS,
    LEARNING_RATE,
    Net,
    adamw,
    assert_same_bits,
    atoll_run,
    batches,
    configured,
    loss,
    relative,
    theta,
)
from tiers import mostly_soak
from torch import Tensor, nn

from atoll.codecs import codec
from atoll.executor.virtual_run import TensorExecutor
from atoll.rules import learning_rate

STEPS = 24
WARM = 3
"""Steps of warm-up; the config says it as a share."""
SCHEDULE = {"warmup_share": WARM / STEPS, "final_share": 0.1}


def rates(steps: int = STEPS) -> list[float]:
    """Linear warm-up over the first WARM steps, then half a cosine down to a tenth at the end."""
    found = []
    for t in range(steps):
        if t < WARM:
            found.append(LEARNING_RATE * ((t + 1) / (WARM + 1)))
        else:
            progress = (t - WARM) / (steps - WARM)
            found.append(LEARNING_RATE * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2))
    return found


def nesterov(rate: float) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda params: torch.optim.SGD(params, lr=rate, momentum=0.9, nesterov=True)


def shared(**more: Any) -> dict[str, Any]:
    return {"learners": 3, "clip": CLIP, "rates": rates(), "loss": loss, "make_optimizer": adamw, "make_model": Net} | more


def assert_learners_hold(executor: TensorExecutor, models: list[nn.Module]) -> None:
    for learner, model in enumerate(models):
        assert_same_bits(executor.learners[learner].model.state_dict(), model.state_dict())


def test_learning_rate_at_every_outer_step_is_warm_up_and_half_a_cosine() -> None:
    config = configured("diloco", total_steps=STEPS, inner=SCHEDULE)
    assert [learning_rate(config, t) for t in range(STEPS)] == pytest.approx(rates(), rel=1e-12)


def test_ddp_over_several_steps_is_the_plain_loop_bit_for_bit() -> None:
    executor = atoll_run(configured("ddp", total_steps=STEPS, inner=SCHEDULE))
    expected = ddp_loop.train(batch=batches(), **shared())
    assert_same_bits(theta(executor), expected.state_dict())


SIZES = (2, 7, 4)


def fedavg_run(weighting: str = "num_samples") -> TensorExecutor:
    protocol = {"local_steps_per_round": 5, "aggregation_weighting": weighting}
    data = {"samples_by_learner": list(SIZES)}
    return atoll_run(configured("fedavg", total_steps=STEPS, protocol=protocol, inner=SCHEDULE, data=data))


def test_fedavg_with_uneven_batches_is_the_weighted_average_of_updates_bit_for_bit() -> None:
    executor = fedavg_run()
    center, _ = fedavg_loop.train(batch=batches(sizes=SIZES), interval=5, form="updates", **shared())
    assert_same_bits(theta(executor), center.state_dict())


def test_fedavg_with_uneven_batches_is_the_weighted_average_of_models_up_to_rounding() -> None:
    # Theta - mean(Theta - theta_m) and mean(theta_m) are one number with two roundings: the outer step of the whole
    # family works on differences, and FedAvg is its member with outer SGD 1.0.
    center, _ = fedavg_loop.train(batch=batches(sizes=SIZES), interval=5, form="models", **shared())
    assert relative(theta(fedavg_run()), center.state_dict()) < 1e-6


def test_fedavg_with_uneven_batches_is_not_the_uniform_average() -> None:
    assert relative(theta(fedavg_run()), theta(fedavg_run("uniform"))) > 1e-3


@pytest.mark.parametrize(("learners", "interval"), [(3, 6), (4, 8), (1, 6)])
def test_diloco_over_several_rounds_is_algorithm_1_bit_for_bit(learners: int, interval: int) -> None:
    protocol = {"local_steps_per_round": interval}
    executor = atoll_run(configured("diloco", learners=learners, total_steps=STEPS, protocol=protocol, inner=SCHEDULE))
    center, models = diloco_loop.train(
        batch=batches(), interval=interval, make_outer=nesterov(0.7), **shared(learners=learners)
    )
    assert_same_bits(theta(executor), center.state_dict())
    assert_learners_hold(executor, models)


def test_diloco_with_total_steps_no_multiple_of_the_interval_merges_whole_rounds() -> None:
    protocol = {"local_steps_per_round": 7}
    executor = atoll_run(configured("diloco", total_steps=STEPS, protocol=protocol, inner=SCHEDULE))
    center, models = diloco_loop.train(batch=batches(), interval=7, make_outer=nesterov(0.7), **shared())
    assert_same_bits(theta(executor), center.state_dict())
    assert_learners_hold(executor, models)


def test_async_diloco_over_several_rounds_is_the_one_round_delay_bit_for_bit() -> None:
    protocol = {"local_steps_per_round": 6, "overlap": 6}
    executor = atoll_run(configured("async_diloco", total_steps=STEPS, protocol=protocol, inner=SCHEDULE))
    center, models = async_loop.train(batch=batches(), interval=6, make_outer=nesterov(0.7), **shared())
    assert_same_bits(theta(executor), center.state_dict())
    assert_learners_hold(executor, models)


def assert_streaming_is_algorithm_2(taus: list[int], alpha: float, up: str, **protocol: Any) -> None:
    protocol |= {"local_steps_per_round": 7, "layers_per_fragment": 2, "alpha": alpha, "codec_up": up}
    layers = {"numbers": {"layers": 4}}
    executor = atoll_run(configured("streaming", total_steps=STEPS, protocol=protocol, inner=SCHEDULE, model=layers))
    wire = codec(up)
    center, models = streaming_loop.train(
        batch=batches(), interval=7, make_outer=nesterov(0.4), fragments=FRAGMENTS, taus=taus, alpha=alpha,
        codec=None if up == "fp32" else lambda flat: wire.decode(wire.encode(flat)), keep=protocol.get("keep_overlap", False),
        **shared(),
    )  # fmt: skip
    assert_same_bits(theta(executor), center.state_dict())
    assert_learners_hold(executor, models)


MIXES = [(0, 0.0), (0, 0.5), (1, 0.0), (1, 0.5), (4, 0.25)]


@pytest.mark.parametrize(
    ("tau", "alpha", "up"),
    mostly_soak(
        [(tau, alpha, up) for up in ("fp32", "e3m0") for tau, alpha in MIXES],
        keep=[(0, 0.0, "fp32"), (0, 0.5, "e3m0"), (1, 0.0, "e3m0"), (1, 0.5, "fp32"), (4, 0.25, "e3m0")],
    ),
)  # fmt: skip
def test_streaming_with_any_mixing_and_overlap_is_algorithm_2_bit_for_bit(tau: int, alpha: float, up: str) -> None:
    assert_streaming_is_algorithm_2([tau] * 3, alpha, up, overlap=tau)


@pytest.mark.parametrize(("taus", "up"), [([1] * 3, "fp32"), ([4, 2, 3], "e3m0")])
def test_streaming_that_keeps_its_overlap_adds_it_to_each_result(taus: list[int], up: str) -> None:
    assert_streaming_is_algorithm_2(taus, 0.0, up, overlap=max(taus), overlap_by_learner=taus, keep_overlap=True)


def test_streaming_with_an_overlap_per_learner_is_algorithm_2_bit_for_bit() -> None:
    assert_streaming_is_algorithm_2([1, 4, 0], 0.5, "e3m0", overlap=2, overlap_by_learner=[1, 4, 0])
