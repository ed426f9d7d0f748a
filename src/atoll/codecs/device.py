"""int8, int4, int2 and e3m0 on a GPU: one kernel of Triton where torch needs a dozen launches and as many passes.

The bytes are those of `integers` and `e3m0`. A multiplication and an addition stay two operations, each rounded, and a division
is correctly rounded: both are asked for below, because Triton's defaults are faster and differ in the last bit. The maximum of a
block does not depend on its order. torch brings Triton along with CUDA; without it torch's operations give the same, slower.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from atoll.codecs.blocks import TINY
from atoll.codecs.layout import BLOCK

ROWS: Final = 8
"""Blocks of one program: sixteen elements for each of its 128 threads."""
_EXACT: Final[dict[str, Any]] = {"num_warps": 4, "enable_fp_fusion": False}


class _Form(NamedTuple):
    bits: int
    powers: bool
    """Codes are powers of two."""
    numerator: float
    """A value times this over the block's largest magnitude is what is rounded."""


FORMS: Final = {
    "int8": _Form(8, False, 127 * 4.0),
    "int4": _Form(4, False, 7 * 4.0),
    "int2": _Form(2, False, 1 * 4.0),
    "e3m0": _Form(4, True, 128.0 * (1.0 - 2.0**-22)),
}
"""As in `integers` (`_STEP`) and `e3m0` (`_BELOW_128`)."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _signed_byte(value):  # type: ignore[no-untyped-def]  # Triton compiles these: its types are its own
    """The low byte, as a number of -128 to 127."""
    return ((value & 255) ^ 128) - 128


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _code(grid, POWERS: tl.constexpr):  # type: ignore[no-untyped-def]
    if POWERS:
        limit = _signed_byte(_signed_byte(grid.to(tl.int32, bitcast=True) >> 22) + 3) >> 1
        limit = tl.maximum(limit, 1)
        return tl.maximum(tl.minimum(grid.to(tl.int32), limit), -limit)
    return (grid + 50331648.0).to(tl.int32, bitcast=True)  # `_MAGIC`: the low bits of the sum are the code


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _quantise(  # type: ignore[no-untyped-def]
    x, stat, codes, blocks, numerator, tiny, BITS: tl.constexpr, POWERS: tl.constexpr, BLOCK_OF: tl.constexpr,
    ROWS_OF: tl.constexpr,
):  # fmt: skip
    per_byte: tl.constexpr = 8 // BITS
    width: tl.constexpr = BLOCK_OF // per_byte
    row = tl.program_id(0).to(tl.int64) * ROWS_OF + tl.arange(0, ROWS_OF)
    there = (row < blocks)[:, None]
    column = tl.arange(0, width)[None, :]
    largest = tl.zeros([ROWS_OF], tl.float32)
    strange = tl.zeros([ROWS_OF], tl.int32)
    for part in tl.static_range(per_byte):
        size = tl.abs(tl.load(x + row[:, None] * BLOCK_OF + part * width + column, mask=there, other=0.0))
        largest = tl.maximum(largest, tl.max(size, axis=1))
        is_number = (size <= 3.4028234663852886e38).to(tl.int32)  # not Inf, and not NaN, which a maximum may lose
        strange = strange | tl.max(is_number ^ 1, axis=1)
    inverse = tl.div_rn(numerator, tl.where(largest > tiny, largest, float("inf")))[:, None]
    packed = tl.zeros([ROWS_OF, width], tl.int32)
    for part in tl.static_range(per_byte):  # from the cache
        values = tl.load(x + row[:, None] * BLOCK_OF + part * width + column, mask=there, other=0.0)
        packed = packed | ((_code(values * inverse, POWERS) & ((1 << BITS) - 1)) << (BITS * part))
    tl.store(codes + row[:, None] * width + column, packed.to(tl.int8), mask=there)
    tl.store(stat + row, tl.where(strange != 0, float("nan"), largest), mask=row < blocks)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _expand(  # type: ignore[no-untyped-def]
    codes, factors, into, blocks, BITS: tl.constexpr, POWERS: tl.constexpr, ADD: tl.constexpr, BLOCK_OF: tl.constexpr,
    ROWS_OF: tl.constexpr,
):  # fmt: skip
    per_byte: tl.constexpr = 8 // BITS
    width: tl.constexpr = BLOCK_OF // per_byte
    row = tl.program_id(0).to(tl.int64) * ROWS_OF + tl.arange(0, ROWS_OF)
    there = (row < blocks)[:, None]
    column = tl.arange(0, width)[None, :]
    packed = tl.load(codes + row[:, None] * width + column, mask=there, other=0).to(tl.int32)
    factor = tl.load(factors + row, mask=row < blocks, other=0.0)[:, None]
    for part in tl.static_range(per_byte):
        value = _signed_byte(packed << (8 - BITS * (part + 1)) & (256 - (1 << (8 - BITS))))  # in the top bits of its byte
        if POWERS:
            code = value >> 4
            size = tl.maximum(tl.abs(code) - 1, 0)
            value = tl.where(code < 0, -1, tl.where(code > 0, 1, 0)) << size
        at = into + row[:, None] * BLOCK_OF + part * width + column
        product = value.to(tl.float32) * factor
        if ADD:
            product = tl.load(at, mask=there, other=0.0) + product
        tl.store(at, product, mask=there)


def _grid(blocks: int) -> tuple[int]:
    return (triton.cdiv(blocks, ROWS),)


def try_out() -> None:
    """Raises whatever keeps Triton from compiling and running a kernel here."""
    x = torch.ones(BLOCK, device="cuda")
    quantise_blocks("int8", x, 1, torch.empty(1, device="cuda"), torch.empty(BLOCK, dtype=torch.int8, device="cuda"))


def quantise_blocks(name: str, x: Tensor, blocks: int, stat: Tensor, codes: Tensor) -> None:
    """Codes of the first `blocks` blocks, and each block's largest magnitude: NaN where the block has NaN or Inf."""
    form = FORMS[name]
    with torch.cuda.device_of(x):
        _quantise[_grid(blocks)](
            x, stat, codes, blocks, form.numerator, TINY, BITS=form.bits, POWERS=form.powers, BLOCK_OF=BLOCK, ROWS_OF=ROWS,
            **_EXACT,
        )  # fmt: skip


def decode_blocks(name: str, into: Tensor, blocks: int, factors: Tensor, codes: Tensor, *, add: bool) -> None:
    """Values of the first `blocks` blocks; with `add` they are added to what is there."""
    form = FORMS[name]
    with torch.cuda.device_of(into):
        _expand[_grid(blocks)](
            codes, factors, into, blocks, BITS=form.bits, POWERS=form.powers, ADD=add, BLOCK_OF=BLOCK, ROWS_OF=ROWS, **_EXACT
        )
