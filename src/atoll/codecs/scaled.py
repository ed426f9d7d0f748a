"""What the codecs with one scale per block share: int8, int4, int2, int1, e3m0. Each adds a kernel and a scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from atoll.codecs.blocks import Scratch, padded, panels, require_codec, require_vector, scratch_for
from atoll.codecs.choice import below, kernels_for, on_gpu
from atoll.codecs.layout import BLOCK, block_count, layout
from atoll.codecs.neon import FACTOR_LIMIT
from atoll.codecs.packet import Packet
from atoll.config.codecs import codec_spec
from atoll.errors import NotFinite


class Kernel(Protocol):
    """A codec's arithmetic on one panel, with its constants already on the device."""

    def quantise(self, x: Tensor, stat: Tensor, codes: Tensor, scratch: Scratch, rng: torch.Generator | None) -> None:
        """Fills codes, and stat with one number per row, from which its scale follows: NaN or Inf if the row has one."""
        ...

    def expand(self, codes: Tensor, scratch: Scratch) -> Tensor:
        """Small integers as floats, in `scratch.floats`."""
        ...


class Scaled:
    """Encode, decode and accumulate for any kernel."""

    name: str
    unit: float
    """A decoded value is the result of the kernel's `expand` times scale times unit. A power of two."""
    lossless = False

    def kernel(self, device: torch.device) -> Kernel:
        raise NotImplementedError

    def scales(self, stat: Tensor, x: Tensor) -> Tensor:
        """One fp32 scale per block. NaN and Inf propagate."""
        raise NotImplementedError

    def nbytes(self, numel: int) -> int:
        return layout(self.name, numel).nbytes

    @property
    def per_byte(self) -> int:
        return 8 // int(codec_spec(self.name).bits)

    def encode(self, x: Tensor, *, rng: torch.Generator | None = None) -> Packet:
        require_vector(x, "x")
        codes = torch.empty(layout(self.name, x.numel()).codes, dtype=torch.int8, device=x.device)
        scales = torch.empty(block_count(x.numel()), dtype=torch.float32, device=x.device)
        compiled = kernels_for(self.name, x) if rng is None else None
        done, finite = 0, True
        if compiled is not None:
            done = x.numel() // BLOCK
            finite = compiled.encode(self.name, x, done, scales, codes)
        rest = x[done * BLOCK :]
        if rest.numel():
            scales[done:] = self._quantise(rest, codes[done * BLOCK // self.per_byte :], rng)
            finite = finite and bool(torch.isfinite(scales[done:]).all())
        # The codes of a block with NaN or Inf are garbage, but they never leave this function.
        if not finite:
            raise NotFinite(f"the tensor to encode as {self.name}")
        return Packet(self.name, x.numel(), codes, scales)

    def encode_unchecked(self, x: Tensor) -> tuple[Packet, Tensor]:
        """The result of `encode`, rounded to nearest, and whether x was finite: a bool on x's device, which the caller must
        check before it sends the packet, because codes and scales are garbage if it is false. On CUDA nothing here waits for the
        device, except int1's scales; int1 is not encoded there, because its sums depend on their order."""
        require_vector(x, "x")
        codes = torch.empty(layout(self.name, x.numel()).codes, dtype=torch.int8, device=x.device)
        scales = self._quantise(x, codes, None)
        return Packet(self.name, x.numel(), codes, scales), torch.isfinite(scales).all()

    def _quantise(self, x: Tensor, codes: Tensor, rng: torch.Generator | None) -> Tensor:
        """Fills codes and returns the scales."""
        stat = torch.empty(block_count(x.numel()), dtype=torch.float32, device=x.device)
        blocks, done = x.numel() // BLOCK, 0
        if rng is None and (device := on_gpu(self.name, x, codes)) is not None:
            done = blocks
            device.quantise_blocks(self.name, x, done, stat, codes)
        if done * BLOCK < x.numel():
            self._quantise_panels(x[done * BLOCK :], stat[done:], codes[done * BLOCK // self.per_byte :], rng)
        return self.scales(stat, x)

    def _quantise_panels(self, x: Tensor, stat: Tensor, codes: Tensor, rng: torch.Generator | None) -> None:
        kernel, blocks = self.kernel(x.device), x.numel() // BLOCK
        elements = panels(x, BLOCK, blocks)
        for panel, stat_panel, code_panel, scratch in zip(
            elements,
            panels(stat, 1, blocks),
            panels(codes, BLOCK // self.per_byte, blocks),
            scratch_for(elements, self.per_byte),
            strict=True,
        ):
            kernel.quantise(padded(panel, scratch.floats.shape[1]), stat_panel, code_panel, scratch, rng)

    def decode(self, packet: Packet) -> Tensor:
        out = torch.empty(packet.numel, dtype=torch.float32, device=packet.codes.device)
        factors = self._factors(packet, out, 1.0)
        compiled = kernels_for(self.name, out, packet.codes)
        done = 0
        if compiled is not None:
            done = packet.numel // BLOCK
            compiled.decode(self.name, out, done, factors, packet.codes)
        elif (device := on_gpu(self.name, out, packet.codes)) is not None:
            done = packet.numel // BLOCK
            device.decode_blocks(self.name, out, done, factors, packet.codes, add=False)
        for target, values, factor in self._expanded(packet, factors, out, done):
            torch.mul(values, factor, out=target)
        return out

    def accumulate(self, packet: Packet, into: Tensor, weight: float = 1.0) -> None:
        """A multiplication and an addition, each rounded. `addcmul_` would save a pass, but it may fuse the two in its vector
        loop and not in its scalar loop, so results would depend on the number of threads."""
        require_vector(into, "into")
        factors = self._factors(packet, into, weight)
        compiled = kernels_for(self.name, into, packet.codes)
        done = 0
        if compiled is not None and below(factors, FACTOR_LIMIT):
            done = packet.numel // BLOCK
            compiled.accumulate(self.name, into, done, factors, packet.codes)
        elif (device := on_gpu(self.name, into, packet.codes)) is not None:
            done = packet.numel // BLOCK
            device.decode_blocks(self.name, into, done, factors, packet.codes, add=True)
        for target, values, factor in self._expanded(packet, factors, into, done):
            target.add_(values.mul_(factor))

    def block_squares(self, packet: Packet) -> tuple[Tensor, Tensor]:
        """By block the sum of the squares of its expanded codes, and the factor from a code to a value. Codes are at most 128, so
        a sum is below 2^23: exact in fp32, in any order."""
        walked = torch.empty(packet.numel, dtype=torch.float32, device=packet.codes.device)
        factors = self._factors(packet, walked, 1.0)
        sums = [values.square().sum(1) for _, values, _ in self._expanded(packet, factors, walked, 0)]
        return torch.cat(sums), factors

    def _factors(self, packet: Packet, target: Tensor, weight: float) -> Tensor:
        """The factor per block that turns expanded codes into weighted values."""
        require_codec(packet.codec, self.name)
        assert target.numel() == packet.numel, f"target holds {target.numel()} elements, the packet {packet.numel}"
        assert packet.scales is not None
        # Units are powers of two, so for weight 1 each value is exactly code * scale, rounded once.
        return packet.scales * (weight * self.unit)

    def _expanded(
        self, packet: Packet, factors: Tensor, target: Tensor, done: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """From block `done` on: panels of target, their codes as floats, and the factor of each row."""
        if done * BLOCK == packet.numel:
            return
        kernel = self.kernel(packet.codes.device)
        blocks = packet.numel // BLOCK - done
        codes_per_block = BLOCK // self.per_byte
        elements = panels(target[done * BLOCK :], BLOCK, blocks)
        for panel, factor, codes, scratch in zip(
            elements,
            panels(factors[done:], 1, blocks),
            panels(packet.codes[done * codes_per_block :], codes_per_block, blocks),
            scratch_for(elements, self.per_byte),
            strict=True,
        ):
            yield panel, kernel.expand(codes, scratch)[:, : panel.shape[1]], factor
