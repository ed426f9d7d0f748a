"""A learner that has a place uploads models that are none, as large as it likes and on several connections: the bytes go to the
disk, one upload at a time, and the memory of the syncer does not notice."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from thread_syncer import Syncer, custom

from atoll.runtime.learner.address import Address, request_place
from atoll.transport import Refused, upload

MEGABYTE = bytes(1 << 20)
UPLOAD_BYTES_MAX = 96 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_uploads_that_are_no_models_go_to_the_disk_one_at_a_time(tmp_path: Path) -> None:
    syncer = Syncer(tmp_path, custom(limits={"upload_bytes_max": UPLOAD_BYTES_MAX}))

    async def attack(megabytes: int) -> Refused:
        with pytest.raises(Refused) as refused:
            await upload(syncer.address, "Upload", shown, [MEGABYTE] * megabytes)
        return refused.value

    async def story() -> tuple[list[Refused], int]:
        nonlocal shown
        address = Address(syncer.address, (tmp_path / "token").read_text())
        placement = await request_place(address, 0, random.Random(0))
        shown = {"run": placement.run, "learner": "0", "incarnation": str(placement.incarnation), "key": placement.key}
        await attack(1)  # from here on all code is loaded
        before, most = resident(), 0
        attacks = [asyncio.create_task(attack(90)) for _ in range(4)]
        while not all(task.done() for task in attacks):
            most = max(most, resident() - before)
            await asyncio.sleep(0.02)
        return [task.result() for task in attacks] + [await attack(100)], most

    shown: dict[str, str] = {}
    try:
        refusals, most = asyncio.run(story())
    finally:
        syncer.stop()
    assert sorted(r.retry for r in refusals[:4]) == [False, True, True, True], [r.reason for r in refusals]
    assert not refusals[4].retry and str(UPLOAD_BYTES_MAX) in refusals[4].reason
    assert most < 64 << 20, f"{most >> 20} MB: one upload is 90, and what gRPC takes for both ends of four is up to 30"
    assert not (tmp_path / "model.received").exists()
