"""Names and sizes: what a codec's packet weighs, known before anything is encoded.

    family       codes                        scales
    fp32         numel x fp32                 none
    bf16         numel x bf16                 none
    int8         numel x int8                 one a block
    int4, e3m0   two elements a byte          one a block
    int2         four elements a byte         one a block
    int1         eight elements a byte        one a block
    top_k:s      kept x int32 (indices)       kept x fp32 (values)
    random_drop:s   the same                  the same

A block is 256 elements; the last one may be shorter and then takes just the bytes it needs. The bytes of a wire
format are a promise, so the sizes live here alone: codecs allocate by them and `Packet.from_bytes` refuses by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from atoll.errors import ConfigError

BLOCK: Final = 256
CODECS: Final[tuple[str, ...]] = ("fp32", "bf16", "int8", "int4", "int2", "int1", "e3m0")
SPARSE: Final[tuple[str, ...]] = ("top_k", "random_drop")
"""Ablations; their name carries the share that is kept, as in `top_k:0.1`."""

BITS: Final[dict[str, int]] = {"int8": 8, "int4": 4, "int2": 2, "int1": 1, "e3m0": 4}


@dataclass(frozen=True, slots=True)
class CodeLayout:
    code_dtype: torch.dtype
    codes: int
    scales: int | None

    @property
    def nbytes(self) -> int:
        return self.codes * self.code_dtype.itemsize + 4 * (self.scales or 0)


def parse(name: str) -> tuple[str, float]:
    """The family and the share kept (1.0 where the family has none)."""
    if name in CODECS:
        return name, 1.0
    family, _, text = name.partition(":")
    if family in SPARSE:
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        # A NaN fails both comparisons, so it is refused too.
        if 0.0 < share <= 1.0:
            return family, share
    raise ConfigError(
        f"codec {name!r} is unknown: allowed are {', '.join(CODECS)}, and top_k:SHARE or random_drop:SHARE "
        "with a share kept in (0, 1], such as top_k:0.1"
    )


def block_count(numel: int) -> int:
    return -(-numel // BLOCK)


def kept_count(numel: int, share: float) -> int:
    """At least one element of a tensor that has any: a fragment that sends nothing would look like a silent learner."""
    return min(numel, max(1, round(share * numel)))


def layout(name: str, numel: int) -> CodeLayout:
    family, share = parse(name)
    if family == "fp32":
        return CodeLayout(torch.float32, numel, None)
    if family == "bf16":
        return CodeLayout(torch.bfloat16, numel, None)
    if family in SPARSE:
        kept = kept_count(numel, share)
        return CodeLayout(torch.int32, kept, kept)
    per_byte = 8 // BITS[family]
    full, rest = divmod(numel, BLOCK)
    return CodeLayout(torch.int8, full * (BLOCK // per_byte) + -(-rest // per_byte), block_count(numel))
