"""What came before a connection was lost is taken before the loss is."""

from __future__ import annotations

import asyncio
from typing import Any

from atoll.runtime.loop import MessageQueue


class Reader:
    """Takes messages, each once `gate` is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.told: list[Any] = []

    async def take(self, _: Any, head: bytes, __: memoryview | None) -> None:
        await self.gate.wait()
        if head == b"garbage":
            raise ValueError("garbage")
        self.told.append(head)

    def queue(self) -> MessageQueue:
        link: Any = None
        return MessageQueue(link, self.take, lambda error: self.told.append(str(error)))

    def lost(self) -> None:
        self.told.append("lost")


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_what_waits_is_taken_and_then_the_loss_is_told() -> None:
    async def story() -> None:
        reader = Reader()
        queue = reader.queue()
        for head in (b"contribution", b"goodbye"):
            queue.put(head, None)
        await settled()
        queue.finish(reader.lost)
        await settled()
        assert reader.told == []
        reader.gate.set()
        await settled()
        assert reader.told == [b"contribution", b"goodbye", "lost"]

    asyncio.run(story())


def test_a_loss_is_told_also_when_nothing_waits_and_when_what_waits_is_garbage() -> None:
    async def story() -> None:
        for heads, told in (([], ["lost"]), ([b"garbage", b"more"], ["garbage", "lost"])):
            reader = Reader()
            reader.gate.set()
            queue = reader.queue()
            for head in heads:
                queue.put(head, None)
            queue.finish(reader.lost)
            await settled()
            assert reader.told == told

    asyncio.run(story())


def test_mail_that_is_over_takes_nothing_more_and_tells_nobody() -> None:
    async def story() -> None:
        reader = Reader()
        queue = reader.queue()
        queue.put(b"goodbye", None)
        await settled()
        queue.finish(reader.lost)
        queue.cancel()
        reader.gate.set()
        await settled()
        assert reader.told == []

    asyncio.run(story())


def test_mail_whose_reader_failed_before_the_loss_tells_it_nevertheless() -> None:
    async def story() -> None:
        reader = Reader()
        reader.gate.set()
        queue = reader.queue()
        queue.put(b"garbage", None)
        await settled()
        assert reader.told == ["garbage"]
        queue.finish(reader.lost)
        await settled()
        assert reader.told == ["garbage", "lost"]

    asyncio.run(story())
