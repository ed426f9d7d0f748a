"""HeLoCo's correction: a learner's outer gradient of a tensor is turned towards the outer momentum as far as it departs from it.

A learner that trained long on an old version, or on other data, may point against the direction in which Theta moves. With c the
cosine between the two: aligned ones stay, those that point back lose a part of what points back, and those in between are
turned and keep their length. A. Al Asif et al. 2026 (arXiv 2606.00271); the constants are our choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.tensors.norms import inner_products, squared_norms

KEPT = 0.2
"""Outer gradients of different learners are nearly orthogonal: a larger cosine is already agreement."""
SHRINKING = 1.0
TURNING = 1.0
KAPPA = 1.0
"""How much a gradient that is short beside the momentum is trusted less."""


class Measures(NamedTuple):
    """Of one tensor of an outer gradient, beside the momentum's."""

    length: float
    along: float
    """The momentum's length."""
    inner: float


def measures(voters: Sequence[Tensor], momentum: Tensor, parts: Sequence[slice]) -> list[list[Measures]]:
    """Part by part, of every voter. They are read from the device at once: each look would wait for all that the device has to
    do, and the fleets of several runs share one. Sums are over a fixed tree."""
    found: list[Tensor] = []
    for part in parts:
        direction = momentum[part].view(1, -1)
        found.append(squared_norms(direction))
        for voter in voters:
            delta = voter[part].view(1, -1)
            found += [squared_norms(delta), inner_products(delta, direction)]
    numbers = iter(torch.cat(found).tolist()) if found else iter(())
    return [
        [Measures(math.sqrt(next(numbers)), along, next(numbers)) for _ in voters]
        for along in (math.sqrt(next(numbers)) for _ in parts)
    ]


def corrected(delta: Tensor, momentum: Tensor, measured: Measures) -> Tensor:
    """Of one tensor, flat. A turned gradient's length follows from the cosine, so nothing is measured anew."""
    length, along, inner = measured
    if length == 0.0 or along == 0.0:
        return delta
    cosine = inner / (length * along)
    trust = length / (length + KAPPA * along)
    if cosine >= KEPT:
        return delta
    if cosine < 0.0:
        back = min(SHRINKING * -cosine * trust, 1.0)
        return delta - momentum.mul(back * cosine * length / along)
    share = min(TURNING * (KEPT - cosine) * trust, 1.0)
    rest = 1.0 - share
    turned = math.sqrt(rest * rest + share * share + 2.0 * rest * share * cosine)
    return delta.mul(rest / turned).add_(momentum.mul(share / turned * length / along))
