"""AdamW and Muon for stacked weights: one pass over [M, ...] tensors, each learner with its own rate, step count and clipping.

Each learner still has a torch optimiser of its own, for peers and snapshots. Its moments are the learner's slices of the stacked
ones, so nothing is held twice. If its state is cleared or loaded, the next step notices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from atoll.config import Config
from atoll.errors import ConfigError
from atoll.executor.optim.muon import factors, reach
from atoll.ids import LearnerId, OuterStep
from atoll.rules import learning_rate

EPS = 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")
TURNED = ("momentum_buffer",)
STACKED = ("AdamW", "Muon")
Stepping: TypeAlias = Mapping[LearnerId, tuple[OuterStep, torch.optim.Optimizer]]


class StackedOptimizer:
    """`turned`: the weights that Muon steps by their orthogonal factor; none of them for AdamW."""

    def __init__(self, config: Config, weights: Mapping[str, Tensor], turned: Collection[str], *, compiled: bool) -> None:
        if config.inner.optimizer not in STACKED:
            raise ConfigError(f"inner.optimizer = {config.inner.optimizer!r}: a fleet steps with AdamW or Muon only")
        self._config = config
        self._weights = list(weights.values())
        self._turned = frozenset(at for at, name in enumerate(weights) if name in turned)
        self._moments = [
            {name: torch.zeros_like(w) for name in (TURNED if at in self._turned else MOMENTS)}
            for at, w in enumerate(self._weights)
        ]
        self._counted = next((at for at in range(len(self._weights)) if at not in self._turned), None)
        """A tensor that AdamW steps; only those have step counts."""
        self.counts_apart = config.protocol.freeze_not_due or (
            not config.inner.preserve_optimizer_state and config.protocol.fragments > 1
        )
        """Each tensor has its own step count, because not all of them step, or are reset, together."""
        self._update: Callable[..., None] = torch.compile(_update, dynamic=False) if compiled else _update

    @torch.no_grad()
    def step(self, who: Stepping, grads: list[Tensor]) -> None:
        inner, learners, device = self._config.inner, self._weights[0].shape[0], self._weights[0].device
        numbers = torch.zeros(4, learners)  # taking part, rate, and the two bias corrections
        numbers[2:] = 1.0
        for m, (outer_step, optimizer) in who.items():
            count = self._count(m, optimizer)
            corrections = [1 - beta**count for beta in inner.betas]
            numbers[:, m] = torch.tensor([1.0, learning_rate(self._config, outer_step), *corrections])
        part, rate, first, second = (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)
        self._update(
            [w.detach() for w in self._weights], grads, self._moments, part, rate, first, second,
            inner.betas[0], inner.betas[1], inner.weight_decay, inner.clip_norm, inner.muon_momentum, inner.adam_rate,
        )  # fmt: skip

    @torch.no_grad()
    def step_some(self, who: Stepping, grads: list[Tensor], which: Mapping[LearnerId, Collection[int]]) -> None:
        """Each learner steps only the tensors that `which` names. The others keep their weights, moments and step counts, and
        their gradients do not count for clipping. It goes tensor by tensor and is slow: for ablations."""
        inner, learners, device = self._config.inner, self._weights[0].shape[0], self._weights[0].device
        states = {m: self._states(m, optimizer) for m, (_, optimizer) in who.items()}
        rates = torch.tensor([learning_rate(self._config, who[m][0]) if m in who else 0.0 for m in range(learners)]).to(device)
        parts = torch.zeros(len(self._weights), learners)
        for m in who:
            parts[list(which[m]), m] = 1.0
        parts = parts.to(device)
        if inner.clip_norm > 0:
            squares = torch.stack([g.flatten(1).square().sum(dim=1) for g in grads])
            scale = torch.clamp(inner.clip_norm / ((squares * parts).sum(dim=0).sqrt() + 1e-6), max=1.0)
            for g in grads:
                g.mul_(scale.view(-1, *[1] * (g.dim() - 1)))
        for at in sorted({at for m in who for at in which[m]}):
            counts = torch.ones(learners)
            for m in who:
                if at in which[m] and at not in self._turned:
                    states[m][at]["step"] += 1
                    counts[m] = states[m][at]["step"]
            first, second = ((1 - beta**counts).to(device) for beta in inner.betas)
            _update(
                [self._weights[at].detach()], [grads[at]], [self._moments[at]], parts[at], rates, first, second,
                inner.betas[0], inner.betas[1], inner.weight_decay, 0.0, inner.muon_momentum, inner.adam_rate,
            )  # fmt: skip

    def _count(self, m: LearnerId, optimizer: torch.optim.Optimizer) -> int:
        """This step's number."""
        states = self._states(m, optimizer)
        if self._counted is None:
            return 1
        count = states[self._counted]["step"]
        count += 1
        return int(count)

    def _states(self, m: LearnerId, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """The states of its tensors. A state that no longer refers to these slices was cleared or loaded, and is copied in."""
        states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
        if self.counts_apart:
            for at, found in enumerate(states):
                if not self._is_mine(m, at, found):
                    self._take_over(m, at, found, torch.tensor(float(found.get("step", 0.0))))
        elif not self._is_mine(m, 0, states[0]):
            first = {} if self._counted is None else states[self._counted]
            count = torch.tensor(float(first.get("step", 0.0)))  # one for all: they step together
            for at, found in enumerate(states):
                self._take_over(m, at, found, count)
        return states

    def _is_mine(self, m: LearnerId, at: int, found: dict[str, Any]) -> bool:
        name, stacked = next(iter(self._moments[at].items()))
        held = found.get(name)
        return held is not None and held.data_ptr() == stacked[m].data_ptr()

    def _take_over(self, m: LearnerId, at: int, found: dict[str, Any], count: Tensor) -> None:
        for name, stacked in self._moments[at].items():
            own = stacked[m]
            if name in found:
                own.copy_(found[name])
            else:
                own.zero_()
            found[name] = own
        if at not in self._turned:
            found["step"] = count


def _update(
    weights: list[Tensor], grads: list[Tensor], moments: list[dict[str, Tensor]], part: Tensor, rate: Tensor,
    correct_first: Tensor, correct_second: Tensor, beta1: float, beta2: float, decay: float, clip: float, mu: float,
    adam_rate: float,
) -> None:  # fmt: skip
    """The arithmetic of `optim.build.optimizer_step`; learners that take no part keep everything unchanged."""
    if clip > 0:
        norm = torch.stack([g.square().sum(dim=tuple(range(1, g.dim()))) for g in grads]).sum(dim=0).sqrt()
        scale = torch.clamp(clip / (norm + 1e-6), max=1.0)
        grads = [g * _like(scale, g) for g in grads]
    turned = [at for at, own in enumerate(moments) if "momentum_buffer" in own]
    for at in sorted(set(range(len(weights))) - set(turned)):
        w, g, (m, v) = weights[at], grads[at], moments[at].values()
        on, lr = _like(part, w), _like(adam_rate * rate, w)
        m.add_(on * (1 - beta1) * (g - m))
        v.add_(on * (1 - beta2) * (g * g - v))
        denominator = (v / _like(correct_second, w)).sqrt() + EPS
        w.sub_(on * lr * (decay * w + (m / _like(correct_first, w)) / denominator))
    ahead: list[Tensor] = []
    for at in turned:
        g, buffer = grads[at], moments[at]["momentum_buffer"]
        buffer.add_(_like(part, g) * (1 - mu) * (g - buffer))
        ahead.append(g + mu * (buffer - g))
    for at, factor in zip(turned, factors(ahead), strict=True):
        w = weights[at]
        w.sub_(_like(part * rate, w) * (decay * w + reach(*w.shape[-2:]) * factor))


def _like(per_learner: Tensor, w: Tensor) -> Tensor:
    return per_learner.view(-1, *[1] * (w.dim() - 1))
