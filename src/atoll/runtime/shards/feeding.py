"""What a shard exchanges with learners itself, over connections of its own: it sends its stripe of every announcement, and
receives its part of every contribution.

A part is looked at where it is, and only what the coordinator decides by goes to it: whether it is sound, and the squares that
the norm of the whole adds up. The part stays here until the coordinator accepts the contribution, or drops it.

Where a shard is on the syncer's machine, learners dial the syncer, whose front door hands the shard the connections that begin
with its number, through a Unix socket in a folder that only this user may enter. TLS begins in the shard, with the syncer's
certificate. So all payloads use the syncer's one port, and each shard encrypts with cores and an interpreter's lock of its own. A
shard on another machine they dial there, where it shows a certificate of its own.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import ssl
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from atoll.codecs import Packet
from atoll.config import Config
from atoll.ids import FragmentId, OuterStep
from atoll.runtime import payload as wire
from atoll.runtime.ranks.channel import ChannelClosed, RankChannel, read_in_thread
from atoll.runtime.shards.messages import (
    DropPart,
    ExpectLink,
    FeedLink,
    ForgetLink,
    JudgePart,
    LinkFed,
    LinkGone,
    LinkHere,
    PartCame,
    PartJudged,
    named,
)
from atoll.tensors.layout import Fragment
from atoll.tensors.norms import Array
from atoll.tensors.stripes import stripes_of
from atoll.transport import FeedEnd, LinkLimits, PlacedBytes, SharedBuffers, server_credentials
from atoll.transport.keys import load_server

log = logging.getLogger("atoll.shard")

KEPT: Final = 2
"""OwnStripes whose checksums are kept beside those of rounds in flight."""
HAND_SECONDS: Final = 5.0
MISSING: Final = "a shard has no part of it"
LOOKING_THREADS: Final = 2
"""That look at parts which arrived, outside the interpreter's lock."""


class StoredStripes(Protocol):
    """What of a store of stripes is read here."""

    def packet(self, p: FragmentId, v: OuterStep) -> Packet | None: ...
    def announced(self, p: FragmentId, v: OuterStep) -> Tensor: ...
    def theta_at(self, p: FragmentId, v: OuterStep) -> tuple[Tensor, Tensor]: ...


class PartNorms(Protocol):
    """What of the merger is used here."""

    def norm_leaves(self, packet: Packet, *, by_value: bool) -> Array | None: ...


class HeldParts:
    """One shard's parts of contributions that the coordinator knows of. Any thread may call any method."""

    def __init__(self, config: Config, stripes: Sequence[Fragment], judge: PartNorms) -> None:
        self._codec, self._stripes, self._judge = config.protocol.codec_up, stripes, judge
        self._lock = threading.Lock()
        self._held: dict[tuple[bytes, int], tuple[Packet, Tensor]] = {}
        self._awaited: set[tuple[bytes, int]] = set()
        """Asked for, and not looked at yet: one that is dropped meanwhile is not kept."""

    def bytes_of(self, p: FragmentId) -> int:
        return wire.bytes_of_part(self._codec, self._stripes[p].numel, self._stripes[p].buffer_numel)

    def expect(self, session: bytes, number: int) -> None:
        with self._lock:
            self._awaited.add((session, number))

    def look(self, note: JudgePart, data: memoryview) -> tuple[str, Array | None]:
        """The flaw, or ""; and the squares that its norm adds up."""
        stripe = self._stripes[note.fragment]
        packet, buffers = wire.part_from_buffer(self._codec, stripe.numel, stripe.buffer_numel, data)
        if not bool(torch.isfinite(buffers).all()):
            return f"fragment {note.fragment} holds NaN or Inf", None
        key = note.session, note.number
        with self._lock:
            if key in self._awaited:
                self._awaited.remove(key)
                self._held[key] = packet, buffers
        return "", self._judge.norm_leaves(packet, by_value=note.by_value)

    def look_again(self, note: JudgePart) -> tuple[str, Array | None]:
        with self._lock:
            packet, _ = self._held[note.session, note.number]
        return "", self._judge.norm_leaves(packet, by_value=note.by_value)

    def of(self, session: bytes, number: int) -> tuple[Packet, Tensor]:
        """For the merge, which may be tried again: it stays until it is dropped."""
        with self._lock:
            return self._held[session, number]

    def drop(self, session: bytes, number: int) -> None:
        with self._lock:
            self._held.pop((session, number), None)
            self._awaited.discard((session, number))


class _Part(NamedTuple):
    total: int
    """Of the payload that it is a part of."""
    stripes: list[PlacedBytes]


class OwnStripes:
    """One shard's stripes, as they are sent. Each is hashed once for all learners."""

    def __init__(self, config: Config, fragments: Sequence[Fragment], shard: int, shards: int, stored: StoredStripes) -> None:
        self._fragments = fragments
        self._begins = shard == 0
        self._firsts = [stripes_of(fragment, shards)[shard].first for fragment in fragments]
        self._stored = stored
        self._kept = KEPT + config.protocol.overlap
        self._parts: OrderedDict[tuple[FragmentId, OuterStep, bool], _Part] = OrderedDict()

    def part(self, p: FragmentId, v: OuterStep, *, whole: bool) -> _Part:
        key = (p, v, whole)
        if key not in self._parts:
            self._parts[key] = self._read(p, v, whole)
            while len(self._parts) > self._kept:
                self._parts.popitem(last=False)
        return self._parts[key]

    def _read(self, p: FragmentId, v: OuterStep, whole: bool) -> _Part:
        content = self._stored.announced(p, v) if whole else self._stored.packet(p, v)
        assert content is not None, "the coordinator asks for a packet where there is one"
        fragment, codec = self._fragments[p], content.codec if isinstance(content, Packet) else ""
        buffers = self._stored.theta_at(p, v)[1]
        places = wire.places_of_stripe(content, buffers, self._firsts[p], fragment.numel, begins=self._begins)
        total = wire.bytes_of_fragment(codec, fragment.numel, fragment.buffer_numel)
        return _Part(total, [PlacedBytes(at, SharedBuffers([data])) for at, data in places])


class Feeding:
    """For one coordinator, which tells on `channel` what to send to whom."""

    def __init__(
        self, channel: RankChannel, stripes: OwnStripes, parts: HeldParts, tls: ssl.SSLContext | None, fragments: int,
        limits: LinkLimits,
    ) -> None:  # fmt: skip
        self._channel, self._stripes_of, self._parts = channel, stripes, parts
        self._looking = ThreadPoolExecutor(LOOKING_THREADS, "parts")
        self.end = FeedEnd(
            tls, limits, lambda session: self._tell(LinkHere(session)),
            lambda session, nbytes: self._tell(LinkFed(session, nbytes)), lambda session, why: self._tell(LinkGone(session, why)),
            part_sizes={parts.bytes_of(p) for p in range(fragments)} - {0},
            came=lambda session, number, nbytes: self._tell(PartCame(session, number, nbytes)),
        )  # fmt: skip
        read_in_thread(channel, self._take, self._closed, "feeds")

    def _tell(self, note: LinkHere | LinkFed | LinkGone | PartCame | PartJudged, data: Sequence[Tensor] = ()) -> None:
        with contextlib.suppress(ChannelClosed):  # the coordinator is gone, and its links with it
            self._channel.send(note, data)

    def _take(self, note: object, _: Tensor) -> None:
        match note:
            case ExpectLink(session=session, key=key, certificate=certificate):
                self.end.expect(session, key, certificate)
            case ForgetLink(session=session):
                self.end.forget(session)
            case FeedLink(session=session, number=number):
                try:
                    part = self._stripes_of.part(note.fragment, note.version, whole=note.whole)
                except Exception as error:  # a disk that cannot be read: the learner connects again, and is sent what it lacks
                    log.warning("version %d of fragment %d cannot be sent: %s", note.version, note.fragment, error)
                    self._tell(LinkGone(session, f"a shard cannot read its files: {error}"[:300]))
                else:
                    self.end.put(session, number, *part)
            case JudgePart(by_value=True):
                self._looking.submit(self._judged, note, partial(self._parts.look_again, note))
            case JudgePart(wanted=False, session=session, number=number):
                self.end.take_part(session, number)
            case JudgePart(session=session, number=number):
                found = self.end.take_part(session, number)
                data = found if found is not None or self._parts.bytes_of(note.fragment) else memoryview(b"")
                if data is None:
                    gone = not self.end.knows(session)
                    return self._tell(PartJudged(session, number, "" if gone else MISSING, gone))
                self._parts.expect(session, number)
                self._looking.submit(self._judged, note, partial(self._parts.look, note, data))
            case DropPart(session=session, number=number):
                self._parts.drop(session, number)
            case _:
                raise ChannelClosed(f"{type(note).__name__} is no word about a link")
        return None

    def _judged(self, note: JudgePart, look: Callable[[], tuple[str, Array | None]]) -> None:
        try:
            flaw, leaves = look()
        except Exception as error:  # a peer's bytes may end its connection, never the shard
            flaw, leaves = f"bytes that cannot be used: {error}"[: wire.FLAW_MAX], None
        rows, data = named({} if leaves is None else {"leaves": torch.from_numpy(np.ascontiguousarray(leaves))})
        self._tell(PartJudged(note.session, note.number, flaw, tensors=rows), data)

    def _closed(self, error: BaseException) -> None:
        if not isinstance(error, ChannelClosed):
            log.error("no more announcements are sent: %s", error)
        self.close()

    def close(self) -> None:
        self._channel.close()
        self.end.close()
        self._looking.shutdown(wait=False)


def syncers_context(keys: str | None) -> ssl.SSLContext | None:
    """From the folder with the syncer's own certificate. None: the run has none."""
    found = load_server(Path(keys)) if keys is not None else None
    return server_credentials(found.certificate, found.key, found.ca).bulk if found is not None else None


class LearnerConnections:
    """Their connections with this process, as long as one coordinator is inside."""

    path = ""
    feeding: Feeding | None = None

    def take(self, connection: socket.socket) -> None:
        """One whose preface was read. In any thread."""
        feeding = self.feeding
        if feeding is None:
            connection.close()
        else:
            feeding.end.take(connection)

    def close(self) -> None:
        feeding, self.feeding = self.feeding, None
        if feeding is not None:
            feeding.close()


class HandedOver(LearnerConnections):
    """Where one coordinator hands them to this process. The socket's file is gone once it has connected."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="atoll-"))
        self.path = str(self._folder / "door")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(1)
        threading.Thread(target=self._take, name="handed over", daemon=True).start()

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # it is closed, or the coordinator has gone
            giver, _ = self._listener.accept()
            self._remove()
            with giver:
                while True:
                    said, descriptors, _, _ = socket.recv_fds(giver, 1, 1)
                    for descriptor in descriptors:
                        self.take(socket.socket(fileno=descriptor))
                    if not said:
                        return

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._remove()
        super().close()


def at_door(path: str) -> socket.socket:
    """A coordinator's end. Raises OSError."""
    door = socket.socket(socket.AF_UNIX)
    door.settimeout(HAND_SECONDS)
    try:
        door.connect(path)
    except OSError:
        door.close()
        raise
    door.setblocking(False)  # it is a loop that hands over: a process that takes none gets none
    return door


def hand_over(door: socket.socket, connection: socket.socket) -> None:
    """Gives the process behind that door the connection; this one keeps its own descriptor of it, to close. Raises OSError."""
    socket.send_fds(door, [b"c"], [connection.fileno()])
