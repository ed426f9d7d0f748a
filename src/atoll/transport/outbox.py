"""The sending queue of one link, and the order in which it empties.

`put` numbers a message, so messages are ordered by their calls of `put`, from any thread. From then on there are two lanes.
A control message that may not overtake waits until the heads of the bulk messages before it were written; the head of a bulk
message waits until its last chunk and the control messages before it were written. The talk stream therefore carries one
legal order of delivery, and the receiver may refuse a frame that must follow one it has not seen.

A spread message has no payload of its own but a part for each of the receiver's other processes, on whose connection it leaves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from atoll.transport.chunks import ChunkHeader, pack_chunk
from atoll.transport.frames import BULK, CONTROL, SPREAD, Buffers, LinkLimits, SharedBuffers, frame_checksum, pack


class Control(NamedTuple):
    head: bytes
    after: int


class Transfer:
    """A bulk message, or a part of one. It releases its buffers when the system has taken all of them."""

    def __init__(self, number: int, after: int, head: bytes, payload: Buffers, of: Transfer | None = None) -> None:
        self.number = number
        self.of = of
        """The message that it is a part of."""
        self.parts_left = 0
        """Of a spread message: parts that are not sent."""
        self.is_spread = False
        self.after = after
        self.head = head
        self.pieces = [view for piece in payload if (view := memoryview(piece).cast("B")).nbytes]
        self.total = sum(piece.nbytes for piece in self.pieces)
        self.checks = payload.checks if isinstance(payload, SharedBuffers) else None
        self.taken = 0
        self.sent_bytes = 0
        self.is_sent = False
        self.started: float | None = None
        self._piece = 0
        self._within = 0

    def take(self, bytes_max: int) -> list[memoryview]:
        parts: list[memoryview] = []
        room = min(bytes_max, self.total - self.taken)
        self.taken += room
        while room:
            piece = self.pieces[self._piece]
            part = piece[self._within : self._within + room]
            parts.append(part)
            room -= part.nbytes
            self._within += part.nbytes
            if self._within == piece.nbytes:
                self._piece, self._within = self._piece + 1, 0
        return parts

    def check_of(self, offset: int, size: int, parts: list[memoryview]) -> int:
        if self.checks is None:
            return frame_checksum(*parts)
        found = self.checks.get((offset, size))
        if found is None:
            found = self.checks[offset, size] = frame_checksum(*parts)
        return found


class Chunk(NamedTuple):
    transfer: Transfer
    size: int
    header: bytes
    parts: list[memoryview]


class Outbox:
    """`put`, `next_chunk` and `mark_sent` may be called from any thread; everything else only from the loop's."""

    def __init__(self, limits: LinkLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._controls: deque[Control] = deque()
        self._bulks: deque[Transfer] = deque()
        """Bulk messages whose head is not written yet."""
        self._unchunked: deque[Transfer] = deque()
        """Those of them with chunks left to take."""
        self._unchunked_of: dict[int, deque[Transfer]] = {}
        """By feed: parts with chunks left to take."""
        self._bytes = 0
        self.bytes_max = limits.queue_bytes_max
        self.put_count = (0, 0)
        """Control and bulk messages put in so far."""
        self._taken = [0, 0]
        self._written = (0, 0)

    def put(self, head: bytes, payload: Buffers | None, may_overtake: bool) -> str | None:
        """None, or the reason why the message does not fit."""
        with self._lock:
            if (flaw := self._misfit(head)) is not None:
                return flaw
            controls, bulks = self.put_count
            if payload is None:
                self._controls.append(Control(head, 0 if may_overtake else bulks))
                self.put_count = (controls + 1, bulks)
                return None
            transfer = Transfer(bulks, controls, head, payload)
            if self._bytes + transfer.total > self.bytes_max:
                return f"the send queue is full: it holds {self._bytes} bytes and {transfer.total} more do not fit"
            self._bytes += transfer.total
            self._bulks.append(transfer)
            self._unchunked.append(transfer)
            self.put_count = (controls, bulks + 1)
            return None

    def put_spread(self, head: bytes, parts: Sequence[Buffers]) -> str | None:
        """A bulk message with a part for each feed, of which some may be empty. None, or the reason why it does not fit."""
        with self._lock:
            if (flaw := self._misfit(head)) is not None:
                return flaw
            controls, bulks = self.put_count
            whole = Transfer(bulks, controls, head, [])
            given = {feed: Transfer(bulks, 0, b"", part, whole) for feed, part in enumerate(parts)}
            own = {feed: part for feed, part in given.items() if part.total}
            assert own, "a message without bytes is sent whole"
            total = sum(part.total for part in own.values())
            if self._bytes + total > self.bytes_max:
                return f"the send queue is full: it holds {self._bytes} bytes and {total} more do not fit"
            whole.total, whole.parts_left, whole.is_spread = total, len(own), True
            self._bytes += total
            self._bulks.append(whole)
            for feed, part in own.items():
                self._unchunked_of.setdefault(feed, deque()).append(part)
            self.put_count = (controls, bulks + 1)
            return None

    def put_elsewhere(self, head: bytes, total: int) -> int | None:
        """A bulk message whose payload another process sends. Its number, or None if the queue is full."""
        with self._lock:
            controls, bulks = self.put_count
            if self._misfit(head) is not None:
                return None
            transfer = Transfer(bulks, controls, head, [])
            transfer.total, transfer.is_sent = total, True
            self._bulks.append(transfer)
            self.put_count = (controls, bulks + 1)
            return bulks

    def _misfit(self, head: bytes) -> str | None:
        """With the lock held: why no message with this head fits now, whatever its payload."""
        if len(head) > self._limits.head_bytes_max:
            return f"a head of {len(head)} bytes is longer than {self._limits.head_bytes_max}"
        waiting = len(self._controls) + len(self._bulks)
        return f"the send queue is full: {waiting} messages" if waiting >= self._limits.queue_messages_max else None

    def next_message(self) -> bytes | None:
        """The next frame for the talk stream, if one may go. The caller writes it before it asks for another."""
        with self._lock:
            if self._controls and self._controls[0].after <= self._taken[1]:
                control = self._controls.popleft()
                self._taken[0] += 1
                return pack(CONTROL, self._taken[0] - 1, control.after, body=(control.head,))
            if self._bulks and (bulk := self._bulks[0]).is_sent and bulk.after <= self._taken[0]:
                self._bulks.popleft()
                self._taken[1] += 1
                return pack(SPREAD if bulk.is_spread else BULK, bulk.number, bulk.after, bulk.total, (bulk.head,))
            return None

    def wrote_message(self) -> None:
        self._written = (self._taken[0], self._taken[1])

    def next_chunk(self, now: float, feed: int | None = None) -> Chunk | None:
        """Chunks leave in order of (bulk message, offset), over all connections; those of parts over the connection of their
        feed. An empty payload has one empty chunk, so that the receiver can tell it from a payload whose chunks have not
        arrived."""
        with self._lock:
            queue = self._unchunked if feed is None else self._unchunked_of.get(feed)
            if not queue:
                return None
            transfer = queue[0]
            whole = transfer.of or transfer
            if whole.started is None:
                whole.started = now
            offset = transfer.taken
            parts = transfer.take(self._limits.chunk_bytes)
            size = transfer.taken - offset
            if transfer.taken == transfer.total:
                queue.popleft()
        check = transfer.check_of(offset, size, parts)
        return Chunk(transfer, size, pack_chunk(ChunkHeader(transfer.number, offset, transfer.total, size, check)), parts)

    def mark_sent(self, chunk: Chunk) -> Transfer | None:
        """The system took this chunk. The message if it was the last of its payload."""
        transfer = chunk.transfer
        with self._lock:
            transfer.sent_bytes += chunk.size
            if transfer.sent_bytes < transfer.total:
                return None
            transfer.pieces.clear()
            if transfer.of is not None:
                transfer = transfer.of
                transfer.parts_left -= 1
                if transfer.parts_left:
                    return None
            transfer.is_sent = True
            self._bytes -= transfer.total
        return transfer

    def has_written(self, count: tuple[int, int]) -> bool:
        return self._written[0] >= count[0] and self._written[1] >= count[1]
