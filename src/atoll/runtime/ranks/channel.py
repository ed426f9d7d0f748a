"""Messages between two ranks of one learner over a socket. Bytes may travel beside a message.

    offset  size  field
    0       4     n: length of the message, unsigned, little-endian
    4       8     m: length of the bytes beside it
    12      n     the message, msgpack
    12+n    m     the bytes

These are sockets of our own and not torch's collectives, because a learner's answer to a pull falls in the middle of a step: it
must neither join the training's collectives nor wait for them. A process that dies closes its sockets, so the other side knows at
once. As torch's own process groups, ranks trust their network; the key that rank 0 deals out keeps strangers out.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from atoll.runtime.ranks.messages import Note, PartOfState, StateArrival
from atoll.transport import spooled

_FRAME: Final = struct.Struct("<IQ")
MESSAGE_MAX: Final = 1 << 30
SPOOLED_BYTES: Final = 1 << 16
"""Of a state, what is smaller stays in memory."""
SEND_SECONDS: Final = 120.0
"""A rank that takes no bytes for so long is not alive."""
REASON_SECONDS: Final = 2.0
"""Between the ends of the two channels of a pair: on the other one the reason may be on its way."""


class ChannelClosed(Exception):
    pass


class RankChannel:
    """`send` may be called from any thread; `receive` from one."""

    def __init__(self, connection: socket.socket, incoming: Any) -> None:
        """`incoming`: the union of messages that the other side may send."""
        self._socket = connection
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self.spool: Path | None = None
        """A folder: large parts of a state are received into files there, not into memory."""
        self._lock = threading.Lock()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A send that makes no progress must end; a receive may wait for as long as a step takes.
        seconds = struct.pack("ll", int(SEND_SECONDS), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def send(self, note: Note, data: Sequence[Tensor] = ()) -> None:
        head = msgspec.msgpack.encode(note)
        views = [_bytes_of(tensor) for tensor in data if tensor.numel()]
        size = sum(view.nbytes for view in views)
        try:
            with self._lock:
                self._socket.sendall(_FRAME.pack(len(head), size) + head)
                for view in views:
                    self._socket.sendall(view)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, most: int | None = None) -> tuple[Any, Tensor]:
        """The next message and the bytes beside it. `most`: bytes of both together, from one who has shown nothing yet."""
        head_size, size = _FRAME.unpack(self._read(_FRAME.size))
        if head_size > MESSAGE_MAX or (most is not None and head_size + size > most):
            raise ChannelClosed("these are not a rank's bytes")
        try:
            note = self._decode(self._read(head_size))
        except msgspec.MsgspecError as error:
            raise ChannelClosed(f"this is not a rank's message: {error}") from None
        if size > SPOOLED_BYTES and self.spool is not None and isinstance(note, PartOfState | StateArrival):
            data = torch.frombuffer(spooled(size, self.spool), dtype=torch.uint8)
        else:
            data = torch.empty(size, dtype=torch.uint8)
        if size:
            self._fill(data.numpy().data)
        return note, data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        self._fill(memoryview(data))
        return data

    def _fill(self, target: memoryview) -> None:
        while len(target):
            try:
                count = self._socket.recv_into(target)
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not count:
                raise ChannelClosed("its process ended or closed the connection")
            target = target[count:]


def read_in_thread(
    channel: RankChannel, take: Callable[[Any, Tensor], None], closed: Callable[[BaseException], None], name: str
) -> threading.Thread:
    """Takes one message after the other in a thread of its own, until the channel is closed or `take` raises."""

    def work() -> None:
        try:
            while True:
                take(*channel.receive())
        except BaseException as error:
            closed(error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def _bytes_of(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return view


def tensors_of(chunks: Sequence[bytes | memoryview]) -> list[Tensor]:
    """Bytes, to be sent beside a message; only what cannot be written to is copied."""
    whole = [bytearray(chunk) if memoryview(chunk).readonly else chunk for chunk in chunks if len(chunk)]
    return [torch.frombuffer(chunk, dtype=torch.uint8) for chunk in whole]


def parts_of(data: Tensor, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Views of received bytes; `sizes` in bytes. torch reads from odd addresses only bytes, so the wide ones come first."""
    found, at = [], 0
    for size, dtype in zip(sizes, dtypes, strict=True):
        part = data[at : at + size]
        found.append(part.view(dtype) if part.storage_offset() % dtype.itemsize == 0 else part.clone().view(dtype))
        at += size
    return found
