"""Merges that bound what one learner can do. Each works on one tensor of a fragment at a time, given flat, in LearnerId order.

`docs/operations/trust.md` says what each costs an honest run and what hostile learners can do against it. With fewer than three
contributions there is no majority, and each of them is the weighted mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from atoll.tensors.norms import squared_norms

CLIP = 1.0
"""Contributions are clipped to this multiple of their median norm: an attacker that keeps to it looks like anybody else."""
TRIM = 0.25
"""The share of the values of a coordinate that is left out at each end, at least one of three."""
ITERATIONS = 16
"""Weiszfeld steps. Each moves a fraction of the way to the geometric median; after 16 it is closer than 1 % of the spread."""


def clipped_mean(voters: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The weighted mean of contributions that are scaled down to the median norm where they exceed it."""
    if len(voters) < 3:
        return _mean(voters, shares)
    norms = [_norm(voter) for voter in voters]
    limit = CLIP * median(norms)
    scales = [1.0 if norm <= limit else limit / norm for norm in norms]
    return _mean([voter if scale == 1.0 else voter * scale for voter, scale in zip(voters, scales, strict=True)], shares)


def trimmed_mean(voters: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """For each coordinate the weighted mean without its lowest and highest values."""
    if len(voters) < 3:
        return _mean(voters, shares)
    cut = max(1, int(TRIM * len(voters)))
    values, order = torch.stack(list(voters)).sort(dim=0, stable=True)
    kept = slice(cut, len(voters) - cut)
    weights = torch.tensor(list(shares), dtype=values.dtype, device=values.device)[order[kept]]
    return _ordered_sum(values[kept] * weights).div_(_ordered_sum(weights))


def geometric_median(voters: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The point with the least weighted sum of distances to the contributions, by Weiszfeld's iteration from their mean."""
    if len(voters) < 3:
        return _mean(voters, shares)
    point = _mean(voters, shares)
    scale = median(_norm(voter) for voter in voters)
    for _ in range(ITERATIONS):
        distances = [_norm(voter - point) for voter in voters]
        least = 1e-6 * scale  # a contribution at the point itself would have all the weight
        if max(distances) <= least:
            break
        point = _mean(voters, [share / max(distance, least) for share, distance in zip(shares, distances, strict=True)])
    return point


ROBUST: dict[str, Callable[[Sequence[Tensor], Sequence[float]], Tensor]] = {
    "clipped_mean": clipped_mean, "trimmed_mean": trimmed_mean, "geometric_median": geometric_median,
}  # fmt: skip


def _norm(voter: Tensor) -> float:
    return float(squared_norms(voter.reshape(1, -1)).sqrt_().item())


def _mean(voters: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = voters[0] * (weights[0] / sum(weights))
    for voter, weight in zip(voters[1:], weights[1:], strict=True):
        total.add_(voter * (weight / sum(weights)))
    return total


def _ordered_sum(rows: Tensor) -> Tensor:
    """Row by row, so that the bits depend on no reduction's order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    return total
