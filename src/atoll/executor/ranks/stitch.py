"""A packet from the parts that ranks encoded: byte for byte the packet of the whole vector.

A codec that scales blocks, or looks at each element alone, gives a block the same codes wherever the block is. So a rank encodes
the blocks that it owns whole. Blocks that ranks share (seams) are sent as numbers and encoded where the packet is assembled. For
a codec that selects, sums or shuffles over the whole vector, or rounds by a random sequence, everything is seams.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.codecs import BLOCK, Codec, Packet
from atoll.codecs import codec as codec_of
from atoll.codecs.layout import layout
from atoll.config import Config
from atoll.config.codecs import codec_spec
from atoll.tensors.pieces import BlockSplit, Run, numel_of, put_runs, take_runs


class EncodedPart(NamedTuple):
    codes: Tensor
    scales: Tensor | None
    seams: Tensor
    """Numbers, not codes."""


def block_of(codec: Codec, *, rounds_randomly: bool) -> int:
    """Elements of a block that a rank may encode by itself; 0: none."""
    spec = codec_spec(codec.name)
    if rounds_randomly or not spec.on_device:  # what a device encodes to the same bytes does not depend on an order
        return 0
    return spec.block or 1


def packs_randomly(config: Config) -> bool:
    protocol = config.protocol
    return protocol.stochastic_rounding or codec_spec(codec_of(protocol.codec_up).name).random


def owned_block(config: Config) -> int:
    """Ranks that hold the same elements share them in ranges of so many."""
    return block_of(codec_of(config.protocol.codec_up), rounds_randomly=packs_randomly(config)) or BLOCK


def encode_part(codec: Codec, flat: Tensor, split: BlockSplit, *, feedback: bool) -> tuple[EncodedPart, Tensor | None]:
    """Of a rank's own flat vector, on the host. With feedback also what the codes do not carry; 0 at the seams, which only the
    assembled packet knows. Raises NotFinite."""
    blocks = take_runs(flat, split.blocks)
    packet = _encoded(codec, blocks, None)
    residual = None
    if feedback:
        residual = torch.zeros_like(flat)
        if blocks.numel():
            codec.accumulate(packet, blocks, -1.0)
        put_runs(residual, split.blocks, blocks)
    return EncodedPart(packet.codes, packet.scales, take_runs(flat, split.seams)), residual


def assemble(
    codec: Codec, numel: int, splits: Sequence[BlockSplit], parts: Sequence[EncodedPart], *, feedback: bool,
    rng: torch.Generator | None = None,
) -> tuple[Packet, list[Tensor]]:  # fmt: skip
    """The packet of `numel` elements, and with feedback of every rank what it does not carry at that rank's seams. Raises
    NotFinite."""
    order = sorted((run.start, rank, at) for rank, split in enumerate(splits) for at, run in enumerate(split.seams))
    offsets = [_offsets(split.seams) for split in splits]
    values = [parts[rank].seams[offsets[rank][at] : offsets[rank][at + 1]] for _, rank, at in order]
    seams = torch.cat(values) if values else torch.empty(0)
    packet = _encoded(codec, seams, rng)
    residuals: list[Tensor] = []
    if feedback:
        if seams.numel():
            codec.accumulate(packet, seams, -1.0)
        residuals = _dealt(seams, order, offsets)
    if seams.numel() == numel:
        return packet, residuals
    shape = layout(codec.name, numel)
    codes = torch.empty(shape.codes, dtype=shape.code_dtype)
    scales = None if shape.scales is None else torch.empty(shape.scales)
    shared = [splits[rank].seams[at] for _, rank, at in order]
    pairs: list[tuple[Sequence[Run], Tensor, Tensor | None]] = [(shared, packet.codes, packet.scales)]
    pairs += [(split.blocks, part.codes, part.scales) for split, part in zip(splits, parts, strict=True)]
    for runs, from_codes, from_scales in pairs:
        _place(codec.name, runs, (from_codes, from_scales), (codes, scales))
    return Packet(codec.name, numel, codes, scales), residuals


def _encoded(codec: Codec, flat: Tensor, rng: torch.Generator | None) -> Packet:
    """A user's codec need not know what to do with nothing."""
    if flat.numel():
        return codec.encode(flat, rng=rng)
    shape = layout(codec.name, 0)
    scales = None if shape.scales is None else torch.empty(0)
    return Packet(codec.name, 0, torch.empty(0, dtype=shape.code_dtype), scales)


def _offsets(runs: Sequence[Run]) -> list[int]:
    found = [0]
    for run in runs:
        found.append(found[-1] + run.length)
    return found


def _dealt(flat: Tensor, order: Sequence[tuple[int, int, int]], offsets: Sequence[list[int]]) -> list[Tensor]:
    dealt = [torch.empty(ends[-1]) for ends in offsets]
    at = 0
    for _, rank, index in order:
        low, high = offsets[rank][index], offsets[rank][index + 1]
        dealt[rank][low:high] = flat[at : at + high - low]
        at += high - low
    return dealt


def _place(
    name: str, runs: Sequence[Run], source: tuple[Tensor, Tensor | None], target: tuple[Tensor, Tensor | None]
) -> None:
    """Runs that touch are copied as one: together they are whole blocks, which each alone need not be."""
    ends = [at for at, (run, following) in enumerate(pairwise(runs), 1) if run.stop != following.start]
    first = 0
    done = 0
    for end in (*ends, len(runs)):
        if end == first:
            continue
        start, length = runs[first].start, numel_of(runs[first:end])
        here, there, span = layout(name, done), layout(name, start), layout(name, length)
        target[0][there.codes : there.codes + span.codes] = source[0][here.codes : here.codes + span.codes]
        if target[1] is not None and source[1] is not None:
            assert here.scales is not None and there.scales is not None and span.scales is not None
            target[1][there.scales : there.scales + span.scales] = source[1][here.scales : here.scales + span.scales]
        first, done = end, done + length
