"""Norms in float64, the same for any number of threads and by any loop that sums over this tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

LEAF: Final = 1024
"""Elements that are summed first. Sums are over halves: element i and element i + n/2, until one is left. Zeros fill the elements
up to a power of two and change no sum of squares."""
_BATCH: Final = 1 << 20
SMALL: Final = 1 << 17
"""Elements up to which numpy is faster."""
FACTOR_MAX: Final = float(np.finfo(np.float32).max) / 128
Array = np.ndarray[Any, Any]


def outlier_norm(delta: Tensor) -> float:
    """The L2 norm in float64. NaN or Inf in `delta` gives NaN or Inf, so refuse with `not norm <= limit`."""
    return math.sqrt(squared_norms(delta.reshape(1, -1)).item())


def may_overflow(factors: Tensor) -> bool:
    """Whether 128 times a factor may be Inf, or is NaN."""
    return not bool((factors.abs() <= FACTOR_MAX).all())


def block_leaves(sums: Array, factors: Array) -> Array:
    """Squares of values from those of codes, block by block."""
    wide = factors.astype(np.float64)
    leaves: Array = sums.astype(np.float64) * (wide * wide)
    return leaves


def squared_norms(rows: Tensor) -> Tensor:
    """The squared L2 norm of each row, in float64, summed over a tree that depends only on the shape of `rows`."""
    return inner_products(rows, rows)


def inner_products(rows: Tensor, others: Tensor) -> Tensor:
    """Of each row with the other's, in float64, summed over the same tree as a norm. Every addition is elementwise, so torch's
    threads change nothing. Batches bound the float64 copy to 8 MiB."""
    if rows.is_cuda:  # reductions on a GPU do not depend on CPU threads, and one launch is fastest
        return rows.to(torch.float64).mul_(others).sum(-1)
    count, _width = rows.shape
    if 0 < rows.numel() <= SMALL and rows.dtype == others.dtype == torch.float32:
        return torch.from_numpy(_small_products(rows.numpy(), others.numpy()))
    leaves = _leaf_sums(rows, others)
    filled = torch.zeros(count, _power_of_two(leaves.shape[1]), dtype=torch.float64, device=rows.device)
    filled[:, : leaves.shape[1]] = leaves
    return _halved(filled)


def _leaf_sums(rows: Tensor, others: Tensor) -> Tensor:
    count, width = rows.shape
    leaves = torch.zeros(count, max(1, -(-width // LEAF)), dtype=torch.float64, device=rows.device)
    for left in range(0, width, _BATCH):
        span = min(_BATCH, width - left)
        leaf = min(LEAF, _power_of_two(span))
        padded = -(-span // leaf) * leaf
        height = max(1, _BATCH // padded)
        for top in range(0, count, height):
            part = rows[top : top + height, left : left + span]
            wide = torch.zeros(part.shape[0], padded, dtype=torch.float64, device=rows.device)
            wide[:, :span].copy_(part)
            wide[:, :span].mul_(others[top : top + height, left : left + span])
            sums = _halved(wide.view(part.shape[0], -1, leaf))
            leaves[top : top + height, left // LEAF : left // LEAF + sums.shape[1]] = sums
    return leaves


def _small_products(rows: Array, others: Array) -> Array:
    """The same additions by numpy, which begins an operation ten times as fast as torch: small vectors are nothing but that."""
    count, width = rows.shape
    leaf = min(LEAF, _power_of_two(width))
    wide = np.zeros((count, max(1, -(-width // leaf)) * leaf))
    np.multiply(rows, others, out=wide[:, :width], dtype=np.float64)
    sums = _halved_array(wide.reshape(count, -1, leaf))
    filled = np.zeros((count, _power_of_two(sums.shape[1])))
    filled[:, : sums.shape[1]] = sums
    return _halved_array(filled)


def _halved_array(x: Array) -> Array:
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return np.ascontiguousarray(x[..., 0])


def tree_sum(leaves: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """The same sum of leaves that a compiled loop has filled."""
    filled = np.zeros(_power_of_two(max(1, len(leaves))))
    filled[: len(leaves)] = leaves
    while len(filled) > 1:
        filled = filled[: len(filled) // 2] + filled[len(filled) // 2 :]
    return float(filled[0])


class PartSquares(NamedTuple):
    """A part of a vector that several processes hold: the sums of squares of its whole leaves, and the numbers at its ends that
    belong to leaves which other parts complete."""

    head: Array
    leaves: Array
    tail: Array


def leaf_squares_of(x: Tensor) -> Array:
    """The sum of squares of each leaf of a vector on the CPU."""
    if not x.numel():
        return np.empty(0)
    found: Array = _leaf_sums(x.reshape(1, -1), x.reshape(1, -1))[0].numpy()
    return found


def part_ends(at: int, numel: int, *, ends: bool) -> tuple[int, int]:
    """Where the whole leaves of a part begin and end, which itself begins `at` in its vector. `ends`: the vector ends with it."""
    head = min(numel, -at % LEAF)
    return head, numel if ends else head + (numel - head) // LEAF * LEAF


def part_squares(x: Tensor, at: int, *, ends: bool) -> PartSquares:
    first, last = part_ends(at, x.numel(), ends=ends)
    return PartSquares(x[:first].numpy(), leaf_squares_of(x[first:last]), x[last:].numpy())


def norm_of_parts(parts: Sequence[PartSquares]) -> float:
    """The norm of the vector that the parts make, to the bit."""
    leaves: list[Array] = []
    open_leaf = np.empty(0, np.float32)
    for part in parts:
        for numbers, whole in ((part.head, part.leaves), (part.tail, np.empty(0))):
            open_leaf = np.concatenate([open_leaf, numbers])
            if len(open_leaf) == LEAF:
                leaves.append(_one_leaf(open_leaf))
                open_leaf = open_leaf[:0]
            assert not (len(whole) and len(open_leaf)), "a part of the vector is missing"
            leaves.append(whole)
    if len(open_leaf):
        leaves.append(_one_leaf(open_leaf))
    return math.sqrt(tree_sum(np.concatenate(leaves)))


def _one_leaf(numbers: Array) -> Array:
    return _small_products(numbers.reshape(1, -1), numbers.reshape(1, -1))


def _halved(x: Tensor) -> Tensor:
    """Sums along the last axis, whose length is a power of two."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x.squeeze(-1)


def _power_of_two(count: int) -> int:
    """The least one that is not below `count`."""
    return 1 << max(0, count - 1).bit_length()
