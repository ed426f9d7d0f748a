"""Indices inside a chunk of 4,096 elements, 12 bits each, two in three bytes; and codes of 2 bits, four in a byte.

A chunk keeps a share of its elements, rounded, and at least one; the last chunk may be shorter and keeps its own share. All
indices come first, then all codes, each without gaps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.codecs.layout import kept_count
from atoll.config.codecs import codec_spec, share_kept


def kept_by_chunk(name: str, numel: int, device: torch.device) -> Tensor:
    """How many elements each chunk keeps."""
    block, share = codec_spec(name).block, share_kept(name)
    full, rest = divmod(numel, block)
    counts = [kept_count(block, share)] * full + ([kept_count(rest, share)] if rest else [])
    return torch.tensor(counts, dtype=torch.int64, device=device)


def packed(indices: Tensor, codes: Tensor) -> Tensor:
    """The bytes of a packet: int64 indices below 4,096 and codes below 4."""
    wide = torch.nn.functional.pad(indices, (0, indices.numel() % 2)).view(-1, 2)
    first, second = wide[:, 0], wide[:, 1]
    triples = torch.stack((first & 255, (first >> 8) | ((second & 15) << 4), second >> 4), dim=1).reshape(-1)
    triples = triples[: -(-indices.numel() * 12 // 8)]
    fours = torch.nn.functional.pad(codes, (0, -codes.numel() % 4)).view(-1, 4)
    quarters = fours[:, 0] | (fours[:, 1] << 2) | (fours[:, 2] << 4) | (fours[:, 3] << 6)
    return torch.cat((triples, quarters)).to(torch.uint8)


def unpacked_indices(data: Tensor, kept: int) -> Tensor:
    size = -(-kept * 12 // 8)
    triples = torch.nn.functional.pad(data[:size].to(torch.int64), (0, -size % 3)).view(-1, 3)
    first = triples[:, 0] | ((triples[:, 1] & 15) << 8)
    second = (triples[:, 1] >> 4) | (triples[:, 2] << 4)
    return torch.stack((first, second), dim=1).reshape(-1)[:kept]


def unpacked_codes(data: Tensor, kept: int) -> Tensor:
    bytes_ = data[-(-kept * 12 // 8) :].to(torch.int64)
    shifts = torch.tensor((0, 2, 4, 6), device=data.device)
    return ((bytes_.unsqueeze(1) >> shifts) & 3).reshape(-1)[:kept]


def indices_rise(name: str, numel: int, data: Tensor) -> bool:
    """Whether the indices of every chunk rise strictly and lie inside it: none occurs twice, and none is outside the tensor."""
    counts = kept_by_chunk(name, numel, data.device)
    if not numel:
        return True
    block = codec_spec(name).block
    places = unpacked_indices(data, int(counts.sum())) + block * torch.arange(len(counts)).repeat_interleave(counts)
    return bool((places[1:] > places[:-1]).all()) and int(places[-1]) < numel
