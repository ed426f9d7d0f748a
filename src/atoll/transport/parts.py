"""The receiving side of one feed's connection: a peer's parts of spread messages, until the server takes them.

A part has its own chunks, which count from its own first byte. Which message it belongs to, and what it must look like, only the
server knows: it has the message's head, hears from each feed which part is there, and delivers the message when all are. A
connection carries the parts in the order of their messages, each from its first byte to its last, and one that no other is held
before never waits for room: so what is delivered next always arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from atoll.transport.chunks import ChunkHeader
from atoll.transport.frames import LinkLimits, Violation
from atoll.transport.inbox import Assembly


class PartInbox:
    """Any thread may call any of its methods."""

    def __init__(
        self, limits: LinkLimits, sizes: Collection[int], came: Callable[[int, int], None], wake: Callable[[], None]
    ) -> None:
        """`sizes`: of the parts that there can be. `came` hears the number of a message whose part is whole, and the part's size;
        `wake` is called where a chunk that had to wait may find room."""
        self._limits, self._sizes = limits, frozenset(sizes)
        self._bytes_max = 2 * max(self._sizes, default=0)
        """Of parts that were not taken yet."""
        self._came, self._wake = came, wake
        self._lock = threading.Lock()
        self._assemblies: dict[int, Assembly] = {}
        self._first = 0
        """The oldest message whose part may still come."""
        self._newest = -1
        """The message of the part that began last."""
        self._claimed = 0
        self._waits = False

    def claim(self, chunk: ChunkHeader, now: float) -> memoryview | None:
        with self._lock:
            self._check(chunk)
            if any(number < chunk.number for number in self._assemblies) and self._is_full(chunk):
                self._waits = True
                return None
            assembly = self._assemblies.get(chunk.number)
            if assembly is None:
                assembly = self._assemblies[chunk.number] = Assembly(chunk.total, now)
                self._newest = chunk.number
            place = assembly.claim(chunk.at, chunk.size)
            self._claimed += chunk.size
            return place

    def _is_full(self, chunk: ChunkHeader) -> bool:
        begins = chunk.number not in self._assemblies
        return (begins and len(self._assemblies) >= self._limits.assembling_max) or self._claimed + chunk.size > self._bytes_max

    def _check(self, chunk: ChunkHeader) -> None:
        if not 0 < chunk.size <= self._limits.chunk_bytes or chunk.at + chunk.size > chunk.total:
            raise Violation("malformed", f"a chunk of {chunk.size} bytes at {chunk.at} is none of {chunk.total}")
        if chunk.total not in self._sizes:
            raise Violation("payload_too_big", f"no part has {chunk.total} bytes")
        if chunk.number < self._first:
            raise Violation("unknown_transfer", f"a chunk belongs to bulk message {chunk.number}, which is over")
        newest, own = self._assemblies.get(self._newest), self._assemblies.get(chunk.number)
        if chunk.number < self._newest or (own is None and newest is not None and not newest.complete):
            raise Violation("order", f"a part of bulk message {chunk.number} came before the end of {self._newest}")
        if own is not None and (own.total != chunk.total or own.complete):
            raise Violation("total_disagrees", f"a part of bulk message {chunk.number} has {own.total} bytes, no more")
        if chunk.at != (own.received if own is not None else 0):
            raise Violation("order", f"a chunk at {chunk.at} of bulk message {chunk.number} does not follow the one before")

    def received(self, chunk: ChunkHeader) -> None:
        with self._lock:
            assembly = self._assemblies.get(chunk.number)
            if assembly is None:  # the server went on without it
                self._claimed -= chunk.size
                return
            assembly.received += chunk.size
            whole = assembly.complete
        if whole:
            self._came(chunk.number, assembly.total)

    def take(self, number: int) -> memoryview | None:
        """The part of the next message, and all before it are over. None: there is none."""
        with self._lock:
            found = self._assemblies.get(number)
            for old in [n for n in self._assemblies if n <= number]:
                self._claimed -= self._assemblies.pop(old).received
            self._first = max(self._first, number + 1)
            waits, self._waits = self._waits, False
        if waits:
            self._wake()
        return found.view if found is not None and found.complete else None
