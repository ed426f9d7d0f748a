"""What the codecs with one scale a block share: int8, int4, int2, int1, e3m0. Each adds a kernel and a scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from atoll.codecs.blocks import Scratch, padded, panels, require_codec, require_vector, scratch_for
from atoll.codecs.layout import BITS, BLOCK, layout
from atoll.codecs.packet import Packet
from atoll.errors import NotFinite


class Kernel(Protocol):
    """A codec's arithmetic on one panel, with the constants it needs already on the device."""

    @property
    def unit(self) -> float:
        """What `expand` gives, times scale, times unit, is the decoded value."""
        ...

    def inverse(self, stat: Tensor) -> Tensor:
        """What `quantise` wants to know of each block, made for all of them at once."""
        ...

    def quantise(
        self, x: Tensor, inverse: Tensor, codes: Tensor, scratch: Scratch, rng: torch.Generator | None
    ) -> None: ...

    def expand(self, codes: Tensor, scratch: Scratch) -> Tensor:
        """Small integers as floats, in `scratch.floats`."""
        ...


class Scaled:
    """Encode, decode and accumulate for any kernel."""

    name: str
    lossless = False

    def kernel(self, device: torch.device) -> Kernel:
        raise NotImplementedError

    def stat(self, x: Tensor) -> Tensor:
        """One number a block, from which its scale comes. NaN or Inf in the block must come out as NaN or Inf."""
        raise NotImplementedError

    def scales(self, stat: Tensor) -> Tensor:
        raise NotImplementedError

    def nbytes(self, numel: int) -> int:
        return layout(self.name, numel).nbytes

    @property
    def per_byte(self) -> int:
        return 8 // BITS[self.name]

    def encode(self, x: Tensor, *, rng: torch.Generator | None = None) -> Packet:
        require_vector(x, "x")
        stat = self.stat(x)
        if not bool(torch.isfinite(stat).all()):
            raise NotFinite(f"the tensor to encode as {self.name}")
        codes = torch.empty(layout(self.name, x.numel()).codes, dtype=torch.int8, device=x.device)
        kernel = self.kernel(x.device)
        blocks = x.numel() // BLOCK
        elements = panels(x, BLOCK, blocks)
        for panel, inverse, target, scratch in zip(
            elements,
            panels(kernel.inverse(stat), 1, blocks),
            panels(codes, BLOCK // self.per_byte, blocks),
            scratch_for(elements, self.per_byte),
            strict=True,
        ):
            kernel.quantise(padded(panel, scratch.floats.shape[1]), inverse, target, scratch, rng)
        return Packet(self.name, x.numel(), codes, self.scales(stat))

    def decode(self, packet: Packet) -> Tensor:
        out = torch.empty(packet.numel, dtype=torch.float32, device=packet.codes.device)
        for target, values, factor in self._expanded(packet, out, 1.0):
            torch.mul(values, factor, out=target)
        return out

    def accumulate(self, packet: Packet, into: Tensor, weight: float = 1.0) -> None:
        """A multiplication and an addition, each rounded: `addcmul_` would save a pass, but whether it fuses the two
        may differ between its vector and its scalar loop, and so between thread counts."""
        require_vector(into, "into")
        for target, values, factor in self._expanded(packet, into, weight):
            target.add_(values.mul_(factor))

    def _expanded(self, packet: Packet, target: Tensor, weight: float) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Panels of target, the codes there as floats, and the factor a row that makes them weighted values."""
        require_codec(packet.codec, self.name)
        assert target.numel() == packet.numel, f"target holds {target.numel()} elements, the packet {packet.numel}"
        assert packet.scales is not None
        kernel = self.kernel(packet.codes.device)
        # Units are powers of two, so for weight 1 each value is exactly code * scale, rounded once.
        factors = packet.scales * (weight * kernel.unit)
        blocks = packet.numel // BLOCK
        elements = panels(target, BLOCK, blocks)
        for panel, factor, codes, scratch in zip(
            elements,
            panels(factors, 1, blocks),
            panels(packet.codes, BLOCK // self.per_byte, blocks),
            scratch_for(elements, self.per_byte),
            strict=True,
        ):
            yield panel, kernel.expand(codes, scratch)[:, : panel.shape[1]], factor
