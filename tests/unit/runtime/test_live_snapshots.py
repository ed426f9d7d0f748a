"""Snapshots of a live run on disk: what can be resumed stays, and what is resumed fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atoll.config import Config, load
from atoll.errors import UserError
from atoll.protocol.vocabulary import LearnerState, SyncerState
from atoll.runtime.learner.snapshots import LearnerSnapshots
from atoll.runtime.syncer.snapshots import SyncerSnapshots
from atoll.store.durable import DurableVersions
from atoll.store.snapshots import learner_root, newest_usable, snapshot_dir, syncer_root, verify
from atoll.store.versions import Version

THETA = torch.zeros(4)


class Stores:
    """A syncer's and one learner's. `beside`: in one run's folder, as on one machine."""

    def __init__(self, run: Path, *, beside: bool = True, name: str = "a7") -> None:
        self.run = run
        self.config: Config = load(preset_name="decoupled", overrides={"protocol": {"fragments": 1}})
        self.home = learner_root(run, 0) if beside else run / "elsewhere"
        self.home.mkdir(parents=True)
        disk = DurableVersions.create(syncer_root(run), [Version(THETA, torch.empty(0), None, None, THETA, None)])
        self.syncer = SyncerSnapshots(syncer_root(run), disk, "a7", self.config)
        self.learner = LearnerSnapshots(self.home, name, self.config)

    def snapshot(self, step: int, *, sealed: bool) -> None:
        self.syncer.begin(step, SyncerState(step, ((0,),), (), (), ()))
        self.learner.put_learner(step, 0, LearnerState((0,), step, step, (), 0, 0), {"x": THETA})
        assert self.learner._writing is not None
        self.learner._writing.result()
        self.syncer.seal(step, (0,) if sealed else (), sealed)

    def kept(self) -> list[int]:
        return sorted(int(path.name) for path in (self.home / "snapshots").iterdir())


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    made = Stores(tmp_path / "run")
    yield made
    made.learner.close()


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


@pytest.mark.parametrize(("beside", "name"), [(False, "a7"), (True, "another run")])
def test_learner_that_sees_no_syncers_folder_keeps_the_newest(tmp_path: Path, beside: bool, name: str) -> None:
    stores = Stores(tmp_path / "run", beside=beside, name=name)
    stores.snapshot(20, sealed=True)
    for step in range(40, 140, 20):
        stores.snapshot(step, sealed=False)
    assert stores.kept() == [60, 80, 100, 120]
    stores.learner.close()


def test_damaged_manifest_of_the_syncer_costs_no_part_of_this_learner(stores: Stores) -> None:
    stores.snapshot(20, sealed=True)
    (snapshot_dir(syncer_root(stores.run), 20) / "manifest.json").write_text("{")
    stores.snapshot(40, sealed=False)
    assert stores.kept() == [20, 40]


def test_part_of_a_run_with_other_batches_is_no_learners_state(stores: Stores, tmp_path: Path) -> None:
    """A syncer cannot see which part its learner was given."""
    stores.snapshot(20, sealed=True)
    part = snapshot_dir(stores.home, 20)
    LearnerSnapshots(tmp_path, "b", stores.config, part).close()
    other = load(preset_name="decoupled", overrides={"protocol": {"fragments": 1}, "data": {"batch_size": 4}})
    with pytest.raises(UserError, match=r"^key data.batch_size = 4: the resumed run had 8, and"):
        LearnerSnapshots(tmp_path, "b", other, part)
