"""The outer step: from Theta and a merged outer gradient to the next Theta. Pure: no argument is changed.

`delta` is before minus after, so it is *subtracted*, like any gradient. The operations and their order are those of
`torch.optim.SGD` on one flat parameter, bit for bit.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.config.sections import Config

OPTIMIZERS = ("sgd", "momentum", "nesterov", "delayed_nesterov", "gather")


@dataclass(frozen=True, slots=True)
class OuterRule:
    optimizer: str
    """"sgd", "momentum", "nesterov" or "delayed_nesterov"; "gather" keeps a momentum and does not apply it."""
    learning_rate: float
    momentum: float = 0.9
    delay: int = 1
    """N of delayed Nesterov: outer gradients summed for one update of the momentum."""
    c: float = 0.0
    """Share of the momentum that delayed Nesterov applies in each of the steps in between."""
    span: float = 0.0
    """Share of the run that one outer step of a fragment stands for: H / T."""
    warmup: float = 0.0
    momenta: tuple[tuple[float, float], ...] = ()
    rates: tuple[tuple[float, float], ...] = ()

    def at(self, count: int) -> OuterRule:
        """The rule of a fragment's outer step after `count` others. It counts and does not look at the outer step of the run: so
        it is a function of the version before, and a merge that is repeated takes the same."""
        now = (count + 1) * self.span
        if now <= self.warmup + EDGE and self.warmup:
            return OuterRule("gather", 1.0, _in_force(self.momenta, now, self.momentum))
        if not (self.momenta or self.rates):
            return self
        rate = self.learning_rate * _in_force(self.rates, now, 1.0)
        return replace(self, learning_rate=rate, momentum=_in_force(self.momenta, now, self.momentum))


EDGE = 1e-9
"""A share of the run that is a whole number of outer steps means those, whatever the division was rounded to."""


def _in_force(schedule: tuple[tuple[float, float], ...], now: float, before: float) -> float:
    at = bisect_right([start for start, _ in schedule], now + EDGE)
    return schedule[at - 1][1] if at else before


@dataclass(frozen=True, slots=True)
class OuterState:
    momentum: Tensor | None
    pending: Tensor | None
    """The sum of the outer gradients since the last update of the momentum (delayed Nesterov only)."""
    count: int
    """Outer steps taken, or contributions."""
    average: Tensor | None = None
    """Of Theta over time, where the run keeps one."""


def initial_state(rule: OuterRule, numel: int, *, device: torch.device | None = None) -> OuterState:
    """Zeros for the state that the rule has, None for the rest."""
    assert rule.optimizer in OPTIMIZERS and rule.delay >= 1, rule
    momentum = None if rule.optimizer == "sgd" else torch.zeros(numel, dtype=torch.float32, device=device)
    delayed = rule.optimizer == "delayed_nesterov"
    pending = torch.zeros(numel, dtype=torch.float32, device=device) if delayed else None
    return OuterState(momentum, pending, 0)


def outer_step(
    theta: Tensor, delta: Tensor, state: OuterState, rule: OuterRule, contributions: int = 1
) -> tuple[Tensor, OuterState]:
    """The next Theta and the next state, as new tensors. Delayed Nesterov may count contributions: `delta` is their mean."""
    rate, mu = rule.learning_rate, rule.momentum
    count = state.count + 1
    match rule.optimizer:
        case "sgd":
            return theta.add(delta, alpha=-rate), OuterState(None, None, count)
        case "momentum":
            velocity = _accelerated(state, delta, mu)
            return theta.add(velocity, alpha=-rate), OuterState(velocity, None, count)
        case "gather":
            velocity = _accelerated(state, delta, mu)
            return theta.add(delta, alpha=-rate), OuterState(velocity, None, count)
        case "nesterov":
            velocity = _accelerated(state, delta, mu)
            return theta.add(delta.add(velocity, alpha=mu), alpha=-rate), OuterState(velocity, None, count)
        case "delayed_nesterov":
            return _delayed_nesterov(theta, delta if contributions == 1 else delta * contributions, state, rule, contributions)
    raise AssertionError(f"unknown outer optimizer {rule.optimizer!r}")


def mix(local: Tensor, global_: Tensor, alpha: float) -> Tensor:
    """`alpha*local + (1 - alpha)*global_`. 0 gives global's bits, even if local holds NaN; 1 gives local's."""
    if alpha == 0.0:
        return global_.clone()
    if alpha == 1.0:
        return local.clone()
    return local.mul(alpha).add_(global_.mul(1.0 - alpha))


def rebased(local: Tensor, taken: Tensor, global_: Tensor) -> Tensor:
    """`global_ + (local - taken)`: what was trained since `taken`, on top of global. Where nothing moved, global's bits."""
    return local.sub(taken).add_(global_)


def averaged(before: Tensor | None, theta: Tensor, decay: float) -> Tensor:
    """The average after another outer step; it starts at the first Theta that was merged. Products and sum are each rounded."""
    return theta.clone() if before is None else before.mul(decay).add_(theta.mul(1.0 - decay))


def _accelerated(state: OuterState, delta: Tensor, mu: float) -> Tensor:
    assert state.momentum is not None, "this rule keeps a momentum: start from initial_state(rule, numel)"
    if state.count == 0:
        return delta.clone()  # as in torch: mu*0 + (-0.0) would be +0.0
    return state.momentum.mul(mu).add_(delta)


def _delayed_nesterov(
    theta: Tensor, delta: Tensor, state: OuterState, rule: OuterRule, contributions: int
) -> tuple[Tensor, OuterState]:
    assert state.momentum is not None and state.pending is not None, "start from initial_state(rule, numel)"
    n, c, mu = rule.delay, rule.c, rule.momentum
    velocity, pending = state.momentum, state.pending.add(delta)
    direction = delta.div(n)
    count = state.count + contributions
    if count // n > state.count // n:
        velocity = velocity.mul(mu).add_(pending.div_(n))
        direction.add_(velocity, alpha=(1.0 - c * n + c) * mu)
        pending = torch.zeros_like(state.pending)
    elif c != 0.0:
        direction.add_(velocity, alpha=c * mu)
    return theta.add(direction, alpha=-rule.learning_rate), OuterState(velocity, pending, count)


def outer_rule(config: Config) -> OuterRule | None:
    o = config.outer
    if o.outer_optimizer == "inner":
        return None
    return OuterRule(
        optimizer=o.outer_optimizer, learning_rate=o.outer_learning_rate, momentum=o.outer_momentum, delay=o.delay,
        span=config.protocol.local_steps_per_round / config.total_steps, warmup=o.momentum_warmup, momenta=o.momentum_schedule,
        rates=o.rate_schedule,
    )  # fmt: skip
