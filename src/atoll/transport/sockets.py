"""What the system tells of TCP connections, and the limit of open files."""

from __future__ import annotations

import resource
import socket
import ssl
import struct
from contextlib import suppress
from typing import Any, Final

RAISED_MOST: Final = 1 << 20
"""Some systems have a hard limit of a thousand million, and programs that close every possible descriptor."""
PROBE_SECONDS: Final = 30
_TCP_INFO: Final[int | None] = getattr(socket, "TCP_INFO", None)
_UNACKED_AT, _LAST_ACK_AT, _RECEIVED_AT, _NOT_SENT_AT = 24, 56, 128, 144
"""Offsets in Linux's struct tcp_info: packets sent and not acknowledged, ms since an acknowledgement, bytes received, bytes not
sent yet."""
_TCP_INFO_BYTES: Final = _NOT_SENT_AT + 4


def _info(sock: socket.socket) -> bytes:
    """Empty where the system does not tell."""
    try:
        found = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_BYTES) if _TCP_INFO is not None else b""
    except OSError:
        return b""
    return found if len(found) == _TCP_INFO_BYTES else b""


def received_bytes(sock: socket.socket) -> int:
    """How many bytes the client has sent; 1 where the system does not tell."""
    info = _info(sock)
    return int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0]) if info else 1


def outstanding(sock: socket.socket) -> tuple[bool, float]:
    """Whether bytes wait to be sent or acknowledged, and the seconds since the last acknowledgement. (False, 0) where the system
    does not tell. A peer that does not read acknowledges probes all the same."""
    info = _info(sock)
    if not info:
        return False, 0.0
    unacked, last_ack_ms, not_sent = (struct.unpack_from("=I", info, at)[0] for at in (_UNACKED_AT, _LAST_ACK_AT, _NOT_SENT_AT))
    return bool(unacked or not_sent), last_ack_ms / 1e3


def keep_known(sock: socket.socket) -> None:
    """Stateful firewalls forget a connection that is quiet for minutes; the system sends a probe every 30 s meanwhile."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), PROBE_SECONDS)


def limit_silence(sock: socket.socket, seconds: float) -> None:
    """The system breaks a connection that acknowledges nothing for so long. gRPC does so with its own sockets
    (`wire.keep_alive`)."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))


def common_name(sock: socket.socket) -> str | None:
    """Of the client's certificate; None without TLS."""
    if not isinstance(sock, ssl.SSLSocket):
        return None
    certificate: Any = sock.getpeercert() or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return names[0] if names else None


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
