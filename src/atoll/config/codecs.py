"""The table of codecs: name, size on the wire, and allowed combinations. It imports no torch, because config, simulators and
planner read it too; `codecs/registry.py` turns a row into code.

To add one to Atoll: a row here, and a file that its `made_by` names. To add one from your own file: `atoll.register_codec`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal

import msgspec

from atoll.errors import ConfigError

SHARE = re.compile(r"0?\.\d*[1-9]\d*|1(\.0*)?")
"""The share of elements that a sparse codec keeps, above 0 and up to 1."""
NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
SCALE_BITS = 32


class CodecSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: Literal["plain", "blocks", "sparse", "chunks", "bytes"] = "bytes"
    """The layout of its packet: elements of a dtype, codes in blocks that share a scale, indices and values, short indices and
    codes in chunks, or bytes that only the codec understands. A registered codec is of kind `bytes`."""
    bits: float
    """Bits of one element's code, without its block's scale."""
    block: int = 0
    """Elements that share fp32 scales; 0: no scales."""
    scales: int = 1
    """Scales of a block."""
    lossless: bool = False
    stochastic: bool = False
    """It can round stochastically."""
    random: bool = False
    """It always draws random numbers."""
    on_device: bool = False
    """A GPU encodes to the same bytes as a CPU."""
    loss_percent: float | None = None
    """The loss that the planner charges for it, in per cent. None: unknown, so the planner refuses it."""
    four_bit_share: float = 0.0
    """Share of the planner's `quality.four_bit_percent` that is added."""
    made_by: str = ""
    """`module:function` that makes the codec from its full name; empty for a registered codec."""

    @property
    def selects(self) -> bool:
        """It sends a share of the elements, which its full name has after a colon."""
        return self.kind in ("sparse", "chunks")


_BLOCK = 256


def _blocks(name: str, bits: int, made_by: str, **more: object) -> CodecSpec:
    return CodecSpec(name=name, kind="blocks", bits=bits, block=_BLOCK, made_by=made_by, **more)  # type: ignore[arg-type]


CODECS: dict[str, CodecSpec] = {spec.name: spec for spec in (
    CodecSpec(name="fp32", kind="plain", bits=32, lossless=True, on_device=True, loss_percent=0.0,
              made_by="atoll.codecs.plain:PlainCodec"),
    CodecSpec(name="bf16", kind="plain", bits=16, on_device=True, loss_percent=0.0, made_by="atoll.codecs.plain:PlainCodec"),
    _blocks("int8", 8, "atoll.codecs.integers:int_codec", stochastic=True, on_device=True, loss_percent=0.0, four_bit_share=0.5),
    _blocks("int4", 4, "atoll.codecs.integers:int_codec", stochastic=True, on_device=True, loss_percent=0.0, four_bit_share=1.0),
    _blocks("int2", 2, "atoll.codecs.integers:int_codec", stochastic=True, on_device=True, loss_percent=32.0),
    _blocks("int1", 1, "atoll.codecs.integers:sign_codec", loss_percent=83.0),
    _blocks("e3m0", 4, "atoll.codecs.e3m0:e3m0_codec", stochastic=True, on_device=True, loss_percent=0.0),
    CodecSpec(name="top_k", kind="sparse", bits=64, loss_percent=10.0, made_by="atoll.codecs.sparse:SparseCodec"),
    CodecSpec(name="random_drop", kind="sparse", bits=64, random=True, loss_percent=10.0,
              made_by="atoll.codecs.sparse:SparseCodec"),
    CodecSpec(name="chunk_top_k", kind="chunks", bits=14, block=4096, scales=2, made_by="atoll.codecs.chunked:ChunkedCodec"),
)}  # fmt: skip
"""By name. The losses of int2 and int1 are from Decoupled DiLoCo, table 10; those of the sparse codecs are our estimates, and
none is known of `chunk_top_k`."""


def codec_spec(name: str) -> CodecSpec:
    """The row of a codec's full name, such as `int4` or `top_k:0.1`. ConfigError lists the known ones."""
    if not is_codec(name):
        raise ConfigError(f"codec {name!r} is unknown: must be {known_codecs()}")
    return CODECS[name.partition(":")[0]]


def is_codec(name: str) -> bool:
    family, colon, share = name.partition(":")
    spec = CODECS.get(family)
    if spec is None or spec.selects != bool(colon):
        return False
    return not colon or SHARE.fullmatch(share) is not None


def known_codecs() -> str:
    names = [f"{spec.name}:SHARE with a share up to 1" if spec.selects else spec.name for spec in CODECS.values()]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def share_kept(name: str) -> float:
    """The share of elements that are sent: 1 except for codecs that select."""
    return float(name.partition(":")[2] or 1.0)


def wire_bits(name: str) -> float:
    """Bits per parameter on the wire: its code, and its share of the block's scales."""
    spec = codec_spec(name)
    return spec.bits * share_kept(name) + (SCALE_BITS * spec.scales / spec.block if spec.block else 0.0)


def packed_bytes(spec: CodecSpec, numel: int) -> int:
    """The exact size of a packet of kind `bytes`: codes without gaps, then one fp32 per block."""
    scales = -(-numel // spec.block) if spec.block else 0
    return -(-int(numel * spec.bits) // 8) + 4 * scales


def codec_digests() -> dict[str, str]:
    """Two processes compare these to make sure that they have the same codecs."""
    return {name: hashlib.sha256(msgspec.json.encode(spec)).hexdigest()[:16] for name, spec in CODECS.items()}


def add_codec(spec: CodecSpec) -> None:
    if not NAME.fullmatch(spec.name) or not 0 < spec.bits <= 64 or not 0 <= spec.block <= 2**20:
        raise ConfigError(
            f"codec {spec.name!r}: the name must be lower-case letters, digits and _, bits must be above 0 and at most 64, and "
            f"block at most {2**20}"
        )
    if spec.name in CODECS and CODECS[spec.name] != spec:
        raise ConfigError(f"codec {spec.name!r} exists already: choose another name")
    CODECS[spec.name] = spec
