"""The sockets that gRPC has accepted in this process, seen from outside: found among the open descriptors, and shut down.

gRPC keeps its sockets to itself, and its own limits know nothing of addresses or of admission. But a process may look at its
own descriptors. Handing checked connections to gRPC instead would mean to copy every byte once more (`docs/decisions.md` has
the cost). A descriptor is duplicated and checked before its socket is shut down: gRPC may close it at any moment, and the
system gives its number out again.
"""

from __future__ import annotations

import os
import resource
import socket
import stat
import struct
from contextlib import suppress
from typing import Final, TypeAlias

from atoll.transport.door import Endpoint, endpoint_of

DESCRIPTORS: Final = "/dev/fd"
RAISED_MOST: Final = 1 << 20
"""Some systems have a hard limit of a thousand million, and programs that close every possible descriptor."""
_BYTES_RECEIVED: Final = struct.Struct("=Q")
_BYTES_RECEIVED_AT: Final = 128
"""Offset of tcpi_bytes_received in Linux's struct tcp_info."""
_TCP_INFO: Final[int | None] = getattr(socket, "TCP_INFO", None)
_TCP_INFO_BYTES: Final = _BYTES_RECEIVED_AT + _BYTES_RECEIVED.size

_Identity: TypeAlias = tuple[int, int]
"""Descriptor and inode: a number that is used again has another inode."""


class AcceptedSockets:
    """Those of one listening port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._known: dict[_Identity, Endpoint | None] = {}
        """None for sockets that are not of this port."""
        self._descriptors: dict[Endpoint, int] = {}

    def scan(self) -> list[Endpoint]:
        """The clients that are connected now."""
        before, self._known, self._descriptors = self._known, {}, {}
        for descriptor in map(int, os.listdir(DESCRIPTORS)):
            try:
                status = os.fstat(descriptor)
            except OSError:
                continue  # closed since it was listed
            if not stat.S_ISSOCK(status.st_mode):
                continue
            identity = (descriptor, status.st_ino)
            endpoint = before[identity] if identity in before else self._client_of(descriptor)
            self._known[identity] = endpoint
            if endpoint is not None:
                self._descriptors[endpoint] = descriptor
        return list(self._descriptors)

    def received(self, endpoint: Endpoint) -> int:
        """How many bytes its client has sent; 1 where the system does not tell. Without a copy, as `_client_of`."""
        try:
            found = _socket(self._descriptors[endpoint])
        except (KeyError, OSError):
            return 1
        try:
            info = found.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_BYTES) if _TCP_INFO is not None else b""
        except OSError:
            info = b""
        finally:
            found.detach()
        return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0]) if len(info) == _TCP_INFO_BYTES else 1

    def close(self, endpoint: Endpoint) -> None:
        """gRPC reads the end of the stream and closes its descriptor."""
        copy = self._copy(endpoint)
        if copy is not None:
            with copy, suppress(OSError):  # the client is gone
                copy.shutdown(socket.SHUT_RDWR)

    def _copy(self, endpoint: Endpoint) -> socket.socket | None:
        try:
            copy = _socket(os.dup(self._descriptors[endpoint]))
        except (KeyError, OSError):
            return None  # it is closed by now, or no descriptor is left for the copy
        with suppress(OSError):
            if endpoint_of(*copy.getpeername()[:2]) == endpoint:
                return copy
        copy.close()  # the number is another socket's by now
        return None

    def _client_of(self, descriptor: int) -> Endpoint | None:
        """Without a copy: what is learnt of a number that has just become another socket's is checked before it is closed."""
        try:
            found = _socket(descriptor)
        except OSError:
            return None
        try:
            name = found.getsockname()
            return endpoint_of(*found.getpeername()[:2]) if isinstance(name, tuple) and name[1] == self._port else None
        except OSError:
            return None  # a listening socket, or a client that is gone
        finally:
            found.detach()


def _socket(descriptor: int) -> socket.socket:
    """As if of IPv6, the family with the longer names: they are decoded by what the system says, and not to ask saves calls."""
    return socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=descriptor)


def raise_open_files_limit() -> int:
    """To the hard limit; returns the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = RAISED_MOST if hard == resource.RLIM_INFINITY else min(hard, RAISED_MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a system may refuse what it calls its own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return open_files_limit()


def open_files_limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return RAISED_MOST if soft == resource.RLIM_INFINITY else soft
