"""Small things around an asyncio loop, and a log that strangers cannot fill."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from atoll.ids import SECOND, Nanos
from atoll.runtime.clock import Clock
from atoll.transport import Link

LINES_PER_SECOND = 20.0
LINES_AT_ONCE = 200.0
LINE_MAX = 400


class _Hush(logging.Filter):
    """Peers decide how often they are refused and what their reasons are: so many lines a second, each of them one line of
    bounded length, and a count of those that were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._room = LINES_AT_ONCE
        self._at = time.monotonic()
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        self._room = min(LINES_AT_ONCE, self._room + (now - self._at) * LINES_PER_SECOND)
        self._at = now
        if self._room < 1:
            self._left_out += 1
            return False
        self._room -= 1
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text, record.exc_info = f"{text}: {record.exc_info[1]!r}", None
        text = "".join(c if c.isprintable() else "?" for c in text[:LINE_MAX]) + ("..." if len(text) > LINE_MAX else "")
        record.msg, record.args = text, ()
        if self._left_out:
            record.msg += f" ({self._left_out} lines of peers before this one were left out)"
            self._left_out = 0
        return True


def hushed(name: str) -> logging.Logger:
    log = logging.getLogger(name)
    if not any(isinstance(each, _Hush) for each in log.filters):
        log.addFilter(_Hush())
    return log


class Alarm:
    """Calls back once the machine's deadline has come. `set` is for any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._clock = clock
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None

    def set(self, deadline: Nanos | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set, deadline)

    def _set(self, deadline: Nanos | None) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if deadline is not None:
            self._handle = self._loop.call_later(max(0, deadline - self._clock.now()) / SECOND, self._ring)

    def stop(self) -> None:
        self._set(None)


class Mail:
    """Takes a link's messages one after the other, in a task of its own."""

    def __init__(
        self, link: Link, take: Callable[[Link, bytes, memoryview | None], Awaitable[None]],
        failed: Callable[[BaseException], None], *, messages_max: int = 4096, bytes_max: int = 1 << 62,
    ) -> None:  # fmt: skip
        self.link = link
        self._take = take
        self._failed = failed
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._waiting_bytes = 0
        self._inbox: asyncio.Queue[tuple[bytes, memoryview | None] | None] = asyncio.Queue()
        """None: no more will come."""
        self._then: Callable[[], None] | None = None
        self._task = asyncio.get_running_loop().create_task(self._listen())
        self._task.add_done_callback(self._ended)

    def put(self, head: bytes, payload: memoryview | None) -> None:
        """A peer that sends more than was asked of it waits in nobody's memory."""
        self._waiting_bytes += payload.nbytes if payload is not None else 0
        if self._inbox.qsize() >= self._messages_max or self._waiting_bytes > self._bytes_max:
            self.link.close("refused: it sends faster than it is listened to")
            return
        self._inbox.put_nowait((head, payload))

    async def _listen(self) -> None:
        while (message := await self._inbox.get()) is not None:
            head, payload = message
            await self._take(self.link, head, payload)
            self._waiting_bytes -= payload.nbytes if payload is not None else 0

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)
        if self._then is not None and not task.cancelled():
            self._then()

    def hear_out(self, then: Callable[[], None]) -> None:
        """The link is gone. What came on it is taken, then `then` is called."""
        if self._task.done():
            then()
        else:
            self._then = then
            self._inbox.put_nowait(None)

    def over(self) -> None:
        """Nobody listens any more."""
        self._task.cancel()
