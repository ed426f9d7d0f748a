"""Links fail in every way a plan knows, processes pause, and the run ends all the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from harness import effects_of, judge, run, small

from atoll.chaos import Clog, Corrupt, Partition, Pause, Slow
from atoll.ids import SYNCER
from atoll.protocol.vocabulary import ConnectionLost, Membership, Received, StepDone
from atoll.tape.weave import open_run


def test_corrupt_frames_clog_pause_and_slowness(tmp_path: Path) -> None:
    config = small(3, total_steps=110)
    faults = [
        Corrupt(at=0.3, a=0, b=SYNCER), Slow(at=0.4, learner=2, factor=3.0, lasts=0.5), Corrupt(at=0.6, a=SYNCER, b=1),
        Clog(at=0.9, a=2, b=SYNCER, lasts=0.5), Pause(at=1.4, learner=0, lasts=0.8),
    ]  # fmt: skip
    run(tmp_path, config, *faults)
    judge(tmp_path, config)
    lost = [r.event.peer for r in open_run(tmp_path).records() if r.worker == SYNCER and isinstance(r.event, ConnectionLost)]
    assert {0, 1} <= set(lost), "a damaged frame costs its peer the connection"
    back = [m.learner for m in effects_of(tmp_path, Membership) if m.standing == "in_sync"]
    assert back.count(0) >= 2 and back.count(1) >= 2


def test_partitioned_learner_trains_on_and_catches_up_when_it_heals(tmp_path: Path) -> None:
    config = small(2, total_steps=170)
    run(tmp_path, config, Partition(at=0.5, a=1, b=SYNCER, lasts=2.6))
    judge(tmp_path, config)
    its = [r for r in open_run(tmp_path).records() if r.worker == 1]
    heard = [r.now for r in its if isinstance(r.event, Received)]
    silence, begun = max((after - before, before) for before, after in pairwise(heard))
    assert silence > 1.5e9, "it was cut off"
    alone = [r for r in its if isinstance(r.event, StepDone) and begun < r.now < begun + silence]
    assert len(alone) >= 10, "it must train on without the syncer"
    standing = [m.standing for m in effects_of(tmp_path, Membership) if m.learner == 1]
    assert "lost" in standing or "silent" in standing
    assert standing[standing.index("in_sync") + 1 :].count("in_sync") >= 1, "it came back"


@pytest.mark.soak
def test_partition_of_a_minute(tmp_path: Path) -> None:
    config = small(3, total_steps=6000)
    run(tmp_path, config, Partition(at=2.0, a=1, b=SYNCER, lasts=60.0))
    judge(tmp_path, config)
    standing = [m.standing for m in effects_of(tmp_path, Membership) if m.learner == 1]
    assert standing[-1] in ("in_sync", "lost") and standing.count("in_sync") >= 2
