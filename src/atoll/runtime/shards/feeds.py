"""The coordinator's side of what its shards exchange with learners: `Feeds` of the transport, one for each shard."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from torch import Tensor

from atoll.executor.sharded import OwnParts, PartFound, ShardLost
from atoll.protocol.vocabulary import Announce, Contribution
from atoll.runtime import payload as wire
from atoll.runtime.log import PacedLog
from atoll.runtime.ranks.channel import ChannelClosed, RankChannel, read_in_thread
from atoll.runtime.ranks.messages import Note
from atoll.runtime.shards.feeding import at_door, hand_over
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
    tensors_of_note,
)
from atoll.tensors.layout import Fragment
from atoll.transport import Elsewhere, Link, Server
from atoll.transport.feed import FeedEvents

log = logging.getLogger("atoll.syncer")

LINE_SECONDS: Final = 10.0


class FeedingShard(Protocol):
    door: str
    """The Unix socket where it takes connections of learners."""

    def feeds(self) -> RankChannel:
        """A connection on which it is told what to send."""
        ...


class _Asked:
    """All shards, about their parts of a contribution."""

    def __init__(self) -> None:
        self.answers: dict[int, PartFound | None] = {}
        """By shard. None: it has let its part go."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class ShardFeeds:
    """A shard that takes no more words ends the syncer's life, as one that is killed does: nothing would be announced."""

    def __init__(
        self, shards: Sequence[FeedingShard], fragments: Sequence[Fragment], addresses: Sequence[str] = ()
    ) -> None:  # fmt: skip
        """`addresses`: where learners dial shards on other machines. OSError or ChannelClosed: one of them is gone."""
        self.count = len(shards)
        self.addresses = addresses
        self._fragments = fragments
        self.announced_as: Callable[[Announce], str] = lambda body: ""
        """The codec of the packet that an announcement is; "": the announced vector itself."""
        self._asked: dict[tuple[bytes, int], _Asked] = {}
        self._used: set[bytes] = set()
        """Sessions of links whose messages are processed."""
        self._forgotten: set[bytes] = set()
        """Those of them whose link is over."""
        self._doors: list[socket.socket] = []
        self._channels: list[RankChannel] = []
        self._closing = False
        self._line = PacedLog(LINE_SECONDS)
        self._gone: list[Exception] = []
        """What the loop has not heard yet."""
        self._lost: Callable[[Exception], None] = self._gone.append
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: FeedEvents | None = None
        try:
            for number, shard in enumerate(shards):
                if not addresses:
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
        log.info("each of its %d shards exchanges its stripes with learners itself", self.count)

    def announce(self, link: Link, head: bytes, body: Announce) -> None:
        fragment, codec = self._fragments[body.fragment], self.announced_as(body)
        number = link.send_elsewhere(head, wire.bytes_of_fragment(codec, fragment.numel, fragment.buffer_numel))
        if number is not None:
            self._tell(FeedLink(link.session, number, body.fragment, body.outer_step, not codec))

    def take_from(self, link: Link) -> None:
        """The link's messages are processed from now on, until `let_go`."""
        self._used.add(link.session)

    def let_go(self, link: Link) -> None:
        """Of a link that still has to tell the peer why it is closed, the shards' connections stay until `forget`: a broken one
        would reach the peer before the reason."""
        self._used.discard(link.session)
        if link.session in self._forgotten:
            self._forgotten.remove(link.session)
            self._tell(ForgetLink(link.session))

    async def judged(self, link: Link, part: Elsewhere, body: Contribution, *, by_value: bool = False) -> list[PartFound] | None:
        """What each shard says of its part. None: the link is over, and was let go."""
        key = link.session, part.number
        asked = self._asked[key] = _Asked()
        self._tell(JudgePart(*key, body.fragment, by_value=by_value))
        try:
            await asked.done
        finally:
            del self._asked[key]
        answers = [answer for _, answer in sorted(asked.answers.items()) if answer is not None]
        return answers if len(answers) == self.count else None

    def pass_over(self, link: Link, part: Elsewhere, body: Contribution) -> None:
        """Nobody asked for this contribution."""
        self._tell(JudgePart(link.session, part.number, body.fragment, wanted=False))

    def own_parts(self, link: Link, part: Elsewhere) -> OwnParts:
        """The shards keep theirs until it is gone: whether it was accepted or refused, nobody has to say so. It may go in any
        thread, in the middle of anything, so the loop is asked to say it."""
        held = OwnParts(link.session, part.number)
        note = DropPart(link.session, part.number)
        weakref.finalize(held, self._in_loop, lambda _: self._tell(note)).atexit = False
        return held

    def drop(self, link: Link, part: Elsewhere) -> None:
        self._tell(DropPart(link.session, part.number))

    # As `Feeds`

    def expect(self, session: bytes, key: bytes, certificate: str | None) -> None:
        self._tell(ExpectLink(session, key, certificate))

    def forget(self, session: bytes) -> None:
        """Where messages of the link are still to be processed, its parts stay until `let_go`."""
        if session in self._used:
            self._forgotten.add(session)
        else:
            self._tell(ForgetLink(session))

    def hand(self, feed: int, connection: socket.socket) -> None:
        """Of a shard on this machine; learners dial the others."""
        if self.addresses:
            return
        try:
            hand_over(self._doors[feed], connection)
        except OSError as error:
            if self._line.due():
                log.warning("shard %d takes no connection of a learner: %s", feed, error)

    def _tell(self, note: Note) -> None:
        for channel in self._channels:
            with contextlib.suppress(ChannelClosed):
                channel.send(note)

    def _heard(self, shard: int, note: object, data: Tensor) -> None:
        """In the thread of a shard's channel."""
        match note:
            case LinkHere(session=session):
                self._in_loop(lambda events: events.feed_is_here(session, shard))
            case LinkFed(session=session, nbytes=nbytes):
                self._in_loop(lambda events: events.feed_sent(session, shard, nbytes))
            case LinkGone(session=session, reason=reason):
                self._in_loop(lambda events: events.feed_is_gone(session, reason))
            case PartCame(session=session, number=number, nbytes=nbytes):
                self._in_loop(lambda events: events.feed_has(session, number, nbytes))
            case PartJudged(session=session, number=number, flaw=flaw, gone=gone, tensors=rows):
                leaves = tensors_of_note(rows, data).get("leaves")
                said = None if gone else PartFound(flaw, None if leaves is None else leaves.numpy())
                self._in_loop(lambda _: self._said(shard, (session, number), said))
            case _:
                raise ChannelClosed(f"{type(note).__name__} is no word about a link")

    def _said(self, shard: int, key: tuple[bytes, int], said: PartFound | None) -> None:
        asked = self._asked.get(key)
        if asked is not None:
            asked.answers[shard] = said
            if len(asked.answers) == self.count and not asked.done.done():
                asked.done.set_result(None)

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
