"""HeLoCo's correction: a learner's outer gradient of a tensor is turned towards the outer momentum as far as it departs from it.

A learner that trained long on an old version, or on other data, may point against the direction in which Theta moves. With c the
cosine between the two: aligned ones stay, those that point back lose a part of what points back, and those in between are
turned and keep their length. A. Al Asif et al. 2026 (arXiv 2606.00271); the constants are our choice.
"""

from __future__ import annotations

import math

from torch import Tensor

from atoll.tensors.norms import inner_product, outlier_norm

KEPT = 0.2
"""Outer gradients of different learners are nearly orthogonal: a larger cosine is already agreement."""
SHRINKING = 1.0
TURNING = 1.0
KAPPA = 1.0
"""How much a gradient that is short beside the momentum is trusted less."""


def corrected(delta: Tensor, momentum: Tensor, along: float) -> Tensor:
    """Of one tensor, flat; `along` is the momentum's length. Sums are over a fixed tree, and a turned gradient's length follows
    from the cosine: so two passes over a gradient decide what becomes of it."""
    length = outlier_norm(delta)
    if length == 0.0 or along == 0.0:
        return delta
    cosine = inner_product(delta, momentum) / (length * along)
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
