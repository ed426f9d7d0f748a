"""The compiled loops of the syncer's data path, by numba. Imported only where a tensor is worth it: the import takes a second.

Every function works on a range of a fragment, in the caller's thread and without the interpreter's lock. Nothing is summed across
ranges, so results depend neither on the ranges nor on the number of threads. Each is the bits of torch's operations:

* numba fuses no multiplication with an addition by itself. torch's `add(alpha=)` does fuse them, so `_fma` does too.
* Squares are summed over the tree of `tensors.norms`: halves of 1,024, in float64.
* Codes are those of `codecs`: the same inverse, the same rounding, the same clamps.

Loops are short and touch few arrays, so that LLVM vectorises them; what is between them stays in the first-level cache.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from atoll.kernels.vectors import (
    add_moved_nibbles,
    add_nibbles,
    difference_block,
    int8_block,
    leaf_squares,
    moved_nibbles,
    nibble_squares,
    nibbles,
    share_of_moved_nibbles,
    share_of_nibbles,
)

FP32: Final = 0
BF16: Final = 1
INT8: Final = 2
INT4: Final = 3
E3M0: Final = 4
SGD: Final = 0
MOMENTUM: Final = 1
NESTEROV: Final = 2
BLOCK: Final = 256
LEAF: Final = 1024
UNIT: Final = 4 * LEAF
HALF: Final = BLOCK // 2
"""Bytes of a block of four bits an element."""

_TINY = np.float32(2.0**-115)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_MAGIC = np.float32(1.5 * 2.0**23 * 4.0)
_INT8_TOP = np.float32(127.0 * 4.0)
_INT8_MAX = np.float32(127.0)
_STEP_MAX = np.float32(np.finfo(np.float32).max / 127.0 * (1.0 - 2.0**-22))
_BF16_MAX = np.float32(3.3895313892515355e38)
_FIELDS = np.array([0, 1, 2, 4, 8, 16, 32, 64, -128, -64, -32, -16, -8, -4, -2, -1], dtype=np.float32)
"""e3m0: sign(c) * 2^(|c| - 1) of the code in each nibble, in units of a 64th."""


@intrinsic
def _fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), build


def loop(function: Any) -> Any:
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written: compiled again in every process
        return njit(nogil=True, error_model="numpy")(function)


# ---------------------------------------------------------------- contributions


@loop
def decode(kind, codes, factors, numel, first, out):  # type: ignore[no-untyped-def]
    """Elements `first` to `first + len(out)` of a packet. A factor is a block's scale times the codec's unit."""
    last = first + out.shape[0]
    if kind == FP32:
        _plain(codes[first:last], out)
        return
    if kind == BF16:
        bits = np.empty(BLOCK, np.uint32)
        floats = bits.view(np.float32)
        for left in range(first, last, BLOCK):
            right = min(last, left + BLOCK)
            _raised(codes[left:right], bits)
            _plain(floats[: right - left], out[left - first : right - first])
        return
    for block in range(first // BLOCK, (last + BLOCK - 1) // BLOCK):
        start = block * BLOCK
        width = min(BLOCK, numel - start)
        left, right = max(first, start), min(last, start + width)
        factor = factors[block]
        if kind == INT8:
            _times(codes[left:right], factor, out[left - first : right - first])
            continue
        half = (width + 1) // 2  # byte j has element j in its low bits and element j + half in its high ones
        at, middle = block * HALF - start, start + half
        low, high = min(right, middle), max(left, middle)
        if low > left:
            _low_nibbles(kind, codes[at + left : at + low], factor, out[left - first : low - first])
        if right > high:
            _high_nibbles(kind, codes[at + high - half : at + right - half], factor, out[high - first : right - first])


# Loops index slices from 0: numba then knows that no index is negative, and LLVM vectorises.


@loop
def _plain(x, out):  # type: ignore[no-untyped-def]
    for i in range(out.shape[0]):
        out[i] = np.float32(x[i])


@loop
def _raised(codes, bits):  # type: ignore[no-untyped-def]
    for i in range(codes.shape[0]):
        bits[i] = np.uint32(codes[i]) << np.uint32(16)


@loop
def _times(codes, factor, out):  # type: ignore[no-untyped-def]
    for i in range(out.shape[0]):
        out[i] = np.float32(codes[i]) * factor


@loop
def _low_nibbles(kind, codes, factor, out):  # type: ignore[no-untyped-def]
    if kind == INT4:
        for i in range(out.shape[0]):
            raised = np.int32(codes[i]) << np.int32(28)
            out[i] = np.float32(np.int32(raised) >> np.int32(24)) * factor
    else:
        for i in range(out.shape[0]):
            out[i] = _FIELDS[np.uint8(codes[i]) & np.uint8(15)] * factor


@loop
def _high_nibbles(kind, codes, factor, out):  # type: ignore[no-untyped-def]
    if kind == INT4:
        for i in range(out.shape[0]):
            out[i] = np.float32(np.int32(codes[i]) & np.int32(-16)) * factor
    else:
        for i in range(out.shape[0]):
            out[i] = _FIELDS[np.uint8(codes[i]) >> np.uint8(4)] * factor


@loop
def square_leaves(x, leaves):  # type: ignore[no-untyped-def]
    """The sum of squares of each 1,024 elements."""
    for leaf in range(leaves.shape[0]):
        start = leaf * LEAF
        if start + LEAF <= x.shape[0]:
            leaves[leaf] = leaf_squares(x, start)  # type: ignore[call-arg]
        else:
            leaves[leaf] = _short_leaf(x[start:])


@loop
def _short_leaf(part):  # type: ignore[no-untyped-def]
    wide = np.zeros(LEAF, np.float64)
    for i in range(part.shape[0]):
        value = np.float64(part[i])
        wide[i] = value * value
    half = LEAF // 2
    while half:
        lower, upper = wide[:half], wide[half : 2 * half]
        for i in range(half):
            lower[i] += upper[i]
        half //= 2
    return wide[0]


@loop
def block_squares(kind, codes, numel, sums):  # type: ignore[no-untyped-def]
    """The sum of squares of each block's codes, which are integers up to 128: exact in any order."""
    for block in range(sums.shape[0]):
        width = min(BLOCK, numel - block * BLOCK)
        if kind == INT8:
            sums[block] = _integer_squares(codes[block * BLOCK : block * BLOCK + width])
            continue
        half, at = (width + 1) // 2, block * HALF
        if kind == INT4 and width == BLOCK:
            sums[block] = 256 * nibble_squares(codes, at)  # type: ignore[call-arg]
        elif kind == INT4:
            sums[block] = _nibble_squares(codes[at : at + half])
        else:
            sums[block] = _field_squares(codes[at : at + half])
        if width % 2:  # the last byte's high bits are no element, and may be anything
            over = np.int32(codes[at + half - 1]) & np.int32(-16)
            field = np.int32(_FIELDS[np.uint8(codes[at + half - 1]) >> np.uint8(4)])
            sums[block] -= over * over if kind == INT4 else field * field


@loop
def _integer_squares(codes):  # type: ignore[no-untyped-def]
    total = np.int32(0)
    for i in range(codes.shape[0]):
        total += np.int32(codes[i]) * np.int32(codes[i])
    return total


@loop
def _nibble_squares(codes):  # type: ignore[no-untyped-def]
    total = np.int32(0)
    for i in range(codes.shape[0]):
        high = np.int32(codes[i]) & np.int32(-16)
        raised = np.int32(np.int32(codes[i]) << np.int32(28)) >> np.int32(24)
        total += high * high + raised * raised
    return total


@loop
def _field_squares(codes):  # type: ignore[no-untyped-def]
    total = np.int32(0)
    for i in range(codes.shape[0]):
        low = np.int32(_FIELDS[np.uint8(codes[i]) & np.uint8(15)])
        high = np.int32(_FIELDS[np.uint8(codes[i]) >> np.uint8(4)])
        total += low * low + high * high
    return total


@loop
def gradient(kind, codes, factors, numel, first, drift, out):  # type: ignore[no-untyped-def]
    """A contribution's outer gradient: decoded, and with `drift` if that is as long."""
    head, tail = _whole_blocks(kind, first, out.shape[0])
    _gradient_part(kind, codes, factors, numel, first, drift[:head], out[:head])
    for at in range(head, tail, BLOCK):
        block = (first + at) // BLOCK
        if drift.shape[0]:
            moved_nibbles(codes, block * HALF, factors[block], drift, at, _ONE, out, at)
        else:
            nibbles(codes, block * HALF, factors[block], drift, 0, _ONE, out, at)
    _gradient_part(kind, codes, factors, numel, first + tail, drift[tail:], out[tail:])


@loop
def _whole_blocks(kind, first, count):  # type: ignore[no-untyped-def]
    """Which of the elements from `first` on are whole int4 blocks: from where to where, counted from `first`."""
    if kind != INT4:
        return 0, 0
    head = min(count, -first % BLOCK)
    return head, head + (count - head) // BLOCK * BLOCK


@loop
def _gradient_part(kind, codes, factors, numel, first, drift, out):  # type: ignore[no-untyped-def]
    if out.shape[0]:
        decode(kind, codes, factors, numel, first, out)
        for i in range(drift.shape[0]):
            out[i] += drift[i]


@loop
def gradient_leaves(kind, codes, factors, numel, first, last, drift, leaves):  # type: ignore[no-untyped-def]
    """The sums of squares of a contribution's outer gradient, which stays in the cache."""
    scratch = np.empty(UNIT, np.float32)
    for left in range(first, last, UNIT):
        right = min(last, left + UNIT)
        x, at = scratch[: right - left], left - first
        gradient(kind, codes, factors, numel, left, drift[at : at + x.shape[0]], x)
        square_leaves(x, leaves[at // LEAF : (at + x.shape[0] + LEAF - 1) // LEAF])


@loop
def add_gradient(kind, codes, factors, numel, first, drift, share, start_anew, total):  # type: ignore[no-untyped-def]
    """total += share * gradient, each rounded, or = ..."""
    count = total.shape[0]
    head, tail = _whole_blocks(kind, first, count)
    _add_part(kind, codes, factors, numel, first, drift[:head], share, start_anew, total[:head])
    for at in range(head, tail, BLOCK):
        block = (first + at) // BLOCK
        if drift.shape[0]:
            if start_anew:
                share_of_moved_nibbles(codes, block * HALF, factors[block], drift, at, share, total, at)
            else:
                add_moved_nibbles(codes, block * HALF, factors[block], drift, at, share, total, at)
        elif start_anew:
            share_of_nibbles(codes, block * HALF, factors[block], drift, 0, share, total, at)
        else:
            add_nibbles(codes, block * HALF, factors[block], drift, 0, share, total, at)
    _add_part(kind, codes, factors, numel, first + tail, drift[tail:], share, start_anew, total[tail:])


@loop
def _add_part(kind, codes, factors, numel, first, drift, share, start_anew, total):  # type: ignore[no-untyped-def]
    if not total.shape[0]:
        return
    scratch = np.empty(UNIT, np.float32)
    for at in range(0, total.shape[0], UNIT):
        target = total[at : at + UNIT]
        x = scratch[: target.shape[0]]
        gradient(kind, codes, factors, numel, first + at, drift[at : at + x.shape[0]], x)
        if start_anew:
            for i in range(x.shape[0]):
                target[i] = x[i] * share
        else:
            for i in range(x.shape[0]):
                target[i] += x[i] * share


@loop
def subtract(a, b, out):  # type: ignore[no-untyped-def]
    for i in range(out.shape[0]):
        out[i] = a[i] - b[i]


@loop
def divide(x, divisor):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        x[i] = x[i] / divisor


# ---------------------------------------------------------------- the outer step and the announcement


@loop
def scaled(delta, bounds, scales, first, out):  # type: ignore[no-untyped-def]
    """delta times the factor of the slot that each element is in; slot s begins at bounds[s]."""
    last = first + out.shape[0]
    slot = np.searchsorted(bounds, first, side="right") - 1
    left = first
    while left < last:
        right = min(last, bounds[slot + 1])
        _times(delta[left:right], scales[slot], out[left - first : right - first])
        left = right
        slot += 1


@loop
def outer(rule, first_step, rate, mu, x, momentum, theta, next_momentum, next_theta):  # type: ignore[no-untyped-def]
    """One outer step on a block. `x` is the outer gradient, which this overwrites."""
    count = x.shape[0]
    if rule != SGD:
        if first_step:
            for i in range(count):
                next_momentum[i] = x[i]
        else:
            for i in range(count):
                next_momentum[i] = momentum[i] * mu + x[i]
        if rule == NESTEROV:
            for i in range(count):
                x[i] = _fma(next_momentum[i], mu, x[i])  # type: ignore[call-arg]
        else:
            for i in range(count):
                x[i] = next_momentum[i]
    minus = -rate
    for i in range(count):
        next_theta[i] = _fma(x[i], minus, theta[i])  # type: ignore[call-arg]


@loop
def announce_int8(theta, announced, next_announced, codes, scales, difference, grid):  # type: ignore[no-untyped-def]
    """Codes and scales of theta - announced, block by block, and what learners will hold. The last two are scratch memory."""
    words = grid.view(np.int32)
    for block in range(scales.shape[0]):
        start, end = block * BLOCK, min(theta.shape[0], (block + 1) * BLOCK)
        whole = end - start == BLOCK
        if whole:
            words[0] = difference_block(theta, announced, start, difference)  # type: ignore[call-arg]
        else:
            words[0] = _differences(theta[start:end], announced[start:end], difference)
        inverse, scale = _int8_scale(grid[0])
        scales[block] = scale
        if whole:
            quarter = scale * np.float32(0.25)
            int8_block(difference, inverse, _MAGIC, quarter, codes, announced, next_announced, start)  # type: ignore[call-arg]
        else:
            x, target = difference[: end - start], codes[start:end]
            for i in range(x.shape[0]):
                grid[i] = x[i] * inverse + _MAGIC
            for i in range(x.shape[0]):
                target[i] = np.int8(words[i])
            _add_codes(target, scale, announced[start:end], next_announced[start:end])


@loop
def _int8_scale(absmax):  # type: ignore[no-untyped-def]
    if absmax > _TINY:
        return _INT8_TOP / absmax, min(absmax / _INT8_MAX, _STEP_MAX)
    return _ZERO, _ZERO


@loop
def _differences(a, b, out):  # type: ignore[no-untyped-def]
    """As `difference_block`, of fewer elements."""
    top, bits = np.int32(0), out.view(np.int32)
    for i in range(a.shape[0]):
        out[i] = a[i] - b[i]
    for i in range(a.shape[0]):
        top = max(top, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return top


@loop
def _add_codes(codes, scale, announced, next_announced):  # type: ignore[no-untyped-def]
    for i in range(codes.shape[0]):
        next_announced[i] = announced[i] + np.float32(codes[i]) * scale


@loop
def announce_bf16(theta, announced, next_announced, codes, difference):  # type: ignore[no-untyped-def]
    """Rounds to nearest, half to even, as torch does; never to Inf."""
    subtract(theta, announced, difference)
    for i in range(difference.shape[0]):
        difference[i] = min(max(difference[i], -_BF16_MAX), _BF16_MAX)
    bits = difference.view(np.uint32)
    for i in range(bits.shape[0]):
        odd = np.uint32(bits[i] >> np.uint32(16)) & np.uint32(1)
        bits[i] = np.uint32(bits[i] + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    for i in range(bits.shape[0]):
        codes[i] = np.uint16(bits[i] >> np.uint32(16))
    for i in range(difference.shape[0]):
        next_announced[i] = announced[i] + difference[i]


@loop
def step(  # type: ignore[no-untyped-def]
    rule, first_step, rate, mu, down, delta, bounds, factors, theta, momentum, announced, next_theta, next_momentum,
    next_announced, codes, scales, leaves, sizes, first, last,
):  # fmt: skip
    """Outer step, jump and announcement of elements `first` to `last`; `first` is a multiple of 1,024. A few thousand elements at
    a time, which stay in the cache: every slice of an array counts a reference, which other threads count too."""
    scratch, grid = np.empty(UNIT, np.float32), np.empty(BLOCK, np.float32)
    for left in range(first, last, UNIT):
        right = min(last, left + UNIT)
        x, before, after = scratch[: right - left], theta[left:right], next_theta[left:right]
        scaled(delta, bounds, factors, left, x)
        if rule == SGD:
            outer(rule, first_step, rate, mu, x, x, before, x, after)
        else:
            outer(rule, first_step, rate, mu, x, momentum[left:right], before, next_momentum[left:right], after)
        subtract(after, before, x)
        here = slice(left // LEAF, (right + LEAF - 1) // LEAF)
        square_leaves(x, leaves[here])
        if down != FP32:
            old, new = announced[left:right], next_announced[left:right]
            if down == INT8:
                blocks = slice(left // BLOCK, (right + BLOCK - 1) // BLOCK)
                announce_int8(after, old, new, codes[left:right], scales[blocks], x, grid)
            else:
                announce_bf16(after, old, new, codes[left:right], x)
            square_leaves(new, sizes[here])
