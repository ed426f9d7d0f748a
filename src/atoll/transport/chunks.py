"""What travels on a bulk connection: a preface, a hello, then chunks of payloads.

    preface  8 bytes   in the clear, before TLS: it tells the front door (`acceptor.py`) a bulk connection from a talk connection
                       (`talk.py`) and from gRPC's, and whether it is for this process or for one of those that send in its
                       place (`feed.py`)
    hello              session 16, key 32, place 1: which link this connection belongs to, and the proof
    chunk              a header, then a part of a payload

The header of a chunk:

    kind    4 bytes   "chnk"
    size    4 bytes   how many bytes follow
    number  8 bytes   the number of its bulk message
    at      8 bytes   its offset in the payload
    total   8 bytes   the size of the payload
    body    4 bytes   the low half of xxh3-64 of the bytes that follow
    check   4 bytes   the low half of xxh3-64 of the fields above

All fields are little-endian. The header has a checksum of its own because its reader acts on it before the body is there: a
damaged size would leave it waiting for bytes that nobody sends. The checksum of the body does not depend on the message's number,
so a payload that goes to many peers is hashed once.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from atoll.transport.frames import CHUNK, Buffer, Violation, frame_checksum

PREFACE: Final = b"ATOLL/1\n"
"""Neither TLS (its first byte is 22) nor HTTP/2 (it begins with "PRI") begins so."""
TALK_PREFACE: Final = b"ATOLT/1\n"
FEED_PREFACE: Final = b"ATOLF"
"""Then two hexadecimal digits, the number of the process that it is for, and a newline."""
FEEDS_MAX: Final = 256
SESSION_BYTES: Final = 16
KEY_BYTES: Final = 32

_FEED: Final = re.compile(FEED_PREFACE + b"([0-9a-f]{2})\n")
_HELLO: Final = struct.Struct(f"<{SESSION_BYTES}s{KEY_BYTES}sB")
_FIELDS: Final = struct.Struct("<4sIQQQI")
_CHECK: Final = struct.Struct("<I")
HELLO_BYTES: Final = _HELLO.size
CHUNK_HEADER_BYTES: Final = _FIELDS.size + _CHECK.size


class BulkHello(NamedTuple):
    session: bytes
    key: bytes
    place: int
    """Its number among the connections of the link."""


class ChunkHeader(NamedTuple):
    number: int
    at: int
    total: int
    size: int
    check: int


def preface_of(feed: int | None) -> bytes:
    """`feed`: the process that sends in the server's place; None: the server itself."""
    return PREFACE if feed is None else b"%b%02x\n" % (FEED_PREFACE, feed)


def may_be_preface(first: bytes) -> bool:
    if PREFACE.startswith(first) or TALK_PREFACE.startswith(first):
        return True
    return first[: len(FEED_PREFACE)] == FEED_PREFACE[: len(first)] and len(first) <= len(PREFACE)


def feed_of(preface: bytes) -> int | None:
    """Of a whole preface, but that of a talk connection. Raises ValueError for one that nobody writes."""
    if preface == PREFACE:
        return None
    found = _FEED.fullmatch(preface)
    if found is None:
        raise ValueError("this is no preface")
    return int(found[1], 16)


def pack_key(key: bytes, addresses: Sequence[str]) -> bytes:
    """What the one who opens a link is told: the key of its connections, and where to dial the processes that exchange payloads
    in the server's place, if not at the server's port."""
    return key + "\n".join(addresses).encode("ascii")


def unpack_key(data: Buffer, processes: int) -> tuple[bytes, list[str]]:
    """Raises ValueError."""
    told = bytes(data[KEY_BYTES:]).decode("ascii")
    addresses = told.split("\n") if told else []
    if len(data) < KEY_BYTES or (addresses and len(addresses) != processes):
        raise ValueError(f"{len(addresses)} addresses for {processes} processes")
    return bytes(data[:KEY_BYTES]), addresses


def pack_hello(hello: BulkHello) -> bytes:
    return _HELLO.pack(*hello)


def unpack_hello(data: Buffer) -> BulkHello:
    return BulkHello(*_HELLO.unpack(data))


def pack_chunk(header: ChunkHeader) -> bytes:
    fields = _FIELDS.pack(CHUNK, header.size, header.number, header.at, header.total, header.check)
    return fields + _CHECK.pack(frame_checksum(fields))


def unpack_chunk(data: Buffer) -> ChunkHeader:
    """From exactly CHUNK_HEADER_BYTES. Raises Violation."""
    fields = bytes(data[: _FIELDS.size])
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != frame_checksum(fields):
        raise Violation("checksum", "the header of a chunk does not match its checksum")
    kind, size, number, at, total, check = _FIELDS.unpack(fields)
    if kind != CHUNK:
        raise Violation("malformed", f"a frame of kind {kind!r} is not a chunk")
    return ChunkHeader(number, at, total, size, check)
