"""A bulk connection of the transport itself, whose peer has already sent all it will: bytes in, and what the link would get."""

from __future__ import annotations

from collections import Counter
from typing import Any

from atoll.transport.bulk import BulkSocket
from atoll.transport.chunks import BulkHello, ChunkHeader
from atoll.transport.frames import LinkLimits
from atoll.transport.inbox import Inbox
from atoll.transport.outbox import Chunk
from atoll.transport.wire import StreamBroken

LIMITS = LinkLimits(payload_bytes_max=1 << 16, chunk_bytes=64)


class _PlayedSocket:
    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def recv_into(self, place: memoryview) -> int:
        if not self._left:
            raise BlockingIOError
        count = min(len(place), len(self._left), 50)
        place[:count], self._left = self._left[:count], self._left[count:]
        return count

    def __getattr__(self, name: str) -> Any:
        """Options, registering, closing: without effect."""
        return lambda *_: None


class _PlayedThread:
    def __init__(self) -> None:
        self.sockets: set[BulkSocket] = set()
        self.busy: set[BulkSocket] = set()
        self.sending: set[BulkSocket] = set()
        self.selector: Any = _PlayedSocket(b"")

    def call(self, function: Any) -> None:
        function()


class PlayedLink:
    def __init__(self) -> None:
        self.hello: BulkHello | None = None
        self.error: BaseException | None = None
        self._inbox = Inbox(LIMITS, Counter())

    def play(self, data: bytes) -> None:
        """Raises what the bytes were refused with."""
        sock: Any = _PlayedSocket(data)
        thread: Any = _PlayedThread()
        BulkSocket.accepted(sock, None, thread, LIMITS, self._greeted, self._closed)
        while thread.busy:
            thread.busy.pop().proceed()
        if self.error is not None:
            raise self.error

    def _greeted(self, bulk: BulkSocket, hello: BulkHello, certificate: str | None) -> None:
        self.hello = hello
        bulk.begin(self, 0)

    def _closed(self, error: BaseException | None) -> None:
        self.error = error or StreamBroken("closed")

    def next_chunk(self, now: float) -> Chunk | None:
        return None

    def chunk_sent(self, chunk: Chunk, now: float) -> None: ...

    def claim(self, chunk: ChunkHeader, now: float, reader: int) -> memoryview | None:
        return self._inbox.claim(chunk, now, reader)

    def chunk_received(self, chunk: ChunkHeader, now: float) -> None:
        self._inbox.received(chunk)

    def connection_failed(self, error: BaseException) -> None:
        self.error = error


def play(data: bytes) -> None:
    PlayedLink().play(data)
