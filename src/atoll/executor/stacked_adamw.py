"""AdamW for stacked weights: one pass over [M, ...] tensors, each learner with its own rate, step count and clipping.

Each learner still has a torch optimiser of its own, which is what peers and snapshots are given. Its moments are this learner's
slices of the stacked ones, so nothing is held twice; whoever empties or loads it is noticed at the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.config import Config
from atoll.errors import ConfigError
from atoll.ids import LearnerId, OuterStep
from atoll.rules import learning_rate

EPS = 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")


class StackedAdamW:
    def __init__(self, config: Config, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], *, compiled: bool) -> None:
        if config.inner.optimizer != "AdamW":
            raise ConfigError(f"inner.optimizer = {config.inner.optimizer!r}: a fleet steps with AdamW only")
        self._config = config
        self._weights, self._grads = list(weights.values()), list(grads.values())
        self._moments = {name: [torch.zeros_like(w) for w in self._weights] for name in MOMENTS}
        self._update: Callable[..., None] = torch.compile(_update, dynamic=False) if compiled else _update

    @torch.no_grad()
    def step(self, who: Mapping[LearnerId, tuple[OuterStep, torch.optim.Optimizer]]) -> None:
        inner, learners, device = self._config.inner, self._weights[0].shape[0], self._weights[0].device
        numbers = torch.zeros(4, learners)  # taking part, rate, and the two bias corrections
        numbers[2:] = 1.0
        for m, (outer_step, optimizer) in who.items():
            count = self._count(m, optimizer)
            corrections = [1 - beta**count for beta in inner.betas]
            numbers[:, m] = torch.tensor([1.0, learning_rate(self._config, outer_step), *corrections])
        part, rate, first, second = (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)
        self._update(
            [w.detach() for w in self._weights], self._grads, self._moments["exp_avg"], self._moments["exp_avg_sq"], part, rate,
            first, second, inner.betas[0], inner.betas[1], inner.weight_decay, inner.clip_norm,
        )  # fmt: skip

    def _count(self, m: LearnerId, optimizer: torch.optim.Optimizer) -> int:
        """This step's number. A state that is not these slices any more was emptied or loaded, and is taken over."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        state = optimizer.state
        mine = state[params[0]].get("exp_avg") if params[0] in state else None
        if mine is None or mine.data_ptr() != self._moments["exp_avg"][0][m].data_ptr():
            count = torch.tensor(float(state[params[0]].get("step", 0.0)))
            for at, parameter in enumerate(params):
                self._take_over(m, at, state[parameter])
                state[parameter]["step"] = count  # one for all: they step together
        count = state[params[0]]["step"]
        count += 1
        return int(count)

    def _take_over(self, m: LearnerId, at: int, found: dict[str, Any]) -> None:
        for name in MOMENTS:
            own = self._moments[name][at][m]
            if name in found:
                own.copy_(found[name])
            else:
                own.zero_()
            found[name] = own


def _update(
    weights: list[Tensor], grads: list[Tensor], first: list[Tensor], second: list[Tensor], part: Tensor, rate: Tensor,
    correct_first: Tensor, correct_second: Tensor, beta1: float, beta2: float, decay: float, clip: float,
) -> None:  # fmt: skip
    """torch.optim.AdamW's arithmetic; who takes no part keeps everything as it is."""
    scale = torch.ones_like(rate)
    if clip > 0:
        norm = torch.stack([g.flatten(1).square().sum(dim=1) for g in grads]).sum(dim=0).sqrt()
        scale = torch.clamp(clip / (norm + 1e-6), max=1.0)
    for w, g, m, v in zip(weights, grads, first, second, strict=True):
        shape = (-1, *[1] * (w.dim() - 1))
        on, lr = part.view(shape), rate.view(shape)
        g = g * scale.view(shape)
        m.add_(on * (1 - beta1) * (g - m))
        v.add_(on * (1 - beta2) * (g * g - v))
        denominator = (v / correct_second.view(shape)).sqrt() + EPS
        w.sub_(on * lr * (decay * w + (m / correct_first.view(shape)) / denominator))
