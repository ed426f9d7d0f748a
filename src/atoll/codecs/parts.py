"""A packet cut into the packets of its parts, and put together again. Cuts fall on blocks, so nothing is decoded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.codecs.layout import BLOCK, layout
from atoll.codecs.packet import Packet


def packet_part(packet: Packet, first: int, last: int) -> Packet:
    """The packet of the elements from `first` to `last`, as views. `first` is a multiple of 256."""
    assert first % BLOCK == 0 and (last % BLOCK == 0 or last == packet.numel), f"{first} to {last} cuts a block"
    before, own = layout(packet.codec, first), layout(packet.codec, last - first)
    codes = packet.codes[before.codes : before.codes + own.codes]
    if packet.scales is None:
        return Packet(packet.codec, last - first, codes, None)
    assert before.scales is not None and own.scales is not None
    return Packet(packet.codec, last - first, codes, packet.scales[before.scales : before.scales + own.scales])


def joined(parts: Sequence[Packet]) -> Packet:
    """The packet of all parts in a row; each but the last ends with a whole block."""
    if len(parts) == 1:
        return parts[0]
    scales: list[Tensor] = [part.scales for part in parts if part.scales is not None]
    whole = torch.cat(scales) if scales else None
    return Packet(parts[0].codec, sum(part.numel for part in parts), torch.cat([part.codes for part in parts]), whole)
