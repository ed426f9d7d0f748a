"""How a coordinator and a shard find each other: sockets of this machine with a key, or TLS with certificates of their roles.

A coordinator has two connections to a shard, which name the same `session`, and a third one where the shard sends to learners
itself. A shard takes the newest coordinator that shows what it must: the older one's syncer was killed, or its machine is gone.
"""

from __future__ import annotations

import hmac
import logging
import queue
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from atoll.runtime.ranks.channel import ChannelClosed, RankChannel
from atoll.runtime.shards.messages import ShardHello, ToCoordinator, ToShard
from atoll.transport.keys import SHARD_NAME, SYNCER_NAME

log = logging.getLogger("atoll.shard")

HELLO_SECONDS: Final = 10.0
HELLO_BYTES_MAX: Final = 4096
STRANGERS_MAX: Final = 32
"""Connections that have not shown yet who they are; a further one is closed."""
_PROBES: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""A machine that is gone is noticed within half a minute."""


def watch(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Half(NamedTuple):
    reads: bool
    channel: RankChannel
    met: threading.Event


class ShardDoor:
    """A shard's listener."""

    def __init__(self, listener: socket.socket, key: str, tls: ssl.SSLContext | None) -> None:
        """With `tls` the certificate says who may be the coordinator, else the key does."""
        self._listener, self._key, self._tls = listener, key, tls
        self._closed = False
        self._lock = threading.Lock()
        self._strangers = threading.Semaphore(STRANGERS_MAX)
        self._waiting: dict[str, _Half] = {}
        """By session: the half that is here."""
        self._inside: tuple[RankChannel, RankChannel] | None = None
        self._session = ""
        """Of those inside."""
        self.on_feeds: Callable[[RankChannel], None] = RankChannel.close
        """Takes the third connection of the coordinator that is inside."""
        self._pairs: queue.SimpleQueue[tuple[RankChannel, RankChannel]] = queue.SimpleQueue()
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def next(self) -> tuple[RankChannel, RankChannel]:
        """The connections of the next coordinator, for work and for reading."""
        return self._pairs.get()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait for the next connection
        self._listener.close()
        with self._lock:
            for channel in (*(self._inside or ()), *(half.channel for half in self._waiting.values())):
                channel.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("a connection could not be taken: %s", error)
                threading.Event().wait(1.0)  # out of descriptors: the shard goes on with those it has
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(connection,), name="hello", daemon=True).start()
            else:
                connection.close()

    def _admit(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(HELLO_SECONDS)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            channel = RankChannel(connection, ToShard)
            connection.settimeout(HELLO_SECONDS)
            hello, _ = channel.receive(HELLO_BYTES_MAX)
            why = self._objection(connection, hello)
            if why is not None:
                log.warning("a connection is refused: %s", why)
                return channel.close()
            connection.settimeout(None)
            watch(connection)
            self._take(hello, channel)
        except (OSError, ChannelClosed) as error:
            log.info("a connection ended before it showed who it is: %s", error)
            connection.close()
        finally:
            self._strangers.release()

    def _objection(self, connection: socket.socket, hello: Any) -> str | None:
        if not isinstance(hello, ShardHello):
            return "it does not begin as a coordinator does"
        if self._tls is not None:
            return None if SYNCER_NAME in _roles_of(connection) else "its certificate is not the syncer's"
        return None if hmac.compare_digest(hello.key.encode(), self._key.encode()) else "it has another key"

    def _take(self, hello: ShardHello, channel: RankChannel) -> None:
        if hello.feeds:
            with self._lock:
                is_theirs = hello.session == self._session
            return self.on_feeds(channel) if is_theirs else channel.close()
        half = _Half(hello.reads, channel, threading.Event())
        with self._lock:
            other = self._waiting.pop(hello.session, None)
            if other is not None and other.reads != half.reads:
                other.met.set()
                for old in self._inside or ():
                    old.close()
                self._inside = (other.channel, channel) if half.reads else (channel, other.channel)
                self._session = hello.session
                self._pairs.put(self._inside)
                return
            self._waiting[hello.session] = half
        if not half.met.wait(HELLO_SECONDS):
            self._give_up(hello.session, half)

    def _give_up(self, session: str, half: _Half) -> None:
        """Its other half did not come."""
        with self._lock:
            if half.met.is_set():
                return
            if self._waiting.get(session) is half:
                del self._waiting[session]
        half.channel.close()


def _roles_of(connection: socket.socket) -> list[str]:
    assert isinstance(connection, ssl.SSLSocket)
    certificate: Any = connection.getpeercert() or {}
    return [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]


def knock(address: tuple[str, int], hello: ShardHello, tls: ssl.SSLContext | None) -> RankChannel:
    """A coordinator's connection to a shard. OSError or ChannelClosed: nobody answers there."""
    connection = socket.create_connection(address, timeout=HELLO_SECONDS)
    try:
        if tls is not None:
            connection = tls.wrap_socket(connection, server_hostname=SHARD_NAME)
        channel = RankChannel(connection, ToCoordinator)
        watch(connection)
        channel.send(hello)
    except BaseException:
        with suppress(OSError):
            connection.close()
        raise
    return channel
