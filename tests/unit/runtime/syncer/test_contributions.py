"""What becomes of a contribution's bytes before the machine hears of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.executor.sharded import PartFound, ShardedSyncer, ShardLost
from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import Contribution
from atoll.runtime.syncer.contributions import Contributions
from atoll.transport import Elsewhere

BODY = Contribution(1, 0, 4, 0, 4, 64, 4, 64)
PARTS = Elsewhere(7, 100)


class Shards:
    """The coordinator's `ShardFeeds`, and what it was told."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked = asyncio.Event()
        self.dropped: list[int] = []

    def own_parts(self, link: object, parts: Elsewhere) -> object:
        return object()

    async def judged(self, link: object, parts: Elsewhere, body: Contribution, *, by_value: bool = False) -> Any:
        self.asked.set()
        return await self.answer if asyncio.isfuture(self.answer) else self.answer

    def drop(self, link: object, parts: Elsewhere) -> None:
        self.dropped.append(parts.number)


class Failing(ShardedSyncer):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def judge(self, body: Contribution, parts: object) -> Any:
        raise self.error


def reader(feeds: Shards, error: Exception) -> Contributions:
    asked_for = SimpleNamespace(objection=lambda learner, body: None)
    directory = SimpleNamespace(feeds=feeds, executor=Failing(error), machine=SimpleNamespace(rounds={1: asked_for}))
    return Contributions(directory, lambda: False, lambda reason: None, lambda: None)  # type: ignore[arg-type]


def test_bug_while_a_part_is_judged_ends_the_peers_connection_and_not_the_syncer() -> None:
    async def story() -> None:
        found = await reader(Shards([PartFound("", None)]), ValueError("odd bytes")).read(None, 0, BODY, PARTS)  # type: ignore[arg-type]
        assert found is not None and found[1].flaw is not None
        assert found[1].flaw.why is Why.POISONED and "odd bytes" in str(found[1].flaw)

    asyncio.run(story())


def test_lost_shard_is_no_fault_of_the_peers() -> None:
    async def story() -> None:
        feeds = Shards([PartFound("", None)])
        with pytest.raises(ShardLost):
            await reader(feeds, ShardLost("shard 1 is gone")).read(None, 0, BODY, PARTS)  # type: ignore[arg-type]
        assert feeds.dropped == [7]

    asyncio.run(story())


def test_parts_are_dropped_when_nobody_waits_for_their_judgement_any_more() -> None:
    """The task that was cancelled may be kept, and the payload with it."""

    async def story() -> None:
        feeds = Shards(asyncio.get_running_loop().create_future())
        reading = asyncio.create_task(reader(feeds, ValueError()).read(None, 0, BODY, PARTS))  # type: ignore[arg-type]
        await feeds.asked.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert feeds.dropped == [7]

    asyncio.run(story())
