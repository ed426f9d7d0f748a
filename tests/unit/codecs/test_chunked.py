"""chunk_top_k: which elements it keeps, by which two magnitudes, in how many bytes, and what it refuses to read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.codecs import Packet, codec
from atoll.codecs.short_indices import packed, unpacked_codes, unpacked_indices
from atoll.config.codecs import wire_bits
from atoll.errors import DataError, NotFinite

CODEC = codec("chunk_top_k:0.02")


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_every_chunk_keeps_its_largest_magnitudes_by_two_levels() -> None:
    x = normal(4096 + 1000)
    decoded = CODEC.decode(CODEC.encode(x))
    for part, found, kept in zip(x.split(4096), decoded.split(4096), (82, 20), strict=True):
        largest = part.abs().sort(descending=True).indices[:kept]
        assert set(found.nonzero().flatten().tolist()) == set(largest.tolist())
        assert torch.equal(found[largest].sign(), part[largest].sign())
        upper = -(-kept // 5)
        assert found[largest[:upper]].abs().unique() == pytest.approx(float(part[largest[:upper]].abs().mean()))
        assert found[largest[upper:]].abs().unique() == pytest.approx(float(part[largest[upper:]].abs().mean()))


@pytest.mark.parametrize("numel", [0, 1, 2, 333, 4096, 4097, 9000])
@pytest.mark.parametrize("share", ["0.02", "0.5", "1"])
def test_any_length_comes_back_from_its_bytes_within_bound_and_size(numel: int, share: str) -> None:
    x, c = normal(numel), codec(f"chunk_top_k:{share}")
    packet = Packet.from_bytes(c.encode(x).to_bytes())
    assert packet.nbytes == c.nbytes(numel)
    decoded = c.decode(packet)
    assert torch.equal(decoded, c.decode(c.encode(x)))
    assert ((decoded - x).abs() <= c.error_bound(x)).all()
    total = normal(numel, seed=1)
    expected = total + -1.0 * decoded
    c.accumulate(packet, total, -1.0)
    assert torch.equal(total, expected)


def test_bits_are_those_of_the_table() -> None:
    numel = 64 * 4096
    assert CODEC.nbytes(numel) * 8 / numel == pytest.approx(wire_bits("chunk_top_k:0.02"), rel=2e-3)
    assert wire_bits("chunk_top_k:0.02") == pytest.approx(0.02 * 14 + 64 / 4096)


@pytest.mark.parametrize("kept", [1, 2, 3, 4, 5, 82, 163])
def test_short_indices_and_codes_come_back_from_their_bytes(kept: int) -> None:
    indices = torch.randperm(4096, generator=torch.Generator().manual_seed(kept))[:kept]
    codes = torch.randint(4, (kept,), generator=torch.Generator().manual_seed(kept))
    data = packed(indices, codes)
    assert data.numel() == -(-kept * 12 // 8) + -(-kept // 4)
    assert torch.equal(unpacked_indices(data, kept), indices) and torch.equal(unpacked_codes(data, kept), codes)


def test_packet_whose_indices_repeat_or_leave_the_tensor_is_refused() -> None:
    honest = CODEC.encode(normal(4096 + 100))
    for places in ([5] * 82 + [1, 2], [*range(82), 1, 1], [*range(82), 1, 100]):
        data = packed(torch.tensor(places), torch.zeros(84, dtype=torch.int64))
        with pytest.raises(DataError, match="not rising inside their chunks"):
            Packet.from_bytes(Packet(honest.codec, honest.numel, data, honest.scales).to_bytes())


def test_nan_is_refused_even_where_it_would_be_dropped_and_zeros_stay_zeros() -> None:
    x = normal(5000)
    x[4999] = float("nan")
    with pytest.raises(NotFinite):
        CODEC.encode(x)
    assert not CODEC.decode(CODEC.encode(torch.zeros(5000))).any()
