"""The inner optimiser: one place that builds it, sets its rate and takes its step. Learners use it on their weights;
data-parallel training uses it on Theta."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from atoll.config import Config
from atoll.executor.optim.muon import ADAM_STATE, MuonWithAdamW
from atoll.ids import OuterStep
from atoll.rules import learning_rate
from atoll.tensors.layout import Fragment


def turned_names(config: Config, fragments: Iterable[Fragment]) -> frozenset[str]:
    """What Muon steps by an orthogonal factor: matrices, and stacks of them, that are neither embeddings nor excepted by name."""
    excepted = [glob.strip() for glob in config.inner.muon_except.split(",")]
    slots = [slot for fragment in fragments for slot in fragment.params]
    return frozenset(
        slot.name for slot in slots
        if len(slot.shape) in (2, 3) and not slot.embedding and not any(fnmatchcase(slot.name, glob) for glob in excepted)
    )  # fmt: skip


def build_optimizer(config: Config, named: Mapping[str, Tensor], fragments: Iterable[Fragment]) -> torch.optim.Optimizer:
    """`named`: the parameters by name, those that train; `fragments` know which are embeddings."""
    inner = config.inner
    params = list(named.values())
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
        case "Muon":
            turned = turned_names(config, fragments)
            return MuonWithAdamW(
                params, [p for name, p in named.items() if name in turned], lr=inner.learning_rate, momentum=inner.muon_momentum,
                betas=inner.betas, weight_decay=inner.weight_decay, adam_rate=inner.adam_rate,
            )  # fmt: skip


def state_keys(optimizer: torch.optim.Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> frozenset[str] | None:
    """The names of what the optimiser keeps for a parameter, from its first step on. None: not known, for a class of the user's
    own that has not stepped yet."""
    if own := optimizer.state.get(parameter):
        return frozenset(own)
    if isinstance(optimizer, MuonWithAdamW):
        return optimizer.state_keys(parameter)
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return ADAM_STATE | {"max_exp_avg_sq"} if group.get("amsgrad") else ADAM_STATE
    return frozenset({"momentum_buffer"}) if type(optimizer) is torch.optim.SGD else None


def divisors(tokens: Sequence[int]) -> list[float]:
    """What each micro-batch's mean loss is divided by, so that every token of a step weighs the same. Batches shrink where
    slices fail, and answers differ in length."""
    total = sum(tokens)
    return [total / t if t else math.inf for t in tokens] if total else [float(len(tokens))] * len(tokens)


def optimizer_step(config: Config, optimizer: torch.optim.Optimizer, outer_step: OuterStep) -> None:
    """Clip, set the rate for this outer step, step, and drop the gradients."""
    clip_gradients(config, optimizer)
    step_at_rate(config, optimizer, outer_step)


def clip_gradients(config: Config, optimizer: torch.optim.Optimizer) -> None:
    """Of sharded gradients the ranks add up the norm: it is the last that a step needs of other ranks."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if config.inner.clip_norm > 0:
        nn.utils.clip_grad_norm_(params, config.inner.clip_norm)


def step_at_rate(config: Config, optimizer: torch.optim.Optimizer, outer_step: OuterStep) -> None:
    rate = learning_rate(config, outer_step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
