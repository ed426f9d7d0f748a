"""Compiled loops over all contributions of a round: their norms, and their weighted sum.

One call works on a whole range, so that Python is asked a few times a merge and not for each chunk of each contribution: that
was a tenth of a syncer's round with eight learners. Inside, a span of every contribution is worked on before the next span, so
that Theta's drift and the sum stay in the cache.

`table` has a row for each contribution: the addresses and lengths of its codes and factors, and the address of the version that
it is a difference to (0: no drift is added). The caller holds these arrays. An array made from an address has no owner, so no
slice of it counts a reference, which other threads would count too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from atoll.kernels.compiled import (
    BLOCK,
    HALF,
    INT4,
    LEAF,
    add_gradient,
    divide,
    gradient_leaves,
    loop,
    square_leaves,
    subtract,
)
from atoll.kernels.vectors import leaf_of_moved_nibbles, leaf_of_nibbles

CODES, CODES_LENGTH, FACTORS, FACTORS_LENGTH, BASE = range(5)
SPAN = 16 * LEAF
"""Shorter ones are slower, although less is in the cache: memory is then read in pieces too short to be fetched ahead."""


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), build


@loop
def _drift(theta, address, left, right, drift):  # type: ignore[no-untyped-def]
    base = carray(_pointer(address), (right,), np.float32)  # type: ignore[call-arg]
    subtract(theta[left:right], base[left:right], drift[: right - left])  # a loop is as long as its last array


@loop
def measure(kind, like, table, numel, offset, first, last, theta, leaves):  # type: ignore[no-untyped-def]
    """The sums of squares of each contribution's outer gradient, leaf by leaf from `offset` on. `like` has the type of codes."""
    drift, nothing = np.empty(SPAN, np.float32), np.empty(0, np.float32)
    for left in range(first, last, SPAN):
        right, known = min(last, left + SPAN), 0
        here = slice((left - offset) // LEAF, (right - offset + LEAF - 1) // LEAF)
        for row in range(table.shape[0]):
            codes = carray(_pointer(table[row, CODES]), (table[row, CODES_LENGTH],), like.dtype)  # type: ignore[call-arg]
            factors = carray(_pointer(table[row, FACTORS]), (table[row, FACTORS_LENGTH],), np.float32)
            base = table[row, BASE]
            if base != 0 and base != known:
                _drift(theta, base, left, right, drift)
                known = base
            part = drift[: right - left] if base != 0 else nothing
            _measure_one(kind, codes, factors, numel, left, right, part, leaves[row, here])


@loop
def _measure_one(kind, codes, factors, numel, first, last, drift, leaves):  # type: ignore[no-untyped-def]
    whole = 0
    if kind == INT4 and first % BLOCK == 0:
        whole = (last - first) // LEAF
        for leaf in range(whole):
            block = first // BLOCK + LEAF // BLOCK * leaf
            if drift.shape[0]:
                leaves[leaf] = leaf_of_moved_nibbles(codes, block * HALF, factors, block, drift, leaf * LEAF)
            else:
                leaves[leaf] = leaf_of_nibbles(codes, block * HALF, factors, block, drift, 0)
    if whole < leaves.shape[0]:
        done = whole * LEAF
        gradient_leaves(kind, codes, factors, numel, first + done, last, drift[done:], leaves[whole:])


@loop
def add(kind, like, table, shares, numel, offset, first, last, theta, total, divisor, lengths):  # type: ignore[no-untyped-def]
    """total = the sum of all outer gradients, each times its share and divided by `divisor` unless that is 0. `lengths`: the
    sums of squares of the total, leaf by leaf from `offset` on, unless it is empty."""
    drift, nothing = np.empty(SPAN, np.float32), np.empty(0, np.float32)
    for left in range(first, last, SPAN):
        right, known = min(last, left + SPAN), 0
        target = total[left:right]
        for row in range(table.shape[0]):
            codes = carray(_pointer(table[row, CODES]), (table[row, CODES_LENGTH],), like.dtype)  # type: ignore[call-arg]
            factors = carray(_pointer(table[row, FACTORS]), (table[row, FACTORS_LENGTH],), np.float32)
            base = table[row, BASE]
            if base != 0 and base != known:
                _drift(theta, base, left, right, drift)
                known = base
            part = drift[: right - left] if base != 0 else nothing
            add_gradient(kind, codes, factors, numel, left, part, shares[row], row == 0, target)
        if divisor != 0:
            divide(target, divisor)
        if lengths.shape[0]:
            square_leaves(target, lengths[(left - offset) // LEAF : (right - offset + LEAF - 1) // LEAF])
