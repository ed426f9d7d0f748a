"""What a shard on the syncer's machine sends to learners itself: its stripe of every announcement, over connections of its own.

Learners dial the syncer, whose front door hands the shard the connections that begin with its number, through a Unix socket in a
folder that only this user may enter. TLS begins in the shard, with the syncer's certificate. So all payloads use the syncer's
one port, and each shard encrypts with cores and an interpreter's lock of its own.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from torch import Tensor

from atoll.codecs import Packet
from atoll.config import Config
from atoll.ids import FragmentId, OuterStep
from atoll.runtime import payload as wire
from atoll.runtime.ranks.channel import ChannelClosed, RankChannel, read_in_thread
from atoll.runtime.shards.messages import ExpectLink, FeedLink, ForgetLink, LinkFed, LinkGone, LinkHere
from atoll.tensors.layout import Fragment
from atoll.tensors.stripes import stripes_of
from atoll.transport import FeedEnd, LinkLimits, PlacedBytes, SharedBuffers, server_credentials
from atoll.transport.keys import load_server

log = logging.getLogger("atoll.shard")

KEPT: Final = 2
"""OwnStripes whose checksums are kept beside those of rounds in flight."""
HAND_SECONDS: Final = 5.0


class StoredStripes(Protocol):
    """What of a store of stripes is read here."""

    def packet(self, p: FragmentId, v: OuterStep) -> Packet | None: ...
    def announced(self, p: FragmentId, v: OuterStep) -> Tensor: ...
    def theta_at(self, p: FragmentId, v: OuterStep) -> tuple[Tensor, Tensor]: ...


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

    def __init__(self, channel: RankChannel, stripes: OwnStripes, keys: str | None) -> None:
        found = load_server(Path(keys)) if keys is not None else None
        tls = server_credentials(found.certificate, found.key, found.ca).bulk if found is not None else None
        self._channel, self._stripes_of = channel, stripes
        self.end = FeedEnd(
            tls, LinkLimits(), lambda session: self._tell(LinkHere(session)),
            lambda session, nbytes: self._tell(LinkFed(session, nbytes)), lambda session, why: self._tell(LinkGone(session, why)),
        )  # fmt: skip
        read_in_thread(channel, self._take, self._closed, "feeds")

    def _tell(self, note: LinkHere | LinkFed | LinkGone) -> None:
        with contextlib.suppress(ChannelClosed):  # the coordinator is gone, and its links with it
            self._channel.send(note)

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
            case _:
                raise ChannelClosed(f"{type(note).__name__} is no word about a link")

    def _closed(self, error: BaseException) -> None:
        if not isinstance(error, ChannelClosed):
            log.error("no more announcements are sent: %s", error)
        self.close()

    def close(self) -> None:
        self._channel.close()
        self.end.close()


class HandedOver:
    """Where one coordinator hands connections of learners to this process. The socket's file is gone once it has connected."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="atoll-"))
        self.path = str(self._folder / "door")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self.feeding: Feeding | None = None
        threading.Thread(target=self._take, name="handed over", daemon=True).start()

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # it is closed, or the coordinator has gone
            giver, _ = self._listener.accept()
            self._remove()
            with giver:
                while True:
                    said, descriptors, _, _ = socket.recv_fds(giver, 1, 1)
                    for descriptor in descriptors:
                        self._taken(socket.socket(fileno=descriptor))
                    if not said:
                        return

    def _taken(self, connection: socket.socket) -> None:
        if self.feeding is None:
            connection.close()
        else:
            self.feeding.end.take(connection)

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._remove()
        if self.feeding is not None:
            self.feeding.close()
            self.feeding = None


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
