"""Which codecs there are, and what a codec is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from atoll.codecs.e3m0 import E3M0
from atoll.codecs.integers import IntCodec, SignCodec
from atoll.codecs.layout import BITS, SPARSE, parse
from atoll.codecs.packet import Packet
from atoll.codecs.plain import PlainCodec
from atoll.codecs.sparse import SparseCodec


class Codec(Protocol):
    """A way to write a vector of fp32. Codecs hold no state: equal inputs (and generators) give equal bytes."""

    @property
    def name(self) -> str: ...

    @property
    def lossless(self) -> bool: ...

    def encode(self, x: Tensor, *, rng: torch.Generator | None = None) -> Packet:
        """x: 1-D contiguous fp32. NaN or Inf raises NotFinite. A generator (on x's device) means stochastic rounding,
        and ConfigError where a codec has none."""
        ...

    def decode(self, packet: Packet) -> Tensor: ...

    def accumulate(self, packet: Packet, into: Tensor, weight: float = 1.0) -> None:
        """into += weight * decode(packet) in fp32, without the whole decoded tensor. For weight 1 and -1 it is that to
        the bit; for others to a few ulp of the product, because the weight joins the scale."""
        ...

    def nbytes(self, numel: int) -> int:
        """Exactly `encode(x).nbytes` for any x of that many elements."""
        ...

    def error_bound(self, x: Tensor) -> Tensor:
        """Elementwise upper bound of |decode(encode(x)) - x| when rounding to nearest."""
        ...


@runtime_checkable
class UncheckedCodec(Codec, Protocol):
    """A codec that can encode where it must not wait for the device: it says whether x was finite, and raises nothing."""

    def encode_unchecked(self, x: Tensor) -> tuple[Packet, Tensor]:
        """The packet of `encode(x)`, to the byte, and a bool tensor on x's device. False: the packet is garbage."""
        ...


def codec(name: str) -> Codec:
    """The codec of that name; ConfigError names the allowed ones."""
    family, _ = parse(name)
    if family in SPARSE:
        return SparseCodec(name)
    if family == "e3m0":
        return E3M0()
    if family == "int1":
        return SignCodec()
    return IntCodec(BITS[family]) if family in BITS else PlainCodec(family)


def encode_with_feedback(
    c: Codec, x: Tensor, residual: Tensor | None, *, rng: torch.Generator | None = None
) -> tuple[Packet, Tensor]:
    """Encodes x + residual and returns what the packet did not carry, for the next time.

    Neither input is changed: the caller commits the new residual only once the packet is merged.
    """
    wanted = x.clone() if residual is None else x + residual
    packet = c.encode(wanted, rng=rng)
    c.accumulate(packet, wanted, -1.0)
    return packet, wanted
