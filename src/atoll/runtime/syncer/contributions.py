"""Reads the bytes of contributions, and inspects those that a round waits for.

Only requested contributions are inspected. The machine refuses all others whatever their bytes are, and a peer that sends many
must not cost the time of a norm each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from atoll.executor.sharded import ShardedSyncer, ShardLost
from atoll.ids import LearnerId
from atoll.protocol.interface import CLEAN, Finding, Payload
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Contribution
from atoll.runtime import payload as wire
from atoll.runtime.shards.feeds import ShardFeeds
from atoll.runtime.syncer.directory import SyncerDirectory
from atoll.store.tensor_files import StorageFailed
from atoll.transport import Elsewhere, Link

RETRY_SECONDS: Final = 1.0
"""Time between attempts to use a disk that refuses, or to listen."""
_Found = TypeVar("_Found")


class Contributions:
    def __init__(
        self, directory: SyncerDirectory, is_blocked: Callable[[], bool], block: Callable[[str], None],
        unblock: Callable[[], None],
    ) -> None:  # fmt: skip
        """`is_blocked`: the disk refuses bytes. `block` and `unblock` are told so."""
        self._directory = directory
        self._is_blocked, self._block, self._unblock = is_blocked, block, unblock

    async def read(
        self, link: Link, learner: LearnerId, body: Contribution, data: memoryview | Elsewhere
    ) -> tuple[Payload, Finding] | None:
        """None: the link is over, and was let go."""
        if isinstance(data, Elsewhere):
            return await self._read_parts(link, learner, body, data)
        quick = data.nbytes <= wire.QUICK_BYTES and self._is_expected(learner, body)
        read, loop = wire.packet_of_peer, asyncio.get_running_loop()
        payload, flaw = read(body, data) if quick else await loop.run_in_executor(None, read, body, data)
        if flaw is not None or not self._is_wanted(learner, body):
            return payload, Finding(flaw)
        return payload, await self._inspected(learner, body, partial(self._inspect, body, payload))

    async def _read_parts(
        self, link: Link, learner: LearnerId, body: Contribution, parts: Elsewhere
    ) -> tuple[Payload, Finding] | None:
        """The shards have it: they look at its parts, and keep them as long as the payload lives."""
        feeds, executor = self._directory.feeds, self._directory.executor
        assert feeds is not None and isinstance(executor, ShardedSyncer)
        payload = Payload("packet", parts.nbytes, feeds.own_parts(link, parts))
        if not self._is_wanted(learner, body):
            feeds.pass_over(link, parts, body)
            return payload, CLEAN
        try:
            return await self._judged(feeds, executor, link, learner, body, parts, payload)
        except BaseException:  # a cancelled task may keep the payload for long
            feeds.drop(link, parts)
            raise

    async def _judged(
        self, feeds: ShardFeeds, executor: ShardedSyncer, link: Link, learner: LearnerId, body: Contribution, parts: Elsewhere,
        payload: Payload,
    ) -> tuple[Payload, Finding] | None:  # fmt: skip
        for by_value in (False, True):
            judged = await feeds.judged(link, parts, body, by_value=by_value)
            if judged is None:
                return None
            found = await self._inspected(learner, body, partial(_guarded, partial(executor.judge, body, judged)))
            if found is not None:
                return payload, found
        raise AssertionError("the squares of values always tell a norm")

    async def _inspected(self, learner: LearnerId, body: Contribution, inspect: Callable[[], _Found]) -> _Found | Finding:
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(None, inspect)
            except StorageFailed as error:  # to inspect it, a version has to be read
                self._block(str(error))
                await asyncio.sleep(RETRY_SECONDS)
                self._unblock()
            if not self._is_wanted(learner, body):
                return CLEAN

    def _is_wanted(self, learner: LearnerId, body: Contribution) -> bool:
        return self._is_blocked() or self._is_expected(learner, body)

    def _is_expected(self, learner: LearnerId, body: Contribution) -> bool:
        round_ = self._directory.machine.rounds.get(body.outer_step)
        return round_ is not None and round_.objection(learner, body) is None

    def _inspect(self, body: Contribution, payload: Payload) -> Finding:
        assert self._directory.executor is not None
        return _guarded(partial(self._directory.executor.inspect, body, payload))


def _guarded(inspect: Callable[[], _Found]) -> _Found | Finding:
    try:
        return inspect()
    except (StorageFailed, ShardLost):
        raise
    except Exception as error:  # a peer's bytes may end its connection, never the syncer
        return Finding(Reason(Why.POISONED, f"bytes that cannot be used: {error!r}"[: wire.FLAW_MAX]))
