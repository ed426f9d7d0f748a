"""The client side: one attempt to open a link, unary calls, uploads, and the wait between attempts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from atoll.transport.bulk import BulkSocket, IoThreads
from atoll.transport.chunks import FEEDS_MAX, SESSION_BYTES, TALK_PREFACE, BulkHello, preface_of, unpack_key
from atoll.transport.credentials import ClientCredentials
from atoll.transport.frames import (
    CHUNK,
    READY,
    REFUSAL,
    WELCOME,
    Buffers,
    Frame,
    LinkFailed,
    LinkLimits,
    Refused,
    Streamed,
    Violation,
    pack,
    unpack,
)
from atoll.transport.keys import SHARD_NAME, split_address
from atoll.transport.link import Handler, Link
from atoll.transport.server import COUNT_KEY, SESSION_KEY
from atoll.transport.talk import TalkStream
from atoll.transport.wire import CALL_SERVICE, Channel, GrpcStream, Metadata, RpcError, StreamBroken, failure

BACKOFF_LEAST_SECONDS: Final = 0.05
BACKOFF_MOST_SECONDS: Final = 2.0
REASON_SECONDS: Final = 1.0
"""How long to wait for the server's reason after it closed a bulk connection."""

_open_links: set[asyncio.Task[None]] = set()
"""Strong references: an event loop keeps only weak ones to its tasks."""


async def dial(
    address: str,
    handler: Handler,
    *,
    peer: str,
    metadata: Mapping[str, str],
    limits: LinkLimits | None = None,
    credentials: ClientCredentials | None = None,
    timeout: float = 10.0,
) -> Link:
    """One attempt. Raises Refused if the server refused, LinkFailed if it could not be reached."""
    attempt = _Attempt(address, limits or LinkLimits(), credentials)
    held = False
    try:
        async with asyncio.timeout(timeout):
            talk = await attempt.open(metadata)
        link = Link(peer, handler, attempt.limits)
        link.begin(talk, attempt.bulks, attempt.fed)
        task = asyncio.create_task(_hold(link, attempt))
        _open_links.add(task)
        task.add_done_callback(_open_links.discard)
        held = True
        return link
    except TimeoutError as error:
        raise LinkFailed(f"{attempt.waits_for} did not answer within {timeout} s") from error
    except (StreamBroken, Violation) as error:
        raise failure(error, address) from error
    except OSError as error:
        raise LinkFailed(f"{address} cannot be reached for payloads ({error.strerror or error})") from error
    finally:
        if not held:
            await attempt.close()


class _Attempt:
    """The connections of a link."""

    def __init__(self, address: str, limits: LinkLimits, credentials: ClientCredentials | None) -> None:
        self.limits = limits
        self.talk: TalkStream | None = None
        self.bulks: list[BulkSocket] = []
        self.fed: list[BulkSocket] = []
        self._address = self.waits_for = address
        """The second: whoever is to answer now, in words."""
        self._credentials = credentials
        self._channel = Channel(address, limits, credentials)
        self._threads = IoThreads(limits.connections + 1)
        self._loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        """Holds the error if a bulk connection ends before the link stands."""

    async def open(self, metadata: Metadata) -> TalkStream:
        number = secrets.token_bytes(SESSION_BYTES)
        session = {**metadata, SESSION_KEY: number.hex(), COUNT_KEY: str(self.limits.connections)}
        stream = self._channel.open("Talk", session)
        welcome = await _expect(stream, WELCOME)
        host, port = split_address(self._address)
        bulk_port, feeds = welcome.number or port, min(welcome.at, FEEDS_MAX)
        try:
            key, addresses = unpack_key(welcome.body, feeds)
        except ValueError as error:
            raise StreamBroken(f"it does not speak this protocol ({error})") from None
        talk = self.talk = await self._connect_talk(host, port, BulkHello(number, key, 0))
        for index in range(self.limits.connections):
            self.bulks.append(await self._connect_bulk(host, bulk_port, BulkHello(number, key, index)))
        for feed in range(feeds):
            self.fed.append(await self._connect_feed(feed, BulkHello(number, key, feed), host, bulk_port, addresses))
        self.waits_for = f"{self._address}, or one of its shards," if feeds else self._address
        ready = asyncio.create_task(_expect(stream, READY))
        try:
            either: set[asyncio.Future[Any]] = {ready, self._broken}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():  # a server that refuses the session says why on the stream
                await asyncio.wait({ready}, timeout=REASON_SECONDS)
            if not ready.done():
                self._broken.result()
            await ready
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
        await self._channel.close()
        return talk

    async def _connect_talk(self, host: str, port: int, hello: BulkHello) -> TalkStream:
        sock = await self._connect(host, port, TALK_PREFACE)
        try:
            if self._credentials is not None:
                name = self._credentials.server_name
                sock = self._credentials.bulk.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
            talk = TalkStream(sock, self.limits)
        except BaseException:
            sock.close()
            raise
        try:
            await talk.greet(hello)
        except BaseException:
            talk.close()
            raise
        return talk

    async def _connect_feed(self, feed: int, hello: BulkHello, host: str, port: int, addresses: Sequence[str]) -> BulkSocket:
        if not addresses:
            return await self._connect_bulk(host, port, hello, feed)
        if self._credentials is None:
            raise StreamBroken("shards on other machines want certificates, and this process has none")
        self.waits_for = f"shard {feed} at {addresses[feed]}"
        try:
            return await self._connect_bulk(*split_address(addresses[feed]), hello, feed, SHARD_NAME)
        except OSError as error:
            raise LinkFailed(f"shard {feed} cannot be reached at {addresses[feed]} ({error.strerror or error})") from None

    async def _connect_bulk(
        self, host: str, port: int, hello: BulkHello, feed: int | None = None, role: str | None = None
    ) -> BulkSocket:
        """`role`: what the other side's certificate must say that it is; None: a server of this link."""
        sock = await self._connect(host, port, preface_of(feed))
        context, name = (self._credentials.bulk, role or self._credentials.server_name) if self._credentials else (None, "")
        try:
            return BulkSocket.dialled(sock, context, name, hello, self._threads.next(), self.limits, self._ended)
        except BaseException:
            sock.close()
            raise

    async def _connect(self, host: str, port: int, preface: bytes) -> socket.socket:
        error: OSError = OSError(f"{host} has no address")
        for family, kind, proto, _, where in await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, proto)
            try:
                sock.setblocking(False)
                await self._loop.sock_connect(sock, where)
                await self._loop.sock_sendall(sock, preface)
                return sock
            except OSError as failed:
                sock.close()
                error = failed
            except BaseException:
                sock.close()
                raise
        raise error

    def _ended(self, error: BaseException | None) -> None:
        """In the thread of a bulk connection."""

        def tell() -> None:
            if not self._broken.done():
                self._broken.set_exception(error or StreamBroken("a bulk connection was closed"))
                self._broken.exception()  # it may never be asked for: then it is no news

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(tell)

    async def close(self) -> None:
        if self.talk is not None:
            self.talk.close()
        self._threads.stop()
        self._broken.cancel()
        await self._channel.close()


async def _expect(talk: GrpcStream, kind: bytes) -> Frame:
    data = await talk.read()
    if data is None or (frame := unpack(data)).kind != kind:
        raise StreamBroken("it closed the stream" if data is None else "it does not speak this protocol")
    return frame


async def _hold(link: Link, attempt: _Attempt) -> None:
    try:
        await link.run_until_closed()
    finally:
        await attempt.close()


async def call(
    address: str,
    name: str,
    metadata: Mapping[str, str],
    request: bytes,
    credentials: ClientCredentials | None = None,
    timeout: float = 10.0,
) -> bytes:
    channel = Channel(address, LinkLimits(), credentials)
    try:
        async with asyncio.timeout(timeout):
            return await channel.call(name, metadata, request)
    except TimeoutError as error:
        raise LinkFailed(f"{address} did not answer within {timeout} s") from error
    except RpcError as error:
        raise failure(error, address) from error
    finally:
        await channel.close()


async def upload(
    address: str,
    name: str,
    metadata: Mapping[str, str],
    payload: Buffers | Streamed,
    credentials: ClientCredentials | None = None,
    timeout: float = 60.0,
) -> bytes:
    """`timeout` applies to each chunk and to the answer: an upload that makes progress may take longer in total."""
    channel = Channel(address, LinkLimits(), credentials)
    try:
        async with asyncio.timeout(timeout) as deadline:
            stream = channel.open(name, metadata, CALL_SERVICE)
            data = await _send_upload(stream, payload, deadline, timeout)
        reply = unpack(data or b"")
    except TimeoutError as error:
        raise LinkFailed(f"{address} accepted no data for {timeout} s") from error
    except (StreamBroken, Violation) as error:
        raise failure(error, address) from error
    finally:
        await channel.close()
    if reply.kind == REFUSAL:
        raise Refused(bytes(reply.body).decode("utf8", "replace"), bool(reply.number))
    return bytes(reply.body)


async def _send_upload(
    stream: GrpcStream, payload: Buffers | Streamed, deadline: asyncio.Timeout, timeout: float
) -> bytes | None:
    """Nothing is sent before a welcome, which may be the answer already. An answer before the last chunk is a refusal; the rest
    is then not sent."""
    first = await stream.read()
    if first is None or unpack(first).kind != WELCOME:
        return first
    answer = asyncio.create_task(stream.read())
    try:
        await _send_pieces(stream, payload, answer, deadline, timeout)
        if not answer.done():
            await stream.finish()
        return await answer
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)


async def _send_pieces(
    stream: GrpcStream, payload: Buffers | Streamed, answer: asyncio.Task[bytes | None], deadline: asyncio.Timeout,
    timeout: float,
) -> None:  # fmt: skip
    """While a piece is read the deadline rests: it is not the server that is slow then."""
    now, at = asyncio.get_running_loop().time, 0
    total = payload.nbytes if isinstance(payload, Streamed) else sum(memoryview(piece).nbytes for piece in payload)
    async for piece in _read(payload):
        for start in range(0, piece.nbytes, LinkLimits.chunk_bytes):
            if answer.done():
                return
            part = piece[start : start + LinkLimits.chunk_bytes]
            deadline.reschedule(now() + timeout)
            await stream.write(pack(CHUNK, 0, at, total, (part,)))
            at += part.nbytes
        deadline.reschedule(None)
    deadline.reschedule(now() + timeout)


async def _read(payload: Buffers | Streamed) -> AsyncIterator[memoryview]:
    """What is not all in memory is read in another thread."""
    if not isinstance(payload, Streamed):
        for piece in payload:
            yield memoryview(piece).cast("B")
        return
    loop, pieces = asyncio.get_running_loop(), payload.pieces()
    while (late := await loop.run_in_executor(None, lambda: next(pieces, None))) is not None:
        yield memoryview(late).cast("B")


class Backoff:
    """How long to wait before the next attempt: twice as long each time, with jitter, so that peers that lost a server at the
    same moment do not all return at the same moment."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._attempt = 0

    def next(self) -> float:
        self._attempt += 1
        ceiling = min(BACKOFF_LEAST_SECONDS * 2**self._attempt, BACKOFF_MOST_SECONDS)
        return self._rng.uniform(ceiling / 2, ceiling)

    def reset(self) -> None:
        self._attempt = 0
