"""A feed's parts of spread messages: taken in the order of their messages, and never more of them than may be held."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.transport import LinkLimits
from atoll.transport.chunks import ChunkHeader
from atoll.transport.frames import Violation
from atoll.transport.parts import PartInbox

CHUNK = 4
SIZES = (3, 4, 9, 20)
LIMITS = LinkLimits(chunk_bytes=CHUNK, assembling_max=3)


class Arrivals:
    """An inbox, with what it told."""

    def __init__(self) -> None:
        self.inbox = PartInbox(LIMITS, SIZES, lambda number, nbytes: self.came.append((number, nbytes)), self.wake)
        self.came: list[tuple[int, int]] = []
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1

    def take(self, number: int) -> bytes | None:
        data = self.inbox.take(number)
        return None if data is None else bytes(data)

    def chunk(self, number: int, at: int, data: bytes, total: int) -> bool:
        """False: it has to wait."""
        header = ChunkHeader(number, at, total, len(data), 0)
        place = self.inbox.claim(header, 0.0)
        if place is None:
            return False
        place[:] = data
        self.inbox.received(header)
        return True


def body(number: int, total: int) -> bytes:
    return bytes((number + i) % 251 for i in range(total))


@given(st.lists(st.tuples(st.sampled_from(SIZES), st.booleans()), min_size=1, max_size=12))
def test_every_part_arrives_whole_though_each_is_taken_as_late_as_may_be(parts: list[tuple[int, bool]]) -> None:
    """Between the messages there are others, which have no part here."""
    there, number, numbers = Arrivals(), 0, list[tuple[int, int]]()
    for total, skips in parts:
        number += 1 + 5 * skips
        numbers.append((number, total))
    taken: dict[int, bytes | None] = {}
    for n, total in numbers:
        data = body(n, total)
        for at in range(0, total, CHUNK):
            while not there.chunk(n, at, data[at : at + CHUNK], total):
                assert len(taken) < len(there.came), "it waits, and nothing will make room"
                oldest = there.came[len(taken)][0]
                taken[oldest] = there.take(oldest)
                assert there.woken
    assert there.came == numbers
    taken |= {n: there.take(n) for n, _ in numbers[len(taken) :]}
    assert taken == {n: body(n, total) for n, total in numbers}


def test_no_more_is_held_than_two_of_the_largest_and_the_oldest_never_waits() -> None:
    there = Arrivals()
    assert all(there.chunk(number, 0, b"....", 4) for number in range(3))
    assert not there.chunk(3, 0, b"....", 4), "three are there"
    assert there.take(0) and there.woken == 1 and there.chunk(3, 0, b"....", 4)
    many = Arrivals()
    for number in range(2):
        for at in range(0, 20, CHUNK):
            assert many.chunk(number, at, b"....", 20)
    assert not many.chunk(2, 0, b"....", 20), "40 bytes are there"
    assert many.take(0) and many.woken == 1 and many.chunk(2, 0, b"....", 20)


def test_part_that_the_server_went_on_without_makes_room() -> None:
    there = Arrivals()
    assert there.chunk(0, 0, b"....", 20)
    header = ChunkHeader(0, 4, 20, 4, 0)
    place = there.inbox.claim(header, 0.0)
    assert there.take(1) is None and place is not None
    there.inbox.received(header)
    assert there.inbox._claimed == 0 and not there.came
    with pytest.raises(Violation, match="which is over"):
        there.chunk(0, 8, b"....", 20)
    assert there.chunk(2, 0, b"....", 20) and there.take(2) is None, "not whole"


@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        (ChunkHeader(1, 0, 5, 4, 0), "no part has 5 bytes"),
        (ChunkHeader(1, 0, 20, 8, 0), "is none of 20"),
        (ChunkHeader(1, 0, 20, 0, 0), "is none of 20"),
        (ChunkHeader(1, 18, 20, 4, 0), "is none of 20"),
        (ChunkHeader(0, 0, 4, 4, 0), "which is over"),
        (ChunkHeader(2, 0, 4, 4, 0), "came before the end of 3"),
        (ChunkHeader(1, 0, 4, 4, 0), "came before the end of 3"),
        (ChunkHeader(4, 0, 4, 4, 0), "came before the end of 3"),
        (ChunkHeader(3, 4, 9, 4, 0), "has 20 bytes, no more"),
        (ChunkHeader(3, 2, 20, 4, 0), "does not follow the one before"),
        (ChunkHeader(3, 8, 20, 4, 0), "does not follow the one before"),
    ],
)
def test_chunks_that_no_honest_peer_sends(chunk: ChunkHeader, says: str) -> None:
    there = Arrivals()
    assert there.take(0) is None
    assert there.chunk(2, 0, b"....", 4) and there.chunk(3, 0, b"....", 20)
    with pytest.raises(Violation, match=says):
        there.inbox.claim(chunk, 0.0)
    assert there.inbox._claimed == 8, "nothing is kept of it"


def test_part_begins_with_its_first_byte() -> None:
    with pytest.raises(Violation, match="does not follow"):
        Arrivals().chunk(5, 4, b"....", 20)


def test_whole_part_takes_no_more_bytes() -> None:
    there = Arrivals()
    assert there.chunk(2, 0, b"....", 4)
    for _ in range(2):
        with pytest.raises(Violation, match="has 4 bytes, no more"):
            there.chunk(2, 0, b"....", 4)
