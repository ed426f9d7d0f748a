"""Snapshots of a live run on disk: what can be resumed stays, and what is resumed fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atoll.config import Config, load
from atoll.errors import UserError
from atoll.executor.durable import DurableDisk
from atoll.executor.snapshots import learner_root, newest_usable, snapshot_dir, syncer_root, verify
from atoll.executor.syncer import Version
from atoll.protocol.vocabulary import Books, Stance
from atoll.runtime.shelves import LearnerShelf, SyncerShelf

THETA = torch.zeros(4)


class Shelves:
    """A syncer's and one learner's. `beside`: in one run's folder, as on one machine."""

    def __init__(self, run: Path, *, beside: bool = True, name: str = "a7") -> None:
        self.run = run
        self.config: Config = load(preset_name="decoupled", overrides={"protocol": {"fragments": 1}})
        self.home = learner_root(run, 0) if beside else run / "elsewhere"
        self.home.mkdir(parents=True)
        disk = DurableDisk.create(syncer_root(run), [Version(THETA, torch.empty(0), None, None, THETA, None)])
        self.syncer = SyncerShelf(syncer_root(run), disk, "a7", self.config)
        self.learner = LearnerShelf(self.home, name, self.config)

    def snapshot(self, step: int, *, sealed: bool) -> None:
        self.syncer.begin(step, Books(step, ((0,),), (), (), ()))
        self.learner.put_learner(step, 0, Stance((0,), step, step, (), 0, 0), {"x": THETA})
        assert self.learner._writing is not None
        self.learner._writing.result()
        self.syncer.seal(step, (0,) if sealed else (), sealed)

    def kept(self) -> list[int]:
        return sorted(int(path.name) for path in (self.home / "snapshots").iterdir())


@pytest.fixture
def shelves(tmp_path: Path) -> Iterator[Shelves]:
    made = Shelves(tmp_path / "run")
    yield made
    made.learner.close()


def test_row_of_abandoned_snapshots_leaves_the_last_that_can_be_resumed(shelves: Shelves) -> None:
    shelves.snapshot(20, sealed=True)
    for step in range(40, 400, 20):
        shelves.snapshot(step, sealed=False)
        usable = newest_usable(shelves.run)
        assert usable is not None and usable.outer_step == 20, f"after {step} was abandoned"
    assert verify(shelves.run, 20) == []


def test_learner_keeps_its_part_of_what_the_syncer_keeps_and_a_few_more(shelves: Shelves) -> None:
    for step in range(20, 400, 20):
        shelves.snapshot(step, sealed=step in (60, 100, 140, 180))
    assert shelves.kept() == [100, 140, 180, 320, 340, 360, 380], "three that the syncer keeps, and limits.snapshots_kept + 1"
    shelves.snapshot(400, sealed=True)
    shelves.snapshot(420, sealed=False)
    assert shelves.kept() == [140, 180, 360, 380, 400, 420]


@pytest.mark.parametrize(("beside", "name"), [(False, "a7"), (True, "another run")])
def test_learner_that_sees_no_syncers_folder_keeps_the_newest(tmp_path: Path, beside: bool, name: str) -> None:
    shelves = Shelves(tmp_path / "run", beside=beside, name=name)
    shelves.snapshot(20, sealed=True)
    for step in range(40, 140, 20):
        shelves.snapshot(step, sealed=False)
    assert shelves.kept() == [60, 80, 100, 120]
    shelves.learner.close()


def test_damaged_manifest_of_the_syncer_costs_no_part_of_this_learner(shelves: Shelves) -> None:
    shelves.snapshot(20, sealed=True)
    (snapshot_dir(syncer_root(shelves.run), 20) / "manifest.json").write_text("{")
    shelves.snapshot(40, sealed=False)
    assert shelves.kept() == [20, 40]


def test_part_of_a_run_with_other_batches_is_no_learners_state(shelves: Shelves, tmp_path: Path) -> None:
    """A syncer cannot see which part its learner was given."""
    shelves.snapshot(20, sealed=True)
    part = snapshot_dir(shelves.home, 20)
    LearnerShelf(tmp_path, "b", shelves.config, part).close()
    other = load(preset_name="decoupled", overrides={"protocol": {"fragments": 1}, "data": {"batch_size": 4}})
    with pytest.raises(UserError, match=r"^key data.batch_size = 4: the run that is resumed had 8, and"):
        LearnerShelf(tmp_path, "b", other, part)
