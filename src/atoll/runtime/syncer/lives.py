"""A syncer's process from its start to the run's end. With shards it may have several lives: one that loses a shard stops, and
the next goes on in the same directory, as a syncer that was killed does. Learners train on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterable
from typing import Final

from atoll.errors import RunFailed
from atoll.executor.sharded import ShardLost
from atoll.runtime.metrics import MetricsAt
from atoll.runtime.shards.group import ShardStarter
from atoll.runtime.syncer.directory import SyncerDirectory
from atoll.runtime.syncer.metrics import syncer_metrics
from atoll.runtime.syncer.process import SyncerProcess
from atoll.transport import ServerCredentials

log = logging.getLogger("atoll.syncer")

STABLE_SECONDS: Final = 60.0
LOST_MAX: Final = 5
"""A syncer ends after so many lives in a row that lost a shard, each shorter than this."""


def run_lives(
    open_home: Callable[[ShardStarter], SyncerDirectory], starter: ShardStarter, listen: str,
    credentials: ServerCredentials | None, key_warnings: Callable[[], Iterable[str]], bulk_port: int | None,
    metrics: MetricsAt | None, obey: Callable[[Callable[[], object]], None] | None,
) -> None:  # fmt: skip
    """`obey` calls what it is given when the launcher ends."""
    stops: list[Callable[[], object]] = []
    if obey is not None:
        obey(lambda: stops[-1]() if stops else None)
    short = 0
    with contextlib.closing(starter):
        while True:
            began = time.monotonic()
            try:
                home = open_home(starter)
                try:
                    process = SyncerProcess(home, listen, credentials, key_warnings, bulk_port)
                    with syncer_metrics(metrics, process, home):
                        asyncio.run(_life(process, stops))
                    return
                finally:
                    listen = process.address or listen  # a free port that was taken once is known to the learners
                    home.close(complete=False)
            except ShardLost as lost:
                short = short + 1 if time.monotonic() - began < STABLE_SECONDS else 1
                if short == LOST_MAX:
                    raise RunFailed(f"{lost}; {short} times in a row within {STABLE_SECONDS:.0f} s of a start") from None
                log.warning("%s; its stripes come back from its folder, and rounds in flight are gathered again", lost)


async def _life(process: SyncerProcess, stops: list[Callable[[], object]]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stop)
    stops.append(lambda: loop.call_soon_threadsafe(process.stop))
    await process.run()
