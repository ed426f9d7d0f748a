"""What waits to be sent on one link, and in which order it may go.

A message is numbered when it is put in, so the order is that of `put`, whichever thread called. From then on there are
two lanes. A control message that may not overtake waits until the heads of the bulk messages before it were written;
the head of a bulk message waits until its last chunk and the control messages before it were written. What is written
to the talk stream is therefore one legal order of delivery, which is why the receiver may refuse any frame that stands
behind something it has not seen.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from atoll.transport.frames import BULK, CHUNK, CONTROL, Limits, Payload, pack


class Control(NamedTuple):
    head: bytes
    after: int


class Transfer:
    """A bulk message: its pieces are let go of as soon as all of them were handed over."""

    def __init__(self, number: int, after: int, head: bytes, payload: Payload) -> None:
        self.number = number
        self.after = after
        self.head = head
        self.pieces = [view for piece in payload if (view := memoryview(piece).cast("B")).nbytes]
        self.total = sum(piece.nbytes for piece in self.pieces)
        self.taken = 0
        self.handed = 0
        self.is_handed = False
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


class Chunk(NamedTuple):
    transfer: Transfer
    size: int
    frame: bytes


class Outbox:
    """`put` is for any thread; everything else belongs to the loop's."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._controls: deque[Control] = deque()
        self._bulks: deque[Transfer] = deque()
        """Bulk messages whose head was not written."""
        self._uncut: deque[Transfer] = deque()
        """Those of them of which chunks are still to be taken."""
        self._bytes = 0
        self.put_count = (0, 0)
        """Control and bulk messages put in so far."""
        self._taken = [0, 0]
        self._written = (0, 0)

    def put(self, head: bytes, payload: Payload | None, may_overtake: bool) -> str | None:
        """The reason why it does not fit, if it does not."""
        limits = self._limits
        if len(head) > limits.head_bytes_max:
            return f"a head of {len(head)} bytes is longer than {limits.head_bytes_max}"
        with self._lock:
            controls, bulks = self.put_count
            waiting = len(self._controls) + len(self._bulks)
            if waiting >= limits.queue_messages_max:
                return f"its queue is full: {waiting} messages wait"
            if payload is None:
                self._controls.append(Control(head, 0 if may_overtake else bulks))
                self.put_count = (controls + 1, bulks)
                return None
            transfer = Transfer(bulks, controls, head, payload)
            if self._bytes + transfer.total > limits.queue_bytes_max:
                return f"its queue is full: {self._bytes} bytes wait and {transfer.total} more do not fit"
            self._bytes += transfer.total
            self._bulks.append(transfer)
            self._uncut.append(transfer)
            self.put_count = (controls, bulks + 1)
            return None

    def next_message(self) -> bytes | None:
        """The next frame for the talk stream, if one may go. To be written before the next is asked for."""
        with self._lock:
            if self._controls and self._controls[0].after <= self._taken[1]:
                control = self._controls.popleft()
                self._taken[0] += 1
                return pack(CONTROL, self._taken[0] - 1, control.after, body=(control.head,))
            if self._bulks and (bulk := self._bulks[0]).is_handed and bulk.after <= self._taken[0]:
                self._bulks.popleft()
                self._taken[1] += 1
                return pack(BULK, bulk.number, bulk.after, bulk.total, (bulk.head,))
            return None

    def wrote_message(self) -> None:
        self._written = (self._taken[0], self._taken[1])

    def next_chunk(self, now: float) -> Chunk | None:
        """Chunks leave in order of (bulk message, offset), whichever connection takes them. An empty payload has one,
        empty, chunk: the receiver can then tell a payload that is still to come from one that needs no chunk."""
        with self._lock:
            if not self._uncut:
                return None
            transfer = self._uncut[0]
            if transfer.started is None:
                transfer.started = now
            offset = transfer.taken
            parts = transfer.take(self._limits.chunk_bytes)
            if transfer.taken == transfer.total:
                self._uncut.popleft()
        return Chunk(transfer, transfer.taken - offset, pack(CHUNK, transfer.number, offset, transfer.total, parts))

    def handed(self, chunk: Chunk) -> bool:
        """gRPC has this chunk. True if it was the last one of its payload."""
        transfer = chunk.transfer
        transfer.handed += chunk.size
        if transfer.handed < transfer.total:
            return False
        transfer.is_handed = True
        transfer.pieces.clear()
        with self._lock:
            self._bytes -= transfer.total
        return True

    def has_written(self, count: tuple[int, int]) -> bool:
        return self._written[0] >= count[0] and self._written[1] >= count[1]
