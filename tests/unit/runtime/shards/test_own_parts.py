"""Contributions in parts: from a learner to the shards, and the words about them to the coordinator; all in this process."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import numpy as np
import torch
from transport_peers import Recorder, admit, credentials_of, run, started

from atoll.codecs import codec
from atoll.config import load
from atoll.executor.merging import FragmentMerger
from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import Contribution
from atoll.runtime import payload as wire
from atoll.runtime.ranks.channel import RankChannel
from atoll.runtime.shards.feeding import MISSING, Feeding, HandedOver, HeldParts, OwnStripes
from atoll.runtime.shards.feeds import ShardFeeds
from atoll.runtime.shards.messages import ToCoordinator, ToShard
from atoll.store.versions import MemoryVersions
from atoll.tensors.layout import Fragment
from atoll.tensors.norms import tree_sum
from atoll.tensors.stripes import stripe_bounds
from atoll.transport import Elsewhere, Link, LinkLimits, Server, dial

CONFIG = load(preset_name="decoupled", overrides={"protocol": {"codec_up": "int8"}})
NUMEL, SMALL = 5000, 700
"""The second fragment is in one stripe: the other shard has nothing of it."""
WHOLE = [Fragment(0, (), (), NUMEL, 2), Fragment(1, (), (), SMALL, 0)]
MERGER = FragmentMerger(CONFIG, WHOLE, warm_up=False)


def stripes(shard: int) -> list[Fragment]:
    bounds = [list(pairwise(stripe_bounds(f.numel, 2)))[shard] for f in WHOLE]
    return [
        Fragment(f.id, (), (), last - first, f.buffer_numel if shard == 0 else 0)
        for f, (first, last) in zip(WHOLE, bounds, strict=True)
    ]


class Shard:
    def __init__(self, number: int) -> None:
        self.handed = HandedOver()
        self.door = self.handed.path
        self.parts = HeldParts(CONFIG, stripes(number), MERGER)
        self._number = number

    def feeds(self) -> RankChannel:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs = RankChannel(listener.accept()[0], ToShard)
        nothing = OwnStripes(CONFIG, WHOLE, self._number, 2, MemoryVersions([]))
        self.handed.feeding = Feeding(theirs, nothing, self.parts, None, len(WHOLE), LinkLimits())
        return RankChannel(ours, ToCoordinator)

    @property
    def holds(self) -> list[int]:
        return sorted(number for _, number in self.parts._held)


class Coordinator(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.feeds: ShardFeeds
        self.spread: list[Elsewhere] = []

    def opened(self, link: Link) -> None:
        super().opened(link)
        self.feeds.take_from(link)
        link.on_spread = self.taken

    def taken(self, link: Link, head: bytes, part: Elsewhere) -> None:
        self.spread.append(part)
        self._notifier.notify_all()


@asynccontextmanager
async def coordinated() -> AsyncIterator[tuple[Coordinator, list[Shard], Link]]:
    there, shards = Coordinator(), [Shard(0), Shard(1)]
    there.feeds = ShardFeeds(shards, WHOLE)
    server = Server(there, admit, LinkLimits())
    there.feeds.begin(server, lambda error: None)
    async with started(server) as address:
        link = await dial(address, Recorder(), peer="syncer", metadata=credentials_of("a"))
        try:
            yield there, shards, link
        finally:
            there.feeds.close()
            for shard in shards:
                shard.handed.close()


def contribution(p: int) -> Contribution:
    return Contribution(1, p, 4, 0, 4, 64, 4, 64)


def send(link: Link, p: int, seed: int, *, bad: bool = False) -> float:
    """Its norm."""
    fragment = WHOLE[p]
    packet = codec("int8").encode(torch.randn(fragment.numel, generator=torch.Generator().manual_seed(seed)))
    buffers = torch.full((fragment.buffer_numel,), math.nan if bad else 1.0)
    parts = wire.to_stripes(Payload("packet", 0, (packet, buffers)), link.feeds)
    assert parts is not None
    link.send_spread(b"head", parts)
    return MERGER.norm(packet)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():
            await asyncio.sleep(0.01)


def test_shards_hold_what_they_have_looked_at_as_long_as_the_coordinator_does() -> None:
    async def story() -> None:
        async with coordinated() as (there, shards, link):
            norms = [send(link, p, seed) for p, seed in ((0, 1), (1, 2), (0, 3))]
            theirs = there.links[0]
            kept = []
            for index, (p, norm) in enumerate(zip((0, 1, 0), norms, strict=True)):
                await there.until(lambda index=index: len(there.spread) > index)  # type: ignore[misc]
                part = there.spread[index]
                kept.append(there.feeds.own_parts(theirs, part))
                answers = await there.feeds.judged(theirs, part, contribution(p))
                assert answers is not None and not any(answer.flaw for answer in answers)
                leaves = [answer.leaves for answer in answers if answer.leaves is not None]
                assert math.sqrt(tree_sum(np.concatenate(leaves))) == norm
                again = await there.feeds.judged(theirs, part, contribution(p), by_value=True)
                assert again is not None and all(answer.leaves is not None for answer in again)
            assert [shard.holds for shard in shards] == [[0, 1, 2], [0, 1, 2]]
            del kept[1]
            gc.collect()
            await until(lambda: [shard.holds for shard in shards] == [[0, 2], [0, 2]])

    run(story())


def test_part_that_nobody_wants_or_that_is_no_good_is_not_held() -> None:
    async def story() -> None:
        async with coordinated() as (there, shards, link):
            send(link, 0, 1)
            send(link, 0, 2, bad=True)
            send(link, 1, 3)
            await there.until(lambda: len(there.spread) == 2)
            theirs = there.links[0]
            there.feeds.pass_over(theirs, there.spread[0], contribution(0))
            flawed = await there.feeds.judged(theirs, there.spread[1], contribution(0))
            assert flawed is not None and "NaN or Inf" in flawed[0].flaw and not flawed[1].flaw
            await there.until(lambda: len(there.spread) == 3)
            other = await there.feeds.judged(theirs, there.spread[2], contribution(0))
            assert other is not None, "it says another fragment"
            assert other[0].flaw == MISSING and "a part of 712 bytes is none of 2952 numbers by int8" in other[1].flaw
            assert 0 not in shards[0].holds + shards[1].holds and shards[0].holds == []

    run(story())


def test_link_that_is_closed_here_tells_why_before_the_shards_let_it_go() -> None:
    async def story() -> None:
        for turn in range(6):
            async with coordinated() as (there, _, link):
                (theirs,) = there.links
                for _ in range(8):
                    theirs.send(bytes(1 << 19))
                theirs.close(f"reason {turn}", timeout=5.0)
                there.feeds.let_go(theirs)  # as a syncer does, which processes no more of its messages
                async with asyncio.timeout(30.0):
                    await link.wait_closed()
                assert f"the peer closed: reason {turn}" in repr(link)
                await until(lambda: not there.feeds._used and not there.feeds._forgotten)

    run(story())


def test_whole_parts_of_a_link_that_is_over_count_until_it_is_let_go() -> None:
    async def story() -> None:
        async with coordinated() as (there, shards, link):
            norm = send(link, 0, 1)
            send(link, 0, 2)
            await link.drain()
            link.close("over", timeout=5.0)
            await there.until(lambda: bool(there.reasons))
            theirs = there.links[0]
            answers = await there.feeds.judged(theirs, there.spread[0], contribution(0))
            assert answers is not None
            leaves = [answer.leaves for answer in answers if answer.leaves is not None]
            assert math.sqrt(tree_sum(np.concatenate(leaves))) == norm
            there.feeds.let_go(theirs)
            assert await there.feeds.judged(theirs, there.spread[1], contribution(0)) is None
            assert [shard.holds for shard in shards] == [[0], [0]], "what the coordinator has not dropped stays"

    run(story())
