"""Bulk connections: sockets, plain or TLS, that carry the chunks of payloads, and the threads that serve them.

A socket belongs to one thread, which reads and writes it as far as it goes without waiting and then waits for all of its
sockets at once. So a TLS connection is never used by two threads, and a thousand peers need no thousand threads. Bytes are
decrypted into the place they have in the payload, and encrypted from the sender's own buffers, outside the interpreter's lock.

A socket that may not read (its link has no place for the chunk) is left alone, and TCP slows the peer. How long the peer may
leave bytes unread or unacknowledged is looked at twice a second.
"""

from __future__ import annotations

import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE
from typing import Final, Protocol

from atoll.transport.chunks import (
    CHUNK_HEADER_BYTES,
    HELLO_BYTES,
    BulkHello,
    ChunkHeader,
    pack_hello,
    unpack_chunk,
    unpack_hello,
)
from atoll.transport.frames import LinkLimits, Violation, frame_checksum
from atoll.transport.outbox import Chunk
from atoll.transport.sockets import common_name, keep_known, outstanding
from atoll.transport.wire import StreamBroken

THREADS_MAX: Final = 8
TURN_BYTES: Final = 2 << 20
"""What a socket reads or writes before the others of its thread have their turn."""
LOOK_SECONDS: Final = 0.5

Closed = Callable[[BaseException | None], None]
"""Called once, in the socket's thread, with the reason unless the socket was told to close."""


class Traffic(Protocol):
    """What a bulk connection asks of its link, from its own thread."""

    def next_chunk(self, now: float) -> Chunk | None: ...

    def chunk_sent(self, chunk: Chunk, now: float) -> None: ...

    def claim(self, chunk: ChunkHeader, now: float, reader: int) -> memoryview | None: ...

    def chunk_received(self, chunk: ChunkHeader, now: float) -> None: ...

    def connection_failed(self, error: BaseException) -> None: ...


class BulkConnection(Protocol):
    """What a link sees of one; any thread may call it."""

    bytes_sent: int
    bytes_received: int

    def begin(self, traffic: Traffic, reader: int) -> None:
        """Reader: the connection's number among those of its link."""

    def wake(self) -> None:
        """There may be a chunk to send, or a place for the one that waits."""

    def close(self) -> None: ...


class IoThread:
    def __init__(self, name: str) -> None:
        self.sockets: set[BulkSocket] = set()
        self.busy: set[BulkSocket] = set()
        """They can go on without waiting."""
        self.sending: set[BulkSocket] = set()
        """They have bytes that the peer has not acknowledged, as far as is known."""
        self.selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._wakeup, self._wake = socket.socketpair()
        for end in (self._wakeup, self._wake):
            end.setblocking(False)
        self.selector.register(self._wakeup, EVENT_READ)
        self._running = True
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[[], None]) -> None:
        """In this thread, soon. From any thread."""
        self._calls.append(function)
        with suppress(OSError):  # full: it is awake; closed: it has ended
            self._wake.send(b"!")

    def stop(self) -> None:
        self.call(self._stop)

    def _stop(self) -> None:
        self._running = False

    def _run(self) -> None:
        next_look = 0.0
        while self._running:
            timeout = 0.0 if self.busy or self._calls else LOOK_SECONDS if self.sending else None
            for key, _ in self.selector.select(timeout):
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._wakeup.recv(4096)
                else:
                    self.busy.add(key.data)
            ready, self.busy = self.busy, set()
            for one in ready:
                one.proceed()
            while self._calls:
                self._calls.popleft()()
            if self.sending and (now := time.monotonic()) >= next_look:
                next_look = now + LOOK_SECONDS
                for one in list(self.sending):
                    one.check_progress(now)
        for one in list(self.sockets):
            one.close_here()
        self.selector.close()
        self._wakeup.close()
        self._wake.close()


class IoThreads:
    """Started by the first connection."""

    def __init__(self, most: int, name: str = "bulk") -> None:
        self._most = max(1, min(most, THREADS_MAX, os.cpu_count() or 1))
        self._name = name
        self._threads: list[IoThread] = []

    def next(self) -> IoThread:
        """The one with the fewest sockets. From one thread."""
        least = min(self._threads, key=lambda thread: len(thread.sockets), default=None)
        if least is None or (least.sockets and len(self._threads) < self._most):
            least = IoThread(f"{self._name}-{len(self._threads)}")
            self._threads.append(least)
        return least

    def stop(self) -> None:
        """Closes all sockets."""
        for thread in self._threads:
            thread.stop()
        self._threads.clear()


class BulkSocket:
    """One connection. Its methods without a word about threads are for its own thread."""

    def __init__(self, sock: socket.socket, thread: IoThread, limits: LinkLimits, closed: Closed) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_known(sock)
        self.bytes_sent = 0
        self.bytes_received = 0
        self.sock = sock
        self._thread = thread
        self._limits = limits
        self._closed = closed
        self._traffic: Traffic | None = None
        self._reader = 0
        self._stage: Callable[[], int] = self._transfer
        self._wanted = 0
        self._has_failed = self._is_closed = False
        self._head = memoryview(bytearray(CHUNK_HEADER_BYTES))
        self._missing = self._head
        """What is to be read next: the rest of a header, or of a body."""
        self._body: memoryview | None = None
        self._receiving: ChunkHeader | None = None
        self._out: deque[bytes | memoryview] = deque()
        self._sending: Chunk | None = None
        self._began = 0.0
        self._outstanding_since = 0.0
        thread.sockets.add(self)

    # How one begins, in any thread

    @classmethod
    def accepted(
        cls, sock: socket.socket, context: ssl.SSLContext | None, thread: IoThread, limits: LinkLimits,
        greeted: Callable[[BulkSocket, BulkHello, str | None], None], closed: Closed,
    ) -> BulkSocket:  # fmt: skip
        """`greeted` is called in the socket's thread, with the hello and the common name of the client's certificate."""
        if context is not None:
            sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        one = cls(sock, thread, limits, closed)
        hello = memoryview(bytearray(HELLO_BYTES))
        one._missing = hello

        def read_hello() -> int:
            wanted = one._read(HELLO_BYTES)
            if one._missing:
                return wanted
            one._missing, one._stage = one._head, one._transfer
            greeted(one, unpack_hello(hello), common_name(one.sock))
            return one._transfer()

        one._start(read_hello)
        return one

    @classmethod
    def dialled(
        cls, sock: socket.socket, context: ssl.SSLContext | None, server_name: str, hello: BulkHello, thread: IoThread,
        limits: LinkLimits, closed: Closed,
    ) -> BulkSocket:  # fmt: skip
        """`sock` is connected, and the preface is written."""
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=server_name, do_handshake_on_connect=False)
        one = cls(sock, thread, limits, closed)
        one._out.append(pack_hello(hello))
        one._start(one._transfer)
        return one

    def _start(self, after: Callable[[], int]) -> None:
        self._stage = after
        sock = self.sock
        if isinstance(sock, ssl.SSLSocket):

            def handshake() -> int:
                try:
                    sock.do_handshake()
                except ssl.SSLWantReadError:
                    return EVENT_READ
                except ssl.SSLWantWriteError:
                    return EVENT_WRITE
                self._stage = after
                return after()

            self._stage = handshake
        self.wake()

    # For its link, in any thread

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def begin(self, traffic: Traffic, reader: int) -> None:
        def begun() -> None:
            self._traffic, self._reader = traffic, reader
            if self._is_closed:
                traffic.connection_failed(StreamBroken("a bulk connection ended before the link stood"))
            self.proceed()

        self._thread.call(begun)

    def wake(self) -> None:
        self._thread.call(self.proceed)

    def close(self) -> None:
        self._thread.call(self.close_here)

    # In its thread

    def proceed(self) -> None:
        if self._is_closed or self._has_failed:
            return
        try:
            self._want(self._stage())
        except (Violation, StreamBroken) as error:
            self._fail(error)
        except OSError as error:  # SSLError is one
            self._fail(StreamBroken(f"a bulk connection: {error.strerror or error}"))
        except Exception as error:
            self._fail(error)

    def close_here(self, error: BaseException | None = None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._want(0)
        self.sock.close()
        for group in (self._thread.sockets, self._thread.busy, self._thread.sending):
            group.discard(self)
        self._out.clear()
        self._traffic = self._sending = self._body = None
        self._missing = self._head
        self._closed(error)

    def _fail(self, error: BaseException) -> None:
        """A link closes its connections itself, after it told the peer why: a reset must not overtake the reason."""
        if self._traffic is None:
            return self.close_here(error)
        self._has_failed = True
        self._want(0)
        self._thread.sending.discard(self)
        self._traffic.connection_failed(error)

    def check_progress(self, now: float) -> None:
        """A peer that reads nothing and a path that loses everything look alike; only the latter acknowledges nothing."""
        limits = self._limits
        if self._out and now - self._began > limits.unread_seconds:
            return self._fail(StreamBroken(f"the peer read nothing for {limits.unread_seconds:g} s"))
        waiting, silent_seconds = outstanding(self.sock)
        if not waiting:
            self._outstanding_since = now
            if not self._out:
                self._thread.sending.discard(self)
        elif min(now - self._outstanding_since, silent_seconds) > limits.stall_seconds:
            self._fail(StreamBroken(f"the peer acknowledged nothing for {limits.stall_seconds:g} s"))

    def _want(self, events: int) -> None:
        if events == self._wanted:
            return
        if not self._wanted:
            self._thread.selector.register(self.sock, events, self)
        elif events:
            self._thread.selector.modify(self.sock, events, self)
        else:
            self._thread.selector.unregister(self.sock)
        self._wanted = events

    def _transfer(self) -> int:
        return self._receive() | self._send()

    def _receive(self) -> int:
        budget = TURN_BYTES
        while budget > 0:
            before = self.bytes_received
            wanted = self._read(budget)
            budget -= self.bytes_received - before
            if self._missing:
                if budget > 0:
                    return wanted
            elif not self._next_part():
                return 0
        self._thread.busy.add(self)
        return EVENT_READ

    def _read(self, budget: int) -> int:
        """Into `_missing`, as far as it goes; returns what to wait for."""
        missing, receive, count = self._missing, self.sock.recv_into, 0
        try:
            while missing and budget > 0:
                count = receive(missing)
                if not count:
                    raise StreamBroken("the peer closed a bulk connection")
                missing = missing[count:]
                budget -= count
                self.bytes_received += count
        except (BlockingIOError, ssl.SSLWantReadError):
            return EVENT_READ
        except ssl.SSLWantWriteError:
            return EVENT_WRITE
        finally:
            self._missing = missing
        return EVENT_READ

    def _next_part(self) -> bool:
        """A header or a body is complete. False if there is no place for the body now: `wake` tries again."""
        if self._receiving is None:
            if self._traffic is None:
                return False
            header = unpack_chunk(self._head)
            place = self._traffic.claim(header, time.monotonic(), self._reader)
            if place is None:
                return False
            self._receiving, self._body, self._missing = header, place, place
            if header.size:
                return True
        assert self._traffic is not None and self._body is not None
        header = self._receiving
        if frame_checksum(self._body) != header.check:
            raise Violation("checksum", "a chunk does not match its checksum")
        self._receiving, self._body, self._missing = None, None, self._head
        self._traffic.chunk_received(header, time.monotonic())
        return True

    def _send(self) -> int:
        budget = TURN_BYTES
        while budget > 0:
            if not self._out and not self._next_chunk():
                return 0
            piece = self._out[0]
            try:
                count = self.sock.send(piece)
            except (BlockingIOError, ssl.SSLWantWriteError):
                return EVENT_WRITE
            except ssl.SSLWantReadError:
                return EVENT_READ
            self.bytes_sent += count
            budget -= count
            if count < len(piece):
                self._out[0] = memoryview(piece)[count:]
                continue
            self._out.popleft()
            if not self._out and self._sending is not None and self._traffic is not None:
                chunk, self._sending = self._sending, None
                self._traffic.chunk_sent(chunk, time.monotonic())
        self._thread.busy.add(self)
        return EVENT_WRITE

    def _next_chunk(self) -> bool:
        if self._traffic is None:
            return False
        now = time.monotonic()
        chunk = self._traffic.next_chunk(now)
        if chunk is None:
            return False
        self._sending, self._began = chunk, now
        self._out.append(chunk.header)
        self._out.extend(chunk.parts)
        if self not in self._thread.sending:
            self._thread.sending.add(self)
            self._outstanding_since = now
        return True
