"""top_k and random_drop: for ablations, which show that they are worse.

Both keep kept = round(share * numel) elements, at least one, and send their indices (int32, rising) and fp32 values.

`top_k` keeps the largest magnitudes with their values unchanged; among equal magnitudes any may be kept. `random_drop` keeps a
uniform choice and multiplies it by numel / kept, so that its expectation is x. The caller gives the generator; without one it is
seeded from numel alone, so that the same call gives the same bytes.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from atoll.codecs.blocks import require_codec, require_vector
from atoll.codecs.layout import kept_count, layout
from atoll.codecs.packet import Packet
from atoll.codecs.plain import finite_absmax
from atoll.config.codecs import codec_spec, share_kept
from atoll.errors import ConfigError, NotFinite

_SEED: Final = 0x41544F4C


class SparseCodec:
    lossless = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._family, self._share = codec_spec(name).name, share_kept(name)

    def encode(self, x: Tensor, *, rng: torch.Generator | None = None) -> Packet:
        require_vector(x, "x")
        assert x.numel() < 2**31, "indices are int32"
        if rng is not None and self._family == "top_k":
            raise ConfigError(f"codec {self.name} has no stochastic rounding; choose int8, int4, int2 or e3m0")
        finite_absmax(x, self.name)
        kept = kept_count(x.numel(), self._share)
        if self._family == "top_k":
            indices = torch.topk(x.abs(), kept, sorted=False).indices.sort().values
            values = x[indices]
        else:
            indices = self._draw(x, kept, rng)
            values = x[indices] * self._gain(x.numel())
            if not bool(torch.isfinite(values).all()):
                raise NotFinite(f"the tensor to encode as {self.name}, multiplied by {self._gain(x.numel()):g},")
        return Packet(self.name, x.numel(), indices.to(torch.int32), values)

    def decode(self, packet: Packet) -> Tensor:
        out = torch.zeros(packet.numel, dtype=torch.float32, device=packet.codes.device)
        self.accumulate(packet, out)
        return out

    def accumulate(self, packet: Packet, into: Tensor, weight: float = 1.0) -> None:
        require_codec(packet.codec, self.name)
        require_vector(into, "into")
        assert into.numel() == packet.numel, f"into holds {into.numel()} elements, the packet {packet.numel}"
        assert packet.scales is not None
        # No index occurs twice, so the order of additions does not matter.
        into.index_add_(0, packet.codes, packet.scales * weight)

    def nbytes(self, numel: int) -> int:
        return layout(self.name, numel).nbytes

    def error_bound(self, x: Tensor) -> Tensor:
        """A dropped element errs by its value; an element that random_drop keeps errs by (gain - 1) times its value."""
        excess = self._gain(x.numel()) - 1.0 if self._family == "random_drop" else 0.0
        return x.abs() * (max(1.0, excess) * (1 + 2.0**-20))

    def _gain(self, numel: int) -> float:
        return numel / kept_count(numel, self._share) if numel else 1.0

    def _draw(self, x: Tensor, kept: int, rng: torch.Generator | None) -> Tensor:
        if rng is None:
            rng = torch.Generator(device=x.device).manual_seed(_SEED ^ x.numel())
        order = torch.randperm(x.numel(), generator=rng, device=x.device)
        return order[:kept].sort().values
