"""Helpers around an asyncio loop: a deadline timer, a queue of a link's messages, a loop in a thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

from atoll.errors import UserError
from atoll.ids import SECOND, Nanos
from atoll.runtime.clock import Clock
from atoll.transport import Elsewhere, Link

DAY_SECONDS = 86_400.0
_Data = TypeVar("_Data", bound=memoryview | Elsewhere)
"""What comes with a message: for a syncer whose shards receive, they may have it."""


class DeadlineTimer:
    """Calls back when the machine's deadline has come. `set` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._clock = clock
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def set(self, deadline: Nanos | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set, deadline)

    def _set(self, deadline: Nanos | None) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if deadline is not None:
            self._handle = self._loop.call_later(max(0, deadline - self._clock.now()) / SECOND, self._callback)

    def stop(self) -> None:
        self._set(None)


class DailyWarnings:
    """Logs sentences once a day: certificates expire while a run goes on. UserError: they cannot be used any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: logging.Logger, warnings: Callable[[], Iterable[str]]) -> None:
        self._loop = loop
        self._log = log
        self._warnings = warnings
        self._handle = loop.call_later(DAY_SECONDS, self._warn)

    def _warn(self) -> None:
        try:
            found = list(self._warnings())
        except UserError as error:
            found = [str(error)]
        for sentence in found:
            self._log.warning("%s", sentence)
        self._handle = self._loop.call_later(DAY_SECONDS, self._warn)

    def stop(self) -> None:
        self._handle.cancel()


class MessageQueue(Generic[_Data]):
    """Processes a link's messages one after the other, in its own task."""

    def __init__(
        self, link: Link, take: Callable[[Link, bytes, _Data | None], Awaitable[None]],
        failed: Callable[[BaseException], None], *, messages_max: int = 4096, bytes_max: int = 1 << 62,
    ) -> None:  # fmt: skip
        self.link = link
        self._take = take
        self._failed = failed
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._waiting_bytes = 0
        self._inbox: asyncio.Queue[tuple[bytes, _Data | None] | None] = asyncio.Queue()
        """None marks the end."""
        self._on_finished: Callable[[], None] | None = None
        self._task = asyncio.get_running_loop().create_task(self._process())
        self._task.add_done_callback(self._ended)

    def put(self, head: bytes, data: _Data | None) -> None:
        """Closes the link if the peer sends faster than its messages are processed: the queue must not fill memory."""
        self._waiting_bytes += _bytes_here(data)
        if self._inbox.qsize() >= self._messages_max or self._waiting_bytes > self._bytes_max:
            self.link.close("refused: it sends faster than its messages are processed")
            return
        self._inbox.put_nowait((head, data))

    async def _process(self) -> None:
        while (message := await self._inbox.get()) is not None:
            head, data = message
            nbytes = _bytes_here(data)
            await self._take(self.link, head, data)
            del message, head, data  # while it waits for the next one, their memory is free
            self._waiting_bytes -= nbytes
            if nbytes:
                self.link.used(nbytes)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)
        if self._on_finished is not None and not task.cancelled():
            self._on_finished()

    def finish(self, on_finished: Callable[[], None]) -> None:
        """The link is closed. Processes what it delivered, then calls `on_finished`."""
        if self._task.done():
            on_finished()
        else:
            self._on_finished = on_finished
            self._inbox.put_nowait(None)

    def cancel(self) -> None:
        """Drops the remaining messages."""
        self._task.cancel()


def _bytes_here(data: memoryview | Elsewhere | None) -> int:
    return data.nbytes if isinstance(data, memoryview) else 0


class LoopThread:
    """An asyncio loop in its own thread."""

    def __init__(self, name: str = "network") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        """Lets tasks that are closing connections finish first: asyncio warns about a loop closed under its tasks."""
        self.run(self._finish_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5.0)
        self.loop.close()

    @staticmethod
    async def _finish_tasks() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=2.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
