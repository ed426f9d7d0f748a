"""HeLoCo's correction: a learner's outer gradient of a tensor is turned towards the outer momentum as far as it departs from it.

A learner that trained long on an old version, or on other data, may point against the direction in which Theta moves. With c the
cosine between the two: aligned ones stay, those that point back lose a part of what points back, and those in between are
turned and keep their length. A. Al Asif et al. 2026 (arXiv 2606.00271); the constants are our choice.
"""

from __future__ import annotations

from torch import Tensor

from atoll.tensors.norms import outlier_norm

KEPT = 0.2
"""Outer gradients of different learners are nearly orthogonal: a larger cosine is already agreement."""
SHRINKING = 1.0
TURNING = 1.0
KAPPA = 1.0
"""How much a gradient that is short beside the momentum is trusted less."""


def corrected(delta: Tensor, momentum: Tensor) -> Tensor:
    """Of one tensor, flat. Lengths are sums over a fixed tree, and the cosine follows from two of them."""
    length, along = outlier_norm(delta), outlier_norm(momentum)
    if length == 0.0 or along == 0.0:
        return delta
    own, reference = delta.div(length), momentum.div(along)
    cosine = (outlier_norm(own + reference) ** 2 - outlier_norm(own - reference) ** 2) / 4
    trust = length / (length + KAPPA * along)
    if cosine >= KEPT:
        return delta
    if cosine < 0.0:
        back = min(SHRINKING * -cosine * trust, 1.0)
        return delta - reference.mul(back * cosine * length)
    share = min(TURNING * (KEPT - cosine) * trust, 1.0)
    turned = own.mul(1.0 - share).add_(reference.mul(share))
    return turned.mul_(length / outlier_norm(turned))
