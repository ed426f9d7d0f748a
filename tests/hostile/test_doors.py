"""Outsiders without a token: thousands of connections, most of which send nothing. The syncer stays, and lets honest learners in.

`make soak` has 32,000 connections, and honest learners that train meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from besieged import PATIENCE_SECONDS, Besieged, besieged, outcome
from ports import unused_port
from unfinished_calls import Caller

from atoll.transport.keys import make_keys


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    """A syncer under the usual limit of open files. The tests do not depend on each other."""
    with besieged(tmp_path_factory.mktemp("doors"), open_files=1024) as found:
        yield found


def test_1200_silent_connections_neither_end_a_syncer_nor_keep_learners_out(around: Besieged) -> None:
    crowds = (("127.0.0.2", "http2"), ("127.0.0.3", "silent"), ("127.0.0.4", "bulk"))
    others = [around.outsiders(source, 400, 1.0, kind, 400) for source, kind in crowds]
    assert [outcome(crowd)["connected"] for crowd in others] == [400, 400, 400]
    assert around.seconds_to_get_in(0) < 10
    same = around.outsiders("127.0.0.1", 400, 1.0, "silent", 400)  # from the honest learner's own address
    assert outcome(same)["connected"] == 400
    assert around.seconds_to_get_in(1) < 30
    assert around.syncer.files() < 1024 - 64


def test_unfinished_calls_without_a_token_hold_no_memory(around: Besieged) -> None:
    """A thousand of 1 MiB each. They held 1.1 GB, and the syncer kept it after they were gone."""
    methods = ("Call/Join", "Call/Upload", "Link/Talk", "Link/Bulk")

    async def attack() -> float:
        callers = [Caller(f"/atoll.{method}") for method in methods for _ in range(5)]
        try:
            for caller in callers:
                await caller.call(around.address, "127.0.0.9", calls=50)
            most = 0.0
            for _ in range(12):
                await asyncio.sleep(0.1)
                most = max(most, around.syncer.megabytes())
            return most
        finally:
            await asyncio.gather(*(caller.end() for caller in callers))

    before = around.syncer.megabytes()
    assert asyncio.run(attack()) < before + 60


def test_learner_is_told_of_a_port_for_weights_and_uses_it(tmp_path: Path) -> None:
    port = unused_port()
    make_keys(tmp_path / "keys", learners=1)
    with besieged(tmp_path, open_files=1024, keys=tmp_path / "keys", learners=1, more=["--bulk-port", port]) as around:
        learner = around.learner(0, slow=1.0)
        learner.until("this is learner 0")
        connected = f":{port:04X} "
        end = time.monotonic() + PATIENCE_SECONDS
        while not any(connected in line and " 01 " in line for line in Path("/proc/net/tcp").read_text().splitlines()):
            assert time.monotonic() < end
            time.sleep(0.1)


LEARNERS = 3
SLOW = 6.0
PACE_LEAST = 0.7
FIRST = [(f"127.0.0.{n}", "silent", 5000) for n in (2, 3, 4, 5, 6)]


def pace(steps: list[float], since: float, until: float) -> float:
    return sum(since <= at < until for at in steps) / (until - since)


@dataclass
class Seen:
    """What an attack did, for people and for the assertions."""

    outcomes: list[dict[str, Any]]
    from_another: float
    from_attacking: float
    files: list[int]
    megabytes: list[float]
    until: float

    def __str__(self) -> str:
        connected, held = (sum(o[key] for o in self.outcomes) for key in ("connected", "held"))
        return (
            f"{connected} connections in {max(o['seconds'] for o in self.outcomes):.1f} s, {held} held at the end; "
            f"a new learner is in after {self.from_another:.2f} s, from an attacking address after {self.from_attacking:.2f} s; "
            f"at most {max(self.files)} descriptors; memory {self.megabytes[0]:.0f} to {max(self.megabytes):.0f} MB"
        )


def attack(around: Besieged, speaking: str) -> Seen:
    kinds = [*FIRST, ("127.0.0.7", speaking, 2000)]
    crowds = [around.outsiders(source, count, 27.0, kind, 1000) for source, kind, count in kinds]
    files, megabytes = [around.syncer.files()], [around.syncer.megabytes()]
    time.sleep(4)
    from_another = around.seconds_to_get_in(LEARNERS)
    crowds.append(around.outsiders("127.0.0.1", 5000, 16.0, "silent", 1000))  # where the honest learners are
    time.sleep(4)
    from_attacking = around.seconds_to_get_in(LEARNERS + 1)
    while not all("}" in crowd.text for crowd in crowds):
        files.append(around.syncer.files())
        megabytes.append(around.syncer.megabytes())
        time.sleep(0.25)
    until = around.steps()[-1]
    outcomes = [outcome(crowd) for crowd in crowds]
    for crowd in crowds:
        crowd.end()
    return Seen(outcomes, from_another, from_attacking, files, megabytes, until)


@pytest.mark.soak
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "certificates"])
def test_syncer_with_1024_descriptors_outlives_30000_connections(tmp_path: Path, secured: bool) -> None:
    keys = tmp_path / "keys" if secured else None
    if keys is not None:
        make_keys(keys, learners=LEARNERS + 2)
    with besieged(tmp_path, open_files=1024, keys=keys, learners=LEARNERS) as around:
        for number in range(LEARNERS):
            around.learner(number, SLOW)
        while len(around.steps()) < 200:
            assert around.syncer.is_alive
            time.sleep(0.5)
        since = around.steps()[-1]
        time.sleep(10)
        began = around.steps()[-1]
        seen = attack(around, "tls" if secured else "http2")
        time.sleep(10)
        steps = around.steps()
        calm = (pace(steps, since, began) + pace(steps, steps[-1] - 9, steps[-1])) / 2
        siege = pace(steps, began, seen.until)
        figures = f"{seen}; inner steps a second {calm:.1f} without the attack and {siege:.1f} during it"
        print(figures)
        (tmp_path / "figures").write_text(figures)
        assert sum(o["connected"] for o in seen.outcomes) >= 32_000 and max(o["seconds"] for o in seen.outcomes) < 30.0
        assert seen.from_another < 10 and seen.from_attacking < 30 and max(seen.files) < 1024 - 64
        assert siege > PACE_LEAST * calm
