"""Accepts links. A link is complete when its talk stream was admitted and all of its bulk streams are connected.

The streams arrive on different connections. A random session number, drawn by the client for every attempt, matches them. A
bulk stream must also repeat the metadata of its talk stream, so an attacker who guesses the number still needs the token.

No message of a stream is read before its metadata was checked. A connection without an admitted stream is closed by the door
(`door.py`) after a few seconds, and earlier where there are too many of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from atoll.transport.credentials import ServerCredentials
from atoll.transport.door import Caps, Door, endpoint_of_peer
from atoll.transport.frames import ANSWER, READY, REFUSAL, WELCOME, LinkLimits, Refused, Violation, pack
from atoll.transport.link import CLOSE_SECONDS, Handler, Link
from atoll.transport.sockets import AcceptedSockets, open_files_limit
from atoll.transport.uploads import UPLOAD_BYTES_PER_SECOND_LEAST, Sink, receive
from atoll.transport.wire import Context, GrpcStream, Listener, Metadata, StreamBroken, metadata_of, refuse

log = logging.getLogger("atoll.door")

SESSION_KEY: Final = "atoll-session"
COUNT_KEY: Final = "atoll-connections"
INDEX_KEY: Final = "atoll-connection"
NONCE_CHARACTERS: Final = 32
CONNECTIONS_MAX: Final = 16
OPENING_SECONDS: Final = 10.0
CALL_SECONDS: Final = 10.0
"""From a call's admission to the last byte of its message."""
LOOK_SECONDS: Final = 0.5
LOOK_AGAIN_SECONDS: Final = 0.2
"""How often the door looks at the connections, and how often while some are not admitted. gRPC accepts at most about 4,000 a
second, so under 1,024 open files it may be full for that long."""
DOOR_LINE_SECONDS: Final = 10.0

Answer: TypeAlias = Awaitable[bytes] | bytes


@dataclass
class _Session:
    """A link whose bulk streams are not all connected yet."""

    peer: str
    metadata: dict[str, str]
    bulks: dict[int, GrpcStream] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_replaced: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    link: Link | None = None


class Server:
    def __init__(
        self,
        handler: Handler,
        admit: Callable[[Mapping[str, str]], str],
        limits: LinkLimits | None = None,
        credentials: ServerCredentials | None = None,
        caps: Caps | None = None,
    ) -> None:
        """`admit` reads a client's metadata and returns the peer's name, or raises Refused. `caps` follow by default from the
        limit of open files."""
        self.refused: Counter[str] = Counter()
        """Violations by clients, by kind. "duplicate" counts frames that were dropped without harm."""
        self._handler = handler
        self._admit = admit
        self._limits = limits or LinkLimits()
        self._credentials = credentials
        self._payload_bytes_max = self._limits.payload_bytes_max
        self._queue_bytes_max = self._limits.queue_bytes_max
        self._sessions: dict[str, _Session] = {}
        self._links: set[Link] = set()
        self._calls: dict[str, tuple[Callable[[Metadata, bytes], Answer], Callable[[Metadata], object]]] = {}
        self._uploads: dict[str, Callable[[Metadata], Sink | bytes]] = {}
        self._listener: Listener | None = None
        self._door = Door(caps or Caps.from_open_files(open_files_limit()))
        self._looking: asyncio.Task[None] | None = None

    @property
    def caps(self) -> Caps:
        return self._door.caps

    @property
    def payload_bytes_max(self) -> int:
        return self._payload_bytes_max

    @payload_bytes_max.setter
    def payload_bytes_max(self, value: int) -> None:
        self._payload_bytes_max = value
        for link in self._links:
            link.payload_bytes_max = value

    @property
    def queue_bytes_max(self) -> int:
        return self._queue_bytes_max

    @queue_bytes_max.setter
    def queue_bytes_max(self, value: int) -> None:
        self._queue_bytes_max = value
        for link in self._links:
            link.queue_bytes_max = value

    def on_call(
        self, name: str, function: Callable[[Mapping[str, str], bytes], Answer], admit: Callable[[Mapping[str, str]], object],
    ) -> None:  # fmt: skip
        """Call before `start`. `admit` sees the metadata before a byte of the message is read, and may raise Refused."""
        self._calls[name] = (function, admit)

    def on_upload(self, name: str, begin: Callable[[Mapping[str, str]], Sink | bytes]) -> None:
        """Call before `start`. `begin` sees the metadata before a byte is read. It returns where the bytes go, or the answer if
        none are needed, or raises Refused."""
        self._uploads[name] = begin

    async def start(self, address: str) -> str:
        """Listens, and returns the address with the port that was bound."""
        self._listener = Listener(self._limits, self._door.caps.connections, self._door.caps.admission_seconds)
        calls = {name: self._caller(*call) for name, call in self._calls.items()}
        uploads = {name: self._uploader(begin) for name, begin in self._uploads.items()}
        self._listener.serve({"Talk": self._talk, "Bulk": self._bulk}, calls | uploads)
        port = await self._listener.start(address, self._credentials)
        self._looking = asyncio.create_task(self._keep_door(AcceptedSockets(port)))
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
        if self._looking is not None:
            self._looking.cancel()
            ending.append(self._looking)
        await asyncio.gather(*ending, return_exceptions=True)

    # The door

    async def _keep_door(self, sockets: AcceptedSockets) -> None:
        """Looks from another thread: under attack it makes hundreds of system calls, between which the loop goes on."""
        loop, closed, next_line = asyncio.get_running_loop(), 0, 0.0

        def look() -> None:
            with contextlib.suppress(OSError):  # no descriptor is left to look with: gRPC's own limits hold meanwhile
                self._door.update(sockets.scan(), loop.time())
                received = {endpoint: sockets.received(endpoint) for endpoint in self._door.unadmitted}
                for endpoint in self._door.to_close(loop.time(), received):
                    sockets.close(endpoint)

        while True:
            await asyncio.to_thread(look)
            total = self._door.closed.total()
            if total > closed and loop.time() >= next_line:
                log.warning("closed %d connections that were not admitted: %s", total - closed, dict(+self._door.closed))
                closed, next_line = total, loop.time() + DOOR_LINE_SECONDS
            await asyncio.sleep(LOOK_AGAIN_SECONDS if self._door.unadmitted else LOOK_SECONDS)

    def _admitted(self, context: Context) -> AbstractContextManager[None]:
        endpoint = endpoint_of_peer(context.peer())
        return nullcontext() if endpoint is None else self._door.admitted(endpoint, asyncio.get_running_loop().time)

    # Streams

    async def _talk(self, _: object, context: Context) -> None:
        try:
            nonce, session, count = self._new_session(metadata_of(context))
        except Refused as refusal:
            self.refused["admit"] += 1
            await refuse(context, refusal)
        with self._admitted(context):
            await self._talk_in(session, nonce, count, context)

    async def _talk_in(self, session: _Session, nonce: str, count: int, context: Context) -> None:
        talk = GrpcStream(context)
        try:
            await talk.write(pack(WELCOME))
            async with asyncio.timeout(OPENING_SECONDS):
                while len(session.bulks) < count and not session.is_replaced:
                    session.changed.clear()
                    await session.changed.wait()
            if session.is_replaced:
                await refuse(context, Refused("replaced by a newer attempt of the same peer", retry=True))
            await self._hold(session, Link(session.peer, self._handler, self._limits, self.refused), talk)
        except TimeoutError:
            self.refused["session"] += 1
            await refuse(context, Refused(f"only {len(session.bulks)} of {count} bulk connections arrived", retry=True))
        except StreamBroken:
            return  # it was no link yet, so no handler knows of it
        finally:
            del self._sessions[nonce]
            session.over.set()

    def _new_session(self, metadata: dict[str, str]) -> tuple[str, _Session, int]:
        nonce, count = metadata.get(SESSION_KEY, ""), metadata.get(COUNT_KEY, "")
        if len(nonce) != NONCE_CHARACTERS or nonce in self._sessions:
            raise Refused("the session number is malformed or already in use")
        if not count.isdecimal() or len(count) > 4 or not 1 <= int(count) <= CONNECTIONS_MAX:
            raise Refused(f"a link has 1 to {CONNECTIONS_MAX} bulk connections, not {count[:20]!r}")
        peer = self._admit(metadata)
        for other in self._sessions.values():  # one attempt at a time: an admitted peer must not hold every connection there is
            if other.peer == peer and other.link is None:
                other.is_replaced = True
                other.changed.set()
        session = self._sessions[nonce] = _Session(peer, _session_metadata(metadata))
        return nonce, session, int(count)

    async def _hold(self, session: _Session, link: Link, talk: GrpcStream) -> None:
        """Registers the link before the client learns that it is ready, so that `stop` at that moment still closes it."""
        link.payload_bytes_max, link.queue_bytes_max = self._payload_bytes_max, self._queue_bytes_max
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
        session.changed.set()
        try:
            with self._admitted(context):
                await session.over.wait()
        finally:
            if session.link is not None:
                session.link.connection_lost("a bulk connection was cancelled")

    # Calls

    def _caller(
        self, function: Callable[[Metadata, bytes], Answer], admit: Callable[[Metadata], object]
    ) -> Callable[[object, Context], Awaitable[None]]:
        async def answer(_: object, context: Context) -> None:
            metadata, stream = metadata_of(context), GrpcStream(context)
            try:
                admit(metadata)
                with self._admitted(context):
                    async with asyncio.timeout(CALL_SECONDS):
                        request = await stream.read()
                    if request is not None:
                        await stream.write(await _resolve(function(metadata, request)))
            except TimeoutError:
                self.refused["call"] += 1
                await refuse(context, Refused(f"the call did not arrive within {CALL_SECONDS:g} s", retry=True))
            except Refused as refusal:
                await refuse(context, refusal)
            except StreamBroken:
                return

        return answer

    def _uploader(self, begin: Callable[[Metadata], Sink | bytes]) -> Callable[[object, Context], Awaitable[None]]:
        async def answer(_: object, context: Context) -> None:
            stream = GrpcStream(context)
            try:
                sink = begin(metadata_of(context))
            except Refused as refusal:
                await refuse(context, refusal)
            with contextlib.suppress(StreamBroken, TimeoutError), self._admitted(context):
                if isinstance(sink, bytes):
                    await stream.write(pack(ANSWER, body=(sink,)))
                    return
                await stream.write(pack(WELCOME))
                await stream.write(await self._take_upload(stream, sink))
                # A refused client is still sending. If its stream ended now, its next write would fail before it reads the
                # reason, so it gets a moment to stop by itself.
                async with asyncio.timeout(CLOSE_SECONDS):
                    while await stream.read() is not None:
                        pass

        return answer

    async def _take_upload(self, stream: GrpcStream, sink: Sink) -> bytes:
        try:
            return pack(ANSWER, body=(await receive(stream, sink),))
        except Violation as violation:
            self.refused[violation.kind] += 1
            return pack(REFUSAL, body=(str(violation).encode(),))
        except TimeoutError:
            self.refused["slow"] += 1
            return _refusal(Refused(f"an upload must bring {UPLOAD_BYTES_PER_SECOND_LEAST} bytes a second", retry=True))
        except Refused as refusal:
            return _refusal(refusal)


def _refusal(refusal: Refused) -> bytes:
    return pack(REFUSAL, int(refusal.retry), body=(refusal.reason.encode(),))


def _session_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata that all streams of a session share: without gRPC's own and the connection's index."""
    return {key: value for key, value in metadata.items() if key not in (INDEX_KEY, "user-agent")}


async def _resolve(answer: Answer) -> bytes:
    return await answer if inspect.isawaitable(answer) else answer
