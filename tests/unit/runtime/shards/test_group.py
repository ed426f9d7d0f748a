"""The coordinator's side of its shards, without their processes."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.runtime.shards import group as group_module
from atoll.runtime.shards.group import ShardGroup, ShardStarter


def test_shard_that_hangs_is_named_and_one_that_works_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "SLOW_SECONDS", 0.2)
    monkeypatch.setattr(group_module, "DIAL_SECONDS", 0.02)
    group = ShardGroup(tmp_path, "run", 2, 1, ShardStarter())
    works, hangs = SimpleNamespace(number=0, asked_at=None), SimpleNamespace(number=1, asked_at=time.monotonic())
    group.shards = [works, hangs]  # type: ignore[list-item]
    watching = threading.Thread(target=group._watch)
    with caplog.at_level(logging.WARNING, "atoll.syncer"):
        watching.start()
        until = time.monotonic() + 10.0
        while not caplog.records and time.monotonic() < until:
            works.asked_at = time.monotonic()
            time.sleep(0.01)
    group.shards.clear()
    group.close()
    watching.join(10.0)
    (line,) = caplog.records
    assert line.message.startswith("shard 1 has not answered for 0 s; rounds wait") and not watching.is_alive()
