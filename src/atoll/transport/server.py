"""Accepts links. A link is complete when it was admitted and all of its connections are there: one to talk, some for payloads.

A client opens a link with a gRPC stream, and is admitted by what its metadata shows. A random session number, drawn by the client
for every attempt, matches the connections; the first answer on the stream is a key, which only this client can read. A connection
belongs to the session if it shows that key, and the same certificate. Whatever else it shows, it is closed without an answer. The
stream ends when the link stands.

No message of a stream is read before its metadata was checked. A connection that is not admitted is closed by the door
(`door.py`) after a few seconds, and earlier where there are too many of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from atoll.errors import UserError
from atoll.transport.acceptor import EVERY_KIND, NO_BULK, ONLY_BULK, Acceptor
from atoll.transport.bulk import THREADS_MAX, BulkSocket, IoThreads
from atoll.transport.chunks import KEY_BYTES, SESSION_BYTES, BulkHello, pack_key
from atoll.transport.credentials import ServerCredentials
from atoll.transport.door import Caps, Door, Endpoint
from atoll.transport.feed import Feeds
from atoll.transport.frames import ANSWER, READY, REFUSAL, WELCOME, LinkLimits, Refused, Violation, pack
from atoll.transport.link import CLOSE_SECONDS, Handler, Link
from atoll.transport.private import PrivateAddress
from atoll.transport.sockets import open_files_limit
from atoll.transport.talk import TalkStream
from atoll.transport.uploads import UPLOAD_BYTES_PER_SECOND_LEAST, Sink, receive
from atoll.transport.wire import CERTIFICATE_KEY, Context, GrpcStream, Listener, Metadata, StreamBroken, metadata_of, refuse

log = logging.getLogger("atoll.door")

SESSION_KEY: Final = "atoll-session"
COUNT_KEY: Final = "atoll-connections"
SESSION_CHARACTERS: Final = 2 * SESSION_BYTES
CONNECTIONS_MAX: Final = 16
OPENING_SECONDS: Final = 10.0
CALL_SECONDS: Final = 10.0
"""From a call's admission to the last byte of its message."""
LOOK_SECONDS: Final = 0.5
LOOK_AGAIN_SECONDS: Final = 0.2
"""How often the door looks at the connections, and how often while some are not admitted. The table may be full for that long."""
DOOR_LINE_SECONDS: Final = 10.0

Answer: TypeAlias = Awaitable[bytes] | bytes


@dataclass
class _Session:
    """A link whose connections are not all there yet."""

    peer: str
    certificate: str | None
    count: int
    """Bulk connections that it is to have."""
    key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))
    talk: TalkStream | None = None
    bulks: dict[int, BulkSocket] = field(default_factory=dict)
    admitted: ExitStack = field(default_factory=ExitStack)
    """Keeps these connections open at the door."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_replaced: bool = False
    link: Link | None = None
    feeds: set[int] = field(default_factory=set)
    """Those whose connection is there."""

    def is_complete(self, feeds: int) -> bool:
        return self.talk is not None and len(self.bulks) == self.count and len(self.feeds) == feeds

    def close(self) -> None:
        if self.talk is not None:
            self.talk.close()
        for bulk in self.bulks.values():
            bulk.close()
        self.admitted.close()


class Server:
    def __init__(
        self,
        handler: Handler,
        admit: Callable[[Mapping[str, str]], str],
        limits: LinkLimits | None = None,
        credentials: ServerCredentials | None = None,
        caps: Caps | None = None,
        bulk_port: int | None = None,
    ) -> None:
        """`admit` reads a client's metadata and returns the peer's name, or raises Refused. `caps` follow by default from the
        limit of open files. `bulk_port`: a port of its own for bulk connections; 0 takes a free one."""
        self.refused: Counter[str] = Counter()
        """Violations by clients, by kind. "duplicate" counts frames that were dropped without harm."""
        self._handler = handler
        self._admit = admit
        self._limits = limits or LinkLimits()
        self._credentials = credentials
        self._payload_bytes_max = self._limits.payload_bytes_max
        self._queue_bytes_max = self._limits.queue_bytes_max
        self.bulk_port = bulk_port
        """None: payloads come on the port of `start`."""
        self.feeds: Feeds | None = None
        """Processes that send payloads in place of this one, to every link that begins from now on."""
        self._sessions: dict[bytes, _Session] = {}
        self._links: set[Link] = set()
        self._holding: set[asyncio.Task[None]] = set()
        """Links that stand, and talk connections that have not said yet which link they belong to."""
        self._calls: dict[str, tuple[Callable[[Metadata, bytes], Answer], Callable[[Metadata], object]]] = {}
        self._uploads: dict[str, Callable[[Metadata], Sink | bytes]] = {}
        self._listener: Listener | None = None
        self._acceptor: Acceptor | None = None
        self._private: PrivateAddress | None = None
        self._threads = IoThreads(THREADS_MAX)
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
        caps, self._private = self._door.caps, PrivateAddress()
        acceptor = self._acceptor = Acceptor(
            caps.connections, self._limits.stall_seconds, self._private, self._take_talk, self._take_bulk, self._hand_to_feed
        )
        self._listener = Listener(self._limits, caps.connections, caps.admission_seconds)
        calls = {name: self._caller(*call) for name, call in self._calls.items()}
        uploads = {name: self._uploader(begin) for name, begin in self._uploads.items()}
        self._listener.serve({"Talk": self._talk}, calls | uploads)
        await self._listener.start(self._private.name, self._credentials)
        self._private.listening()
        host = address.rpartition(":")[0]
        try:
            if self.bulk_port is not None:
                self.bulk_port = acceptor.listen(f"{host}:{self.bulk_port}", ONLY_BULK)
            port = acceptor.listen(address, EVERY_KIND if self.bulk_port is None else NO_BULK)
        except UserError:
            await self.stop(0.0)
            raise
        self._looking = asyncio.create_task(self._keep_door(acceptor))
        return f"{host}:{port}"

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
        if self._acceptor is not None:
            self._acceptor.stop()
        if self._private is not None:
            self._private.close()
        self._threads.stop()
        left = [*self._holding, *([self._looking] if self._looking is not None else [])]
        for task in left:
            task.cancel()
        ending += left
        await asyncio.gather(*ending, return_exceptions=True)

    # The door

    async def _keep_door(self, acceptor: Acceptor) -> None:
        loop, closed, next_line = asyncio.get_running_loop(), 0, 0.0
        while True:
            self._door.update(acceptor.endpoints, loop.time())
            received = {endpoint: acceptor.received(endpoint) for endpoint in self._door.unadmitted}
            for endpoint in self._door.to_close(loop.time(), received):
                acceptor.close(endpoint)
            total = self._door.closed.total()
            if total > closed and loop.time() >= next_line:
                log.warning("closed %d connections that were not admitted: %s", total - closed, dict(+self._door.closed))
                closed, next_line = total, loop.time() + DOOR_LINE_SECONDS
            await asyncio.sleep(LOOK_AGAIN_SECONDS if self._door.unadmitted else LOOK_SECONDS)

    def _admitted(self, context: Context) -> AbstractContextManager[None]:
        endpoint = self._acceptor.endpoint(context.peer()) if self._acceptor is not None else None
        return nullcontext() if endpoint is None else self._door.admitted(endpoint, asyncio.get_running_loop().time)

    # Streams

    async def _talk(self, _: object, context: Context) -> None:
        try:
            number, session = self._new_session(metadata_of(context))
        except Refused as refusal:
            self.refused["admit"] += 1
            await refuse(context, refusal)
        stream, feeds = GrpcStream(context), self.feeds
        with self._admitted(context):
            try:
                await self._gather(session, number, feeds, stream, context)
            except BaseException as error:
                self._forget(session, number, feeds)
                if isinstance(error, StreamBroken):
                    return  # it was no link yet, so no handler knows of it
                raise
            self._keep(self._hold(session, self._link_of(session, number), number, feeds))
            with contextlib.suppress(StreamBroken):  # it is gone: its connections tell the link
                await stream.write(pack(READY))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._holding.add(task)
        task.add_done_callback(self._holding.discard)

    async def _gather(self, session: _Session, number: bytes, feeds: Feeds | None, stream: GrpcStream, context: Context) -> None:
        """Until all connections of the session are there."""
        count = feeds.count if feeds is not None else 0
        if feeds is not None:
            feeds.expect(number, session.key, session.certificate)
        addresses = feeds.addresses if feeds is not None else ()
        await stream.write(pack(WELCOME, self.bulk_port or 0, count, body=(pack_key(session.key, addresses),)))
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                while not session.is_complete(count) and not session.is_replaced:
                    session.changed.clear()
                    await session.changed.wait()
        except TimeoutError:
            self.refused["session"] += 1
            arrived = len(session.bulks) + len(session.feeds) + (session.talk is not None)
            await refuse(context, Refused(f"only {arrived} of {1 + session.count + count} connections arrived", retry=True))
        if session.is_replaced:
            await refuse(context, Refused("replaced by a newer attempt of the same peer", retry=True))

    def _link_of(self, session: _Session, number: bytes) -> Link:
        link = session.link = Link(session.peer, self._handler, self._limits, self.refused)
        link.session = number
        link.payload_bytes_max, link.queue_bytes_max = self._payload_bytes_max, self._queue_bytes_max
        self._links.add(link)  # before the client learns that it is ready, so that `stop` at that moment still closes it
        return link

    def _forget(self, session: _Session, number: bytes, feeds: Feeds | None) -> None:
        del self._sessions[number]
        if session.link is not None:
            self._links.discard(session.link)
        if feeds is not None:
            feeds.forget(number)
        session.close()

    def _new_session(self, metadata: dict[str, str]) -> tuple[bytes, _Session]:
        shown, count = metadata.get(SESSION_KEY, ""), metadata.get(COUNT_KEY, "")
        try:
            number = bytes.fromhex(shown) if len(shown) == SESSION_CHARACTERS else b""
        except ValueError:
            number = b""
        if len(number) != SESSION_BYTES or number in self._sessions:
            raise Refused("the session number is malformed or already in use")
        if not count.isdecimal() or len(count) > 4 or not 1 <= int(count) <= CONNECTIONS_MAX:
            raise Refused(f"a link has 1 to {CONNECTIONS_MAX} bulk connections, not {count[:20]!r}")
        peer = self._admit(metadata)
        for other in self._sessions.values():  # one attempt at a time: an admitted peer must not hold every connection there is
            if other.peer == peer and other.link is None:
                other.is_replaced = True
                other.changed.set()
        session = self._sessions[number] = _Session(peer, metadata.get(CERTIFICATE_KEY), int(count))
        return number, session

    async def _hold(self, session: _Session, link: Link, number: bytes, feeds: Feeds | None) -> None:
        assert session.talk is not None
        try:
            link.begin(session.talk, [session.bulks[index] for index in sorted(session.bulks)])
            await link.run_until_closed()
        finally:
            self._forget(session, number, feeds)

    # Their connections

    def _take_talk(
        self, sock: socket.socket, endpoint: Endpoint, closed: Callable[[], None]
    ) -> tuple[socket.socket, Callable[[], None]] | None:
        context = self._credentials.bulk if self._credentials is not None else None
        try:
            if context is not None:
                sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            talk = TalkStream(sock, self._limits, closed)
        except OSError:  # the client is gone
            return None
        self._keep(self._greet(talk, endpoint))
        return sock, talk.close

    async def _greet(self, talk: TalkStream, endpoint: Endpoint) -> None:
        try:
            hello, certificate = await talk.greeted()
        except BaseException as error:
            talk.close()
            if not isinstance(error, StreamBroken):
                raise
            return
        session = self._session_of(hello, certificate)
        if session is None or session.talk is not None or hello.place:
            self.refused["session"] += 1
            talk.close()
            return
        session.talk = talk
        self._has_come(session, endpoint)

    def _session_of(self, hello: BulkHello, certificate: str | None) -> _Session | None:
        """That a connection proves to belong to. None: it proves nothing, or the link stands already."""
        session = self._sessions.get(hello.session)
        if session is None or session.link is not None or session.certificate != certificate:
            return None
        return session if hmac.compare_digest(session.key, hello.key) else None

    def _has_come(self, session: _Session, endpoint: Endpoint) -> None:
        session.admitted.enter_context(self._door.admitted(endpoint, asyncio.get_running_loop().time))
        session.changed.set()

    def _take_bulk(
        self, sock: socket.socket, endpoint: Endpoint, closed: Callable[[], None]
    ) -> tuple[socket.socket, Callable[[], None]] | None:
        loop = asyncio.get_running_loop()

        def in_loop(function: Callable[..., None], *arguments: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(function, *arguments)

        def greeted(bulk: BulkSocket, hello: BulkHello, certificate: str | None) -> None:
            in_loop(self._greeted, bulk, hello, certificate, endpoint)

        context = self._credentials.bulk if self._credentials is not None else None
        try:
            bulk = BulkSocket.accepted(sock, context, self._threads.next(), self._limits, greeted, lambda _: in_loop(closed))
        except OSError:  # the client is gone
            return None
        return bulk.sock, bulk.close

    def _greeted(self, bulk: BulkSocket, hello: BulkHello, certificate: str | None, endpoint: Endpoint) -> None:
        session = self._session_of(hello, certificate)
        if session is None or hello.place >= session.count or hello.place in session.bulks:
            self.refused["session"] += 1
            bulk.close()
            return
        session.bulks[hello.place] = bulk
        self._has_come(session, endpoint)

    # Connections to other processes

    def _hand_to_feed(self, feed: int, sock: socket.socket) -> None:
        """Only while somebody opens a link: the process has less to tell an outsider by than this one's door."""
        opening = any(session.link is None for session in self._sessions.values())
        if self.feeds is not None and feed < self.feeds.count and opening:
            self.feeds.hand(feed, sock)

    def feed_is_here(self, session: bytes, feed: int) -> None:
        found = self._sessions.get(session)
        if found is not None:
            found.feeds.add(feed)
            found.changed.set()

    def feed_sent(self, session: bytes, feed: int, nbytes: int) -> None:
        found = self._sessions.get(session)
        if found is not None and found.link is not None:
            found.link.bytes_fed[feed] = nbytes

    def feed_has(self, session: bytes, number: int, nbytes: int) -> None:
        found = self._sessions.get(session)
        if found is not None and found.link is not None:
            found.link.part_came(number, nbytes)

    def feed_is_gone(self, session: bytes, reason: str) -> None:
        found = self._sessions.get(session)
        if found is not None and found.link is not None:
            found.link.connection_lost(f"a connection to another process of this server: {reason}")

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


async def _resolve(answer: Answer) -> bytes:
    return await answer if inspect.isawaitable(answer) else answer
