"""Small things around an asyncio loop, and a log that strangers cannot fill."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from atoll.ids import SECOND, Nanos
from atoll.runtime.clock import Clock
from atoll.transport import Link


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

    def put(self, head: bytes, data: memoryview | None) -> None:
        """A peer that sends more than was asked of it waits in nobody's memory."""
        self._waiting_bytes += data.nbytes if data is not None else 0
        if self._inbox.qsize() >= self._messages_max or self._waiting_bytes > self._bytes_max:
            self.link.close("refused: it sends faster than it is listened to")
            return
        self._inbox.put_nowait((head, data))

    async def _listen(self) -> None:
        while (message := await self._inbox.get()) is not None:
            head, data = message
            await self._take(self.link, head, data)
            self._waiting_bytes -= data.nbytes if data is not None else 0

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


class Loop:
    """An asyncio loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="network", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        """What is still closing its connections may end; a loop that is closed under its tasks complains."""
        self.run(self._settle())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5.0)
        self.loop.close()

    @staticmethod
    async def _settle() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=2.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
