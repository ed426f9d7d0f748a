"""Payloads that another process sends and receives: a syncer's shards exchange their stripes with each learner, on connections
of their own.

A link has its talk stream and its own bulk connections with one process, the server's. Each *feed* gives it one more connection.
What a feed sends are chunks that name their bulk message and their place in its payload, as all chunks do: so the receiving
link puts a payload together from all its connections, and does not know which process a chunk came from. What it receives are
whole parts: a peer cuts the payload of a spread message (`outbox.py`), and gives each feed its own (`parts.py`).

The server hands the feed a connection that its front door accepted (`chunks.preface_of`), and tells it the session and the key
that this connection must show.
"""

from __future__ import annotations

import hmac
import random
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple, Protocol

from atoll.transport.bulk import BulkSocket, IoThreads
from atoll.transport.chunks import BulkHello, ChunkHeader, pack_chunk
from atoll.transport.frames import LinkLimits, SharedBuffers
from atoll.transport.outbox import Chunk, Transfer
from atoll.transport.parts import PartInbox

FEED_THREADS: Final = 4
STRANGERS_MAX: Final = 256
"""Connections that have not shown a session and its key; of more than so many any one is closed. If it were the oldest, whoever
opens enough of them would end every handshake that takes longer; so each has a chance (`door.py`)."""
STRANGER_SECONDS: Final = 10.0
TOLD_SECONDS: Final = 0.5
"""How often the server hears how much was sent while a payload is."""


class Feeds(Protocol):
    """The processes that send in a server's place, as the server sees them. May be called in its loop only."""

    count: int
    addresses: Sequence[str]
    """Where peers dial them, one each. Empty: at the server's port, by their preface."""

    def expect(self, session: bytes, key: bytes, certificate: str | None) -> None: ...

    def forget(self, session: bytes) -> None: ...

    def hand(self, feed: int, connection: socket.socket) -> None:
        """A connection that begins with the preface of that process."""


class FeedEvents(Protocol):
    """What the server hears of them, in its loop."""

    def feed_is_here(self, session: bytes, feed: int) -> None: ...

    def feed_sent(self, session: bytes, feed: int, nbytes: int) -> None:
        """All in all."""

    def feed_has(self, session: bytes, number: int, nbytes: int) -> None:
        """One of them has its whole part of a spread message."""

    def feed_is_gone(self, session: bytes, reason: str) -> None: ...


class PlacedBytes(NamedTuple):
    """Where bytes belong in a payload. `checks`, by place and size, are computed for the first peer."""

    at: int
    data: SharedBuffers


class Feed:
    """One connection. `put` may be called from any thread; what a `Traffic` has is for the connection's."""

    def __init__(
        self, bulk: BulkSocket, limits: LinkLimits, sent: Callable[[int], None], gone: Callable[[str], None],
        part_sizes: Collection[int], came: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        self.bulk = bulk
        self.parts = PartInbox(limits, part_sizes, came, bulk.wake)
        self._limits = limits
        self._sent, self._gone = sent, gone
        self._lock = threading.Lock()
        self._queue: deque[tuple[Transfer, int, int]] = deque()
        """With the place of its first byte, and the size of the whole payload."""
        self._queued = 0
        """Bytes of it, and of the chunk that is being sent."""
        self._nbytes = 0
        self._told_at = 0.0
        self._over = False

    def end(self) -> None:
        """What has come as a whole may still be taken."""
        with self._lock:
            self._over = True
            self._queue.clear()
        self.bulk.close()

    def put(self, number: int, total: int, stripes: Sequence[PlacedBytes]) -> None:
        with self._lock:
            if self._over:
                return
            added = [(Transfer(number, 0, b"", stripe.data), stripe.at, total) for stripe in stripes]
            self._queue.extend(added)
            self._queued += sum(transfer.total for transfer, _, _ in added)
            full = self._queued > self._limits.queue_bytes_max
        if full:  # it says that it has what it was sent, and does not read
            self._gone(f"the send queue is full: {self._limits.queue_bytes_max} bytes wait")
        else:
            self.bulk.wake()

    # For the connection

    def next_chunk(self, now: float) -> Chunk | None:
        with self._lock:
            if not self._queue:
                return None
            transfer, at, total = self._queue[0]
            offset = transfer.taken
            parts = transfer.take(self._limits.chunk_bytes)
            size = transfer.taken - offset
            if transfer.taken == transfer.total:
                self._queue.popleft()
        check = transfer.check_of(offset, size, parts)
        return Chunk(transfer, size, pack_chunk(ChunkHeader(transfer.number, at + offset, total, size, check)), parts)

    def chunk_sent(self, chunk: Chunk, now: float) -> None:
        self._nbytes += chunk.size
        with self._lock:
            self._queued -= chunk.size
        if not self._queue or now >= self._told_at + TOLD_SECONDS:
            self._told_at = now
            self._sent(self._nbytes)

    def claim(self, chunk: ChunkHeader, now: float, reader: int) -> memoryview | None:
        return self.parts.claim(chunk, now)

    def chunk_received(self, chunk: ChunkHeader, now: float) -> None:
        self.parts.received(chunk)

    def connection_failed(self, error: BaseException) -> None:
        self._gone(str(error))


class _Expected(NamedTuple):
    key: bytes
    certificate: str | None


class _Stranger(NamedTuple):
    bulk: BulkSocket
    since: float
    hello: BulkHello | None = None
    """It has come before the server told of its session."""
    certificate: str | None = None


class FeedEnd:
    """All connections of one feeding process. `expect`, `forget`, `take` and `put` may be called from any thread."""

    def __init__(
        self, context: ssl.SSLContext | None, limits: LinkLimits, here: Callable[[bytes], None],
        sent: Callable[[bytes, int], None], gone: Callable[[bytes, str], None], *, part_sizes: Collection[int] = (),
        came: Callable[[bytes, int, int], None] = lambda session, number, nbytes: None,
    ) -> None:  # fmt: skip
        """`here`, `sent`, `gone` and `came` are called with a session, in any thread. `part_sizes`: of the parts that peers may
        send; `came` hears of each that is whole, with the number of its message."""
        self._part_sizes, self._came = part_sizes, came
        self._context, self._limits = context, limits
        self._here, self._sent, self._gone = here, sent, gone
        self._threads = IoThreads(FEED_THREADS, "feed")
        self._lock = threading.Lock()
        self._expected: dict[bytes, _Expected] = {}
        self._strangers: list[_Stranger] = []
        """The oldest first."""
        self._looks = False
        """Somebody will see to those that stay strangers."""
        self._feeds: dict[bytes, Feed] = {}

    def take(self, sock: socket.socket) -> None:
        """A connection whose preface was read."""
        with self._lock:
            thread = self._threads.next()
        try:
            bulk = BulkSocket.accepted(sock, self._context, thread, self._limits, self._greeted, lambda _: self._sweep())
        except OSError:  # the peer is gone
            return sock.close()
        with self._lock:
            known = any(one.bulk is bulk for one in self._strangers) or any(f.bulk is bulk for f in self._feeds.values())
            if not known and not bulk.is_closed:
                self._strangers.append(_Stranger(bulk, time.monotonic()))
            surplus = None
            if len(self._strangers) > STRANGERS_MAX:
                surplus = self._strangers.pop(random.randrange(len(self._strangers)))
            self._look_later()
        if surplus is not None:
            surplus.bulk.close()
        return None

    def _sweep(self) -> None:
        """One has closed: if it was a stranger, nobody has to make room for it any more."""
        with self._lock:
            self._strangers = [one for one in self._strangers if not one.bulk.is_closed]

    def _look_later(self) -> None:
        """With the lock held."""
        if self._strangers and not self._looks:
            self._looks = True
            timer = threading.Timer(STRANGER_SECONDS / 2, self._look)
            timer.daemon = True
            timer.start()

    def _look(self) -> None:
        with self._lock:
            self._looks = False
            until = time.monotonic() - STRANGER_SECONDS
            old = [one for one in self._strangers if one.since <= until]
            self._strangers = [one for one in self._strangers if one.since > until]
            self._look_later()
        for one in old:
            one.bulk.close()

    def expect(self, session: bytes, key: bytes, certificate: str | None) -> None:
        with self._lock:
            self._expected[session] = _Expected(key, certificate)
            early = [one for one in self._strangers if one.hello is not None and one.hello.session == session]
        for one in early:
            assert one.hello is not None
            self._greeted(one.bulk, one.hello, one.certificate)

    def forget(self, session: bytes) -> None:
        with self._lock:
            self._expected.pop(session, None)
            feed = self._feeds.pop(session, None)
        if feed is not None:
            feed.end()

    def knows(self, session: bytes) -> bool:
        """It has begun and is not forgotten."""
        with self._lock:
            return session in self._feeds

    def take_part(self, session: bytes, number: int) -> memoryview | None:
        """Of a spread message that was delivered, message after message. None: there is none, or the link is forgotten."""
        with self._lock:
            feed = self._feeds.get(session)
        return feed.parts.take(number) if feed is not None else None

    def put(self, session: bytes, number: int, total: int, stripes: Sequence[PlacedBytes]) -> None:
        """Nothing to a link that is over."""
        with self._lock:
            feed = self._feeds.get(session)
        if feed is not None:
            feed.put(number, total, stripes)

    def close(self) -> None:
        with self._lock:
            feeds, self._feeds = list(self._feeds.values()), {}
        for feed in feeds:
            feed.end()
        self._threads.stop()

    def _greeted(self, bulk: BulkSocket, hello: BulkHello, certificate: str | None) -> None:
        session = hello.session
        with self._lock:
            self._strangers = [one for one in self._strangers if one.bulk is not bulk]
            expected = self._expected.get(session)
            if expected is None:
                self._strangers.append(_Stranger(bulk, time.monotonic(), hello, certificate))
                return
            known = hmac.compare_digest(expected.key, hello.key) and expected.certificate == certificate
            if not known or session in self._feeds:
                bulk.close()
                return
            feed = self._feeds[session] = Feed(
                bulk, self._limits, lambda nbytes: self._sent(session, nbytes), lambda why: self._failed(session, why),
                self._part_sizes, lambda number, nbytes: self._came(session, number, nbytes),
            )
        bulk.begin(feed, 0)
        self._here(session)

    def _failed(self, session: bytes, why: str) -> None:
        with self._lock:
            feed = self._feeds.get(session)
        if feed is not None:
            feed.end()
            self._gone(session, why)
