"""The coordinator's side of what its shards send to learners: `Feeds` of the transport, one for each shard."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from atoll.executor.sharded import ShardLost
from atoll.protocol.vocabulary import Announce
from atoll.runtime import payload as wire
from atoll.runtime.ranks.channel import ChannelClosed, RankChannel, read_in_thread
from atoll.runtime.ranks.messages import Note
from atoll.runtime.shards.feeding import at_door, hand_over
from atoll.runtime.shards.messages import ExpectLink, FeedLink, ForgetLink, LinkFed, LinkGone, LinkHere
from atoll.tensors.layout import Fragment
from atoll.transport import Link, Server
from atoll.transport.feed import FeedEvents

log = logging.getLogger("atoll.syncer")


class FeedingShard(Protocol):
    door: str
    """The Unix socket where it takes connections of learners."""

    def feeds(self) -> RankChannel:
        """A connection on which it is told what to send."""
        ...


class ShardFeeds:
    """A shard that takes no more words ends the syncer's life, as one that is killed does: nothing would be announced."""

    def __init__(self, shards: Sequence[FeedingShard], fragments: Sequence[Fragment]) -> None:
        """OSError or ChannelClosed: one of them is gone."""
        self.count = len(shards)
        self._fragments = fragments
        self.announced_as: Callable[[Announce], str] = lambda body: ""
        """The codec of the packet that an announcement is; "": the announced vector itself."""
        self._doors: list[socket.socket] = []
        self._channels: list[RankChannel] = []
        self._closing = False
        self._gone: list[Exception] = []
        """What the loop has not heard yet."""
        self._lost: Callable[[Exception], None] = self._gone.append
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: FeedEvents | None = None
        try:
            for number, shard in enumerate(shards):
                self._doors.append(at_door(shard.door))
                self._channels.append(shard.feeds())
                heard = partial(self._heard, number)
                read_in_thread(self._channels[-1], heard, partial(self._ended, number), f"feed {number}")
        except BaseException:
            self.close()
            raise

    def begin(self, server: Server, lost: Callable[[Exception], None]) -> None:
        """In the loop in which the server runs, which calls `lost`."""
        self._loop, self._events, server.feeds, self._lost = asyncio.get_running_loop(), server, self, lost
        for error in self._gone:
            lost(error)
        log.info("each of its %d shards sends learners its stripe of what is announced", self.count)

    def announce(self, link: Link, head: bytes, body: Announce) -> None:
        fragment, codec = self._fragments[body.fragment], self.announced_as(body)
        number = link.send_elsewhere(head, wire.bytes_of_fragment(codec, fragment.numel, fragment.buffer_numel))
        if number is not None:
            self._tell(FeedLink(link.session, number, body.fragment, body.outer_step, not codec))

    # As `Feeds`

    def expect(self, session: bytes, key: bytes, certificate: str | None) -> None:
        self._tell(ExpectLink(session, key, certificate))

    def forget(self, session: bytes) -> None:
        self._tell(ForgetLink(session))

    def hand(self, feed: int, connection: socket.socket) -> None:
        try:
            hand_over(self._doors[feed], connection)
        except OSError as error:
            log.warning("shard %d takes no connection of a learner: %s", feed, error)

    def _tell(self, note: Note) -> None:
        for channel in self._channels:
            with contextlib.suppress(ChannelClosed):
                channel.send(note)

    def _heard(self, shard: int, note: object, _: Tensor) -> None:
        """In the thread of a shard's channel."""
        match note:
            case LinkHere(session=session):
                self._in_loop(lambda events: events.feed_is_here(session, shard))
            case LinkFed(session=session, nbytes=nbytes):
                self._in_loop(lambda events: events.feed_sent(session, shard, nbytes))
            case LinkGone(session=session, reason=reason):
                self._in_loop(lambda events: events.feed_is_gone(session, reason))
            case _:
                raise ChannelClosed(f"{type(note).__name__} is no word about a link")

    def _ended(self, shard: int, error: BaseException) -> None:
        """In the thread of a shard's channel."""
        if not self._closing:
            lost = ShardLost(f"shard {shard} sends learners nothing any more: {error}")
            if self._loop is None:
                return self._lost(lost)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._lost, lost)
        return None

    def _in_loop(self, call: Callable[[FeedEvents], None]) -> None:
        loop, events = self._loop, self._events
        if loop is not None and events is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(call, events)

    def close(self) -> None:
        self._closing = True
        for channel in self._channels:
            channel.close()
        for door in self._doors:
            door.close()
