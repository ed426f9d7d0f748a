"""Compares `codecs.device`, on the CPU by Triton's interpreter, with torch's operations: python interpreted_codecs.py CODEC.

A process of its own, because Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from atoll.codecs import codec, device
from atoll.codecs.layout import BLOCK, layout
from atoll.codecs.scaled import Scaled

BLOCKS = 19
"""More than two programs, the last one not full."""


def vectors() -> list[Tensor]:
    by = torch.Generator().manual_seed(0)
    found = []
    for scale in (1e-4, 1.0, 3e37, 1e-34, 1e-40):
        found.append(torch.randn(BLOCKS * BLOCK, generator=by) * scale)
        found.append(torch.randint(-260, 260, (BLOCKS * BLOCK,), generator=by) / 2 * scale)  # many ties
        wide = torch.randn(BLOCKS * BLOCK, generator=by) * torch.exp(5 * torch.randn(BLOCKS * BLOCK, generator=by)) * scale
        wide[::7], wide[BLOCK : 2 * BLOCK], wide[3] = 0.0, 0.0, -0.0
        found.append(wide)
    return [x.clamp(-3.3e38, 3.3e38) for x in found]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def compare(name: str, x: Tensor) -> None:
    by = codec(name)
    assert isinstance(by, Scaled)
    packet, finite = by.encode_unchecked(x)
    stat, codes = torch.empty(BLOCKS), torch.empty_like(packet.codes)
    device.quantise_blocks(name, x, BLOCKS, stat, codes)
    assert finite and packet.scales is not None
    assert same(by.scales(stat, x), packet.scales) and same(codes, packet.codes)
    values, into = torch.empty_like(x), torch.linspace(-1, 1, x.numel())
    expected = into.clone()
    device.decode_blocks(name, values, BLOCKS, by._factors(packet, values, 1.0), packet.codes, add=False)
    device.decode_blocks(name, into, BLOCKS, by._factors(packet, into, -0.7), packet.codes, add=True)
    by.accumulate(packet, expected, -0.7)
    assert same(values, by.decode(packet)) and same(into, expected)


def finds_what_is_no_number(name: str) -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        x, stat = torch.ones(3 * BLOCK), torch.empty(3)
        x[BLOCK + 44] = value
        device.quantise_blocks(name, x, 3, stat, torch.empty(layout(name, x.numel()).codes, dtype=torch.int8))
        assert stat.isfinite().tolist() == [True, False, True]


if __name__ == "__main__":
    for each in vectors():
        compare(sys.argv[1], each)
    finds_what_is_no_number(sys.argv[1])
    print("equal")
