"""The interface of a codec, and codecs by name."""

from __future__ import annotations

import importlib
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from atoll.codecs.packet import Packet
from atoll.codecs.registered import Decode, Encode, RegisteredCodec
from atoll.config.codecs import CodecSpec, add_codec, codec_spec
from atoll.errors import ConfigError


class Codec(Protocol):
    """Encodes a vector of fp32. Codecs have no state: equal inputs (and generators) give equal bytes."""

    @property
    def name(self) -> str: ...

    @property
    def lossless(self) -> bool: ...

    def encode(self, x: Tensor, *, rng: torch.Generator | None = None) -> Packet:
        """x: 1-D contiguous fp32. NaN or Inf raises NotFinite. A generator (on x's device) means stochastic rounding;
        ConfigError if the codec has none."""
        ...

    def decode(self, packet: Packet) -> Tensor: ...

    def accumulate(self, packet: Packet, into: Tensor, weight: float = 1.0) -> None:
        """into += weight * decode(packet) in fp32, without the whole decoded tensor. Bit-exact for weights 1 and -1; for others
        within a few ulp of the product, because the weight is multiplied into the scale."""
        ...

    def nbytes(self, numel: int) -> int:
        """Exactly `encode(x).nbytes` for any x of `numel` elements."""
        ...

    def error_bound(self, x: Tensor) -> Tensor:
        """An elementwise upper bound of |decode(encode(x)) - x| with rounding to nearest."""
        ...


@runtime_checkable
class UncheckedCodec(Codec, Protocol):
    """A codec that can encode without waiting for the device: it returns whether x was finite instead of raising."""

    def encode_unchecked(self, x: Tensor) -> tuple[Packet, Tensor]:
        """The packet of `encode(x)`, byte for byte, and a bool tensor on x's device. False: the packet is garbage."""
        ...


_registered: dict[str, Codec] = {}


def codec(name: str) -> Codec:
    """The codec of that name; ConfigError lists the known ones."""
    spec = codec_spec(name)
    if not spec.made_by:
        return _registered[spec.name]
    module, _, function = spec.made_by.partition(":")
    made: Codec = getattr(importlib.import_module(module), function)(name)
    return made


def register_codec(spec: CodecSpec, encode: Encode, decode: Decode) -> None:
    """Adds a user's codec. `encode` and `decode` must be pure functions: every learner and the syncer must compute the same.
    Registering the same row again replaces its functions."""
    if spec.kind != "bytes" or spec.made_by or spec.stochastic or spec.random or spec.on_device:
        raise ConfigError(
            f"codec {spec.name!r}: a registered codec must have kind 'bytes', no made_by, and be neither stochastic nor random "
            f"nor on_device"
        )
    add_codec(spec)
    _registered[spec.name] = RegisteredCodec(spec, encode, decode)


def encode_with_feedback(
    c: Codec, x: Tensor, residual: Tensor | None, *, rng: torch.Generator | None = None
) -> tuple[Packet, Tensor]:
    """Encodes x + residual and returns the new residual: what the packet did not carry.

    Neither input is changed: the caller keeps the new residual only once the packet is merged.
    """
    total = x.clone() if residual is None else x + residual
    packet = c.encode(total, rng=rng)
    c.accumulate(packet, total, -1.0)
    return packet, total
