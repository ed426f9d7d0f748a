"""The client's side: one attempt to open a link, unary calls, uploads, and how long to wait between attempts."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Mapping
from typing import Final

from atoll.transport.credentials import ClientCredentials
from atoll.transport.frames import (
    CHUNK,
    REFUSAL,
    STANDING,
    WELCOME,
    Limits,
    LinkFailed,
    Payload,
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

_holding: set[asyncio.Task[None]] = set()
"""A loop keeps only weak references to its tasks."""


async def dial(
    address: str,
    handler: Handler,
    *,
    peer: str,
    metadata: Mapping[str, str],
    limits: Limits | None = None,
    credentials: ClientCredentials | None = None,
    timeout: float = 10.0,
) -> Link:
    """One attempt. Raises Refused if the server said no, LinkFailed if it could not be asked."""
    limits = limits or Limits()
    channels: list[Channel] = []
    held = False
    try:
        async with asyncio.timeout(timeout):
            talk, bulks = await _open(address, metadata, limits, credentials, channels)
        link = Link(peer, handler, limits)
        link.begin(talk, bulks)
        task = asyncio.create_task(_hold(link, channels))
        _holding.add(task)
        task.add_done_callback(_holding.discard)
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
    address: str, metadata: Metadata, limits: Limits, credentials: ClientCredentials | None, channels: list[Channel]
) -> tuple[GrpcStream, list[GrpcStream]]:
    """Channels are added to the list as they are made, so that whoever called can close them whatever happens here."""
    session = {**metadata, SESSION_KEY: secrets.token_hex(NONCE_CHARACTERS // 2), COUNT_KEY: str(limits.connections)}
    channels.append(Channel(address, limits, credentials))
    talk = channels[0].open("Talk", session)
    await _expect(talk, WELCOME)
    bulks = []
    for index in range(limits.connections):
        channels.append(Channel(address, limits, credentials))
        bulks.append(channels[-1].open("Bulk", {**session, INDEX_KEY: str(index)}))
    await _expect(talk, STANDING)
    return talk, bulks


async def _expect(talk: GrpcStream, kind: bytes) -> None:
    data = await talk.read()
    if data is None or unpack(data).kind != kind:
        raise StreamBroken("it ended the conversation" if data is None else "it does not speak this protocol")


async def _hold(link: Link, channels: list[Channel]) -> None:
    try:
        await link.until_over()
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
    channel = Channel(address, Limits(), credentials)
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
    payload: Payload,
    credentials: ClientCredentials | None = None,
    timeout: float = 60.0,
) -> bytes:
    """`timeout` is for one chunk, and for the answer: what is still being taken may take its time."""
    channel = Channel(address, Limits(), credentials)
    try:
        async with asyncio.timeout(timeout) as patience:
            stream = channel.open(name, metadata, CALL_SERVICE)
            data = await _send_upload(stream, Transfer(0, 0, b"", payload), patience, timeout)
        reply = unpack(data or b"")
    except TimeoutError as error:
        raise LinkFailed(f"{address} took nothing for {timeout} s") from error
    except (StreamBroken, Violation) as error:
        raise failure(error, address) from error
    finally:
        await channel.close()
    if reply.kind == REFUSAL:
        raise Refused(bytes(reply.body).decode("utf8", "replace"), bool(reply.number))
    return bytes(reply.body)


async def _send_upload(stream: GrpcStream, transfer: Transfer, patience: asyncio.Timeout, timeout: float) -> bytes | None:
    """The answer may come early, and then it is a refusal: there is no point in sending the rest."""
    answer = asyncio.create_task(stream.read())
    try:
        while transfer.taken < transfer.total and not answer.done():
            offset = transfer.taken
            await stream.write(pack(CHUNK, 0, offset, transfer.total, transfer.take(Limits.chunk_bytes)))
            patience.reschedule(asyncio.get_running_loop().time() + timeout)
        if not answer.done():
            await stream.finish()
        return await answer
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)


class Backoff:
    """How long to wait before the next attempt: twice as long each time, and never the same for two peers that lost the
    same server at the same moment."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._attempt = 0

    def next(self) -> float:
        self._attempt += 1
        ceiling = min(BACKOFF_LEAST_SECONDS * 2**self._attempt, BACKOFF_MOST_SECONDS)
        return self._rng.uniform(ceiling / 2, ceiling)

    def reset(self) -> None:
        self._attempt = 0
