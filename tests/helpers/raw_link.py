"""A client of a link that says what it likes: admitted or not, and without any of the transport's own rules."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from atoll.transport import ClientCredentials, LinkLimits
from atoll.transport.chunks import (
    CHUNK_HEADER_BYTES,
    PREFACE,
    SESSION_BYTES,
    TALK_PREFACE,
    BulkHello,
    ChunkHeader,
    pack_chunk,
    pack_hello,
    preface_of,
)
from atoll.transport.frames import READY, WELCOME, frame_checksum, unpack
from atoll.transport.keys import split_address
from atoll.transport.server import COUNT_KEY, SESSION_KEY
from atoll.transport.talk import TalkStream
from atoll.transport.wire import Channel, GrpcStream, StreamBroken


def chunk(number: int, at: int, total: int, body: bytes = b"") -> bytes:
    return pack_chunk(ChunkHeader(number, at, total, len(body), frame_checksum(body))) + body


def of_kind(kind: bytes, frame: bytes) -> bytes:
    """A chunk under another name, with a checksum that fits."""
    fields = kind + frame[4 : CHUNK_HEADER_BYTES - 4]
    return fields + frame_checksum(fields).to_bytes(4, "little") + frame[CHUNK_HEADER_BYTES:]


class RawBulk:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    @classmethod
    async def connect(
        cls, address: str, hello: BulkHello | None = None, credentials: ClientCredentials | None = None, preface: bytes = PREFACE
    ) -> RawBulk:
        one = cls(*await asyncio.open_connection(*split_address(address), limit=1 << 16))
        await one.write(preface)
        if credentials is not None:
            await one._writer.start_tls(credentials.bulk, server_hostname=credentials.server_name)
        if hello is not None:
            await one.write(pack_hello(hello))
        return one

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def is_closed(self) -> bool:
        """Waits until the server closes it; False if it says something first."""
        try:
            return await self.reader.read(1) == b""
        except (ConnectionError, ssl.SSLError):
            return True

    async def close(self) -> None:
        self._writer.transport.abort()
        with suppress(ConnectionError, ssl.SSLError):
            await self._writer.wait_closed()


class RawLink:
    def __init__(self, address: str, metadata: Mapping[str, str], credentials: ClientCredentials | None = None) -> None:
        self.number = secrets.token_bytes(SESSION_BYTES)
        self.key = b""
        self.bulks: list[RawBulk] = []
        self.talks: list[TalkStream] = []
        self.stream: GrpcStream
        """With which the link is opened."""
        self.talk: TalkStream
        self._address, self._metadata, self._credentials = address, metadata, credentials
        self._channel = Channel(address, LinkLimits(chunk_bytes=8 << 20), credentials)

    async def ask(self, count: int = 1) -> None:
        shown = {**self._metadata, SESSION_KEY: self.number.hex(), COUNT_KEY: str(count)}
        self.stream = self._channel.open("Talk", shown)
        self.key = bytes(await self._hear(WELCOME))

    async def open_talk(self, count: int = 1) -> None:
        await self.ask(count)
        await self.connect_talk()

    async def connect_talk(self, **other: Any) -> None:
        """`other`: parts of the hello that are not as they should be."""
        loop, (host, port) = asyncio.get_running_loop(), split_address(self._address)
        sock = socket.socket()
        sock.setblocking(False)
        await loop.sock_connect(sock, (host, port))
        await loop.sock_sendall(sock, TALK_PREFACE)
        if self._credentials is not None:
            name = self._credentials.server_name
            sock = self._credentials.bulk.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
        self.talk = TalkStream(sock, LinkLimits(chunk_bytes=8 << 20))
        self.talks.append(self.talk)
        await self.talk.greet(BulkHello(self.number, self.key, 0)._replace(**other))

    async def open_bulk(self, feed: int | None = None, **other: Any) -> RawBulk:
        """`other`: parts of the hello that are not as they should be."""
        hello = BulkHello(self.number, self.key, len(self.bulks))._replace(**other)
        self.bulks.append(await RawBulk.connect(self._address, hello, self._credentials, preface_of(feed)))
        return self.bulks[-1]

    async def ready(self) -> None:
        await self._hear(READY)

    async def _hear(self, kind: bytes) -> memoryview:
        frame = unpack(await self.stream.read() or b"")
        if frame.kind != kind:
            raise StreamBroken("it was not let in")
        return frame.body

    async def close(self) -> None:
        for talk in self.talks:
            talk.close()
        for bulk in self.bulks:
            await bulk.close()
        await self._channel.close()


@asynccontextmanager
async def raw_link(
    address: str, metadata: Mapping[str, str], connections: int = 1
) -> AsyncIterator[tuple[TalkStream, list[RawBulk]]]:
    """Admitted, with all of its connections."""
    link = RawLink(address, metadata)
    try:
        await link.open_talk(connections)
        for _ in range(connections):
            await link.open_bulk()
        await link.ready()
        yield link.talk, link.bulks
    finally:
        await link.close()
