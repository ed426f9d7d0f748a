"""Links fail in every way a plan knows, processes pause, and the run ends all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import LONG, effects_of, judge, run, small

from atoll.chaos import Clog, Corrupt, Partition, Pause, Slow
from atoll.ids import SYNCER
from atoll.protocol.vocabulary import ConnectionLost, FixParticipants, Membership, Received, StepDone
from atoll.runtime.local.cluster import LocalCluster
from atoll.tape.format import Record, Tape


def test_corrupt_frames_clog_pause_and_slowness(tmp_path: Path) -> None:
    config = small(3, total_steps=LONG)
    faults = [
        Corrupt(at=0.3, a=0, b=SYNCER), Slow(at=0.4, learner=2, factor=3.0, lasts=0.5), Corrupt(at=0.6, a=SYNCER, b=1),
        Clog(at=0.9, a=2, b=SYNCER, lasts=0.5), Pause(at=1.4, learner=0, lasts=0.8),
    ]  # fmt: skip
    lost: set[int] = set()
    back: set[int] = set()
    rounds = 0

    def watch(cluster: LocalCluster, record: Record) -> None:
        nonlocal rounds
        if isinstance(record.event, ConnectionLost):
            lost.add(record.event.peer)
        for effect in record.effects:
            if isinstance(effect, Membership) and effect.standing == "in_sync" and effect.learner in lost:
                back.add(effect.learner)
            elif isinstance(effect, FixParticipants) and len(cluster.struck) >= config.learners + len(faults):
                rounds += effect.participants == (0, 1, 2)

    run(tmp_path, config, *faults, watch=watch, until=lambda: {0, 1} <= back and rounds > 20)
    judge(tmp_path, config, whole=False)
    assert {0, 1} <= lost, "a damaged frame costs its peer the connection"
    assert {0, 1} <= back and rounds > 20, "all are back, and train together"


def test_partitioned_learner_trains_on_and_catches_up_when_it_heals(tmp_path: Path) -> None:
    config = small(2, total_steps=LONG)
    standing: list[str] = []
    rounds = 0

    def watch(cluster: LocalCluster, record: Record) -> None:
        nonlocal rounds
        for effect in record.effects:
            if isinstance(effect, Membership) and effect.learner == 1:
                standing.append(effect.standing)
            elif isinstance(effect, FixParticipants) and standing[-1:] == ["in_sync"] and {"lost", "silent"} & set(standing):
                rounds += 1 in effect.participants

    partition = Partition(at=0.5, a=1, b=SYNCER, lasts=5.0)  # its connections break after 3 s: no slow step hides that
    run(tmp_path, config, partition, watch=watch, until=lambda: rounds > 20 and long_alone(tmp_path) >= 10)
    judge(tmp_path, config, whole=False)
    assert long_alone(tmp_path) >= 10, "it must train on without the syncer"
    assert rounds > 20, "it came back"


def long_alone(directory: Path) -> int:
    """The most steps that learner 1 took without a word of the syncer, from which it otherwise hears in every step."""
    steps = most = 0
    for record in Tape(directory / "learners" / "1" / "0.tape").records():
        steps = 0 if isinstance(record.event, Received) else steps + isinstance(record.event, StepDone)
        most = max(most, steps)
    return most


@pytest.mark.soak
def test_partition_of_a_minute(tmp_path: Path) -> None:
    config = small(3, total_steps=6000)
    run(tmp_path, config, Partition(at=2.0, a=1, b=SYNCER, lasts=60.0))
    judge(tmp_path, config)
    standing = [m.standing for m in effects_of(tmp_path, Membership) if m.learner == 1]
    assert standing[-1] in ("in_sync", "lost") and standing.count("in_sync") >= 2
