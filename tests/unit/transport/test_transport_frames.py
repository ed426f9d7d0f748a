"""The codec, and the order of lanes under every order of arrival."""

from __future__ import annotations

import ctypes
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_peers import Recorder, paired, run

from atoll.transport import Backoff, LinkLimits
from atoll.transport.chunks import (
    CHUNK_HEADER_BYTES,
    BulkHello,
    ChunkHeader,
    pack_chunk,
    pack_hello,
    unpack_chunk,
    unpack_hello,
)
from atoll.transport.frames import BULK, CHUNK, CONTROL, HEADER_BYTES, SharedBuffers, Violation, frame_checksum, pack, unpack
from atoll.transport.inbox import Assembly, Inbox, PagePool
from atoll.transport.outbox import Outbox

U64 = st.integers(0, 2**64 - 1)


@given(st.sampled_from([CONTROL, BULK, CHUNK]), U64, U64, U64, st.lists(st.binary(max_size=40), max_size=4))
def test_frame_round_trips(kind: bytes, number: int, at: int, total: int, body: list[bytes]) -> None:
    frame = unpack(pack(kind, number, at, total, body))
    assert (frame.kind, frame.number, frame.at, frame.total) == (kind, number, at, total)
    assert frame.body == b"".join(body)


@given(st.binary(max_size=60), st.data())
def test_frame_with_one_flipped_bit_or_cut_short_is_a_violation(body: bytes, data: st.DataObject) -> None:
    frame = bytearray(pack(CHUNK, 3, 5, 99, [body]))
    if data.draw(st.booleans()):
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del frame[data.draw(st.integers(0, len(frame) - 1)) :]
    with pytest.raises(Violation):
        unpack(bytes(frame))


@given(st.binary(max_size=100))
def test_garbage_is_a_violation(data: bytes) -> None:
    with pytest.raises(Violation):
        unpack(data)


def test_header_keeps_the_body_aligned() -> None:
    assert HEADER_BYTES == 32


U32 = st.integers(0, 2**32 - 1)


@given(U64, U64, U64, U32, U32, st.data())
def test_header_of_a_chunk_round_trips_and_any_flipped_bit_is_a_violation(
    number: int, at: int, total: int, size: int, check: int, data: st.DataObject
) -> None:
    header = ChunkHeader(number, at, total, size, check)
    packed = bytearray(pack_chunk(header))
    assert len(packed) == CHUNK_HEADER_BYTES and unpack_chunk(packed) == header
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Violation):
        unpack_chunk(packed)


def test_hello_round_trips() -> None:
    hello = BulkHello(b"s" * 16, b"k" * 32, 15)
    assert unpack_hello(pack_hello(hello)) == hello


def test_payload_for_many_peers_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(*pieces: memoryview) -> int:
        hashed.append(sum(piece.nbytes for piece in pieces))
        return frame_checksum(*pieces)

    monkeypatch.setattr("atoll.transport.outbox.frame_checksum", counted)
    payload, frames = SharedBuffers([b"head", bytes(1000)]), []
    for _ in range(3):
        outbox = Outbox(LinkLimits(chunk_bytes=300))
        outbox.put(b"", payload, False)
        while (chunk := outbox.next_chunk(0.0)) is not None:
            frames.append((chunk.header, b"".join(chunk.parts)))
    assert sum(hashed) == 1004 and frames[:4] == frames[4:8] == frames[8:]
    assert all(unpack_chunk(header).check == frame_checksum(body) for header, body in frames)


@given(st.lists(st.binary(max_size=50), max_size=6), st.integers(1, 17), st.randoms(use_true_random=False))
def test_payload_is_the_same_whatever_the_order_of_its_chunks(pieces: list[bytes], chunk_bytes: int, rng: random.Random) -> None:
    outbox = Outbox(LinkLimits(chunk_bytes=chunk_bytes))
    outbox.put(b"", pieces, False)
    chunks = []
    while (chunk := outbox.next_chunk(0.0)) is not None:
        chunks.append((unpack_chunk(chunk.header), b"".join(chunk.parts)))
        assert outbox.next_message() is None, "the head goes after the last chunk was handed over"
        outbox.mark_sent(chunk)
    rng.shuffle(chunks)
    assembly = Assembly(len(b"".join(pieces)), 0.0)
    for header, body in chunks:
        assert frame_checksum(body) == header.check
        assembly.claim(header.at, header.size)[:] = body
        assembly.received += header.size
    assert assembly.complete and assembly.view == b"".join(pieces)
    assert outbox.next_message() is not None


@given(st.integers(0, 30), st.integers(1, 30), st.integers(0, 30), st.integers(1, 30))
def test_chunks_that_overlap_are_a_violation(a: int, a_size: int, b: int, b_size: int) -> None:
    assembly = Assembly(100, 0.0)
    assert assembly.claim(a, a_size).nbytes == a_size
    if a < b + b_size and b < a + a_size:
        with pytest.raises(Violation):
            assembly.claim(b, b_size)
    else:
        assert assembly.claim(b, b_size).nbytes == b_size


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("coB"), st.integers(0, 40)), max_size=30),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_lanes_keep_their_order_whatever_the_network_does(
    sends: list[tuple[str, int]], connections: int, assembling_max: int, seed: int
) -> None:
    """c: control, o: control that may overtake, B: bulk of that many bytes."""
    limits = LinkLimits(chunk_bytes=8, connections=connections, assembling_max=assembling_max, payload_bytes_max=64)
    rng = random.Random(seed)

    async def story() -> None:
        a, b = Recorder(), Recorder()
        async with paired(a, b, limits, rng) as (left, _, _):
            for index, (kind, size) in enumerate(sends):
                head = f"{kind}{index}".encode()
                left.send(head, [bytes([index]) * size] if kind == "B" else None, may_overtake=kind == "o")
            await b.until(lambda: len(b.heads) == len(sends) or bool(b.reasons))
            assert not b.reasons
        for head, payload in zip(b.heads, b.payloads, strict=True):
            index = int(head[1:])
            assert payload == (bytes([index]) * sends[index][1] if head[:1] == b"B" else None)
        order = [int(head[1:]) for head in b.heads]
        for earlier, (first, _) in enumerate(sends):
            for later in range(earlier + 1, len(sends)):
                if first != "B" or sends[later][0] != "o":
                    assert order.index(earlier) < order.index(later)

    run(story())


def test_large_payload_that_is_only_announced_takes_no_memory() -> None:
    inbox = Inbox(LinkLimits(), Counter())
    inbox.readers = 2  # the other one may still bring what is missing
    for number in range(8):
        first = ChunkHeader(number, 0, 1 << 34, 1, 0)
        assert inbox.claim(first, 0.0) is not None
        assert inbox.received(first) is None
    assert inbox.claim(ChunkHeader(8, 0, 1 << 34, 1, 0), 0.0) is None, "eight at a time"
    assert inbox.claim(ChunkHeader(0, 1 << 33, 1 << 34, 1, 0), 0.0) is None, "far beyond the hole"
    assert inbox.take_waiting() == {0}


def test_backoff_grows_is_jittered_and_starts_again() -> None:
    backoff = Backoff(random.Random(1))
    waits = [backoff.next() for _ in range(12)]
    assert all(0.05 <= wait <= 2.0 for wait in waits) and waits[0] <= 0.1 and waits[-1] >= 1.0
    assert Backoff(random.Random(2)).next() != waits[0]
    backoff.reset()
    assert backoff.next() <= 0.1


def place_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_pages_are_used_again_only_when_nobody_reads_them() -> None:
    pool = PagePool(bytes_max=8 << 20)
    first = pool.take(2_000_000)
    part, place = first[1_000_000:1_000_010], place_of(first)
    first[1_000_000:1_000_010] = b"held views"
    del first
    second = pool.take(2_000_000)
    second[:] = bytes(2_000_000)
    assert part == b"held views" and place_of(second) != place
    del part
    assert place_of(pool.take(2_000_001)) == place, "of nearly the same size"


def test_pool_of_pages_keeps_no_more_than_its_bytes() -> None:
    pool = PagePool(bytes_max=4 << 20)
    held = [pool.take(2 << 20) for _ in range(2)]
    places = {place_of(view) for view in held}
    pool.take(2 << 20)[:5] = b"fresh"
    assert pool.take(2 << 20)[:5] == bytes(5), "there was no room to keep it"
    held.clear()
    assert place_of(pool.take(2 << 20)) in places
    pool.take(4 << 20)[:5] = b"other"
    assert pool.take(4 << 20)[:5] == b"other", "it has the place of two idle ones of another size"
    pool.take(5 << 20)[:5] = b"large"
    assert pool.take(5 << 20)[:5] == bytes(5)
