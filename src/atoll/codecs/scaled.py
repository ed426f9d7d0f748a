"""What the codecs with one scale a block share: int8, int4, int2, int1, e3m0. Each adds a kernel and a scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from atoll.codecs.blocks import Scratch, padded, panels, require_codec, require_vector, scratch_for
from atoll.codecs.layout import BITS, BLOCK, block_count, layout
from atoll.codecs.packet import Packet
from atoll.errors import NotFinite


class Kernel(Protocol):
    """A codec's arithmetic on one panel, with the constants it needs already on the device."""

    @property
    def unit(self) -> float:
        """What `expand` gives, times scale, times unit, is the decoded value."""
        ...

    def quantise(self, x: Tensor, stat: Tensor, codes: Tensor, scratch: Scratch, rng: torch.Generator | None) -> None:
        """Fills codes, and stat with one number a row, from which its scale comes: NaN or Inf if the row holds such."""
        ...

    def expand(self, codes: Tensor, scratch: Scratch) -> Tensor:
        """Small integers as floats, in `scratch.floats`."""
        ...


class Scaled:
    """Encode, decode and accumulate for any kernel."""

    name: str
    lossless = False

    def kernel(self, device: torch.device) -> Kernel:
        raise NotImplementedError

    def scales(self, stat: Tensor, x: Tensor) -> Tensor:
        """One fp32 scale a block. NaN and Inf stay."""
        raise NotImplementedError

    def nbytes(self, numel: int) -> int:
        return layout(self.name, numel).nbytes

    @property
    def per_byte(self) -> int:
        return 8 // BITS[self.name]

    def encode(self, x: Tensor, *, rng: torch.Generator | None = None) -> Packet:
        require_vector(x, "x")
        codes = torch.empty(layout(self.name, x.numel()).codes, dtype=torch.int8, device=x.device)
        stat = torch.empty(block_count(x.numel()), dtype=torch.float32, device=x.device)
        kernel = self.kernel(x.device)
        blocks = x.numel() // BLOCK
        elements = panels(x, BLOCK, blocks)
        for panel, stat_panel, code_panel, scratch in zip(
            elements,
            panels(stat, 1, blocks),
            panels(codes, BLOCK // self.per_byte, blocks),
            scratch_for(elements, self.per_byte),
            strict=True,
        ):
            kernel.quantise(padded(panel, scratch.floats.shape[1]), stat_panel, code_panel, scratch, rng)
        scales = self.scales(stat, x)
        # The codes of a block with NaN or Inf are garbage, but they never leave this function.
        if not bool(torch.isfinite(scales).all()):
            raise NotFinite(f"the tensor to encode as {self.name}")
        return Packet(self.name, x.numel(), codes, scales)

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
