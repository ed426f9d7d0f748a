"""Frames on a stream: a header, then a body.

    kind   4 bytes   the type of frame
    number 8 bytes   a message: its sequence number in its lane; a chunk: the number of its bulk message
    at     8 bytes   a message: how many of the other lane must be delivered first; a chunk: its offset in the payload
    total  8 bytes   the size of the payload (0 for a control message)
    check  4 bytes   the low half of xxh3-64 of the fields above and of the body

All fields are little-endian. The checksum covers the header too: a corrupted offset does as much harm as corrupted data.
The header has 32 bytes, so the body is aligned as the frame is.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import xxhash

from atoll.errors import AtollError, PeerViolation

Buffer: TypeAlias = bytes | bytearray | memoryview
Buffers: TypeAlias = Sequence[Buffer]
"""Buffers that are concatenated on the wire. They are not copied, so they must not change before they are sent."""


class SharedBuffers(list[Buffer]):
    """A payload for several peers: the checksums of its chunks are computed for the first of them."""

    def __init__(self, pieces: Iterable[Buffer]) -> None:
        super().__init__(pieces)
        self.checks: dict[tuple[int, int], int] = {}
        """By offset and size of a chunk."""


class Streamed(NamedTuple):
    """A payload that is not all in memory."""

    nbytes: int
    pieces: Callable[[], Iterator[Buffer]]
    """Anew from the first byte with every call; it may wait. A piece is valid until the next one is asked for."""


CONTROL: Final = b"ctrl"
BULK: Final = b"bulk"
SPREAD: Final = b"sprd"
"""A message of the bulk lane whose payload goes to other processes of the receiver, in a part for each (`feed.py`)."""
CHUNK: Final = b"chnk"
BYE: Final = b"bye."
PULSE: Final = b"puls"
WELCOME: Final = b"welc"
READY: Final = b"open"
ANSWER: Final = b"answ"
REFUSAL: Final = b"nope"

_FIELDS: Final = struct.Struct("<4sQQQ")
_CHECK: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _CHECK.size


class Refused(AtollError):
    """The other side refused."""

    def __init__(self, reason: str, retry: bool = False, rejoin: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry = retry
        """The caller may try again later."""
        self.rejoin = rejoin
        """The same call is refused for good, but the caller may ask for a new place."""


class LinkFailed(AtollError, ConnectionError):
    """The other side could not be reached, or the connection broke before it answered."""


class Violation(PeerViolation):
    """A frame that no honest peer sends. `kind` is the short name it is counted under."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class LinkLimits:
    head_bytes_max: int = 1 << 20
    payload_bytes_max: int = 1 << 34
    queue_messages_max: int = 4096
    """Messages queued for sending; also how many a receiver holds back before it stops reading."""
    queue_bytes_max: int = 1 << 34
    """Bytes of payloads queued for sending."""
    chunk_bytes: int = 1 << 20
    """Both ends must agree: a receiver refuses a chunk larger than its own limit."""
    assembling_max: int = 8
    """Payloads being assembled or waiting for delivery at a time."""
    unused_bytes_max: int = 1 << 62
    """Of payloads that arrived, or are arriving, and that the handler has not used. The one whose turn it is is received also
    beyond it, once all before it are used."""
    connections: int = 1
    """Connections for payloads. The dialling side chooses; a server allows up to `CONNECTIONS_MAX`."""
    pulse_seconds: float = 2.0
    """Each end sends a pulse this often. Both ends must agree: an end that receives nothing for three pulses ends the link."""
    stall_seconds: float = 20.0
    """A connection with unacknowledged bytes is broken after this long without an acknowledgement."""
    spool: Path | None = None
    """A folder: large payloads are received into files there, not into memory."""
    unread_seconds: float = 180.0
    """A peer that leaves room for no frame for this long ends the link. A chunk of 1 MiB takes 150 s on a link of 56 kbit/s."""

    @property
    def frame_bytes_max(self) -> int:
        return max(self.chunk_bytes, self.head_bytes_max) + HEADER_BYTES


class Frame(NamedTuple):
    kind: bytes
    number: int
    at: int
    total: int
    check: int
    body: memoryview


def pack(kind: bytes, number: int = 0, at: int = 0, total: int = 0, body: Iterable[Buffer] = ()) -> bytes:
    """Copies the pieces once: the checksum reads them in place."""
    pieces = tuple(body)
    fields = _FIELDS.pack(kind, number, at, total)
    return b"".join((fields, _CHECK.pack(frame_checksum(fields, *pieces)), *pieces))


def frame_checksum(*pieces: Buffer) -> int:
    """xxh3 at 10 GB/s and more, where zlib's CRC-32 has 1.4: with eight learners that was a fifth of a second a round."""
    xxh = xxhash.xxh3_64()
    for piece in pieces:
        xxh.update(piece)
    return int(xxh.intdigest()) & 0xFFFFFFFF


def unpack(data: bytes) -> Frame:
    if len(data) < HEADER_BYTES:
        raise Violation("malformed", f"a frame of {len(data)} bytes is shorter than its header")
    kind, number, at, total = _FIELDS.unpack_from(data)
    (check,) = _CHECK.unpack_from(data, _FIELDS.size)
    whole = memoryview(data)
    body = whole[HEADER_BYTES:]
    if frame_checksum(whole[: _FIELDS.size], body) != check:
        raise Violation("checksum", "a frame does not match its checksum")
    return Frame(kind, number, at, total, check, body)
