"""The receiving side of one link: assembles payloads and holds messages back until their turn.

Nothing here waits or reads. While a chunk must wait (`must_wait`), the link reads no further from that connection, and
HTTP/2 flow control slows the sender: an honest peer whose connections differ in speed is slowed down, and a hostile one
cannot fill memory.

This cannot deadlock with an honest peer: each connection carries chunks in ascending order, so the earliest missing chunk
is never behind one that must wait. If all connections wait while the payload whose turn it is has a hole, no chunk can
fill that hole any more, and that is a violation (`is_stuck`).
"""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from atoll.transport.frames import BULK, CHUNK, CONTROL, Frame, LinkLimits, Violation

AHEAD_BYTES_MAX: Final = 64 << 20
"""How far a chunk may be beyond the first hole of its payload."""
RANGES_MAX: Final = 4096
HELD_BYTES_MAX: Final = 64 << 20
"""Total size of the heads held back."""
SMALL_BYTES: Final = 1 << 20
RECENT_FRAMES: Final = 64


class Assembly:
    """One payload being received. A large one is an anonymous mapping, whose pages exist only once data was written to them:
    a peer that announces 16 GiB and sends nothing costs no memory."""

    def __init__(self, total: int, now: float) -> None:
        self.total = total
        self.started = now
        self.received = 0
        self.filled = 0
        """All bytes before this offset were received."""
        self.view = memoryview(bytearray(total) if total <= SMALL_BYTES else _pages(total))
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def complete(self) -> bool:
        return self.filled == self.total

    def is_far(self, offset: int) -> bool:
        return offset > self.filled and (offset > self.filled + AHEAD_BYTES_MAX or len(self._starts) >= RANGES_MAX)

    def place(self, offset: int, data: memoryview) -> bool:
        """False if the very same bytes were there already."""
        end = offset + data.nbytes
        index = bisect_left(self._starts, offset)
        if offset < self.filled:
            known = end <= self.filled
        else:
            known = index < len(self._starts) and self._starts[index] == offset and self._ends[index] == end
        if known and self.view[offset:end] == data:
            return False
        clear = offset >= self.filled and (index == 0 or self._ends[index - 1] <= offset)
        if not clear or (index < len(self._starts) and self._starts[index] < end):
            raise Violation("overlap", f"a chunk at {offset} overlaps another one")
        self.view[offset:end] = data
        self.received += data.nbytes
        if offset > self.filled:
            self._starts.insert(index, offset)
            self._ends.insert(index, end)
            return True
        self.filled = end
        while self._starts and self._starts[0] == self.filled:
            self.filled = self._ends.pop(0)
            del self._starts[0]
        return True


def _pages(total: int) -> mmap.mmap:
    pages = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class Held(NamedTuple):
    head: bytes
    after: int
    total: int


class Inbox:
    def __init__(self, limits: LinkLimits, refused: Counter[str]) -> None:
        self._limits = limits
        self._refused = refused
        self.payload_bytes_max = limits.payload_bytes_max
        self._controls: deque[Held] = deque()
        self._bulks: deque[Held] = deque()
        self._assemblies: dict[int, Assembly] = {}
        self._seen = {CONTROL: 0, BULK: 0}
        self._delivered = {CONTROL: 0, BULK: 0}
        self._held_bytes = 0
        self._received_bytes = 0
        self._recent: deque[tuple[bytes, int, int, int]] = deque(maxlen=RECENT_FRAMES)

    @property
    def is_full(self) -> bool:
        """While this holds, nothing is read from the talk stream. Held messages wait only for chunks, which use other streams."""
        return len(self._controls) + len(self._bulks) >= self._limits.queue_messages_max or self._held_bytes > HELD_BYTES_MAX

    @property
    def is_empty(self) -> bool:
        """Every message received was delivered."""
        return not self._controls and not self._bulks

    @property
    def is_stuck(self) -> bool:
        first = self._assemblies.get(self._delivered[BULK])
        return first is None or not first.complete

    def message(self, frame: Frame) -> None:
        kind, number = frame.kind, frame.number
        if kind not in self._seen or (kind == CONTROL and frame.total):
            raise Violation("malformed", f"a frame of kind {kind!r} does not belong here")
        if frame.body.nbytes > self._limits.head_bytes_max:
            raise Violation("head_too_long", f"a head of {frame.body.nbytes} bytes is longer than {self._limits.head_bytes_max}")
        if number != self._seen[kind]:
            return self._check_duplicate(frame, "order", f"message {number} came instead of {self._seen[kind]}")
        behind = self._seen[BULK if kind == CONTROL else CONTROL]
        if frame.at > behind:
            raise Violation("order", f"a message must follow {frame.at} others, of which {behind} were sent")
        held = Held(bytes(frame.body), frame.at, frame.total)
        if kind == CONTROL:
            self._controls.append(held)
        else:
            self._check_total(number, frame.total)
            self._bulks.append(held)
        self._seen[kind] += 1
        self._held_bytes += len(held.head)
        self._recent.append((kind, number, frame.at, frame.check))

    def must_wait(self, chunk: Frame) -> bool:
        """This chunk must wait for earlier ones."""
        first = self._delivered[BULK]
        if chunk.number > first:
            if chunk.number >= first + self._limits.assembling_max:
                return True
            if self._received_bytes + chunk.body.nbytes > self.payload_bytes_max:
                return True
        assembly = self._assemblies.get(chunk.number)
        return chunk.at > AHEAD_BYTES_MAX if assembly is None else assembly.is_far(chunk.at)

    def check(self, chunk: Frame) -> None:
        """The checks that need no earlier chunk."""
        if chunk.kind != CHUNK or (chunk.total and not chunk.body.nbytes):
            raise Violation("malformed", f"a frame of kind {chunk.kind!r} and {chunk.body.nbytes} bytes is not a chunk")
        end = chunk.at + chunk.body.nbytes
        if end > chunk.total:
            raise Violation("malformed", f"a chunk ends at {end}, beyond its payload of {chunk.total} bytes")
        self._check_total(chunk.number, chunk.total)

    def chunk(self, chunk: Frame, now: float) -> Assembly | None:
        """The payload if this was its last missing chunk."""
        if chunk.number < self._delivered[BULK]:
            delivered = f"a chunk belongs to bulk message {chunk.number}, which was delivered"
            self._check_duplicate(chunk, "unknown_transfer", delivered)
            return None
        self._check_total(chunk.number, chunk.total)
        assembly = self._assemblies.get(chunk.number)
        if assembly is None:
            try:
                assembly = self._assemblies[chunk.number] = Assembly(chunk.total, now)
            except (MemoryError, OSError) as error:
                raise Violation("payload_too_big", f"there is no memory for a payload of {chunk.total} bytes") from error
        if not assembly.place(chunk.at, chunk.body):
            self._refused["duplicate"] += 1
            return None
        self._received_bytes += chunk.body.nbytes
        self._recent.append((CHUNK, chunk.number, chunk.at, chunk.check))
        return assembly if assembly.complete else None

    def deliverable(self) -> Iterator[tuple[bytes, memoryview | None]]:
        """Messages whose turn has come. Each counts as delivered when the caller asks for the next."""
        done = self._delivered
        while True:
            if self._controls and self._controls[0].after <= done[BULK]:
                held, lane, payload = self._controls.popleft(), CONTROL, None
            elif self._bulks and self._bulks[0].after <= done[CONTROL] and self._is_whole():
                held, lane = self._bulks.popleft(), BULK
                payload = self._assemblies.pop(done[BULK]).view
                self._received_bytes -= held.total
            else:
                return
            self._held_bytes -= len(held.head)
            done[lane] += 1
            yield held.head, payload

    def _is_whole(self) -> bool:
        assembly = self._assemblies.get(self._delivered[BULK])
        return assembly is not None and assembly.complete

    def _check_total(self, number: int, total: int) -> None:
        if total > self.payload_bytes_max:
            raise Violation("payload_too_big", f"a payload of {total} bytes is larger than {self.payload_bytes_max}")
        place = number - self._delivered[BULK]
        known = self._assemblies.get(number)
        announced = known.total if known else self._bulks[place].total if 0 <= place < len(self._bulks) else total
        if announced != total:
            text = f"the payload of bulk message {number} was announced with {announced} bytes and now with {total}"
            raise Violation("total_disagrees", text)

    def _check_duplicate(self, frame: Frame, kind: str, text: str) -> None:
        """An identical frame may arrive twice; any other frame with a past number is a violation."""
        if (frame.kind, frame.number, frame.at, frame.check) not in self._recent:
            raise Violation(kind, text)
        self._refused["duplicate"] += 1
