"""Codecs: tensors to bytes and back, with exact sizes, error bounds and fp32 accumulation. `layout` has the sizes."""

from __future__ import annotations

from atoll.codecs.choice import available_kernels, kernels, kernels_in_use
from atoll.codecs.layout import BLOCK
from atoll.codecs.packet import Packet
from atoll.codecs.registry import Codec, UncheckedCodec, codec, encode_with_feedback, register_codec

__all__ = [
    "BLOCK",
    "Codec",
    "Packet",
    "UncheckedCodec",
    "available_kernels",
    "codec",
    "encode_with_feedback",
    "kernels",
    "kernels_in_use",
    "register_codec",
]
