"""Published methods beside the family, each against a plain loop. docs/research/methods.md has the formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import async_loop
import diloco_loop
import eager_loop
import heloco_loop
import pytest
import sparse_loop
import torch
from plain_muon import PlainMuon
from task import (
    BETAS,
    CLIP,
    WEIGHT_DECAY,
    Net,
    adamw,
    assert_same_bits,
    atoll_run,
    batches,
    configured,
    loss,
    relative,
    task_module,
    theta,
)
from torch import Tensor

from atoll.executor.virtual_run import TensorExecutor
from atoll.rules import learning_rate
from atoll.sim.cluster import VirtualCluster
from atoll.store.versions import Version, average_of

STEPS, INTERVAL, LEARNERS = 24, 6, 3
ROUNDS = {"local_steps_per_round": INTERVAL}
RATES = [learning_rate(configured("diloco", total_steps=STEPS), t) for t in range(STEPS)]
"""`test_oracles.py` holds this function to a formula of its own."""
COMMON = {"learners": LEARNERS, "interval": INTERVAL, "clip": CLIP, "rates": RATES, "loss": loss, "make_model": Net,
          "batch": batches()}  # fmt: skip


def nesterov(rate: float = 0.7, momentum: float = 0.9) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda params: torch.optim.SGD(params, lr=rate, momentum=momentum, nesterov=True)


def assert_learners_hold(executor: TensorExecutor, models: list[torch.nn.Module]) -> None:
    for learner, model in enumerate(models):
        assert_same_bits(executor.learners[learner].model.state_dict(), model.state_dict())


def muon(params: list[Tensor], adam_rate: float = 1.0) -> PlainMuon:
    """The last two parameters are the head's, which AdamW steps."""
    matrices = [p for p in params[:-2] if p.dim() == 2]
    return PlainMuon(params, matrices, momentum=0.95, betas=BETAS, weight_decay=WEIGHT_DECAY, adam_rate=adam_rate)


@pytest.mark.parametrize("adam_rate", [1.0, 2.0])
def test_muloco_is_diloco_with_muon_inside_up_to_rounding(adam_rate: float) -> None:
    # Atoll turns all matrices of one shape as one batch, and a batched product adds in another order than a single one.
    executor = atoll_run(configured("muloco", total_steps=STEPS, protocol=ROUNDS, inner={"adam_rate": adam_rate}))
    center, _ = diloco_loop.train(make_optimizer=partial(muon, adam_rate=adam_rate), make_outer=nesterov(), **COMMON)
    assert relative(theta(executor), center.state_dict()) < 1e-5
    inside, _ = diloco_loop.train(make_optimizer=adamw, make_outer=nesterov(), **COMMON)
    assert relative(inside.state_dict(), center.state_dict()) > 1e-2, "AdamW inside is another method"


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_sparseloco_is_the_published_loop_bit_for_bit(share: float) -> None:
    protocol = ROUNDS | {"codec_up": f"chunk_top_k:{share}"}
    executor = atoll_run(configured("sparseloco", total_steps=STEPS, protocol=protocol))
    center, models = sparse_loop.train(make_optimizer=adamw, share=share, decay=0.95, **COMMON)
    assert_same_bits(theta(executor), center.state_dict())
    assert_learners_hold(executor, models)


def test_pier_gathers_its_momentum_then_applies_and_lowers_it_bit_for_bit() -> None:
    """12 rounds: 3 that gather, then 0.9, from the sixth on 0.5 and from the ninth on half the rate."""
    outer = {"outer_momentum": 0.9, "momentum_warmup": 0.25, "momentum_schedule": [[0.5, 0.5]], "rate_schedule": [[0.75, 0.5]]}
    executor = atoll_run(configured("pier", total_steps=STEPS, protocol={"local_steps_per_round": 2}, outer=outer))
    center, _ = diloco_loop.train(make_optimizer=adamw, make_outer=PierOuter, **COMMON | {"interval": 2})
    assert_same_bits(theta(executor), center.state_dict())


class PierOuter:
    """Nesterov as written; in the first rounds the momentum grows, and Theta takes the outer gradient alone."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params, self.round = params, 0
        self.buffers: list[Tensor] = []

    @torch.no_grad()
    def step(self) -> None:
        self.round += 1
        momentum, rate = 0.5 if self.round >= 6 else 0.9, 0.35 if self.round >= 9 else 0.7
        gradients = [p.grad for p in self.params if p.grad is not None]
        if self.round == 1:
            self.buffers = [g.clone() for g in gradients]
        else:
            self.buffers = [b * momentum + g for b, g in zip(self.buffers, gradients, strict=True)]
        for p, g, b in zip(self.params, gradients, self.buffers, strict=True):
            p.sub_(g) if self.round <= 3 else p.add_(g.add(b, alpha=momentum), alpha=-rate)


OUTERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.4),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.4, momentum=0.9),
    "nesterov": nesterov(0.4),
}


@pytest.mark.parametrize("optimizer", OUTERS)
def test_eager_is_the_published_loop_with_an_outer_optimiser_on_every_learner(optimizer: str) -> None:
    """Up to rounding: the published loop adds the own share before the outer optimiser, Atoll after it, to the announced version.
    27 steps, so that at the end learners stand in the middle of a round and hold what they added at its start."""
    protocol = {"local_steps_per_round": INTERVAL, "overlap": INTERVAL}
    config = configured("eager", total_steps=27, protocol=protocol, outer={"outer_optimizer": optimizer})
    executor = atoll_run(config)
    rates = [learning_rate(config, t) for t in range(27)]
    settings = COMMON | {"rates": rates}
    center, models = eager_loop.train(make_optimizer=adamw, make_outer=OUTERS[optimizer], **settings)
    assert relative(theta(executor), center.state_dict()) < 1e-5
    for learner, model in enumerate(models):
        assert relative(executor.learners[learner].model.state_dict(), model.state_dict()) < 1e-5
    delayed, _ = async_loop.train(make_optimizer=adamw, make_outer=OUTERS[optimizer], **settings)
    assert relative(delayed.state_dict(), center.state_dict()) > 1e-3, "without the own share it is another method"


@pytest.mark.parametrize("ramp", [0.0, 0.3])
def test_average_of_theta_over_time_is_the_plain_recursion_over_stored_versions(ramp: float) -> None:
    protocol = {"fragments": 3, "local_steps_per_round": 3, "fragmentation": "tensor", "ramp": ramp, "codec_down": "int8"}
    config = configured("decoupled", total_steps=STEPS, protocol=protocol, outer={"average_decay": 0.8})
    executor = TensorExecutor(task_module(config))
    stored: list[list[Tensor]] = [[] for _ in range(3)]
    put = executor.disk.put

    def noted(t: int, versions: dict[int, Version], inputs: object = None) -> None:
        for p, version in versions.items():
            stored[p].append(version.theta)
        put(t, versions, None)

    executor.disk.put = noted  # type: ignore[method-assign, assignment]
    VirtualCluster(config, executor_for=executor).run(until_seconds=2_000.0)
    averages, _ = average_of(executor.disk.newest()) or ([], [])
    for found, thetas in zip(averages, stored, strict=True):
        expected = thetas[0]
        for value in thetas[1:]:
            expected = expected * 0.8 + value * (1.0 - 0.8)
        assert len(thetas) > 3 and torch.equal(found, expected)


def test_heloco_turns_what_departs_from_the_momentum_as_the_plain_loop_does() -> None:
    # Up to rounding: the loop corrects in float64. Rounds are made synchronous here, and the arithmetic is the same in any.
    together = {"quorum": "all", "adopt": "exact", "grace": "none", "pace": 0.0, "overlap": 0, "anchor": "adopted"}
    whole = {"fragmentation": "whole", "codec_up": "fp32", "codec_down": "fp32", "aggregation_weighting": "uniform"}
    executor = atoll_run(configured("heloco", total_steps=STEPS, protocol={"local_steps_per_round": 3} | together | whole))
    center, cases = heloco_loop.train(make_optimizer=adamw, rate=0.7, momentum=0.9, **COMMON | {"interval": 3})
    assert all(cases.values()), f"every case of the correction occurs: {cases}"
    assert relative(theta(executor), center.state_dict()) < 1e-5
