"""HTTP/2 by hand: calls whose message is announced with 1 MiB, sent but for its last byte, and never finished.

It keeps to the windows that the server grants, as any HTTP/2 library would; so what it can send is what the server lets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct

DATA, HEADERS, RESET, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
INITIAL_WINDOW = 4
MESSAGE_BYTES = 1 << 20


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def header(name: bytes, value: bytes) -> bytes:
    """HPACK: a literal without indexing."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


class Caller:
    """One connection with many calls."""

    def __init__(self, path: str) -> None:
        pairs = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers",
                 "content-type": "application/grpc"}  # fmt: skip
        self._headers = b"".join(header(name.encode(), value.encode()) for name, value in pairs.items())
        self._window, self._initial = 65_535, 65_535
        self._streams: dict[int, int] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.sent = 0
        self.is_closed = False

    async def call(self, address: str, source: str, calls: int) -> None:
        host, _, port = address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
        self._writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))
        self._tasks.append(asyncio.create_task(self._listen()))
        self._tasks += [asyncio.create_task(self._send(1 + 2 * number)) for number in range(calls)]

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _send(self, stream: int) -> None:
        self._streams[stream] = self._initial
        self._writer.write(frame(HEADERS, END_HEADERS, stream, self._headers))
        left = memoryview(struct.pack(">BI", 0, MESSAGE_BYTES) + bytes(MESSAGE_BYTES - 1))
        while left and stream in self._streams and not self.is_closed:
            size = min(16_384, len(left), self._window, self._streams[stream])
            if size <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            self._window -= size
            self._streams[stream] -= size
            self.sent += size
            with contextlib.suppress(ConnectionError):
                self._writer.write(frame(DATA, 0, stream, bytes(left[:size])))
                await self._writer.drain()
            left = left[size:]

    async def _listen(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                body = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._heard(head[3], head[4], int.from_bytes(head[5:], "big"), body)
                self._changed.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_closed = True
            self._changed.set()

    def _heard(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(body), 6):
                key, value = struct.unpack_from(">HI", body, at)
                if key == INITIAL_WINDOW:
                    self._streams = {number: left + value - self._initial for number, left in self._streams.items()}
                    self._initial = value
            self._writer.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._writer.write(frame(PING, ACK, 0, body))
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(body, "big")
        elif kind == WINDOW_UPDATE and stream in self._streams:
            self._streams[stream] += int.from_bytes(body, "big")
        elif kind == RESET or (kind == HEADERS and flags & END_STREAM):
            self._streams.pop(stream, None)
