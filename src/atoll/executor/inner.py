"""The inner optimiser: one place that builds it, sets its rate and takes its step. Learners use it on their weights;
data-parallel training uses it on Theta."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from atoll.config import Config
from atoll.ids import OuterStep
from atoll.rules import learning_rate


def build_optimizer(config: Config, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    inner = config.inner
    params = list(params)
    fused = all(p.dtype == torch.float32 for p in params)
    match inner.optimizer:
        case "AdamW":
            return torch.optim.AdamW(
                params, lr=inner.learning_rate, betas=inner.betas, weight_decay=inner.weight_decay, fused=fused
            )
        case "Adam":
            return torch.optim.Adam(
                params, lr=inner.learning_rate, betas=inner.betas, weight_decay=inner.weight_decay, fused=fused
            )
        case "SGD":
            return torch.optim.SGD(
                params, lr=inner.learning_rate, momentum=inner.momentum, weight_decay=inner.weight_decay, fused=fused
            )


def optimizer_step(config: Config, optimizer: torch.optim.Optimizer, outer_step: OuterStep) -> None:
    """Clip, set the rate for this outer step, step, and drop the gradients."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if config.inner.clip_norm > 0:
        nn.utils.clip_grad_norm_(params, config.inner.clip_norm)
    rate = learning_rate(config, outer_step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
