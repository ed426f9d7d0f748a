"""The client side: one attempt to open a link, unary calls, uploads, and the wait between attempts."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Mapping
from typing import Final

from atoll.transport.credentials import ClientCredentials
from atoll.transport.frames import (
    CHUNK,
    READY,
    REFUSAL,
    WELCOME,
    Buffers,
    LinkFailed,
    LinkLimits,
    Refused,
    Violation,
    pack,
    unpack,
)
from atoll.transport.link import Handler, Link
from atoll.transport.outbox import Transfer
from atoll.transport.server import COUNT_KEY, INDEX_KEY, NONCE_CHARACTERS, SESSION_KEY
from atoll.transport.wire import CALL_SERVICE, Channel, GrpcStream, Metadata, RpcError, StreamBroken, failure

BACKOFF_LEAST_SECONDS: Final = 0.05
BACKOFF_MOST_SECONDS: Final = 5.0

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
    limits = limits or LinkLimits()
    channels: list[Channel] = []
    held = False
    try:
        async with asyncio.timeout(timeout):
            talk, bulks = await _open(address, metadata, limits, credentials, channels)
        link = Link(peer, handler, limits)
        link.begin(talk, bulks)
        task = asyncio.create_task(_hold(link, channels))
        _open_links.add(task)
        task.add_done_callback(_open_links.discard)
        held = True
        return link
    except TimeoutError as error:
        raise LinkFailed(f"{address} did not answer within {timeout} s") from error
    except (StreamBroken, Violation) as error:
        raise failure(error, address) from error
    finally:
        if not held:
            await _close(channels)


async def _open(
    address: str, metadata: Metadata, limits: LinkLimits, credentials: ClientCredentials | None, channels: list[Channel]
) -> tuple[GrpcStream, list[GrpcStream]]:
    """Adds each channel to the list when it is made, so that the caller can close them all if a later one fails."""
    session = {**metadata, SESSION_KEY: secrets.token_hex(NONCE_CHARACTERS // 2), COUNT_KEY: str(limits.connections)}
    channels.append(Channel(address, limits, credentials))
    talk = channels[0].open("Talk", session)
    await _expect(talk, WELCOME)
    bulks = []
    for index in range(limits.connections):
        channels.append(Channel(address, limits, credentials))
        bulks.append(channels[-1].open("Bulk", {**session, INDEX_KEY: str(index)}))
    await _expect(talk, READY)
    return talk, bulks


async def _expect(talk: GrpcStream, kind: bytes) -> None:
    data = await talk.read()
    if data is None or unpack(data).kind != kind:
        raise StreamBroken("it closed the stream" if data is None else "it does not speak this protocol")


async def _hold(link: Link, channels: list[Channel]) -> None:
    try:
        await link.run_until_closed()
    finally:
        await _close(channels)


async def _close(channels: list[Channel]) -> None:
    await asyncio.gather(*(channel.close() for channel in channels))


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
    payload: Buffers,
    credentials: ClientCredentials | None = None,
    timeout: float = 60.0,
) -> bytes:
    """`timeout` applies to each chunk and to the answer: an upload that makes progress may take longer in total."""
    channel = Channel(address, LinkLimits(), credentials)
    try:
        async with asyncio.timeout(timeout) as deadline:
            stream = channel.open(name, metadata, CALL_SERVICE)
            data = await _send_upload(stream, Transfer(0, 0, b"", payload), deadline, timeout)
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


async def _send_upload(stream: GrpcStream, transfer: Transfer, deadline: asyncio.Timeout, timeout: float) -> bytes | None:
    """Nothing is sent before a welcome, which may be the answer already. An answer before the last chunk is a refusal; the rest
    is then not sent."""
    first = await stream.read()
    if first is None or unpack(first).kind != WELCOME:
        return first
    answer = asyncio.create_task(stream.read())
    try:
        while transfer.taken < transfer.total and not answer.done():
            offset = transfer.taken
            await stream.write(pack(CHUNK, 0, offset, transfer.total, transfer.take(LinkLimits.chunk_bytes)))
            deadline.reschedule(asyncio.get_running_loop().time() + timeout)
        if not answer.done():
            await stream.finish()
        return await answer
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)


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
