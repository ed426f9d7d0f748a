"""How others find a shard: its coordinator by sockets of this machine with a key, or by TLS with certificates of their roles.

A coordinator has two connections to a shard, which name the same `session`, and a third one where the shard sends to learners
itself. A shard takes the newest coordinator that shows what it must: the older one's syncer was killed, or its machine is gone.

On a machine of its own a shard is dialled by learners too: their connections begin with a preface (`transport/chunks.py`), those
of a coordinator with TLS.
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

from atoll.runtime.log import PacedLog
from atoll.runtime.ranks.channel import ChannelClosed, RankChannel
from atoll.runtime.shards.messages import ShardHello, ToCoordinator, ToShard
from atoll.transport.chunks import PREFACE, feed_of
from atoll.transport.keys import SHARD_NAME, SYNCER_NAME

log = logging.getLogger("atoll.shard")

HELLO_SECONDS: Final = 10.0
HELLO_BYTES_MAX: Final = 4096
LINE_SECONDS: Final = 10.0
LINE_MAX: Final = 300
STRANGERS_MAX: Final = 64
"""Connections that have not shown yet who they are. For a further one the oldest is closed: an honest one shows it at once."""
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


class _Stranger:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def hang_up(self) -> None:
        """Its own thread closes it. Not as a TLS connection would: that thread may be inside OpenSSL."""
        with suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


class ShardDoor:
    """A shard's listener."""

    def __init__(
        self, listener: socket.socket, key: str, tls: ssl.SSLContext | None,
        take_learner: Callable[[socket.socket], None] = socket.socket.close,
    ) -> None:  # fmt: skip
        """With `tls` the certificate says who may be the coordinator, else the key does. `take_learner` gets a connection whose
        preface was read, in any thread."""
        self._listener, self._key, self._tls = listener, key, tls
        self._take_learner = take_learner
        self._closed = False
        self._line, self._unsaid = PacedLog(LINE_SECONDS), 0
        self._lock = threading.Lock()
        self._strangers: list[_Stranger] = []
        """The oldest first."""
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
            stranger = _Stranger(connection)
            with self._lock:
                self._strangers.append(stranger)
                surplus = self._strangers[:-STRANGERS_MAX]
                del self._strangers[: len(surplus)]
            for one in surplus:
                one.hang_up()
            threading.Thread(target=self._admit, args=(stranger,), name="hello", daemon=True).start()

    def _admit(self, stranger: _Stranger) -> None:
        connection = stranger.connection
        try:
            connection.settimeout(HELLO_SECONDS)
            if self._tls is not None:
                if self._is_learner(connection):
                    return self._take_learner(connection)
                secret = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                stranger.connection = connection = secret
                secret.do_handshake()
            channel = RankChannel(connection, ToShard)
            connection.settimeout(HELLO_SECONDS)
            hello, _ = channel.receive(HELLO_BYTES_MAX)
            why = self._objection(connection, hello)
            if why is not None:
                self._say(f"a connection is refused: {why}")
                return channel.close()
            self._is_known(stranger)
            connection.settimeout(None)
            watch(connection)
            self._take(hello, channel)
        except (OSError, ChannelClosed) as error:
            self._say(f"a connection ended before it showed who it is: {error}")
            connection.close()
        finally:
            self._is_known(stranger)

    def _say(self, sentence: str) -> None:
        """Strangers do not decide how often."""
        with self._lock:
            self._unsaid += 1
            if not self._line.due():
                return
            count, self._unsaid = self._unsaid, 0
        log.warning("%s%s", sentence[:LINE_MAX], f" ({count} since the last such line)" if count > 1 else "")

    def _is_known(self, stranger: _Stranger) -> None:
        """Or gone: no further one takes its place."""
        with self._lock:
            if stranger in self._strangers:
                self._strangers.remove(stranger)

    @staticmethod
    def _is_learner(connection: socket.socket) -> bool:
        """Whether it begins with a learner's preface, which is read then. ChannelClosed: with something that nobody writes."""
        if connection.recv(1, socket.MSG_PEEK) != PREFACE[:1]:
            return False
        preface = b""
        while (missing := len(PREFACE) - len(preface)) and (data := connection.recv(missing)):
            preface += data
        try:
            if feed_of(preface) is not None:
                return True
        except ValueError:
            pass
        raise ChannelClosed("it is neither a coordinator's nor a learner's")

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
