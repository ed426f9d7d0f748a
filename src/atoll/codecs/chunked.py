"""chunk_top_k: of every 4,096 elements the largest magnitudes, each by a 12-bit index, its sign and one of two magnitudes.

What the chunk keeps is the tail of a distribution and has no values near zero, so the levels of int2 would be wasted on it. The
two magnitudes are the mean of the upper fifth and the mean of the rest, the best split of an exponential tail. Means are sums
over halves in float64, so that they depend on no order; among equal magnitudes any may be kept.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from atoll.codecs.blocks import require_codec, require_vector
from atoll.codecs.layout import kept_count, layout
from atoll.codecs.packet import Packet
from atoll.codecs.plain import finite_absmax
from atoll.codecs.short_indices import kept_by_chunk, packed, unpacked_codes, unpacked_indices
from atoll.config.codecs import codec_spec, share_kept
from atoll.errors import ConfigError

UPPER: Final = 5
"""One of so many kept elements has the larger magnitude."""


class ChunkedCodec:
    lossless = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._chunk, self._share = codec_spec(name).block, share_kept(name)

    def encode(self, x: Tensor, *, rng: torch.Generator | None = None) -> Packet:
        require_vector(x, "x")
        if rng is not None:
            raise ConfigError(f"codec {self.name} has no stochastic rounding; choose int8, int4, int2 or e3m0")
        finite_absmax(x, self.name)
        whole = x.numel() - x.numel() % self._chunk
        parts = [_selected(rows, kept_count(rows.shape[1], self._share))
                 for rows in (x[:whole].view(-1, self._chunk), x[whole:].view(1, -1)) if rows.numel()]  # fmt: skip
        if not parts:
            return Packet(self.name, 0, torch.empty(0, dtype=torch.uint8), torch.empty(0))
        indices, codes, levels = (torch.cat([part[at].reshape(-1) for part in parts]) for at in range(3))
        return Packet(self.name, x.numel(), packed(indices, codes), levels)

    def decode(self, packet: Packet) -> Tensor:
        out = torch.zeros(packet.numel, dtype=torch.float32, device=packet.codes.device)
        self.accumulate(packet, out)
        return out

    def accumulate(self, packet: Packet, into: Tensor, weight: float = 1.0) -> None:
        require_codec(packet.codec, self.name)
        require_vector(into, "into")
        assert into.numel() == packet.numel, f"into holds {into.numel()} elements, the packet {packet.numel}"
        assert packet.scales is not None
        if not packet.numel:
            return
        counts = kept_by_chunk(self.name, packet.numel, into.device)
        kept = int(counts.sum())
        chunk = torch.arange(len(counts), device=into.device).repeat_interleave(counts)
        codes = unpacked_codes(packet.codes, kept)
        values = (packet.scales * weight)[2 * chunk + (codes >> 1)]
        # No index occurs twice, so the order of additions does not matter.
        places = unpacked_indices(packet.codes, kept) + self._chunk * chunk
        into.index_add_(0, places, torch.where(codes & 1 == 1, -values, values))

    def nbytes(self, numel: int) -> int:
        return layout(self.name, numel).nbytes

    def error_bound(self, x: Tensor) -> Tensor:
        """Nothing in a chunk errs by more than its largest magnitude: a dropped element errs by its own, a kept one by less."""
        parts = [part.abs().amax().expand_as(part) for part in x.split(self._chunk) if part.numel()]
        return torch.cat(parts) * (1 + 2.0**-20) if parts else x.clone()


def _selected(rows: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: rising indices of what is kept, their codes (bit 0: negative, bit 1: the larger magnitude), and the two
    magnitudes, smaller first."""
    magnitudes, found = torch.topk(rows.abs(), kept, dim=1, sorted=True)
    upper = -(-kept // UPPER)
    large = _row_means(magnitudes[:, :upper])
    small = _row_means(magnitudes[:, upper:]) if kept > upper else large
    is_large = (torch.arange(kept, device=rows.device) < upper).expand_as(found)
    indices, order = found.sort(dim=1)
    codes = is_large.gather(1, order).to(torch.int64) * 2 + (rows.gather(1, indices) < 0).to(torch.int64)
    return indices, codes, torch.stack((small, large), dim=1)


def _row_means(rows: Tensor) -> Tensor:
    total, count = rows.to(torch.float64), rows.shape[1]
    while total.shape[1] > 1:
        half = -(-total.shape[1] // 2)
        left, right = total[:, :half].clone(), total[:, half:]
        left[:, : right.shape[1]] += right
        total = left
    return (total[:, 0] / torch.full((1,), count, dtype=torch.float64, device=rows.device)).to(torch.float32)
