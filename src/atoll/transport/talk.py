"""The talk connection of a link: a socket, plain or TLS, that carries frames and is served by the event loop itself.

    preface  8 bytes   in the clear, before TLS (`chunks.py`)
    hello              session, key, place 0: which link this connection belongs to, and the proof
    frame              its length (4 bytes), the low half of xxh3-64 of these four (4 bytes), then the frame (`frames.py`)

The length has a checksum of its own because its reader acts on it before the frame is there.

gRPC admits a link, and could carry its messages too. But every message would pass through its threads and through the relay of
the front door: that costs several times what a socket does, for a syncer with each report of each learner.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE
from typing import Final

from atoll.transport.chunks import HELLO_BYTES, BulkHello, pack_hello, unpack_hello
from atoll.transport.frames import HEADER_BYTES, LinkLimits, Violation, frame_checksum
from atoll.transport.sockets import common_name, keep_known, limit_silence
from atoll.transport.wire import StreamBroken

READ_BYTES: Final = 64 << 10
AHEAD_BYTES: Final = 256 << 10
"""Of whole frames. Nothing is read beyond them until they are taken, and TCP slows the peer."""
AGAIN_SECONDS: Final = 0.01
"""OpenSSL wants to write before it reads, or the other way round: when to try again. TLS 1.3 has next to no reason for it."""

_LENGTH: Final = struct.Struct("<I")
_WANTS_READ: Final = (BlockingIOError, ssl.SSLWantReadError)
_WANTS_WRITE: Final = (BlockingIOError, ssl.SSLWantWriteError)


class TalkStream:
    """A `FrameStream`, within one event loop. One task at a time reads, and one writes."""

    def __init__(self, sock: socket.socket, limits: LinkLimits, closed: Callable[[], None] = lambda: None) -> None:
        """The preface is written, or read. `closed` is called once, when the socket is closed."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_known(sock)
        limit_silence(sock, limits.stall_seconds)
        self.sock = sock
        self._closed = closed
        self._frame_bytes_max = limits.frame_bytes_max
        self._loop = asyncio.get_running_loop()
        self._data = bytearray()
        self._frames: deque[bytes] = deque()
        self._ahead = 0
        """Bytes of `_frames`."""
        self._ended = self._is_closed = self._listens = False
        self._error: Exception | None = None
        """Why nothing more comes; it is raised when the frames before it are read."""
        self._reader: asyncio.Future[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        """Of whoever waits for the socket: the handshake, or the task that writes."""

    # How one begins

    async def greet(self, hello: BulkHello) -> None:
        """As the side that dialled."""
        await self._shake_hands()
        await self._send(pack_hello(hello))

    async def greeted(self) -> tuple[BulkHello, str | None]:
        """As the other side: the hello, and the common name of the client's certificate."""
        await self._shake_hands()
        hello = b""
        while missing := HELLO_BYTES - len(hello):
            try:
                data = self.sock.recv(missing)
            except _WANTS_READ:
                await self._until_ready(EVENT_READ)
                continue
            except OSError as error:
                raise _broken(error) from None
            if not data:
                raise StreamBroken("the peer went away")
            hello += data
        return unpack_hello(hello), common_name(self.sock)

    async def _shake_hands(self) -> None:
        sock = self.sock
        while isinstance(sock, ssl.SSLSocket):
            try:
                return sock.do_handshake()
            except ssl.SSLWantReadError:
                await self._until_ready(EVENT_READ)
            except ssl.SSLWantWriteError:
                await self._until_ready(EVENT_WRITE)
            except OSError as error:
                raise _broken(error) from None

    # A frame stream

    async def read(self) -> bytes | None:
        while not self._frames:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._listen()
            self._reader = self._loop.create_future()
            await self._reader
        frame = self._frames.popleft()
        self._ahead -= len(frame)
        return frame

    async def write(self, frame: bytes) -> None:
        length = _LENGTH.pack(len(frame))
        await self._send(b"%b%b%b" % (length, _LENGTH.pack(frame_checksum(length)), frame))

    def close(self) -> None:
        if self._is_closed:
            return
        self._deafen()
        if self._ready is not None:
            self._loop.remove_reader(self.sock)
            self._loop.remove_writer(self.sock)
        self._is_closed = self._ended = True
        self.sock.close()
        for waiting in (self._reader, self._ready):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        self._closed()

    # Writing

    async def _send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            if self._is_closed:
                raise StreamBroken("the connection is closed")
            try:
                left = left[self.sock.send(left) :]
            except _WANTS_WRITE:
                await self._until_ready(EVENT_WRITE)
            except ssl.SSLWantReadError:
                await asyncio.sleep(AGAIN_SECONDS)
            except OSError as error:
                raise _broken(error) from None

    async def _until_ready(self, event: int) -> None:
        loop, reads = self._loop, event == EVENT_READ
        ready = self._ready = loop.create_future()
        (loop.add_reader if reads else loop.add_writer)(self.sock, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            self._ready = None
            if not self._is_closed:
                (loop.remove_reader if reads else loop.remove_writer)(self.sock)
        if self._is_closed:
            raise StreamBroken("the connection is closed")

    # Reading

    def _listen(self) -> None:
        if not self._listens and not self._is_closed:
            self._listens = True
            self._loop.add_reader(self.sock, self._readable)
            self._loop.call_soon(self._readable)  # OpenSSL may hold what the system does not tell of

    def _deafen(self) -> None:
        if self._listens:
            self._listens = False
            self._loop.remove_reader(self.sock)

    def _readable(self) -> None:
        if not self._listens:
            return
        try:
            self._receive()
        except _WANTS_READ:
            pass
        except ssl.SSLWantWriteError:
            self._loop.call_later(AGAIN_SECONDS, self._readable)
        except Violation as violation:
            self._end(violation)
        except OSError as error:
            self._end(None if isinstance(error, ssl.SSLEOFError) else _broken(error))
        if self._reader is not None and not self._reader.done() and (self._frames or self._ended):
            self._reader.set_result(None)

    def _receive(self) -> None:
        while self._ahead < AHEAD_BYTES:
            data = self.sock.recv(READ_BYTES)
            if not data:
                return self._end(None)
            self._data += data
            self._cut()
            if not _holds_more(self.sock):
                return None
        return self._deafen()

    def _end(self, error: Exception | None) -> None:
        self._deafen()
        self._ended, self._error = True, error

    def _cut(self) -> None:
        data, at = self._data, 0
        while len(data) - at >= 2 * _LENGTH.size:
            (size,), (check,) = _LENGTH.unpack_from(data, at), _LENGTH.unpack_from(data, at + _LENGTH.size)
            if check != frame_checksum(data[at : at + _LENGTH.size]):
                raise Violation("checksum", "the length of a frame does not match its checksum")
            if not HEADER_BYTES <= size <= self._frame_bytes_max:
                raise Violation("malformed", f"a frame of {size} bytes: it has {HEADER_BYTES} to {self._frame_bytes_max}")
            begin = at + 2 * _LENGTH.size
            if len(data) < begin + size:
                break
            self._frames.append(bytes(data[begin : begin + size]))
            self._ahead += size
            at = begin + size
        del data[:at]


def _holds_more(sock: socket.socket) -> bool:
    """Bytes that were decrypted already: the system does not say that they are there."""
    return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0


def _broken(error: OSError) -> StreamBroken:
    return StreamBroken(f"the talk connection: {error.strerror or error}")
