"""What all block codecs share: the walk over cache-sized panels, scratch memory that stays in L2, and bit packing.

Each torch operation is one pass over memory. On a whole 64 MiB tensor every pass would go to main memory; on a panel it stays
in the second-level cache, and only the reads of x and the writes of codes leave it. So a tensor is processed in panels of
(rows, 256), one row per block, and every operation writes into preallocated scratch.

Encoding walks once: a block's statistic first, then its codes while x is still in the cache. Two walks would save a few small
operations per panel but read x twice from memory, which on x86 costs more than all work on bytes.

Nothing here depends on the number of threads: operations are elementwise and correctly rounded, or reduce one block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from atoll.codecs.layout import BLOCK, block_count
from atoll.errors import DataError

PANEL_CPU: Final = 131_072
"""Elements. Six bytes of scratch each and four of x fit an L2 of 1 to 2 MiB. Half as many cost more calls; twice as many gain a
little on ARM (1 MiB of L2) and lose a little on x86 (2 MiB)."""
PANEL_CUDA: Final = 16_777_216
"""A GPU is fastest with few large launches; this only bounds the scratch memory."""

TINY: Final = 2.0**-115
"""Blocks whose largest magnitude is at most this are sent as zeros. Above it every intermediate (the inverse scale, the scale
divided by a power of two) is a normal float: nothing overflows, nothing depends on the flush-to-zero mode, and nothing takes
x86's slow path for subnormals."""


def panel_elements(device: torch.device) -> int:
    return PANEL_CUDA if device.type == "cuda" else PANEL_CPU


class Scratch:
    """Buffers for panels of one shape. `words` are the bits of `floats`; `parts` are the fields of a packed byte."""

    __slots__ = ("bytes", "floats", "more_bytes", "packed", "parts", "words")

    def __init__(self, rows: int, width: int, per_byte: int, memory: Tensor) -> None:
        count = rows * width
        self.floats = memory[: 4 * count].view(torch.float32).view(rows, width)
        self.words = self.floats.view(torch.int32)
        self.bytes = memory[4 * count : 5 * count].view(rows, width)
        self.parts = self.bytes.chunk(per_byte, dim=1)
        self.more_bytes = memory[5 * count : 6 * count].view(rows, width)
        self.packed = self.more_bytes.view(-1)[: self.parts[0].numel()].view(rows, -1)


_local = threading.local()


def _memory(count: int, device: torch.device) -> Tensor:
    """Six bytes per element. On the CPU each thread keeps the memory of one panel: fresh pages would fault at every call, which
    costs more than a pass. Walks must therefore not nest, and none does."""
    size = 6 * count
    if device.type != "cpu":
        return torch.empty(size, dtype=torch.int8, device=device)
    memory: Tensor | None = getattr(_local, "memory", None)
    if memory is None or memory.numel() < size:
        memory = _local.memory = torch.empty(size, dtype=torch.int8)
    return memory


def panels(flat: Tensor, per_block: int, blocks: int) -> list[Tensor]:
    """Views of (rows, per_block) over `blocks` whole blocks, then one of (1, rest) over the remainder, if there is one."""
    rows = panel_elements(flat.device) // BLOCK
    body = flat[: blocks * per_block]
    rest = flat[blocks * per_block :]
    found = list(torch.split(body.view(blocks, per_block), rows)) if blocks else []
    return [*found, rest.view(1, -1)] if rest.numel() else found


def scratch_for(elements: list[Tensor], per_byte: int) -> Iterator[Scratch]:
    """Scratch for each panel. At most three shapes occur: a full panel, the last whole blocks, the short block."""
    scratch: Scratch | None = None
    for panel in elements:
        rows, width = panel.shape[0], -(-panel.shape[1] // per_byte) * per_byte
        if scratch is None or scratch.floats.shape != (rows, width):
            scratch = Scratch(rows, width, per_byte, _memory(rows * width, panel.device))
        yield scratch


def padded(x: Tensor, width: int) -> Tensor:
    """Pads the short block with zeros to whole bytes."""
    return x if x.shape[1] == width else torch.nn.functional.pad(x, (0, width - x.shape[1]))


def absmax_rows(x: Tensor, out: Tensor, scratch: Scratch) -> None:
    """The largest magnitude of each row. NaN and Inf propagate, so they are found without a further pass.

    abs and amax are two passes, and still much faster than `aminmax(dim=)` and `vector_norm(inf)`, whose inner loops are scalar.
    """
    torch.amax(torch.abs(x, out=scratch.floats), dim=1, keepdim=True, out=out)


def block_absmax(x: Tensor) -> Tensor:
    require_vector(x, "x")
    blocks = x.numel() // BLOCK
    out = torch.empty(block_count(x.numel()), dtype=torch.float32, device=x.device)
    elements = panels(x, BLOCK, blocks)
    for panel, target, scratch in zip(elements, panels(out, 1, blocks), scratch_for(elements, 1), strict=True):
        absmax_rows(panel, target, scratch)
    return out


def inverse_scale(absmax: Tensor, numerator: float) -> Tensor:
    """numerator / absmax, and 0 for the blocks that are sent as zeros."""
    return torch.div(numerator, torch.nn.functional.threshold(absmax, TINY, float("inf")))


def flush_tiny(scales: Tensor) -> Tensor:
    """Scale 0 for the blocks that are sent as zeros. Keeps NaN."""
    return torch.nn.functional.threshold(scales, TINY, 0.0)


def per_element(per_block: Tensor, numel: int) -> Tensor:
    return per_block.repeat_interleave(BLOCK)[:numel]


def constant(value: float, device: torch.device, dtype: torch.dtype = torch.int8) -> Tensor:
    """A one-element operand. torch wraps a Python number at every call, which for bytes costs as much as the operation.

    Filled in place: `torch.tensor` would copy it from the host, and on CUDA the host waits for that copy."""
    return torch.full((1,), value, dtype=dtype, device=device)


class BitPacker:
    """Two's complement fields of 4, 2 or 1 bits in bytes.

    A row of width w becomes w/n bytes: byte j has the elements j, j + w/n, j + 2w/n ... from the low bits up. Because the fields
    of a byte come from contiguous parts of the row and not from neighbours, every operation is vectorised.
    """

    __slots__ = ("_bits", "_mask", "_shifts", "_top")

    def __init__(self, bits: int, device: torch.device) -> None:
        self._bits = bits
        self._mask = constant((1 << bits) - 1, device)
        self._top = constant(-(1 << (8 - bits)), device)
        self._shifts = [constant(8 - bits * (part + 1), device) for part in range(8 // bits)]

    def pack(self, scratch: Scratch, out: Tensor) -> None:
        """`scratch.bytes` into `out`; `more_bytes` is overwritten."""
        high = scratch.parts[-1]
        for part in reversed(scratch.parts[:-1]):
            torch.bitwise_and(part, self._mask, out=scratch.packed)
            torch.add(scratch.packed, high, alpha=1 << self._bits, out=out)
            high = out

    def unpack_high(self, codes: Tensor, scratch: Scratch) -> None:
        """Writes each field to the top bits of its byte of `scratch.bytes`, which is field * 2^(8 - bits). The scale includes
        that factor, which saves the shift down."""
        parts = scratch.parts
        torch.bitwise_left_shift(codes, self._shifts[0], out=parts[0])
        for part, shift in zip(parts[1:-1], self._shifts[1:-1], strict=True):
            torch.bitwise_left_shift(codes, shift, out=part)
            torch.bitwise_and(part, self._top, out=part)
        torch.bitwise_and(codes, self._top, out=parts[-1])


def require_vector(x: Tensor, name: str) -> None:
    fits = x.dim() == 1 and x.dtype == torch.float32 and x.is_contiguous()
    assert fits, f"{name} must be a contiguous 1-D float32 tensor, not {tuple(x.shape)} {x.dtype}"


def require_codec(packet_codec: str, name: str) -> None:
    if packet_codec != name:
        raise DataError(f"packet was encoded by {packet_codec!r} and cannot be decoded by {name!r}")
