"""int8, int4, int2: symmetric integers. int1: sign times mean magnitude.

intN has scale = absmax / (2^(N-1) - 1), and codes are x / scale rounded to nearest, half to even; int2 is therefore
{-1, 0, 1} * scale. With a generator the rounding is stochastic and unbiased: floor(x / scale + U[0, 1)).

The product with the inverse scale may exceed the largest code by a few ulp, never by half, so rounding to nearest gives that
code and no clamp is needed; stochastic rounding could exceed it and has a clamp.
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
    panels,
    per_element,
    require_vector,
)
from atoll.codecs.layout import BLOCK, block_count
from atoll.codecs.packet import Packet
from atoll.codecs.scaled import Kernel, Scaled
from atoll.config.codecs import codec_spec
from atoll.errors import ConfigError

_STEP: Final = 4.0
"""The grid is scaled by this, so that even for absmax near the largest float the inverse scale is a normal float."""
_MAGIC: Final = 1.5 * 2.0**23 * _STEP
"""Its ulp is one step: adding it rounds to nearest even, and the low byte of the sum's bits is the code in two's complement.
Rounding and conversion together are one addition and one narrowing copy of int32, half the cost of float to int8."""
_FLOAT_MAX: Final = torch.finfo(torch.float32).max


class _IntKernel:
    def __init__(self, bits: int, device: torch.device) -> None:
        self._code_max = 2 ** (bits - 1) - 1
        self._magic = constant(_MAGIC, device, torch.float32)
        self._packer = BitPacker(bits, device) if bits < 8 else None

    def quantise(self, x: Tensor, stat: Tensor, codes: Tensor, scratch: Scratch, rng: torch.Generator | None) -> None:
        absmax_rows(x, stat, scratch)
        grid = torch.mul(x, inverse_scale(stat, self._code_max * _STEP), out=scratch.floats)
        if rng is not None:
            grid.div_(_STEP).add_(torch.rand(grid.shape, generator=rng, device=grid.device))
            grid.floor_().clamp_(-self._code_max, self._code_max).mul_(_STEP)
        grid.add_(self._magic)
        if self._packer is None:
            codes.copy_(scratch.words)
        else:
            scratch.bytes.copy_(scratch.words)
            self._packer.pack(scratch, codes)

    def expand(self, codes: Tensor, scratch: Scratch) -> Tensor:
        if self._packer is None:
            return scratch.floats.copy_(codes)
        self._packer.unpack_high(codes, scratch)
        return scratch.floats.copy_(scratch.bytes)


class IntCodec(Scaled):
    def __init__(self, bits: int) -> None:
        self.name = f"int{bits}"
        self.unit = 2.0 ** -(8 - bits)  # `expand` leaves codes in the top bits of a byte
        self._bits = bits
        self._code_max = 2 ** (bits - 1) - 1

    def kernel(self, device: torch.device) -> Kernel:
        return _IntKernel(self._bits, device)

    def scales(self, stat: Tensor, x: Tensor) -> Tensor:
        # Divided by a tensor: CUDA multiplies by the inverse of a Python number, and scales would differ from the CPU's. Near
        # the largest float a scale that is rounded up would decode to Inf; the error bound covers the clamp.
        steps = flush_tiny(stat) / constant(self._code_max, stat.device, torch.float32)
        steps.clamp_(max=_FLOAT_MAX / self._code_max * (1 - 2.0**-22))
        return steps.add_(stat - stat)  # adds 0, or NaN where the clamp hid an Inf

    def error_bound(self, x: Tensor) -> Tensor:
        """Half a step, and a margin for the rounding of the inverse and the product. A block sent as zeros errs by x."""
        absmax = block_absmax(x)
        half_step = absmax / self._code_max * (0.5 + self._code_max * 2.0**-21)
        return per_element(torch.where(absmax > TINY, half_step, absmax), x.numel())


def int_codec(name: str) -> IntCodec:
    return IntCodec(int(codec_spec(name).bits))


class _SignKernel:
    """The bit is set for negative elements; zero is positive, also -0.0."""

    def __init__(self, device: torch.device) -> None:
        self._packer = BitPacker(1, device)
        self._bit6 = constant(64, device)
        self._zero = constant(0.0, device, torch.float32)
        self._sign_shift = constant(31, device, torch.int32)

    def quantise(self, x: Tensor, stat: Tensor, codes: Tensor, scratch: Scratch, rng: torch.Generator | None) -> None:
        torch.sum(torch.abs(x, out=scratch.floats), dim=1, keepdim=True, out=stat)
        torch.add(x, self._zero, out=scratch.floats)  # -0.0 + 0.0 is +0.0
        scratch.bytes.copy_(scratch.words.bitwise_right_shift_(self._sign_shift))
        self._packer.pack(scratch, codes)

    def expand(self, codes: Tensor, scratch: Scratch) -> Tensor:
        # Unpacked, a byte is 0 or -128; with bit 6 set it is 64 or -64.
        self._packer.unpack_high(codes, scratch)
        return scratch.floats.copy_(scratch.bytes.bitwise_or_(self._bit6))


class SignCodec(Scaled):
    name = "int1"
    unit = 1.0 / 64
    """`expand` gives 64 and -64."""

    def kernel(self, device: torch.device) -> Kernel:
        return _SignKernel(device)

    def encode(self, x: Tensor, *, rng: torch.Generator | None = None) -> Packet:
        if rng is not None:
            # Unbiased signs need scale >= absmax, so with the mean magnitude there is no stochastic rounding.
            raise ConfigError("codec int1 has no stochastic rounding; choose int8, int4, int2 or e3m0")
        return super().encode(x)

    def scales(self, stat: Tensor, x: Tensor) -> Tensor:
        means = _means(stat, x.numel())
        # A sum of 256 magnitudes may overflow although their mean does not. This is rare, so it may be slow.
        if not bool(torch.isfinite(means).all()):
            means = _means(_exact_sums(x), x.numel())
        return flush_tiny(means)

    def error_bound(self, x: Tensor) -> Tensor:
        scale = per_element(_means(_exact_sums(x), x.numel()), x.numel())
        # 256 fp32 additions lose at most 256 half-ulps of the sum. A block sent as zeros errs by x itself.
        error = (x.abs() - scale).abs() + scale * 2.0**-15
        return torch.where(scale > 2 * TINY, error, torch.maximum(error, x.abs()))


def _means(sums: Tensor, numel: int) -> Tensor:
    """The short block has its own count."""
    means = sums / BLOCK
    if numel % BLOCK:
        means[-1:] = sums[-1:] / constant(numel % BLOCK, sums.device, sums.dtype)
    return means.float()


def _exact_sums(x: Tensor) -> Tensor:
    """Each block's sum of magnitudes in fp64, which 256 fp32 numbers cannot overflow."""
    require_vector(x, "x")
    blocks = x.numel() // BLOCK
    sums = torch.empty(block_count(x.numel()), dtype=torch.float64, device=x.device)
    for panel, target in zip(panels(x, BLOCK, blocks), panels(sums, 1, blocks), strict=True):
        torch.sum(panel.abs(), dim=1, keepdim=True, dtype=torch.float64, out=target)
    return sums


def sign_codec(name: str) -> SignCodec:
    return SignCodec()
