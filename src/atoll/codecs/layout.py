"""The exact size of a codec's packet, known before anything is encoded.

    family       codes                        scales
    fp32         numel x fp32                 none
    bf16         numel x bf16                 none
    int8         numel x int8                 one per block
    int4, e3m0   two elements per byte        one per block
    int2         four elements per byte       one per block
    int1         eight elements per byte      one per block
    top_k:s      kept x int32 (indices)       kept x fp32 (values)
    random_drop:s   the same                  the same
    chunk_top_k:s   kept x 12 bits (indices), kept x 2 bits   two per chunk of 4,096
    registered   bytes of their own           in these bytes

A block is 256 elements; the last one may be shorter and then takes only the bytes it needs. A wire format must not change by
accident, so the sizes are defined only here: codecs allocate by them, and `Packet.from_bytes` refuses by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from atoll.config.codecs import CODECS, codec_spec, packed_bytes, share_kept

BLOCK: Final = CODECS["int4"].block
"""Elements that share a scale, in every built-in codec."""


@dataclass(frozen=True, slots=True)
class CodeLayout:
    code_dtype: torch.dtype
    codes: int
    scales: int | None

    @property
    def nbytes(self) -> int:
        return self.codes * self.code_dtype.itemsize + 4 * (self.scales or 0)


def block_count(numel: int) -> int:
    return -(-numel // BLOCK)


def kept_count(numel: int, share: float) -> int:
    """At least one element of a tensor that has any: a fragment without bytes would look like a silent learner."""
    return min(numel, max(1, round(share * numel)))


def layout(name: str, numel: int) -> CodeLayout:
    spec = codec_spec(name)
    if spec.kind == "plain":
        return CodeLayout(torch.float32 if spec.bits == 32 else torch.bfloat16, numel, None)
    if spec.kind == "sparse":
        kept = kept_count(numel, share_kept(name))
        return CodeLayout(torch.int32, kept, kept)
    if spec.kind == "chunks":
        full, rest = divmod(numel, spec.block)
        kept = full * kept_count(spec.block, share_kept(name)) + kept_count(rest, share_kept(name))
        return CodeLayout(torch.uint8, -(-kept * 12 // 8) + -(-kept // 4), spec.scales * -(-numel // spec.block))
    if spec.kind == "bytes":
        return CodeLayout(torch.uint8, packed_bytes(spec, numel), None)
    per_byte = 8 // int(spec.bits)
    full, rest = divmod(numel, BLOCK)
    return CodeLayout(torch.int8, full * (BLOCK // per_byte) + -(-rest // per_byte), block_count(numel))
