"""The front door: accepts every connection of a listening process, and sends each where it belongs.

The first bytes tell. A talk connection begins with a preface and is served by the event loop (`talk.py`); a bulk connection
begins with another one and goes to a thread that serves it; every other one is relayed to gRPC, which listens where nobody else
can reach it (`private.py`). TLS passes through the relay as it is. The relay copies each byte once more, but what it carries is
rare: joins, the first words of a link, and the upload of a user's model.

A connection that says nothing costs a descriptor here and nothing at gRPC. Which connections are closed is decided by the table
in `door.py`; this file knows how.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from atoll.errors import UserError
from atoll.transport.chunks import PREFACE, TALK_PREFACE, feed_of, may_be_preface
from atoll.transport.door import Endpoint, endpoint_of
from atoll.transport.keys import split_address
from atoll.transport.private import PrivateAddress
from atoll.transport.sockets import limit_silence, received_bytes

BACKLOG: Final = 1024
ACCEPTS_A_TURN: Final = 64
ACCEPT_AGAIN_SECONDS: Final = 0.2
"""After no descriptor was left for a connection."""

Kind: TypeAlias = Literal["grpc", "talk", "bulk"]
NO_BULK: Final[frozenset[Kind]] = frozenset(("grpc", "talk"))
ONLY_BULK: Final[frozenset[Kind]] = frozenset(("bulk",))
EVERY_KIND: Final = NO_BULK | ONLY_BULK
Take: TypeAlias = Callable[[socket.socket, Endpoint, Callable[[], None]], tuple[socket.socket, Callable[[], None]] | None]
"""Gets a connection whose preface was read, its client, and what to call when it is closed. Returns the socket, perhaps another
one around it, and how to close it; None: the client is gone."""


def kind_of(first: bytes) -> Kind | None:
    """By the first bytes of a connection. None: more of them are needed."""
    if not may_be_preface(first):
        return "grpc"
    if len(first) < len(PREFACE):
        return None
    return "talk" if first == TALK_PREFACE else "bulk"


class _Side(asyncio.Protocol):
    """One side of a relayed connection."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self._other: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._ended = ended

    def join(self, other: asyncio.Transport) -> None:
        self._other = other
        other.writelines(self._early)
        self._early.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early.append(data)
        else:
            self._other.write(data)

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self._other is not None:
            self._other.close() if error is None else self._other.abort()
        self._ended()


@dataclass(eq=False)
class _Connection:
    endpoint: Endpoint
    sock: socket.socket
    kinds: Collection[Kind]
    close: Callable[[], None]
    first: bytes = b""
    name: str = ""
    """Under which gRPC knows it."""


class Acceptor:
    """Used within one event loop."""

    def __init__(
        self, connections_max: int, stall_seconds: float, private: PrivateAddress, take_talk: Take, take_bulk: Take,
        hand_over: Callable[[int, socket.socket], None] = lambda feed, sock: None,
    ) -> None:  # fmt: skip
        """`hand_over` gets a bulk connection that is for another process, and does not keep it."""
        self._connections_max = connections_max
        self._stall_seconds = stall_seconds
        self._private = private
        self._take_talk, self._take_bulk = take_talk, take_bulk
        self._to_feed = hand_over
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._connections: dict[Endpoint, _Connection] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._relaying: set[asyncio.Task[None]] = set()

    # For the server

    def listen(self, address: str, kinds: Collection[Kind] = EVERY_KIND) -> int:
        """Returns the port."""
        listeners = bind(address)
        for listener in listeners:
            self._listeners.append(listener)
            self._loop.add_reader(listener, self._accept, listener, kinds)
        return int(listeners[0].getsockname()[1])

    def endpoint(self, name: str) -> Endpoint | None:
        """The client that gRPC knows under this name."""
        return self._endpoints.get(name)

    @property
    def endpoints(self) -> list[Endpoint]:
        return list(self._connections)

    def received(self, endpoint: Endpoint) -> int:
        found = self._connections.get(endpoint)
        return received_bytes(found.sock) if found is not None else 0

    def close(self, endpoint: Endpoint) -> None:
        found = self._connections.get(endpoint)
        if found is not None:
            found.close()

    def stop(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        for connection in list(self._connections.values()):
            connection.close()
        for task in self._relaying:
            task.cancel()

    # Accepting

    def _accept(self, listener: socket.socket, kinds: Collection[Kind]) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, name = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:
                self._loop.remove_reader(listener)
                self._loop.call_later(ACCEPT_AGAIN_SECONDS, self._accept_again, listener, kinds)
                return
            endpoint = endpoint_of(*name[:2])
            if len(self._connections) >= self._connections_max or endpoint in self._connections:
                sock.close()
                continue
            sock.setblocking(False)
            # gRPC does so on a connection of its own; here small answers would wait 40 ms for the peer's acknowledgement
            with contextlib.suppress(OSError):  # it is gone already, as the first read will find
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one = _Connection(endpoint, sock, kinds, lambda: None)
            one.close = lambda one=one: self._close_unread(one)  # type: ignore[misc]
            self._connections[endpoint] = one
            self._loop.add_reader(sock, self._read_first, one)

    def _accept_again(self, listener: socket.socket, kinds: Collection[Kind]) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener, kinds)

    def _forget(self, one: _Connection) -> None:
        if self._connections.get(one.endpoint) is one:
            del self._connections[one.endpoint]
        self._endpoints.pop(one.name, None)

    def _close_unread(self, one: _Connection) -> None:
        self._loop.remove_reader(one.sock)
        one.sock.close()
        self._forget(one)

    def _read_first(self, one: _Connection) -> None:
        try:
            data = one.sock.recv(len(PREFACE) - len(one.first))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        one.first += data
        kind = kind_of(one.first)
        if not data or (kind is not None and kind not in one.kinds):
            self._close_unread(one)
        elif kind is not None:
            self._loop.remove_reader(one.sock)
            if kind == "grpc":
                task = self._loop.create_task(self._relay(one))
                self._relaying.add(task)
                task.add_done_callback(self._relaying.discard)
            elif kind == "talk":
                self._hand_over(one, self._take_talk)
            else:
                self._hand_over_bulk(one)

    def _hand_over_bulk(self, one: _Connection) -> None:
        try:
            feed = feed_of(one.first)
        except ValueError:
            return self._close_unread(one)
        if feed is not None:
            self._to_feed(feed, one.sock)
            return self._close_unread(one)  # this process's own descriptor of it
        return self._hand_over(one, self._take_bulk)

    def _hand_over(self, one: _Connection, take: Take) -> None:
        taken = take(one.sock, one.endpoint, lambda: self._forget(one))
        if taken is None:
            one.sock.close()
            self._forget(one)
        else:
            one.sock, one.close = taken

    # The relay

    async def _relay(self, one: _Connection) -> None:
        sides: list[_Side] = []

        def close() -> None:
            for side in sides:
                if side.transport is not None:
                    side.transport.abort()

        one.close = close
        inner: socket.socket | None = None
        try:
            inner, one.name = self._private.connect()
            self._endpoints[one.name] = one.endpoint
            limit_silence(one.sock, self._stall_seconds)
            sides = [_Side(lambda: self._forget(one)), _Side(lambda: None)]
            await self._loop.connect_accepted_socket(lambda: sides[0], one.sock)
            await self._loop.create_unix_connection(lambda: sides[1], sock=inner)
        except (OSError, asyncio.CancelledError):  # no descriptor is left, gRPC has no room, or the server stops
            close()
            for sock in (one.sock, inner):
                if sock is not None:
                    sock.close()
            self._forget(one)
            return
        outer, grpc = sides[0].transport, sides[1].transport
        assert outer is not None and grpc is not None
        grpc.write(one.first)
        sides[0].join(grpc)
        sides[1].join(outer)
        if outer.is_closing() or grpc.is_closing():  # one of them ended before they were joined
            close()


def bind(address: str) -> list[socket.socket]:
    """Listening sockets, all on one port. One free address of a host name is enough."""
    host, port = split_address(address)
    found: list[socket.socket] = []
    try:
        names = dict.fromkeys(
            (family, where[0]) for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
    except socket.gaierror:
        names = {}
    for family, where in names:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(where != "::"))
            sock.bind((where, port or (found[0].getsockname()[1] if found else 0)))
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            continue
        sock.setblocking(False)
        found.append(sock)
    if not found:
        raise cannot_listen(address)
    return found


def refuse_taken(address: str) -> None:
    """Fails early, before a run is prepared, if the port is taken; the probe releases it again."""
    for sock in bind(address):
        sock.close()


def cannot_listen(address: str) -> UserError:
    return UserError(f"cannot listen on {address}: the port is taken or the address is not one of this machine")
