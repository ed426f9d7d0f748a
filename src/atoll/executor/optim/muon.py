"""Muon: a hidden matrix steps along the orthogonal factor of its momentum, everything else (embeddings, heads, norms) by AdamW.

Why it is here: averaging learners keeps what their updates have in common. AdamW's update of a small batch is mostly noise
scaled to full size, so M learners share little; an orthogonal factor spends the step on all directions of the gradient alike, and
learners that saw different text agree far better (docs/research/results.md). K. Jordan et al. 2024; the factor 0.2 is that
of J. Liu et al. 2025 (arXiv 2502.16982): updates as large as AdamW's, so one learning rate serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor

ADAM_EPS = 1e-8
RMS = 0.2
ROUNDS = 5
A, B, C = 3.4445, -4.7750, 2.0315
"""Of the quintic that drives singular values to about 1 in five rounds, quickly rather than exactly."""


def orthogonal(x: Tensor) -> Tensor:
    """About U V^T of x = U S V^T, for every matrix in the last two axes. The rounds are on the Gram matrix of the shorter side:
    turning the standing matrices over would cost as much memory traffic as the rounds themselves."""
    standing = x.shape[-2] > x.shape[-1]
    x = x / (x.float().square().sum(dim=(-2, -1), keepdim=True).sqrt() + 1e-7).to(x.dtype)
    for _ in range(ROUNDS):
        gram = x.mT @ x if standing else x @ x.mT
        mixed = B * gram + C * (gram @ gram)
        x = A * x + (x @ mixed if standing else mixed @ x)
    return x


def factors(matrices: Sequence[Tensor]) -> list[Tensor]:
    """The orthogonal factor of each, in fp32. Those of one shape are turned as one batch: a hidden layer has many of a kind, and
    one at a time their products are too small to be worth the calls."""
    found = list(matrices)
    groups: dict[tuple[int, ...], list[int]] = {}
    for at, x in enumerate(matrices):
        groups.setdefault(tuple(x.shape), []).append(at)
    for members in groups.values():
        alike = torch.stack([matrices[at] for at in members])
        # Five rounds stand bf16's error. A CPU's bf16 products are slower than its fp32 ones.
        turned = orthogonal(alike.bfloat16() if alike.is_cuda else alike).float()
        for at, factor in zip(members, turned, strict=True):
            found[at] = factor
    return found


def reach(rows: int, columns: int) -> float:
    """What an orthogonal factor is multiplied by, so that the root mean square of its entries is RMS."""
    return RMS * math.sqrt(max(rows, columns))


class Muon(torch.optim.Optimizer):
    """`turned`: the parameters, matrices or stacks of them, that are stepped by their orthogonal factor."""

    def __init__(
        self, params: Iterable[Tensor], turned: Iterable[Tensor], *, lr: float, momentum: float, betas: tuple[float, float],
        weight_decay: float,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "momentum": momentum, "betas": betas, "weight_decay": weight_decay})
        self._turned = {id(p) for p in turned}

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            turned = [p for p in moving if id(p) in self._turned]
            ahead = [_ahead(p.grad, self.state[p], group["momentum"]) for p in turned]
            for p, factor in zip(turned, factors(ahead), strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(factor.to(p.dtype), alpha=-group["lr"] * reach(*p.shape[-2:]))
            for p in moving:
                if id(p) not in self._turned:
                    _scale(p, p.grad, self.state[p], group)
        return loss


def _ahead(grad: Tensor, state: dict[str, Any], mu: float) -> Tensor:
    """The momentum with this gradient in it, and once more ahead, as Nesterov looks."""
    if not state:
        state["step"], state["momentum_buffer"] = torch.tensor(0.0), torch.zeros_like(grad)
    state["step"] += 1
    buffer = cast(Tensor, state["momentum_buffer"])
    buffer.mul_(mu).add_(grad)
    return grad + mu * buffer


def _scale(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """torch.optim.AdamW's arithmetic."""
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
    state["step"] += 1
    beta1, beta2 = group["betas"]
    first, second, count = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
    first.lerp_(grad, 1 - beta1)
    second.lerp_(grad.square(), 1 - beta2)
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.addcdiv_(first / (1 - beta1**count), (second / (1 - beta2**count)).sqrt() + ADAM_EPS, value=-group["lr"])
