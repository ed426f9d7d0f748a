"""e3m0: a sign and three bits of exponent. The values are 0 and +-scale * 2^-k for k = 0..6, with scale = absmax.

The code is a signed number c in -7..7, two's complement in four bits: 0 is zero, otherwise the value is
sign(c) * scale * 2^(|c| - 7). Rounding is to the nearest value; a tie goes to the larger magnitude, up to the few
ulp that the inverse scale's rounding moves it.

To find the nearest code, let y = 128 * x / absmax. The borders between neighbours are |y| = 1, 3, 6, 12 ... 96:
    from 3 on they are 1.5 * 2^j, where rounding y's exponent by its first mantissa bit steps up, so
        e = (2 * exponent + first mantissa bit + 1) >> 1 is the code's magnitude wherever that is at least 2;
    below 3 it is min(1, |trunc y|).
With w = trunc(y) as int8, both are sign(w) * min(|w|, max(e, 1)), because |w| >= e wherever e >= 2. And that is
clamp(w, -max(e, 1), max(e, 1)): one product, one shift of y's bits, and the rest on single bytes. Exponents of tiny y
wrap around in a byte, which does not matter: there w is 0.

y must stay below 128 to fit int8, so the numerator is 128 less 2^-22 of it. No value comes near the subnormals.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from atoll.codecs.blocks import (
    TINY,
    BitPacker,
    Scratch,
    absmax_rows,
    block_absmax,
    constant,
    flush_tiny,
    inverse_scale,
    per_element,
)
from atoll.codecs.scaled import Kernel, Scaled

_BELOW_128: Final = 128.0 * (1.0 - 2.0**-22)
_EXPONENT_BIAS: Final = 127
_MANTISSA_BITS: Final = 23
_CODE_MAX: Final = 7


class _E3M0Kernel:
    def __init__(self, device: torch.device) -> None:
        self._packer = BitPacker(4, device)
        self._to_first_bit = constant(_MANTISSA_BITS - 1, device, torch.int32)
        # Modulo 256: subtracts twice the exponent's bias and adds the 1 that rounds.
        self._round = constant((1 - 2 * _EXPONENT_BIAS) % 256, device)
        self._one = constant(1, device)
        self._four = constant(4, device)

    def quantise(self, x: Tensor, stat: Tensor, codes: Tensor, scratch: Scratch, rng: torch.Generator | None) -> None:
        absmax_rows(x, stat, scratch)
        grid = torch.mul(x, inverse_scale(stat, _BELOW_128), out=scratch.floats)
        if rng is None:
            self._nearest(grid, scratch)
        else:
            self._stochastic(grid, scratch, rng)
        self._packer.pack(scratch, codes)

    def _nearest(self, grid: Tensor, scratch: Scratch) -> None:
        signed, limit, words = scratch.bytes, scratch.more_bytes, scratch.words
        signed.copy_(grid)
        # The narrowing copy drops the sign and keeps the exponent's low bits and the first mantissa bit.
        limit.copy_(words.bitwise_right_shift_(self._to_first_bit))
        torch.add(limit, self._round, out=limit)
        torch.bitwise_right_shift(limit, self._one, out=limit)
        torch.maximum(limit, self._one, out=limit)
        torch.minimum(signed, limit, out=signed)
        torch.maximum(signed, limit.neg_(), out=signed)

    def _stochastic(self, grid: Tensor, scratch: Scratch, rng: torch.Generator) -> None:
        """A uniform mantissa, added in place of half a binade, carries with the required probability."""
        noise = torch.rand(grid.shape, generator=rng, device=grid.device)
        size = grid.abs()
        lifted = size.view(torch.int32) + (noise * 2.0**_MANTISSA_BITS).to(torch.int32)
        magnitude = (lifted >> _MANTISSA_BITS) - _EXPONENT_BIAS
        # Below 2, which is the smallest nonzero value, the neighbours are 0 and 2.
        small = (size * 0.5 + noise).to(torch.int32)
        magnitude = torch.where(size < 2.0, small.clamp_(max=1), magnitude.clamp_(max=_CODE_MAX))
        scratch.bytes.copy_(magnitude * torch.sign(grid).to(torch.int32))

    def expand(self, codes: Tensor, scratch: Scratch) -> Tensor:
        values, shift = scratch.bytes, scratch.more_bytes
        self._packer.unpack_high(codes, scratch)
        torch.bitwise_right_shift(values, self._four, out=values)
        torch.abs(values, out=shift)
        torch.sub(shift, self._one, out=shift)
        values.clamp_(-1, 1)
        # Code 0 shifts a zero by -1, and a shifted zero is zero.
        torch.bitwise_left_shift(values, shift, out=values)
        return scratch.floats.copy_(values)


class E3M0(Scaled):
    name = "e3m0"
    unit = 1.0 / 64
    """`expand` gives sign(c) * 2^(|c| - 1), which is 64 for the scale itself."""

    def kernel(self, device: torch.device) -> Kernel:
        return _E3M0Kernel(device)

    def scales(self, stat: Tensor, x: Tensor) -> Tensor:
        return flush_tiny(stat)

    def error_bound(self, x: Tensor) -> Tensor:
        """A third of x between the neighbours 2^j and 2^(j+1), half the smallest value near zero, and a few ulp."""
        absmax = block_absmax(x)
        floor = torch.where(absmax > TINY, absmax / 128, absmax)
        return torch.maximum(x.abs() / 3, per_element(floor, x.numel())) * (1 + 2.0**-18)


def e3m0_codec(name: str) -> E3M0:
    return E3M0()
