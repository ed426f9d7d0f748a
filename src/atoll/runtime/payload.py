"""Encodes envelopes as msgpack, and their payloads as bytes; decodes and checks both.

    payload of a contribution or announcement:
    offset  size  field
    0       1     1: a codec's packet, 2: plain fp32
    1       8     bytes of the first part, unsigned, little-endian
    9       n     the packet, or the numbers
    9+n     ...   the fragment's buffers, fp32

`store/tensor_files.py` encodes a peer's state. Received bytes are checked before they are used.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from atoll.codecs import Packet
from atoll.codecs.layout import layout
from atoll.codecs.parts import packet_part
from atoll.config.codecs import codec_spec
from atoll.errors import UNDECODABLE, DataError
from atoll.executor.late import LateContent
from atoll.ids import OuterStep
from atoll.protocol.interface import Payload
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Envelope, Message, StateTransfer
from atoll.store.tensor_files import pack_state, unpack_state
from atoll.tensors.stripes import stripe_bounds

Buffers = list[bytes | bytearray | memoryview]
FLAW_MAX = 300
"""Characters of a sentence about a peer's message."""

_PREFIX: Final = struct.Struct("<BQ")
_PACKET, _PLAIN = 1, 2


class WireMessage(msgspec.Struct, frozen=True, array_like=True):
    """An envelope on the wire. Beside a Ticket or a Serve it carries the peer's address and the ticket's key: these belong to
    the transport, not to the protocol, and are never on a tape. Beside a Ticket also the digests of the versions that the peer
    may hold, by fragment and outer step: the newcomer checks the peer's anchors against them. `kept` are the snapshots that the
    syncer keeps: a learner keeps its parts of these."""

    envelope: Envelope
    address: str = ""
    key: str = ""
    digests: dict[int, dict[int, str]] = {}
    kept: tuple[OuterStep, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(WireMessage).decode


def to_head(
    envelope: Envelope, address: str = "", key: str = "", digests: dict[int, dict[int, str]] | None = None,
    kept: tuple[OuterStep, ...] = (),
) -> bytes:  # fmt: skip
    return _encode(WireMessage(envelope, address, key, digests or {}, kept))


def from_head(head: bytes) -> WireMessage:
    try:
        return _decode(head)
    except (*UNDECODABLE, ValueError) as error:
        raise DataError(f"this is not a message: {error}") from None


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


QUICK_BYTES: Final = 1 << 18
"""A payload up to this size is decoded where it is: to hand it to another thread and back costs more than its decoding."""


def waits_for_device(payload: Payload | None) -> bool:
    """Whether `to_buffers` would wait for the device, or for other ranks."""
    return payload is not None and isinstance(payload.content, LateContent)


def to_buffers(payload: Payload) -> Buffers | None:
    """Views of the tensors. These never change, and their memory is not reused while a view is read."""
    staged = payload.content
    if not isinstance(staged, LateContent):
        return _payload(payload.kind, staged)
    views = _payload(payload.kind, staged.resolve())
    for view in views or ():
        if isinstance(view, memoryview):
            staged.lend(view)
    return views


def to_stripes(payload: Payload, shards: int) -> list[Buffers] | None:
    """A contribution in parts for shards of a syncer, instead of `to_buffers`: of a part the scales, the buffers in the first
    one, and the codes. None: it is no packet that can be cut."""
    content = payload.content.resolve() if isinstance(payload.content, LateContent) else payload.content
    if payload.kind != "packet" or content is None or codec_spec(content[0].codec).kind not in ("plain", "blocks"):
        return None
    packet, buffers = content
    bounds, found = stripe_bounds(packet.numel, shards), list[Buffers]()
    for shard, (first, last) in enumerate(pairwise(bounds)):
        part = packet_part(packet, first, last)
        scales = memoryview(b"") if part.scales is None else raw(part.scales)
        found.append([scales, raw(buffers[:0] if shard else buffers), raw(part.codes)])
    if isinstance(payload.content, LateContent):
        for view in (view for part in found for view in part):
            payload.content.lend(memoryview(view))
    return found


def bytes_of_part(codec: str, numel: int, buffer_numel: int) -> int:
    """The size of a part of `to_stripes`."""
    return layout(codec, numel).nbytes + 4 * buffer_numel


def part_from_buffer(codec: str, numel: int, buffer_numel: int, data: memoryview) -> tuple[Packet, Tensor]:
    """A part of `to_stripes`, whose bytes it keeps. DataError: it has another size."""
    shape, expected = layout(codec, numel), bytes_of_part(codec, numel, buffer_numel)
    if data.nbytes != expected:
        raise DataError(f"a part of {data.nbytes} bytes is none of {numel} numbers by {codec}, which has {expected}")
    if not expected:
        return Packet(codec, 0, torch.empty(0, dtype=shape.code_dtype), _no_scales(shape.scales)), torch.empty(0)
    whole = torch.frombuffer(data, dtype=torch.uint8)
    scales, buffers, codes = whole.split([4 * (shape.scales or 0), 4 * buffer_numel, shape.codes * shape.code_dtype.itemsize])
    wide = None if shape.scales is None else scales.view(torch.float32)
    return Packet(codec, numel, codes.view(shape.code_dtype), wide), buffers.view(torch.float32)


def _no_scales(scales: int | None) -> Tensor | None:
    return None if scales is None else torch.empty(0)


def _payload(kind: str, content: Any) -> Buffers | None:
    if content is None:
        return []  # NaN or Inf: the message goes without bytes, and the syncer refuses it with the reason
    if kind == "state":
        return list(pack_state(content))
    first, buffers = content
    if isinstance(first, Packet):
        header = replace(first, codes=first.codes[:0], scales=None).to_bytes()
        parts = [raw(first.codes)] if first.scales is None else [raw(first.codes), raw(first.scales)]
        return [_PREFIX.pack(_PACKET, len(header) + first.nbytes), header, *parts, raw(buffers)]
    numbers = raw(first)
    return [_PREFIX.pack(_PLAIN, numbers.nbytes), numbers, raw(buffers)]


def _beginning(codec: str, numel: int) -> bytes:
    """Of the payload of a fragment, or of its packet where `codec` names one."""
    if not codec:
        return _PREFIX.pack(_PLAIN, 4 * numel)
    shape = layout(codec, numel)
    empty = Packet(codec, numel, torch.empty(0, dtype=shape.code_dtype), None).to_bytes()
    return _PREFIX.pack(_PACKET, len(empty) + shape.nbytes) + empty


def bytes_of_fragment(codec: str, numel: int, buffer_numel: int) -> int:
    """The size of the payload of a fragment."""
    numbers = layout(codec, numel).nbytes if codec else 4 * numel
    return len(_beginning(codec, numel)) + numbers + 4 * buffer_numel


def places_of_stripe(
    content: Packet | Tensor, buffers: Tensor, first: int, numel: int, *, begins: bool
) -> list[tuple[int, bytes | memoryview]]:
    """Where the bytes of a stripe belong in the payload of its fragment of `numel` elements: `to_buffers`, in pieces. `begins`:
    of the shard that has the beginning, and the buffers."""
    codec = content.codec if isinstance(content, Packet) else ""
    begin = _beginning(codec, numel)
    found: list[tuple[int, bytes | memoryview]] = [(0, begin)] if begins else []
    if isinstance(content, Packet):
        whole, before = layout(codec, numel), layout(codec, first)
        size = whole.code_dtype.itemsize
        found.append((len(begin) + size * before.codes, raw(content.codes)))
        if content.scales is not None:
            found.append((len(begin) + size * whole.codes + 4 * (before.scales or 0), raw(content.scales)))
    else:
        found.append((len(begin) + 4 * first, raw(content)))
    if begins:
        found.append((bytes_of_fragment(codec, numel, 0), raw(buffers)))
    return [(at, view) for at, view in found if len(view)]


def from_buffer(body: Message, data: memoryview, *, shared: bool = False, into: Tensor | None = None) -> Payload:
    """The payload of a message, which may keep `data`. Raises DataError with the reason if the bytes are not one. `shared`: a
    peer's state is views of `data` too. `into`: memory for the numbers of a whole fragment, instead of new memory."""
    size = data.nbytes
    if isinstance(body, StateTransfer):
        return Payload("state", size, unpack_state(data, shared=shared))
    if size < _PREFIX.size:
        empty = "it is empty: the learner found NaN or Inf in it, or lost a rank"
        raise DataError(f"payload of {size} bytes is too short" if size else empty)
    tag, length = _PREFIX.unpack_from(data)
    rest = data[_PREFIX.size :]
    if tag not in (_PACKET, _PLAIN) or length > rest.nbytes or (rest.nbytes - length) % 4:
        raise DataError(f"payload with tag {tag} and {length} of {rest.nbytes} bytes is not a fragment")
    buffers = _numbers(rest[length:])
    if tag == _PACKET:
        return Payload("packet", size, (Packet.from_bytes(rest[:length], owned=True), buffers))
    if length % 4:
        raise DataError(f"payload of {length} bytes is not an fp32 vector")
    return Payload("fragment", size, (_numbers(rest[:length], into), buffers))


def packet_of_peer(body: Message, data: memoryview) -> tuple[Payload, Reason | None]:
    """In any thread: decodes a peer's bytes, with the reason if they cannot be used. Any error ends the peer's connection, never
    the syncer."""
    try:
        payload = from_buffer(body, data)
        if payload.kind == "packet":
            return payload, None
        flaw = "plain numbers, not a packet"
    except Exception as error:
        flaw = f"bytes that cannot be read: {error}"[:FLAW_MAX]
    return Payload("packet", data.nbytes, None), Reason(Why.POISONED, flaw)


def _numbers(data: memoryview, into: Tensor | None = None) -> Tensor:
    """A copy, because a received buffer need not be aligned."""
    if not data.nbytes:
        return torch.empty(0)
    if into is not None and data.nbytes <= into.nbytes:
        found = into[: data.nbytes // 4]
        raw(found)[:] = data
        return found
    return torch.frombuffer(bytearray(data), dtype=torch.float32)
