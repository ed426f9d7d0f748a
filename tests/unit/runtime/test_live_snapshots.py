"""Snapshots of a live run on disk: what can be resumed stays, and what is resumed fits."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.config import Config, load
from atoll.errors import UserError
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Envelope, Goodbye, LearnerState, StateWritten, SyncerState
from atoll.runtime.learner.snapshots import LearnerSnapshots
from atoll.runtime.syncer import snapshots as syncer_snapshots
from atoll.runtime.syncer.snapshots import SyncerSnapshots
from atoll.store.durable import DurableVersions
from atoll.store.snapshots import learner_root, list_snapshots, newest_usable, snapshot_dir, syncer_root, verify
from atoll.store.versions import Version

THETA = torch.zeros(4)


class Stores:
    """A syncer's and one learner's. The learner may be on another machine: it knows what the syncer says."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.config: Config = load(preset_name="decoupled", overrides={"protocol": {"fragments": 1}})
        self.home = learner_root(run, 0)
        self.home.mkdir(parents=True)
        disk = DurableVersions.create(syncer_root(run), [Version(THETA, torch.empty(0), None, None, THETA, None)])
        self.syncer = SyncerSnapshots(syncer_root(run), disk, "a7", self.config)
        self.learner = LearnerSnapshots(self.home, "a7", self.config)
        self.written: queue.Queue[StateWritten] = queue.Queue()
        self.learner.on_written = self.written.put

    def snapshot(self, step: int, *, sealed: bool) -> None:
        self.syncer.begin(step, SyncerState(step, ((0,),), (), (), ()))
        self.records(step)
        self.syncer.seal(step, (0,) if sealed else (), sealed)
        self.learner.keep(self.syncer.kept)  # as the next message says

    def records(self, step: int) -> StateWritten:
        said = self.learner.put_learner(step, 0, LearnerState((0,), step, step, (), 0, 0), {"x": THETA})
        return said or self.written.get(timeout=30)

    def kept(self) -> list[int]:
        return sorted(int(path.name) for path in (self.home / "snapshots").iterdir())


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    made = Stores(tmp_path / "run")
    yield made
    made.learner.close()


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_learner_says_that_its_part_is_written_and_when_it_is_not(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stores.records(20) == StateWritten(20)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        flaw = stores.records(40).flaw
    assert flaw is not None and flaw.why is Why.NOT_WRITTEN and "No space left" in flaw.detail
    assert stores.kept() == [20]


def test_part_that_the_disk_returns_otherwise_is_not_written(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def flips(handle: int, data: Any) -> int:
        return write(handle, bytes(data)[:-1] + bytes([bytes(data)[-1] ^ 1]))

    monkeypatch.setattr(os, "write", flips)
    assert stores.records(20).flaw is not None
    assert stores.kept() == []


def test_learner_that_is_still_writing_says_so_for_the_next(stores: Stores) -> None:
    go_on = threading.Event()
    stores.learner.on_written = lambda written: (go_on.wait(30), stores.written.put(written))[1]
    assert stores.learner.put_learner(20, 0, LearnerState((0,), 20, 20, (), 0, 0), {"x": THETA}) is None
    flaw = stores.records(40).flaw
    assert flaw is not None and flaw.why is Why.NOT_WRITTEN
    go_on.set()
    assert stores.written.get(timeout=30) == StateWritten(20)


def test_last_snapshot_of_everybody_outlives_any_number_of_partial_ones(stores: Stores) -> None:
    """The learner's disk is full from outer step 40 on: Theta and the others' parts are kept, and so is its last own state."""
    stores.snapshot(20, sealed=True)
    for step in range(40, 200, 20):
        stores.syncer.begin(step, SyncerState(step, ((0,),), (), (), ()))
        stores.syncer.seal(step, (), True, (0,))
    assert [info.outer_step for info in list_snapshots(stores.run)] == [20, 140, 160, 180]
    assert list_snapshots(stores.run)[-1].left_out == (0,)
    assert verify(stores.run, 20) == []
    for step in range(200, 260, 20):
        stores.snapshot(step, sealed=True)
    assert [info.outer_step for info in list_snapshots(stores.run)] == [200, 220, 240]


def test_snapshot_with_more_in_flight_than_memory_should_hold_is_given_up(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syncer_snapshots, "IN_FLIGHT_BYTES_MAX", 1000)
    stores.snapshot(20, sealed=True)
    stores.syncer.begin(40, SyncerState(40, ((0,),), (), (), ()))
    for seq in range(100):
        stores.syncer.put_in_flight(40, Envelope(0, 0, -1, seq, 0, Goodbye(Reason(Why.LEAVES))), None)
    stores.syncer.seal(40, (0,), True)
    assert [info.outer_step for info in list_snapshots(stores.run)] == [20]


def test_row_of_abandoned_snapshots_leaves_the_last_that_can_be_resumed(stores: Stores) -> None:
    stores.snapshot(20, sealed=True)
    for step in range(40, 400, 20):
        stores.snapshot(step, sealed=False)
        usable = newest_usable(stores.run)
        assert usable is not None and usable.outer_step == 20, f"after {step} was abandoned"
    assert verify(stores.run, 20) == []


def test_learner_keeps_its_part_of_what_the_syncer_keeps_and_a_few_more(stores: Stores) -> None:
    for step in range(20, 400, 20):
        stores.snapshot(step, sealed=step in (60, 100, 140, 180))
    assert stores.kept() == [100, 140, 180, 320, 340, 360, 380], "three that the syncer keeps, and limits.snapshots_kept + 1"
    stores.snapshot(400, sealed=True)
    stores.snapshot(420, sealed=False)
    assert stores.kept() == [140, 180, 360, 380, 400, 420]


def test_restarted_syncer_still_names_what_it_keeps(stores: Stores) -> None:
    for step in (20, 40):
        stores.snapshot(step, sealed=True)
    disk = DurableVersions.open(syncer_root(stores.run))
    assert SyncerSnapshots(syncer_root(stores.run), disk, "a7", stores.config).kept == (20, 40)


def test_syncer_whose_disk_is_full_costs_no_part_of_its_last_good_snapshot(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its learners go on writing theirs: the markers are the machine's, and the files are not."""
    stores.snapshot(20, sealed=True)
    for step in range(40, 200, 20):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            stores.syncer.begin(step, SyncerState(step, ((0,),), (), (), ()))
        stores.records(step)
        stores.syncer.seal(step, (0,), True)
        stores.learner.keep(stores.syncer.kept)
    assert 20 in stores.kept() and newest_usable(stores.run) is not None


def test_part_of_a_run_with_other_batches_is_no_learners_state(stores: Stores, tmp_path: Path) -> None:
    """A syncer cannot see which part its learner was given."""
    stores.snapshot(20, sealed=True)
    part = snapshot_dir(stores.home, 20)
    LearnerSnapshots(tmp_path, "b", stores.config, part).close()
    other = load(preset_name="decoupled", overrides={"protocol": {"fragments": 1}, "data": {"batch_size": 4}})
    with pytest.raises(UserError, match=r"^key data.batch_size = 4: the resumed run had 8, and"):
        LearnerSnapshots(tmp_path, "b", other, part)
