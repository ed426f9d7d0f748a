"""One link to one peer: a talk stream for messages, bulk connections for the chunks of payloads.

The talk stream's reader and writer are tasks of one event loop; each bulk connection has a thread (`bulk.py`) that asks the link
for chunks to send and for places of chunks received. The first of them to end ends the link, with its reason. The side that
closes a link sends a close frame and then waits briefly for the peer to disconnect. They are different connections: if they were
torn down at once, the peer might see a broken bulk connection before it reads the reason on the talk stream. For the same reason
a close frame may overtake chunks that were sent before it, so the peer receives those chunks before it considers the link closed.

A link is alive while anything arrives on any of its connections. Each end therefore sends a pulse on the talk stream every few
seconds. Pulses are not answered: a prompt answer would prove that a link is fast, and a slow link would be taken for dead.
Pulses leave a queue as often as they entered it, however long the queue is.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

from atoll.transport.bulk import BulkConnection
from atoll.transport.chunks import ChunkHeader
from atoll.transport.frames import BYE, PULSE, Buffers, LinkLimits, Violation, pack, unpack
from atoll.transport.inbox import Elsewhere, Inbox
from atoll.transport.outbox import Chunk, Outbox
from atoll.transport.wire import FrameStream, StreamBroken

CLOSE_SECONDS: Final = 1.0
REASON_CHARACTERS_MAX: Final = 1000
FRAME_REFUSED, MESSAGE_REFUSED = 1, 2
"""Numbers of a close frame: of a frame that no peer sends, or that broke on the way; of a message that the handler refuses."""
SILENT_PULSES_MAX: Final = 3
"""Pulse intervals in a row without data; a dead link is noticed after two to four of them."""


class Handler(Protocol):
    """Receives a link's events: called in the loop's thread, in order for each link."""

    def opened(self, link: Link) -> None: ...

    def arrived(self, link: Link, head: bytes, payload: memoryview | None) -> None:
        """The payload is one contiguous buffer, which the handler owns from here on."""

    def closed(self, link: Link, reason: str) -> None:
        """Called exactly once after `opened`."""


class Notifier:
    """Wakes all waiting tasks. A task checks its condition and calls `wait` in the loop's thread with no await in between, and
    `notify_all` runs in that thread too, so no notification is missed."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter


class Link:
    """`send`, `used` and `close` may be called from any thread; everything else only from the loop's."""

    def __init__(self, peer: str, handler: Handler, limits: LinkLimits, refused: Counter[str] | None = None) -> None:
        self.peer = peer
        self.refused: Counter[str] = Counter() if refused is None else refused
        """Violations by the peer, by kind. All links of a server share one counter."""
        self._talk_bytes_sent = 0
        self._talk_bytes_received = 0
        self.messages_sent = 0
        self.messages_received = 0
        self.bulk_bytes_per_second_up: float | None = None
        self.bulk_bytes_per_second_down: float | None = None
        """Measured on the last payload of more than one chunk."""
        self._handler = handler
        self._limits = limits
        self._outbox = Outbox(limits)
        self._inbox = Inbox(limits, self.refused)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._to_send, self._sent, self._delivered = Notifier(), Notifier(), Notifier()
        self._tasks: list[asyncio.Task[None]] = []
        self._bulks: Sequence[BulkConnection] = ()
        """With this process of the peer first, then with its feeds."""
        self._senders: Sequence[BulkConnection] = ()
        self.feeds = 0
        """Processes of the peer that take parts of payloads, on connections of their own."""
        self.on_spread: Callable[[Link, bytes, Elsewhere], None] | None = None
        """Set in `opened` where other processes of this end take parts of payloads: takes such messages, as `arrived` does."""
        self._bytes_elsewhere = 0
        self.session = b""
        """By which feeds know this link, on the server's side."""
        self.bytes_fed: dict[int, int] = {}
        """By feed: what it has sent. Copied where it is read: other threads ask while the first bytes of a feed are told."""
        self._pulse_is_due = False
        self._writer_told = False
        self._ended = asyncio.Event()
        self._released = asyncio.Event()
        self._reason: str | None = None
        self._close_frame: bytes | None = None
        self._close_timeout = CLOSE_SECONDS
        self._peer_reason = ""
        """From the peer's close frame."""
        self.refused_by_peer = False
        """The peer closed the link because of a message's content. A frame that broke on the way is another matter."""

    def __repr__(self) -> str:
        return f"<link to {self.peer}{f', ended: {self._reason}' if self._reason else ''}>"

    @property
    def bytes_sent(self) -> int:
        return self._talk_bytes_sent + sum(bulk.bytes_sent for bulk in self._bulks) + sum(list(self.bytes_fed.values()))

    @property
    def bytes_received(self) -> int:
        return self._talk_bytes_received + sum(bulk.bytes_received for bulk in self._bulks) + self._bytes_elsewhere

    @property
    def payload_bytes_max(self) -> int:
        return self._inbox.payload_bytes_max

    @payload_bytes_max.setter
    def payload_bytes_max(self, value: int) -> None:
        self._inbox.payload_bytes_max = value

    @property
    def queue_bytes_max(self) -> int:
        return self._outbox.bytes_max

    @queue_bytes_max.setter
    def queue_bytes_max(self, value: int) -> None:
        self._outbox.bytes_max = value

    # Public

    def send(self, head: bytes, payload: Buffers | None = None, *, may_overtake: bool = False) -> None:
        """Raises nothing for what the peer or the network does: a link whose queue is full closes and calls its handler."""
        if self._reason is not None:
            return
        overflow = self._outbox.put(head, payload, may_overtake)
        if overflow is not None:
            self.close(overflow)
        elif payload is None:
            self._wake_writer()
        else:
            for bulk in self._senders:
                bulk.wake()

    def send_spread(self, head: bytes, parts: Sequence[Buffers]) -> None:
        """A message whose payload goes to the peer's feeds: to each its part, which may be empty, but not all of them."""
        if self._reason is not None:
            return
        overflow = self._outbox.put_spread(head, parts)
        if overflow is not None:
            self.close(overflow)
        for bulk in self._bulks[len(self._senders) :]:
            bulk.wake()

    @property
    def closed_here(self) -> bool:
        """We closed the link and may have dropped messages that the peer had sent before."""
        return self._close_frame is not None

    def send_elsewhere(self, head: bytes, total: int) -> int | None:
        """A message whose payload of `total` bytes other processes send (`feed.py`). The number of its bulk message, which they
        need; None if the link is closed."""
        if self._reason is not None:
            return None
        number = self._outbox.put_elsewhere(head, total)
        if number is None:
            self.close("the send queue is full")
        else:
            self._wake_writer()
        return number

    def close(self, reason: str, timeout: float = CLOSE_SECONDS, *, refused: bool = False) -> None:
        """Drops the queue and sends the peer the reason. To leave without losing messages, `drain` first and give a timeout
        that lets the drained bytes arrive. `refused`: a message of the peer is the reason, and it is told so."""
        self._in_loop(self._end, reason, pack(BYE, MESSAGE_REFUSED if refused else 0, body=(_encoded(reason),)), timeout)

    def used(self, nbytes: int) -> None:
        """From any thread: so many bytes of payloads that arrived are not needed any more. Where `unused_bytes_max` is set, what
        is beyond it is not read before."""
        for reader in self._inbox.used(nbytes):
            self._bulks[reader].wake()

    async def drain(self) -> None:
        """Waits until the system accepted everything sent so far, or the link is closed."""
        wanted = self._outbox.put_count
        while self._reason is None and not self._outbox.has_written(wanted):
            await self._sent.wait()

    async def wait_closed(self) -> None:
        """Waits until the link is closed and its connections are released."""
        await self._released.wait()

    # For the two makers of links: the server and `dial`

    def begin(self, talk: FrameStream, bulks: Sequence[BulkConnection], fed: Sequence[BulkConnection] = ()) -> None:
        """`fed`: connections with the peer's feeds."""
        self._senders, self._bulks, self.feeds = bulks, [*bulks, *fed], len(fed)
        self._inbox.readers = len(self._bulks)
        self._handler.opened(self)
        self._inbox.takes_spread = self.on_spread is not None
        jobs: list[Coroutine[Any, Any, None]] = [self._write_talk(talk), self._read_talk(talk), self._watch()]
        self._tasks = [asyncio.create_task(job) for job in jobs]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        for reader, bulk in enumerate(self._bulks):
            bulk.begin(self if reader < len(bulks) else _WithFeed(self, reader - len(bulks)), reader)

    async def run_until_closed(self) -> None:
        """Cancelling this coroutine breaks the link."""
        try:
            await self._ended.wait()
        finally:
            self._end("the connection broke (it was cancelled)", None)
            try:
                self._handler.closed(self, self._reason or "")
                await self._send_close_frame()
            finally:
                for task in self._tasks:
                    task.cancel()
                for bulk in self._bulks:
                    bulk.close()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                self._released.set()

    def part_came(self, number: int, nbytes: int) -> None:
        """A feed has its part of a spread message."""
        self._bytes_elsewhere += nbytes
        if self._reason is None:
            try:
                self._inbox.part_came(number, nbytes)
            except Violation as violation:
                return self._refuse(violation)
            self._deliver()
        return None

    def connection_lost(self, why: str) -> None:
        self._end(self._peer_reason or f"the connection broke ({why})", None)

    def _wake_writer(self) -> None:
        """From any thread. A loop that was told and has not looked yet is not told again: that is a call of the system each."""
        if not self._writer_told:
            self._writer_told = True
            self._in_loop(self._let_writer_look)

    def _let_writer_look(self) -> None:
        self._writer_told = False  # before it looks: what is queued from now on tells it again
        self._to_send.notify_all()

    # The end

    def _in_loop(self, function: Any, *arguments: Any) -> None:
        if threading.get_ident() == self._thread:
            function(*arguments)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the link with it
            self._loop.call_soon_threadsafe(function, *arguments)

    def _end(self, reason: str, farewell: bytes | None, timeout: float = CLOSE_SECONDS) -> None:
        if self._reason is not None:
            return
        self._reason, self._close_frame, self._close_timeout = reason, farewell, timeout
        self._ended.set()
        for notifier in (self._to_send, self._sent, self._delivered):
            notifier.notify_all()

    async def _send_close_frame(self) -> None:
        if self._close_frame is None or not self._tasks:
            return
        writer, reader = self._tasks[:2]
        await asyncio.wait({writer}, timeout=self._close_timeout)
        if writer.done():
            await asyncio.wait({reader}, timeout=self._close_timeout)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self._failed(StreamBroken("the peer went away") if error is None else error)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, Violation):
            self._refuse(error)
        elif isinstance(error, StreamBroken):
            self.connection_lost(str(error))
        else:
            self._end(f"a bug here: {error!r}", pack(BYE, body=(b"a bug",)))
            self._loop.call_exception_handler({"message": f"in {self!r}", "exception": error})

    def _refuse(self, violation: Violation) -> None:
        if self._reason is None:
            self.refused[violation.kind] += 1
            self._end(f"the peer broke the rules: {violation}", pack(BYE, FRAME_REFUSED, body=(_encoded(str(violation)),)))

    async def _write(self, stream: FrameStream, frame: bytes) -> None:
        """A peer may be alive and read nothing: what is queued for it would stay in memory."""
        try:
            async with asyncio.timeout(self._limits.unread_seconds):
                await stream.write(frame)
        except TimeoutError:
            raise StreamBroken(f"the peer read nothing for {self._limits.unread_seconds:g} s") from None

    # The talk stream

    async def _write_talk(self, talk: FrameStream) -> None:
        while self._reason is None:
            frame = self._outbox.next_message()
            if frame is not None:
                await self._write(talk, frame)
                self._outbox.wrote_message()
                self._talk_bytes_sent += len(frame)
                self.messages_sent += 1
                self._sent.notify_all()
            elif self._pulse_is_due:
                await self._write(talk, pack(PULSE))
            else:
                await self._to_send.wait()
                continue
            self._pulse_is_due = False  # any frame does a pulse's job
        if self._close_frame is not None:
            await talk.write(self._close_frame)

    async def _read_talk(self, talk: FrameStream) -> None:
        """Reads on after a violation: the end of this stream shows that the peer has read the reason."""
        while (data := await talk.read()) is not None:
            self._talk_bytes_received += len(data)
            try:
                if self._is_close(data):
                    return await self._finish_inbox()
            except Violation as violation:
                self._refuse(violation)
            while self._inbox.is_full and self._reason is None:
                await self._delivered.wait()

    def _is_close(self, data: bytes) -> bool:
        frame = unpack(data)
        if frame.kind == BYE:
            words = bytes(frame.body[: 4 * REASON_CHARACTERS_MAX]).decode("utf8", "replace")
            self.refused_by_peer = frame.number == MESSAGE_REFUSED
            plain = words if self.refused_by_peer else f"the peer closed: {words}"
            self._peer_reason = f"refused: {words}" if frame.number == FRAME_REFUSED else plain
            return True
        if frame.kind == PULSE and not frame.body:
            return False
        if self._reason is None:
            self._inbox.message(frame)
            self._deliver()
        return False

    async def _finish_inbox(self) -> None:
        """A head is written after its chunks, so held messages wait only for chunks that were already sent. The chunks
        arrive, or their streams end, or nothing arrives at all and `_watch` notices."""
        while self._reason is None and not self._inbox.is_empty:
            await self._delivered.wait()
        self._end(self._peer_reason, None)

    def _deliver(self) -> None:
        moved = False
        while self._reason is None and (message := self._inbox.deliver_next()) is not None:
            moved = True
            self.messages_received += 1
            head, payload = message
            if isinstance(payload, Elsewhere):
                assert self.on_spread is not None
                self.on_spread(self, head, payload)
            else:
                self._handler.arrived(self, head, payload)
        if moved:
            self._make_room()
            self._delivered.notify_all()

    def _make_room(self) -> None:
        """From any thread."""
        for reader in self._inbox.take_waiting():
            self._bulks[reader].wake()

    async def _watch(self) -> None:
        """Counts turns, not seconds: a process that was suspended for a minute finds the bytes of that minute at its next
        turn. A full inbox reads nothing, so silence is then not the peer's fault."""
        silent_pulses = 0
        while self._reason is None:
            before = self.bytes_received
            await asyncio.sleep(self._limits.pulse_seconds)
            self._pulse_is_due = True
            self._to_send.notify_all()
            silent_pulses = 0 if self.bytes_received > before or self._inbox.is_full else silent_pulses + 1
            if silent_pulses == SILENT_PULSES_MAX:
                self.connection_lost(f"nothing came for {SILENT_PULSES_MAX * self._limits.pulse_seconds:g} s")

    # The bulk connections, each in its thread

    def next_chunk(self, now: float) -> Chunk | None:
        return self.next_chunk_of(None, now)

    def next_chunk_of(self, feed: int | None, now: float) -> Chunk | None:
        return self._outbox.next_chunk(now, feed) if self._reason is None else None

    def chunk_sent(self, chunk: Chunk, now: float) -> None:
        transfer = self._outbox.mark_sent(chunk)
        if transfer is not None:
            if transfer.total > self._limits.chunk_bytes and transfer.started is not None:
                self.bulk_bytes_per_second_up = transfer.total / max(now - transfer.started, 1e-9)
            self._wake_writer()

    def claim(self, chunk: ChunkHeader, now: float, reader: int) -> memoryview | None:
        return self._inbox.claim(chunk, now, reader) if self._reason is None else None

    def chunk_received(self, chunk: ChunkHeader, now: float) -> None:
        assembly = self._inbox.received(chunk)
        self._make_room()
        if assembly is not None:
            if assembly.total > self._limits.chunk_bytes:
                self.bulk_bytes_per_second_down = assembly.total / max(now - assembly.started, 1e-9)
            self._in_loop(self._deliver)

    def connection_failed(self, error: BaseException) -> None:
        self._in_loop(self._failed, error)


class _WithFeed:
    """A link, for its connection with one of the peer's feeds."""

    def __init__(self, link: Link, feed: int) -> None:
        self._link, self._feed = link, feed
        self.chunk_sent, self.claim = link.chunk_sent, link.claim
        self.chunk_received, self.connection_failed = link.chunk_received, link.connection_failed

    def next_chunk(self, now: float) -> Chunk | None:
        return self._link.next_chunk_of(self._feed, now)


def _encoded(reason: str) -> bytes:
    return reason[:REASON_CHARACTERS_MAX].encode("utf8")
