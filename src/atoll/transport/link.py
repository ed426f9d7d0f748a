"""One link to one peer: a talk stream for messages, bulk streams for the chunks of payloads.

Four or more tasks share it, all in one loop: per stream one that reads and one that writes. The first of them to end ends
the link, with its reason. Who closes a link says so in a last frame and then waits a moment for the peer to go, because
the streams are different connections: if they were torn down at once, the peer might see a broken bulk stream before it
reads the reason on the talk stream. For the same reason the last frame may come before chunks that were sent before it: the
peer hears them out, and only then is the link over.

A link lives while something comes on any of its streams. So that something does, each end sends a pulse on the talk stream
every few seconds. Nobody answers a pulse: an answer in time says that a link is quick, and a slow one would be taken for dead.
However long the queue that pulses pass through, they come out of it as often as they went in.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Protocol

from atoll.transport.frames import BYE, PULSE, Frame, Limits, Payload, Violation, pack, unpack
from atoll.transport.inbox import Inbox
from atoll.transport.outbox import Outbox
from atoll.transport.wire import Stream, StreamBroken

FAREWELL_SECONDS: Final = 1.0
REASON_CHARACTERS_MAX: Final = 1000
UNHEARD_MAX: Final = 3
"""Pulses in a row; a dead link is noticed after two to four of them."""


class Handler(Protocol):
    """Who is told. Called in the loop's thread, in order, per link."""

    def opened(self, link: Link) -> None: ...

    def arrived(self, link: Link, head: bytes, payload: memoryview | None) -> None:
        """The payload is one contiguous buffer that belongs to whoever is told."""

    def closed(self, link: Link, reason: str) -> None:
        """Exactly once after opened."""


class Bell:
    """Wakes everybody who waits. Looking and waiting happen in the loop's thread with no await in between, and it is rung
    there too, so nobody misses a ring."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def ring(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter


class Link:
    """`send` and `close` are for any thread; everything else belongs to the loop's."""

    def __init__(self, peer: str, handler: Handler, limits: Limits, refused: Counter[str] | None = None) -> None:
        self.peer = peer
        self.refused: Counter[str] = Counter() if refused is None else refused
        """What the peer did that it must not, by kind. A server's links share one."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.messages_sent = 0
        self.messages_received = 0
        self.bulk_bytes_per_second_up: float | None = None
        self.bulk_bytes_per_second_down: float | None = None
        """Of the last payload that had more than one chunk."""
        self._handler = handler
        self._limits = limits
        self._outbox = Outbox(limits)
        self._inbox = Inbox(limits, self.refused)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._to_send, self._handed, self._delivered = Bell(), Bell(), Bell()
        self._tasks: list[asyncio.Task[None]] = []
        self._bulk_count = 0
        self._waiting_readers = 0
        self._pulse_is_due = False
        self._ended = asyncio.Event()
        self._gone = asyncio.Event()
        self._reason: str | None = None
        self._farewell: bytes | None = None
        self._patience = FAREWELL_SECONDS
        self._last_word = ""
        """The peer's."""

    def __repr__(self) -> str:
        return f"<link to {self.peer}{f', ended: {self._reason}' if self._reason else ''}>"

    @property
    def payload_bytes_max(self) -> int:
        return self._inbox.payload_bytes_max

    @payload_bytes_max.setter
    def payload_bytes_max(self, value: int) -> None:
        self._inbox.payload_bytes_max = value

    # For everybody

    def send(self, head: bytes, payload: Payload | None = None, *, may_overtake: bool = False) -> None:
        """Never raises for what the peer or the network does: a link that cannot take more closes, and its handler is told."""
        if self._reason is not None:
            return
        overflow = self._outbox.put(head, payload, may_overtake)
        if overflow is None:
            self._in_loop(self._to_send.ring)
        else:
            self.close(overflow)

    @property
    def ended_here(self) -> bool:
        """By us, in so many words: what the peer said before may not have been listened to any more."""
        return self._farewell is not None

    def close(self, reason: str, patience: float = FAREWELL_SECONDS) -> None:
        """What is queued is dropped. The peer is told the reason if it still listens. To leave politely, `drain` first, and
        have the patience to let what was drained arrive."""
        self._in_loop(self._end, reason, pack(BYE, body=(_words(reason),)), patience)

    async def drain(self) -> None:
        """Until everything sent so far was handed to gRPC, or the link is over."""
        wanted = self._outbox.put_count
        while self._reason is None and not self._outbox.has_written(wanted):
            await self._handed.wait()

    async def gone(self) -> None:
        """Until the link was closed and all of its streams were let go of."""
        await self._gone.wait()

    # For the two who make links: the server and `dial`

    def begin(self, talk: Stream, bulks: Sequence[Stream]) -> None:
        self._bulk_count = len(bulks)
        self._handler.opened(self)
        jobs: list[Coroutine[Any, Any, None]] = [self._write_talk(talk), self._read_talk(talk)]
        for bulk in bulks:
            jobs += [self._write_bulk(bulk), self._read_bulk(bulk)]
        jobs.append(self._watch())
        self._tasks = [asyncio.create_task(job) for job in jobs]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def until_over(self) -> None:
        """Cancelling this breaks the link."""
        try:
            await self._ended.wait()
        finally:
            self._end("the connection broke (it was cancelled)", None)
            try:
                self._handler.closed(self, self._reason or "")
                await self._say_farewell()
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                self._gone.set()

    def broke(self, why: str) -> None:
        self._end(self._last_word or f"the connection broke ({why})", None)

    # The end

    def _in_loop(self, function: Any, *arguments: Any) -> None:
        if threading.get_ident() == self._thread:
            function(*arguments)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the link with it
            self._loop.call_soon_threadsafe(function, *arguments)

    def _end(self, reason: str, farewell: bytes | None, patience: float = FAREWELL_SECONDS) -> None:
        if self._reason is not None:
            return
        self._reason, self._farewell, self._patience = reason, farewell, patience
        self._ended.set()
        for bell in (self._to_send, self._handed, self._delivered):
            bell.ring()

    async def _say_farewell(self) -> None:
        if self._farewell is None or not self._tasks:
            return
        writer, reader = self._tasks[:2]
        await asyncio.wait({writer}, timeout=self._patience)
        if writer.done():
            await asyncio.wait({reader}, timeout=self._patience)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Violation):
            self._refuse(error)
        elif isinstance(error, StreamBroken) or error is None:
            self.broke("the peer went away" if error is None else str(error))
        else:
            self._end(f"a bug here: {error!r}", pack(BYE, body=(b"a bug",)))
            self._loop.call_exception_handler({"message": f"in {self!r}", "exception": error, "task": task})

    def _refuse(self, violation: Violation) -> None:
        if self._reason is None:
            self.refused[violation.kind] += 1
            self._end(f"the peer broke the rules: {violation}", pack(BYE, 1, body=(_words(str(violation)),)))

    # The talk stream

    async def _write_talk(self, talk: Stream) -> None:
        while self._reason is None:
            frame = self._outbox.next_message()
            if frame is not None:
                await talk.write(frame)
                self._outbox.wrote_message()
                self.bytes_sent += len(frame)
                self.messages_sent += 1
                self._handed.ring()
            elif self._pulse_is_due:
                await talk.write(pack(PULSE))
            else:
                await self._to_send.wait()
                continue
            self._pulse_is_due = False  # whatever was written says as much
        if self._farewell is not None:
            await talk.write(self._farewell)

    async def _read_talk(self, talk: Stream) -> None:
        """Reads on after a violation: the end of this stream tells that the peer has heard why."""
        while (data := await talk.read()) is not None:
            self.bytes_received += len(data)
            try:
                if self._is_last_word(data):
                    return await self._hear_out()
            except Violation as violation:
                self._refuse(violation)
            while self._inbox.is_full and self._reason is None:
                await self._delivered.wait()

    def _is_last_word(self, data: bytes) -> bool:
        frame = unpack(data)
        if frame.kind == BYE:
            words = bytes(frame.body[: 4 * REASON_CHARACTERS_MAX]).decode("utf8", "replace")
            self._last_word = f"refused: {words}" if frame.number else f"the peer closed: {words}"
            return True
        if frame.kind == PULSE and not frame.body:
            return False
        if self._reason is None:
            self._inbox.message(frame)
            self._deliver()
        return False

    async def _hear_out(self) -> None:
        """A head is written after its chunks, so what is held here waits for nothing but chunks that are on their way. They
        come, or their streams end, or nothing comes at all and `_watch` notices."""
        while self._reason is None and not self._inbox.is_empty:
            await self._delivered.wait()
        self._end(self._last_word, None)

    def _deliver(self) -> None:
        moved = False
        for head, payload in self._inbox.deliverable():
            moved = True
            self.messages_received += 1
            self._handler.arrived(self, head, payload)
            if self._reason is not None:
                break
        if moved:
            self._make_room()

    def _make_room(self) -> None:
        self._waiting_readers = 0
        self._delivered.ring()

    async def _watch(self) -> None:
        """Turns are counted, not seconds: a process that stood still for a minute finds what came in the meantime at its next
        turn. While the inbox is full nothing is read, so nothing can be heard, and that is not the peer's fault."""
        unheard = 0
        while self._reason is None:
            before = self.bytes_received
            await asyncio.sleep(self._limits.pulse_seconds)
            self._pulse_is_due = True
            self._to_send.ring()
            unheard = 0 if self.bytes_received > before or self._inbox.is_full else unheard + 1
            if unheard == UNHEARD_MAX:
                self.broke(f"nothing came for {UNHEARD_MAX * self._limits.pulse_seconds:g} s")

    # The bulk streams

    async def _write_bulk(self, bulk: Stream) -> None:
        while self._reason is None:
            chunk = self._outbox.next_chunk(self._loop.time())
            if chunk is None:
                await self._to_send.wait()
                continue
            await bulk.write(chunk.frame)
            self.bytes_sent += len(chunk.frame)
            if self._outbox.handed(chunk):
                transfer = chunk.transfer
                if transfer.total > self._limits.chunk_bytes and transfer.started is not None:
                    self.bulk_bytes_per_second_up = transfer.total / max(self._loop.time() - transfer.started, 1e-9)
                self._to_send.ring()
        # A stream that ended here would look broken to `_task_ended`; the link decides when it is let go of.
        await self._gone.wait()

    async def _read_bulk(self, bulk: Stream) -> None:
        while (data := await bulk.read()) is not None:
            self.bytes_received += len(data)
            if self._reason is not None:
                continue
            chunk = unpack(data)
            self._inbox.check(chunk)
            while self._inbox.holds(chunk) and self._reason is None:
                await self._wait_for_earlier(chunk)
            assembly = self._inbox.chunk(chunk, self._loop.time())
            if self._waiting_readers:
                self._make_room()
            if assembly is not None:
                if assembly.total > self._limits.chunk_bytes:
                    self.bulk_bytes_per_second_down = assembly.total / max(self._loop.time() - assembly.started, 1e-9)
                self._deliver()

    async def _wait_for_earlier(self, chunk: Frame) -> None:
        """Whoever rings counts the waiting anew: a reader that was woken and has not run yet is not waiting any more."""
        self._waiting_readers += 1
        if self._waiting_readers == self._bulk_count and self._inbox.is_stuck:
            raise Violation("order", f"a chunk of bulk message {chunk.number} at {chunk.at} came before those it follows")
        await self._delivered.wait()


def _words(reason: str) -> bytes:
    return reason[:REASON_CHARACTERS_MAX].encode("utf8")
