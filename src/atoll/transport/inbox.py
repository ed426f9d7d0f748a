"""The receiving side of one link: assembles payloads and holds messages back until their turn.

Nothing here waits or reads. A connection that has the header of a chunk claims its place in the payload, reads the bytes into
that place, checks them, and reports them received. While a chunk must wait, `claim` gives no place: the connection reads no
further, and TCP slows the sender. An honest peer whose connections differ in speed is slowed down, and a hostile one cannot fill
memory.

This cannot deadlock with an honest peer: each connection carries chunks in ascending order, so the earliest missing chunk
is never behind one that must wait. If all connections wait while the payload whose turn it is has a hole, no chunk can
fill that hole any more, and that is a violation.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from bisect import bisect_left
from collections import Counter, deque
from pathlib import Path
from typing import Final, NamedTuple

from atoll.transport.chunks import ChunkHeader
from atoll.transport.frames import BULK, CONTROL, SPREAD, Frame, LinkLimits, Violation
from atoll.transport.spool import spooled

AHEAD_BYTES_MAX: Final = 64 << 20
"""How far a chunk may be beyond the first hole of its payload."""
RANGES_MAX: Final = 4096
HELD_BYTES_MAX: Final = 64 << 20
"""Total size of the heads held back."""
SMALL_BYTES: Final = 1 << 20
POOL_BYTES_MAX: Final = 512 << 20
"""Of mappings that are kept to be used again, lent ones included: packets of a few rounds."""
RECENT_FRAMES: Final = 64


def _pages(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class PagePool:
    """Memory for large payloads: anonymous mappings, whose pages exist only once data was written to them, so a peer that
    announces 16 GiB and sends nothing costs no memory. One that nobody reads any more is used again, because the system clears
    fresh pages: with eight learners that was a fifteenth of a syncer's round.

    Only whole payloads are delivered, so that no peer sees what another one sent. What does not fit is mapped afresh."""

    def __init__(self, bytes_max: int = POOL_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._kept: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, total: int) -> memoryview:
        """A view, and all views of it, hold the mapping; without any of them only this list does."""
        step = max(mmap.PAGESIZE, 1 << max(0, total.bit_length() - 5))  # payloads of similar size share mappings
        size = -(-total // step) * step
        with self._lock:
            idle = [pages for pages in self._kept if sys.getrefcount(pages) == _IDLE_REFERENCES]
            fitting = next((pages for pages in idle if len(pages) == size), None)
            if fitting is None:
                fitting = _pages(size)
                self._keep(fitting, idle)
            return memoryview(fitting)[:total]

    def _keep(self, new: mmap.mmap, idle: list[mmap.mmap]) -> None:
        """If there is room for it, also in place of idle ones of other sizes."""
        room, surplus = self._bytes_max - sum(map(len, self._kept)), set[int]()
        if len(new) > room + sum(map(len, idle)):
            return
        for pages in idle:
            if room < len(new):
                room += len(pages)
                surplus.add(id(pages))
        self._kept = [*(pages for pages in self._kept if id(pages) not in surplus), new]


def _idle_references() -> int:
    lent = [mmap.mmap(-1, 1)]
    (found,) = [sys.getrefcount(pages) for pages in lent]
    return found


_IDLE_REFERENCES: Final = _idle_references()
PAGES: Final = PagePool()
"""Of all links of this process."""


class Assembly:
    """One payload being received."""

    def __init__(self, total: int, now: float, spool: Path | None = None) -> None:
        self.total = total
        self.started = now
        self.received = 0
        self.filled = 0
        """All bytes before this offset were received, or are being read."""
        large = PAGES.take if spool is None else lambda total: memoryview(spooled(total, spool))
        self.view = memoryview(bytearray(total)) if total <= SMALL_BYTES else large(total)
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def complete(self) -> bool:
        return self.received == self.total

    def is_far(self, offset: int) -> bool:
        return offset > self.filled and (offset > self.filled + AHEAD_BYTES_MAX or len(self._starts) >= RANGES_MAX)

    def claim(self, offset: int, size: int) -> memoryview:
        """Where these bytes belong. No two claims overlap."""
        end = offset + size
        index = bisect_left(self._starts, offset)
        clear = offset >= self.filled and (index == 0 or self._ends[index - 1] <= offset)
        if not clear or (index < len(self._starts) and self._starts[index] < end):
            raise Violation("overlap", f"a chunk at {offset} overlaps another one")
        if offset > self.filled:
            self._starts.insert(index, offset)
            self._ends.insert(index, end)
        else:
            self.filled = end
            while self._starts and self._starts[0] == self.filled:
                self.filled = self._ends.pop(0)
                del self._starts[0]
        return self.view[offset:end]


class Elsewhere(NamedTuple):
    """In the place of a payload whose parts other processes of the receiver have."""

    number: int
    """Of its bulk message."""
    nbytes: int
    """Of all parts."""


class Held(NamedTuple):
    head: bytes
    after: int
    total: int
    spread: bool = False


class Inbox:
    """Any thread may call any of its methods. Each reader is one connection, known by a number."""

    def __init__(self, limits: LinkLimits, refused: Counter[str]) -> None:
        self._limits = limits
        self._refused = refused
        self.payload_bytes_max = limits.payload_bytes_max
        self.readers = 1
        self.takes_spread = False
        """Other processes receive parts of payloads; else nobody may spread one."""
        self._lock = threading.Lock()
        self._waiting: set[int] = set()
        """Readers that were given no place."""
        self._controls: deque[Held] = deque()
        self._bulks: deque[Held] = deque()
        self._assemblies: dict[int, Assembly] = {}
        self._seen = {CONTROL: 0, BULK: 0}
        self._delivered = {CONTROL: 0, BULK: 0}
        self._held_bytes = 0
        self._claimed_bytes = 0
        """Of payloads that are not delivered."""
        self._unused_bytes = 0
        """Of payloads that were delivered, and that the handler has not used yet."""
        self._elsewhere: Counter[int] = Counter()
        """By spread message: how many bytes of its parts have come."""
        self._recent: deque[tuple[bytes, int, int, int]] = deque(maxlen=RECENT_FRAMES)

    @property
    def is_full(self) -> bool:
        """While this holds, nothing is read from the talk stream. Held messages wait only for chunks, which go another way."""
        return len(self._controls) + len(self._bulks) >= self._limits.queue_messages_max or self._held_bytes > HELD_BYTES_MAX

    @property
    def is_empty(self) -> bool:
        """Every message received was delivered."""
        return not self._controls and not self._bulks

    def message(self, frame: Frame) -> None:
        with self._lock:
            self._message(frame)

    def claim(self, chunk: ChunkHeader, now: float, reader: int = 0) -> memoryview | None:
        """Where the bytes of this chunk belong, or None: it must wait for earlier ones, until `take_waiting` names the reader."""
        with self._lock:
            self._check(chunk)
            if not self._must_wait(chunk):
                view = self._assembly(chunk, now).claim(chunk.at, chunk.size)
                self._claimed_bytes += chunk.size
                return view
            self._waiting.add(reader)
            if len(self._waiting) == self.readers and self._is_stuck and not self._unused_bytes and not self.takes_spread:
                behind = f"the chunk of bulk message {chunk.number} at {chunk.at} came before the chunks it follows"
                raise Violation("order", behind)
            return None

    def received(self, chunk: ChunkHeader) -> Assembly | None:
        """The bytes are in their place, and checked. The payload if they were its last."""
        with self._lock:
            assembly = self._assemblies[chunk.number]
            assembly.received += chunk.size
            return assembly if assembly.complete else None

    def part_came(self, number: int, nbytes: int) -> None:
        """Another process has its part of a spread message."""
        with self._lock:
            place = number - self._delivered[BULK]
            if place < 0:
                raise Violation("unknown_transfer", f"a part belongs to bulk message {number}, which was delivered")
            self._elsewhere[number] += nbytes
            if place < len(self._bulks):
                self._check_parts(number, self._bulks[place])

    def used(self, nbytes: int) -> set[int]:
        """The handler needs so many bytes of payloads no longer. The readers to wake, as `take_waiting`, and at once: one that
        waited for room must not be taken for one that waits for a hole."""
        with self._lock:
            self._unused_bytes -= nbytes
            waiting, self._waiting = self._waiting, set()
            return waiting

    def take_waiting(self) -> set[int]:
        """Readers that may find a place now: something was received or delivered since they asked."""
        with self._lock:
            waiting, self._waiting = self._waiting, set()
            return waiting

    def deliver_next(self) -> tuple[bytes, memoryview | Elsewhere | None] | None:
        """The next message whose turn has come, with its payload; it counts as delivered."""
        with self._lock:
            done = self._delivered
            payload: memoryview | Elsewhere | None = None
            if self._controls and self._controls[0].after <= done[BULK]:
                held, lane = self._controls.popleft(), CONTROL
            elif self._bulks and self._bulks[0].after <= done[CONTROL] and self._is_elsewhere():
                held, lane = self._bulks.popleft(), BULK
                del self._elsewhere[done[BULK]]
                payload = Elsewhere(done[BULK], held.total)
            elif self._bulks and self._bulks[0].after <= done[CONTROL] and self._is_whole():
                held, lane = self._bulks.popleft(), BULK
                payload = self._assemblies.pop(done[BULK]).view
                self._claimed_bytes -= held.total
                self._unused_bytes += held.total
            else:
                return None
            self._held_bytes -= len(held.head)
            done[lane] += 1
            return held.head, payload

    # With the lock held

    @property
    def _is_stuck(self) -> bool:
        first = self._assemblies.get(self._delivered[BULK])
        return first is None or not first.complete

    def _message(self, frame: Frame) -> None:
        spread = frame.kind == SPREAD and self.takes_spread
        kind, number = BULK if spread else frame.kind, frame.number
        if kind not in self._seen or (kind == CONTROL and frame.total) or (spread and not frame.total):
            raise Violation("malformed", f"a frame of kind {kind!r} does not belong here")
        if frame.body.nbytes > self._limits.head_bytes_max:
            raise Violation("head_too_long", f"a head of {frame.body.nbytes} bytes is longer than {self._limits.head_bytes_max}")
        if number != self._seen[kind]:
            return self._check_duplicate(frame, f"message {number} came instead of {self._seen[kind]}")
        behind = self._seen[BULK if kind == CONTROL else CONTROL]
        if frame.at > behind:
            raise Violation("order", f"a message must follow {frame.at} others, of which {behind} were sent")
        held = Held(bytes(frame.body), frame.at, frame.total, spread)
        if spread and number in self._assemblies:
            raise Violation("overlap", f"a part of bulk message {number}, which is spread, came here")
        if kind == BULK:
            self._check_parts(number, held)
        if kind == CONTROL:
            self._controls.append(held)
        else:
            self._check_total(number, frame.total)
            self._bulks.append(held)
        self._seen[kind] += 1
        self._held_bytes += len(held.head)
        self._recent.append((frame.kind, number, frame.at, frame.check))

    def _must_wait(self, chunk: ChunkHeader) -> bool:
        first = self._delivered[BULK]
        there = self._unused_bytes + self._claimed_bytes
        if (chunk.number > first or self._unused_bytes) and there + chunk.size > self._limits.unused_bytes_max:
            return True
        if chunk.number > first:
            if chunk.number >= first + self._limits.assembling_max:
                return True
            if self._claimed_bytes + chunk.size > self.payload_bytes_max:
                return True
        assembly = self._assemblies.get(chunk.number)
        return chunk.at > AHEAD_BYTES_MAX if assembly is None else assembly.is_far(chunk.at)

    def _check(self, chunk: ChunkHeader) -> None:
        if chunk.size > self._limits.chunk_bytes or (chunk.total and not chunk.size):
            raise Violation("malformed", f"a chunk of {chunk.size} bytes is empty, or larger than {self._limits.chunk_bytes}")
        end = chunk.at + chunk.size
        if end > chunk.total:
            raise Violation("malformed", f"a chunk ends at {end}, beyond its payload of {chunk.total} bytes")
        if chunk.number < self._delivered[BULK]:
            raise Violation("unknown_transfer", f"a chunk belongs to bulk message {chunk.number}, which was delivered")
        self._check_total(chunk.number, chunk.total)
        place = chunk.number - self._delivered[BULK]
        if place < len(self._bulks) and self._bulks[place].spread:
            raise Violation("overlap", f"a chunk of bulk message {chunk.number}, which is spread, came here")

    def _assembly(self, chunk: ChunkHeader, now: float) -> Assembly:
        assembly = self._assemblies.get(chunk.number)
        if assembly is None:
            try:
                assembly = self._assemblies[chunk.number] = Assembly(chunk.total, now, self._limits.spool)
            except (MemoryError, OSError) as error:
                where = f"in {self._limits.spool}" if self._limits.spool is not None else "in memory"
                raise Violation("payload_too_big", f"there is no room {where} for a payload of {chunk.total} bytes") from error
        elif assembly.complete:
            raise Violation("overlap", f"a chunk of bulk message {chunk.number} came after its last byte")
        return assembly

    def _is_elsewhere(self) -> bool:
        first = self._bulks[0]
        return first.spread and self._elsewhere[self._delivered[BULK]] == first.total

    def _check_parts(self, number: int, held: Held) -> None:
        most = held.total if held.spread else 0
        if self._elsewhere[number] > most:
            raise Violation("total_disagrees", f"the parts of bulk message {number} have more than {most} bytes")

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

    def _check_duplicate(self, frame: Frame, text: str) -> None:
        """An identical frame may arrive twice; any other frame with a past number is a violation."""
        if (frame.kind, frame.number, frame.at, frame.check) not in self._recent:
            raise Violation("order", text)
        self._refused["duplicate"] += 1
