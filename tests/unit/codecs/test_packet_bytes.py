"""A packet's bytes: the same every time, back without loss, and refused when they are not what they say."""

from __future__ import annotations

import contextlib
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.codecs import Packet, codec
from atoll.config.codecs import CODECS as TABLE
from atoll.errors import DataError

CODECS = tuple(spec.name for spec in TABLE.values() if spec.kind in ("plain", "blocks"))

pytestmark = pytest.mark.usefixtures("each_kernels")

NAMES = (*CODECS, "top_k:0.1", "random_drop:0.5")


def packet_of(name: str, numel: int = 300) -> Packet:
    return codec(name).encode(torch.randn(numel, generator=torch.Generator().manual_seed(numel)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 300, 5000])
def test_packet_to_bytes_and_back_is_the_same_packet(name: str, numel: int) -> None:
    packet = packet_of(name, numel)
    data = packet.to_bytes()
    back = Packet.from_bytes(memoryview(data))
    assert (back.codec, back.numel, back.nbytes) == (name, numel, packet.nbytes)
    assert torch.equal(back.codes, packet.codes)
    assert back.codes.dtype == packet.codes.dtype
    assert (back.scales is None) == (packet.scales is None)
    if back.scales is not None and packet.scales is not None:
        assert torch.equal(back.scales, packet.scales)
    assert back.to_bytes() == data
    assert torch.equal(codec(name).decode(back), codec(name).decode(packet))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_a_small_header_and_the_payload(name: str) -> None:
    packet = packet_of(name)
    assert len(packet.to_bytes()) == 14 + len(name) + packet.nbytes


def test_bytes_of_a_known_packet_are_these() -> None:
    """The wire format is a promise: this changes with the version byte, or not at all."""
    data = codec("int4").encode(torch.tensor([7.0, -7.0, 1.0])).to_bytes()
    # Bytes hold (7, 1) and (-7, padding).
    assert data == b"ATPK\x01\x04int4" + struct.pack("<Q", 3) + b"\x17\x09" + struct.pack("<f", 1.0)
    data = codec("e3m0").encode(torch.tensor([4.0, -2.0, 0.0, 0.0625])).to_bytes()
    # Codes 7, -6, 0, 1; bytes hold (7, 0) and (-6, 1).
    assert data == b"ATPK\x01\x04e3m0" + struct.pack("<Q", 4) + b"\x07\x1a" + struct.pack("<f", 4.0)


@pytest.mark.parametrize("name", NAMES)
def test_truncated_bytes_are_refused_wherever_they_end(name: str) -> None:
    data = packet_of(name, 40).to_bytes()
    for length in range(len(data)):
        with pytest.raises(DataError, match="truncated"):
            Packet.from_bytes(data[:length])


@pytest.mark.parametrize("name", NAMES)
def test_oversized_bytes_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="oversized"):
        Packet.from_bytes(packet_of(name).to_bytes() + b"\0")


@pytest.mark.parametrize("numel", [0, 1, 298, 302, 2**40 + 1, 2**64 - 1])
def test_numel_that_does_not_fit_the_payload_is_refused(numel: int) -> None:
    data = bytearray(packet_of("int4").to_bytes())
    data[10:18] = struct.pack("<Q", numel)
    with pytest.raises(DataError):
        Packet.from_bytes(bytes(data))


def test_unknown_codec_name_is_refused_by_name() -> None:
    data = packet_of("int4").to_bytes().replace(b"int4", b"int5", 1)
    with pytest.raises(DataError, match="int5"):
        Packet.from_bytes(data)


def test_codec_name_that_is_not_ascii_is_refused() -> None:
    data = packet_of("int4").to_bytes().replace(b"int4", b"\xff\xfe\xfd\xfc", 1)
    with pytest.raises(DataError, match="unknown codec"):
        Packet.from_bytes(data)


@pytest.mark.parametrize(("at", "value", "said"), [(0, b"X", "ATPK"), (4, b"\x02", "version 2")])
def test_wrong_magic_or_version_is_refused(at: int, value: bytes, said: str) -> None:
    data = bytearray(packet_of("int4").to_bytes())
    data[at : at + 1] = value
    with pytest.raises(DataError, match=said):
        Packet.from_bytes(bytes(data))


@pytest.mark.parametrize("name", ["fp32", "int4", "int1", "e3m0", "top_k:0.1"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bytes_with_nan_or_inf_in_values_or_scales_are_refused(name: str, bad: float) -> None:
    data = packet_of(name).to_bytes()[:-4] + struct.pack("<f", bad)
    with pytest.raises(DataError, match="NaN or Inf"):
        Packet.from_bytes(data)


@pytest.mark.parametrize("indices", [(0, 300), (-1, 5), (7, 7), (9, 3)])
def test_sparse_bytes_with_indices_outside_or_out_of_order_are_refused(indices: tuple[int, int]) -> None:
    packet = Packet("top_k:0.005", 300, torch.tensor(indices, dtype=torch.int32), torch.ones(2))
    with pytest.raises(DataError, match="indices"):
        Packet.from_bytes(packet.to_bytes())


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=80), name=st.sampled_from(NAMES), numel=st.integers(0, 40))
def test_arbitrary_payload_is_refused_or_decodes_to_finite_numbers(data: bytes, name: str, numel: int) -> None:
    size = codec(name).nbytes(numel)
    payload = (data * (size // max(1, len(data)) + 1))[:size].ljust(size, b"\x55")
    raw = b"ATPK\x01" + bytes([len(name)]) + name.encode() + struct.pack("<Q", numel) + payload
    try:
        packet = Packet.from_bytes(raw)
    except DataError:
        return
    assert packet.to_bytes() == raw
    assert codec(name).decode(packet).shape == (numel,)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=64))
def test_arbitrary_bytes_raise_data_error_and_nothing_else(data: bytes) -> None:
    for raw in (data, b"ATPK\x01" + data):
        with contextlib.suppress(DataError):
            assert Packet.from_bytes(raw).to_bytes() == raw


@pytest.mark.parametrize("name", NAMES)
def test_packet_of_owned_bytes_keeps_what_is_aligned_and_copies_the_rest(name: str) -> None:
    data = packet_of(name).to_bytes()
    for offset in range(4):
        memory = torch.zeros(len(data) + 64, dtype=torch.uint8)
        view = memoryview(memory.numpy())[offset : offset + len(data)]
        view[:] = data
        mine, copied = Packet.from_bytes(view, owned=True), Packet.from_bytes(view)
        assert mine.to_bytes() == copied.to_bytes() == data
        inside = range(memory.data_ptr(), memory.data_ptr() + len(memory))
        assert copied.codes.data_ptr() not in inside
        if mine.codes.element_size() == 1:
            assert mine.codes.data_ptr() in inside
        assert mine.codes.data_ptr() % mine.codes.element_size() == 0
    assert Packet.from_bytes(data, owned=True).to_bytes() == data, "bytes that nobody may write to are copied"
