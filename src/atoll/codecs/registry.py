"""Which codecs there are, and what a codec is."""

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
    """Adds a codec of your own. `encode` and `decode` are pure functions of their arguments: every learner and the syncer must
    compute the same. Registering the same row again replaces its functions."""
    if spec.kind != "bytes" or spec.made_by or spec.stochastic or spec.random or spec.on_device:
        raise ConfigError(
            f"codec {spec.name!r}: a codec that is registered has kind 'bytes', no made_by, and is neither stochastic nor random "
            f"nor on_device"
        )
    add_codec(spec)
    _registered[spec.name] = RegisteredCodec(spec, encode, decode)


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
