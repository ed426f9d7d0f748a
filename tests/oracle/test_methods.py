"""Published methods beside the family, each against a plain loop. docs/research/methods.md has the formulas."""

from __future__ import annotations

from collections.abc import Callable

import diloco_loop
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
    theta,
)
from torch import Tensor

from atoll.executor.virtual_run import TensorExecutor
from atoll.rules import learning_rate

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


def muon(params: list[Tensor]) -> PlainMuon:
    """The last two parameters are the head's, which AdamW steps."""
    matrices = [p for p in params[:-2] if p.dim() == 2]
    return PlainMuon(params, matrices, momentum=0.95, betas=BETAS, weight_decay=WEIGHT_DECAY)


def test_muloco_is_diloco_with_muon_inside_up_to_rounding() -> None:
    # Atoll turns all matrices of one shape as one batch, and a batched product adds in another order than a single one.
    executor = atoll_run(configured("muloco", total_steps=STEPS, protocol=ROUNDS))
    center, _ = diloco_loop.train(make_optimizer=muon, make_outer=nesterov(), **COMMON)
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
