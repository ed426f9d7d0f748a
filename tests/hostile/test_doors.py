"""Outsiders without a token: thousands of connections, most of which send nothing. The syncer stays, and lets honest learners in.

The small test gives the syncer 256 descriptors; `make soak` has the usual 1,024 and 30,000 connections.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from besieged import Besieged, besieged, outcome

from atoll.transport import Caps
from atoll.transport.keys import make_keys


def test_syncer_with_few_descriptors_outlives_outsiders_and_admits_others(tmp_path: Path) -> None:
    with besieged(tmp_path, open_files=256) as around:
        before = around.syncer.files()
        crowds = (("127.0.0.2", "http2"), ("127.0.0.3", "silent"))
        others = [around.outsiders(source, 300, 1.0, kind, 300) for source, kind in crowds]
        assert [outcome(crowd)["connected"] for crowd in others] == [300, 300]
        assert around.seconds_to_get_in(0) < 10
        same = around.outsiders("127.0.0.1", 300, 1.0, "silent", 300)  # from the honest learner's own address
        assert outcome(same)["connected"] == 300
        assert around.seconds_to_get_in(1) < 30
        assert around.syncer.files() <= before + Caps.from_open_files(256).connections + 20


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
    kinds = [*FIRST, ("127.0.0.7", speaking, 2500), ("127.0.0.8", speaking, 2500)]
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
        assert sum(o["connected"] for o in seen.outcomes) >= 35_000 and max(o["seconds"] for o in seen.outcomes) < 30.0
        assert seen.from_another < 10 and seen.from_attacking < 30 and max(seen.files) < 1024 - 64
        assert siege > PACE_LEAST * calm
