"""A model is uploaded a piece at a time: the bytes are those of the whole, and no piece is larger than the bound."""

from __future__ import annotations

import base64
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from atoll.config import load
from atoll.store import model_upload
from atoll.store.model_upload import pack_model, unpack_model
from atoll.store.tensor_files import FORMAT, flatten, tensor_chunks
from atoll.tensors.access import FragmentReader, named_tensors, read_buffers, read_params
from atoll.tensors.layout import Layout, build_layout


class Recycling:
    """Weights in memory that every piece uses again, as on rank 0 of a learner of several ranks."""

    def __init__(self, layout: Layout, tensors: dict[str, Tensor]) -> None:
        self.layout, self.tensors, self.asked = layout, tensors, list[tuple[int, int, int]]()
        self._piece = torch.empty(max(f.numel for f in layout.fragments))

    def params(self, p: int, start: int, stop: int) -> Tensor:
        self.asked.append((p, start, stop))
        piece = self._piece[: stop - start]
        return piece.copy_(read_params(self.tensors, self.layout.fragments[p])[start:stop])

    def buffers(self, p: int) -> Tensor:
        return read_buffers(self.tensors, self.layout.fragments[p])


def made() -> Recycling:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    return Recycling(build_layout(model, "sub_tensor", 3), named_tensors(model))


def at_once(weights: Recycling) -> bytes:
    """All of it in memory, as a file of nested values."""
    fragments = weights.layout.fragments
    slots = [[model_upload._plain(slot) for slot in (*f.params, *f.buffers)] for f in fragments]
    whole = {
        "pattern": weights.layout.pattern, "slots": slots, "params": [read_params(weights.tensors, f) for f in fragments],
        "buffers": [read_buffers(weights.tensors, f) for f in fragments], "frozen": "",
    }  # fmt: skip
    structure, tensors = flatten(whole, "state")
    metadata = {"format": FORMAT, "structure": base64.b64encode(structure).decode("ascii")}
    return b"".join(map(bytes, tensor_chunks(tensors, metadata)))


@pytest.mark.parametrize("numel", [1, 4, 1 << 20])
def test_pieces_are_the_bytes_of_the_whole_and_bounded(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    monkeypatch.setattr(model_upload, "PIECE_NUMEL", numel)
    weights = made()
    packed = pack_model(weights.layout, weights)
    for _ in range(2):  # a syncer may ask for it again
        found = [bytes(piece) for piece in packed.pieces()]
        assert b"".join(found) == at_once(weights) and packed.nbytes == sum(map(len, found))
    assert all(stop - start <= numel for _, start, stop in weights.asked)
    for (p, _, stop), (following, start, _) in pairwise(weights.asked[: len(weights.asked) // 2]):
        assert (following, start) in ((p, stop), (p + 1, 0)), "in rising order, without gaps"
    config = load(preset_name="decoupled", overrides={"model": {"name": "custom"}, "protocol": {"fragments": 3}})
    layout, params, _ = unpack_model(config, memoryview(b"".join(found)))
    assert layout.fingerprint == weights.layout.fingerprint
    assert all(torch.equal(a, read_params(weights.tensors, f)) for a, f in zip(params, layout.fragments, strict=True))


def test_reader_copies_a_fragment_once_and_drops_it_after_its_last_range() -> None:
    weights = made()
    first, second = weights.layout.fragments[:2]
    reader = FragmentReader()
    whole = reader.read(weights.tensors, first, last=False)
    assert reader.read(weights.tensors, first, last=True) is whole
    assert reader.read(weights.tensors, first, last=False) is not whole
    assert torch.equal(reader.read(weights.tensors, second, last=True), read_params(weights.tensors, second))
    assert reader._held is None
