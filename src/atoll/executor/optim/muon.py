"""Muon: a hidden matrix steps along the orthogonal factor of its momentum, everything else (embeddings, heads, norms) by AdamW.

Why it is here: averaging learners keeps what their updates have in common. AdamW's update of a small batch is mostly noise
scaled to full size, so M learners share little; an orthogonal factor spends the step on all directions of the gradient alike, and
learners that saw different text agree far better (docs/research/results.md). K. Jordan et al. 2024; the factor 0.2 is that
of J. Liu et al. 2025 (arXiv 2502.16982): updates as large as AdamW's, so one learning rate serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

RMS = 0.2
ROUNDS = 5
A, B, C = 3.4445, -4.7750, 2.0315
"""Of the quintic that drives singular values to about 1 in five rounds, quickly rather than exactly."""
ALONE_NUMEL = 1 << 22
ADAM_STATE = frozenset({"step", "exp_avg", "exp_avg_sq"})


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


def goes_alone(p: Tensor) -> bool:
    """torch.optim.Muon takes one matrix after another, in bf16. From about this size on that is as fast on a GPU as a batch, in a
    fraction of the memory: 17 against 15 ms and 48 against 1,920 MiB for 24 matrices of 2,048 x 2,048 on an H200. Half as wide
    it takes four times as long, with stacks of experts 30 times; a CPU's bf16 products make it three to eight times as slow."""
    return p.is_cuda and p.dim() == 2 and p.numel() >= ALONE_NUMEL


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for `matrices`, or stacks of them, and torch's AdamW for the other parameters. One group and one state for all, so
    that peers and snapshots see one optimiser; a matrix has the state that torch.optim.Muon gives it."""

    def __init__(
        self, params: Iterable[Tensor], matrices: Iterable[Tensor], *, lr: float, momentum: float, betas: tuple[float, float],
        weight_decay: float, adam_rate: float = 1.0,
    ) -> None:  # fmt: skip
        """`adam_rate`: what AdamW steps has this multiple of the group's rate, and decays at it."""
        everything, chosen = list(params), {id(p) for p in matrices}
        fused = all(p.dtype == torch.float32 for p in everything)
        # `fused` is for load_state_dict: fused kernels want the step counts of AdamW on the parameters' device
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "weight_decay": weight_decay, "fused": fused}
        super().__init__(everything, defaults)
        alone = [p for p in everything if id(p) in chosen and goes_alone(p)]
        others = [p for p in everything if id(p) not in chosen]
        self._chosen, self._adam_rate = chosen, adam_rate
        self._batched = [p for p in everything if id(p) in chosen and not goes_alone(p)]
        self._parts: list[torch.optim.Optimizer] = []
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=lr, betas=betas, weight_decay=weight_decay, fused=fused))
        if alone:
            rule = "match_rms_adamw"  # `reach`
            self._parts.append(torch.optim.Muon(alone, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn=rule))

    def state_keys(self, parameter: Tensor) -> frozenset[str]:
        """The names of what is kept for it from the first step on."""
        return frozenset({"momentum_buffer"}) if id(parameter) in self._chosen else ADAM_STATE

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
        (group,) = self.param_groups
        for part in self._parts:
            part.state = self.state  # which load_state_dict replaces
            part.param_groups[0].update((key, group[key]) for key in part.param_groups[0].keys() & group.keys() - {"params"})
            if isinstance(part, torch.optim.AdamW):
                part.param_groups[0]["lr"] = group["lr"] * self._adam_rate
            part.step()
        moving = [(p, p.grad) for p in self._batched if p.grad is not None]
        ahead = [_ahead(grad, self.state[p], group["momentum"]) for p, grad in moving]
        for (p, _), factor in zip(moving, factors(ahead), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(factor.to(p.dtype), alpha=-group["lr"] * reach(*p.shape[-2:]))
        return loss


def _ahead(grad: Tensor, state: dict[str, Any], mu: float) -> Tensor:
    """The momentum with this gradient in it, and once more ahead, as Nesterov looks; torch.optim.Muon's arithmetic."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(grad)
    buffer: Tensor = state["momentum_buffer"]
    buffer.lerp_(grad, 1 - mu)
    return grad.lerp(buffer, mu)
