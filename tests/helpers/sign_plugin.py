"""A plugin as a researcher would write it: a codec of one sign bit and one scale for 64 elements, and a merge by the median."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import atoll

BLOCK = 64


def encode(x: Tensor) -> Tensor:
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    counts = torch.full((blocks.shape[0],), float(BLOCK))
    counts[-1] = x.numel() - BLOCK * (blocks.shape[0] - 1)
    scales = blocks.abs().sum(1) / counts
    bits = torch.nn.functional.pad((x < 0).to(torch.uint8), (0, -x.numel() % 8)).view(-1, 8)
    codes = (bits << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.int64).to(torch.uint8)
    return torch.cat([codes, scales.view(torch.uint8)])


def decode(data: Tensor, numel: int) -> Tensor:
    size = -(-numel // 8)
    bits = (data[:size].view(-1, 1) >> torch.arange(8, dtype=torch.uint8)) & 1
    signs = 1.0 - 2.0 * bits.reshape(-1)[:numel].float()
    scales = data[size:].clone().view(torch.float32)
    return signs * scales.repeat_interleave(BLOCK)[:numel]


def median(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack(list(deltas)).median(dim=0).values


atoll.register_codec(
    atoll.CodecSpec(name="sign64", bits=1, block=BLOCK, loss_percent=5.0), encode, decode
)
atoll.register_merge(atoll.MergeSpec(name="median", summary="the elementwise median, whatever the weights"), median)
