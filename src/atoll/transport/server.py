"""Accepts links. A link is complete when its talk stream was admitted and all of its bulk streams are connected.

The streams arrive on different connections. A random session number, drawn by the client for every attempt, matches them. A
bulk stream must also repeat the metadata of its talk stream, so an attacker who guesses the number still needs the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from atoll.transport.credentials import ServerCredentials
from atoll.transport.frames import ANSWER, CHUNK, READY, REFUSAL, WELCOME, LinkLimits, Refused, Violation, pack, unpack
from atoll.transport.link import CLOSE_SECONDS, Handler, Link
from atoll.transport.wire import Context, GrpcStream, Listener, Metadata, StreamBroken, metadata_of, refuse

SESSION_KEY: Final = "atoll-session"
COUNT_KEY: Final = "atoll-connections"
INDEX_KEY: Final = "atoll-connection"
NONCE_CHARACTERS: Final = 32
CONNECTIONS_MAX: Final = 16
OPENING_SECONDS: Final = 10.0

Answer: TypeAlias = Awaitable[bytes] | bytes


@dataclass
class _Session:
    """A link whose bulk streams are not all connected yet."""

    metadata: dict[str, str]
    bulks: dict[int, GrpcStream] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    link: Link | None = None


class Server:
    def __init__(
        self,
        handler: Handler,
        admit: Callable[[Mapping[str, str]], str],
        limits: LinkLimits | None = None,
        credentials: ServerCredentials | None = None,
    ) -> None:
        """`admit` reads a client's metadata and returns the peer's name, or raises Refused."""
        self.refused: Counter[str] = Counter()
        """Violations by clients, by kind. "duplicate" counts frames that were dropped without harm."""
        self._handler = handler
        self._admit = admit
        self._limits = limits or LinkLimits()
        self._credentials = credentials
        self._payload_bytes_max = self._limits.payload_bytes_max
        self._sessions: dict[str, _Session] = {}
        self._links: set[Link] = set()
        self._calls: dict[str, Callable[[Metadata, bytes], Answer]] = {}
        self._uploads: dict[str, tuple[Callable[[Metadata, bytearray], Answer], Callable[[Metadata], int]]] = {}
        self._listener: Listener | None = None

    @property
    def payload_bytes_max(self) -> int:
        return self._payload_bytes_max

    @payload_bytes_max.setter
    def payload_bytes_max(self, value: int) -> None:
        self._payload_bytes_max = value
        for link in self._links:
            link.payload_bytes_max = value

    def on_call(self, name: str, function: Callable[[Mapping[str, str], bytes], Answer]) -> None:
        """Call before `start`."""
        self._calls[name] = function

    def on_upload(
        self, name: str, function: Callable[[Mapping[str, str], bytearray], Answer],
        bytes_max: int | Callable[[Mapping[str, str]], int],
    ) -> None:  # fmt: skip
        """Call before `start`. `bytes_max` may depend on the client's metadata. It is evaluated before anything is read and may
        raise Refused; for 0 nothing is read and the function answers at once."""
        self._uploads[name] = (function, bytes_max if callable(bytes_max) else lambda _: bytes_max)

    async def start(self, address: str) -> str:
        """Listens, and returns the address with the port that was bound."""
        self._listener = Listener(self._limits)
        self._listener.serve(
            {"Talk": self._talk, "Bulk": self._bulk},
            {name: self._caller(function) for name, function in self._calls.items()},
            {name: self._uploader(function, bytes_max) for name, (function, bytes_max) in self._uploads.items()},
        )
        port = await self._listener.start(address, self._credentials)
        return f"{address.rpartition(':')[0]}:{port}"

    async def stop(self, grace: float) -> None:
        """Closes every link; a link that is not closed after `grace` seconds is cut."""
        ending = [asyncio.create_task(link.wait_closed()) for link in self._links]
        for link in list(self._links):
            link.close("the server is stopping")
        if ending:
            _, late = await asyncio.wait(ending, timeout=grace)
            for task in late:
                task.cancel()
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await listener.stop(grace)
        await asyncio.gather(*ending, return_exceptions=True)

    # Streams

    async def _talk(self, _: object, context: Context) -> None:
        try:
            nonce, session, peer, count = self._new_session(metadata_of(context))
        except Refused as refusal:
            self.refused["admit"] += 1
            await refuse(context, refusal)
        talk = GrpcStream(context)
        try:
            await talk.write(pack(WELCOME))
            async with asyncio.timeout(OPENING_SECONDS):
                while len(session.bulks) < count:
                    session.complete.clear()
                    await session.complete.wait()
            await self._hold(session, Link(peer, self._handler, self._limits, self.refused), talk)
        except TimeoutError:
            self.refused["session"] += 1
            await refuse(context, Refused(f"only {len(session.bulks)} of {count} bulk connections arrived", retry=True))
        except StreamBroken:
            return  # it was no link yet, so no handler knows of it
        finally:
            del self._sessions[nonce]
            session.over.set()

    def _new_session(self, metadata: dict[str, str]) -> tuple[str, _Session, str, int]:
        nonce, count = metadata.get(SESSION_KEY, ""), metadata.get(COUNT_KEY, "")
        if len(nonce) != NONCE_CHARACTERS or nonce in self._sessions:
            raise Refused("the session number is malformed or already in use")
        if not count.isdecimal() or len(count) > 4 or not 1 <= int(count) <= CONNECTIONS_MAX:
            raise Refused(f"a link has 1 to {CONNECTIONS_MAX} bulk connections, not {count[:20]!r}")
        peer = self._admit(metadata)
        session = self._sessions[nonce] = _Session(_session_metadata(metadata))
        return nonce, session, peer, int(count)

    async def _hold(self, session: _Session, link: Link, talk: GrpcStream) -> None:
        """Registers the link before the client learns that it is ready, so that `stop` at that moment still closes it."""
        link.payload_bytes_max = self._payload_bytes_max
        session.link = link
        self._links.add(link)
        try:
            await talk.write(pack(READY))
            link.begin(talk, [session.bulks[index] for index in sorted(session.bulks)])
            await link.run_until_closed()
        finally:
            self._links.discard(link)

    async def _bulk(self, _: object, context: Context) -> None:
        metadata = metadata_of(context)
        session = self._sessions.get(metadata.get(SESSION_KEY, ""))
        index = metadata.get(INDEX_KEY, "")
        known = (
            session is not None and session.metadata == _session_metadata(metadata) and index in map(str, range(CONNECTIONS_MAX))
        )
        if session is None or not known or session.link is not None or int(index) in session.bulks:
            self.refused["session"] += 1
            await refuse(context, Refused("this bulk connection belongs to no session"))
        session.bulks[int(index)] = GrpcStream(context)
        session.complete.set()
        try:
            await session.over.wait()
        finally:
            if session.link is not None:
                session.link.connection_lost("a bulk connection was cancelled")

    # Calls

    def _caller(self, function: Callable[[Metadata, bytes], Answer]) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def answer(request: bytes, context: Context) -> bytes:
            try:
                return await _resolve(function(metadata_of(context), request))
            except Refused as refusal:
                await refuse(context, refusal)

        return answer

    def _uploader(
        self, function: Callable[[Metadata, bytearray], Answer], bytes_max: Callable[[Metadata], int]
    ) -> Callable[[object, Context], Awaitable[None]]:
        async def answer(_: object, context: Context) -> None:
            stream = GrpcStream(context)
            with contextlib.suppress(StreamBroken, TimeoutError):
                await stream.write(await self._take_upload(stream, metadata_of(context), function, bytes_max))
                # A refused client is still sending. If its stream ended now, its next write would fail before it reads the
                # reason, so it gets a moment to stop by itself.
                async with asyncio.timeout(CLOSE_SECONDS):
                    while await stream.read() is not None:
                        pass

        return answer

    async def _take_upload(
        self, stream: GrpcStream, metadata: Metadata, function: Callable[[Metadata, bytearray], Answer],
        bytes_max: Callable[[Metadata], int],
    ) -> bytes:  # fmt: skip
        whole = bytearray()
        try:
            room = bytes_max(metadata)
            while room and (data := await stream.read()) is not None:
                _append(whole, data, room)
            return pack(ANSWER, body=(await _resolve(function(metadata, whole)),))
        except Violation as violation:
            self.refused[violation.kind] += 1
            return pack(REFUSAL, body=(str(violation).encode(),))
        except Refused as refusal:
            return pack(REFUSAL, int(refusal.retry), body=(refusal.reason.encode(),))


def _append(whole: bytearray, data: bytes, bytes_max: int) -> None:
    chunk = unpack(data)
    if chunk.kind != CHUNK or chunk.at != len(whole):
        raise Violation("order", f"a chunk at {chunk.at} came instead of the one at {len(whole)}")
    if max(chunk.total, chunk.at + chunk.body.nbytes) > bytes_max:
        raise Violation("payload_too_big", f"an upload of {max(chunk.total, len(whole))} bytes is larger than {bytes_max}")
    whole += chunk.body


def _session_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata that all streams of a session share: without gRPC's own and the connection's index."""
    return {key: value for key, value in metadata.items() if key not in (INDEX_KEY, "user-agent")}


async def _resolve(answer: Answer) -> bytes:
    return await answer if inspect.isawaitable(answer) else answer
