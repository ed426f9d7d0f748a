"""Norms in float64, the same for any number of threads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LEAF = 1024
_BATCH = 1 << 20


def outlier_norm(delta: Tensor) -> float:
    """The L2 norm in float64. NaN or Inf in `delta` gives NaN or Inf, so refuse with `not norm <= limit`."""
    return math.sqrt(squared_norms(delta.reshape(1, -1)).item())


def squared_norms(rows: Tensor) -> Tensor:
    """The squared L2 norm of each row, in float64, summed over a tree that depends only on the shape of `rows`.

    torch splits a reduction to one number among its threads, but never one of many. So leaves of 1024 are summed first, then at
    most 1024 leaves, which are too few for torch to split. Batches bound the float64 copy to 8 MiB.
    """
    if rows.is_cuda:  # reductions on a GPU do not depend on CPU threads, and one launch is fastest
        return rows.to(torch.float64).square_().sum(-1)
    count, width = rows.shape
    total = torch.zeros(count, dtype=torch.float64, device=rows.device)
    for left in range(0, width, _BATCH):
        span = min(_BATCH, width - left)
        leaf = min(_LEAF, span)
        padded = -(-span // leaf) * leaf
        height = max(1, _BATCH // padded)
        for top in range(0, count, height):
            part = rows[top : top + height, left : left + span]
            wide = torch.zeros(part.shape[0], padded, dtype=torch.float64, device=rows.device)
            wide[:, :span].copy_(part)
            total[top : top + height] += wide.square_().view(part.shape[0], -1, leaf).sum(-1).sum(-1)
    return total
