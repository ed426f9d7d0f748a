"""fp32, which is bit-exact, and bf16, which rounds to nearest even."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from atoll.codecs.blocks import panel_elements, require_codec, require_vector
from atoll.codecs.layout import layout
from atoll.codecs.packet import Packet
from atoll.errors import ConfigError, NotFinite

_BF16_MAX: Final = float(torch.finfo(torch.bfloat16).max)
_BF16_HALF_ULP: Final = 2.0**-8
_BF16_SMALLEST: Final = 2.0**-133
"""The spacing of bf16's subnormals; half of it bounds the error there."""


def finite_absmax(x: Tensor, name: str) -> float:
    """The largest magnitude. Maxima propagate NaN and Inf, so this also checks that there are none."""
    if x.numel() == 0:
        return 0.0
    absmax = torch.maximum(x.amax(), -x.amin())
    if not bool(torch.isfinite(absmax)):
        raise NotFinite(f"the tensor to encode as {name}")
    return float(absmax)


class PlainCodec:
    """The element type is the code; there are no blocks and no scales."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lossless = name == "fp32"

    def encode(self, x: Tensor, *, rng: torch.Generator | None = None) -> Packet:
        if rng is not None:
            raise ConfigError(f"codec {self.name} has no stochastic rounding; choose int8, int4, int2 or e3m0")
        require_vector(x, "x")
        absmax = finite_absmax(x, self.name)
        dtype = layout(self.name, x.numel()).code_dtype
        if absmax > _BF16_MAX and not self.lossless:
            # Rounding to nearest would turn the largest floats into Inf.
            x = x.clamp(-_BF16_MAX, _BF16_MAX)
        # A packet is a copy: the caller goes on changing x.
        return Packet(self.name, x.numel(), x.to(dtype, copy=True), None)

    def encode_unchecked(self, x: Tensor) -> tuple[Packet, Tensor]:
        """The result of `encode`, and whether x was finite: a bool on x's device, which the caller must check before it sends
        the packet. Nothing here waits for a device; in return bf16 always clamps."""
        require_vector(x, "x")
        finite = torch.isfinite(torch.stack(torch.aminmax(x))).all() if x.numel() else x.new_ones((), dtype=torch.bool)
        if not self.lossless:
            x = x.clamp(-_BF16_MAX, _BF16_MAX)
        return Packet(self.name, x.numel(), x.to(layout(self.name, x.numel()).code_dtype, copy=True), None), finite

    def decode(self, packet: Packet) -> Tensor:
        require_codec(packet.codec, self.name)
        return packet.codes.to(torch.float32, copy=True)

    def accumulate(self, packet: Packet, into: Tensor, weight: float = 1.0) -> None:
        """Product and sum are rounded separately, as in every codec, so that no bit depends on the number of threads."""
        require_codec(packet.codec, self.name)
        require_vector(into, "into")
        assert into.numel() == packet.numel, f"into holds {into.numel()} elements, the packet {packet.numel}"
        size = panel_elements(into.device)
        scratch = torch.empty(min(size, packet.numel), device=into.device)
        for codes, target in zip(torch.split(packet.codes, size), torch.split(into, size), strict=True):
            values = scratch[: codes.numel()]
            if codes.dtype != torch.float32:
                codes = values.copy_(codes)
            target.add_(torch.mul(codes, weight, out=values))

    def nbytes(self, numel: int) -> int:
        return layout(self.name, numel).nbytes

    def error_bound(self, x: Tensor) -> Tensor:
        if self.lossless:
            return torch.zeros_like(x)
        return x.abs() * _BF16_HALF_ULP + _BF16_SMALLEST
