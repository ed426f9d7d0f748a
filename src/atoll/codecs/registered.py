"""Codecs that users register: two functions on plain tensors, wrapped as a `Codec`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from atoll.codecs.blocks import require_codec, require_vector
from atoll.codecs.packet import Packet
from atoll.config.codecs import CodecSpec, packed_bytes
from atoll.errors import ConfigError, DataError, NotFinite

Encode = Callable[[Tensor], Tensor]
"""From a flat fp32 vector to the bytes of its packet: uint8, of exactly the size that follows from the spec."""
Decode = Callable[[Tensor, int], Tensor]
"""From these bytes and the number of elements to a flat fp32 vector."""


class RegisteredCodec:
    def __init__(self, spec: CodecSpec, encode: Encode, decode: Decode) -> None:
        self._spec, self._encode, self._decode = spec, encode, decode
        self.name = spec.name
        self.lossless = spec.lossless

    def encode(self, x: Tensor, *, rng: torch.Generator | None = None) -> Packet:
        if rng is not None:
            raise ConfigError(f"codec {self.name} has no stochastic rounding")
        require_vector(x, "x")
        if not bool(torch.isfinite(x).all()):
            raise NotFinite(f"the tensor to encode as {self.name}")
        codes = self._encode(x)
        size = self.nbytes(x.numel())
        if codes.dtype != torch.uint8 or codes.shape != (size,):
            raise ConfigError(
                f"codec {self.name} encoded {x.numel()} elements as {tuple(codes.shape)} of {codes.dtype}; by its row it must be "
                f"({size},) of torch.uint8"
            )
        return Packet(self.name, x.numel(), codes.contiguous(), None)

    def decode(self, packet: Packet) -> Tensor:
        require_codec(packet.codec, self.name)
        values = self._decode(packet.codes, packet.numel)
        if values.dtype != torch.float32 or values.shape != (packet.numel,):
            raise DataError(f"codec {self.name} decoded {tuple(values.shape)} of {values.dtype}, not ({packet.numel},) of fp32")
        return values

    def accumulate(self, packet: Packet, into: Tensor, weight: float = 1.0) -> None:
        values = self.decode(packet)
        into.add_(values if weight == 1.0 else values * weight)

    def nbytes(self, numel: int) -> int:
        return packed_bytes(self._spec, numel)

    def error_bound(self, x: Tensor) -> Tensor:
        """The error on this vector itself: nothing more is known of a registered codec."""
        return (self.decode(self.encode(x)) - x).abs()
