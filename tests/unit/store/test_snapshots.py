"""Snapshots on disk: whole or ignorable after a crash at any point, never without the last complete one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.errors import DataError
from atoll.store import snapshots
from atoll.store.durable import DurableVersions
from atoll.store.snapshots import (
    add_syncer_file,
    begin_syncer,
    learner_root,
    list_snapshots,
    load_learner_part,
    load_syncer,
    newest_usable,
    remove_rank_parts,
    seal_syncer,
    snapshot_dir,
    syncer_root,
    verify,
    write_learner,
    write_rank_part,
)
from atoll.store.tensor_files import StorageFailed
from atoll.store.versions import Version
from atoll.tensors.outer import OuterState


def version(number: float) -> Version:
    theta = torch.full((50,), number)
    return Version(theta, torch.zeros(2), OuterState(-theta, None, 1), None, theta, None)


def state(learner: int, step: int) -> dict[str, Any]:
    return {"tensors": {"w": torch.full((4,), float(step))}, "anchors": [None], "kept": {0: (step, torch.ones(1), torch.ones(0))}}


class Run:
    def __init__(self, directory: Path, learners: tuple[int, ...] = (0, 1)) -> None:
        self.directory, self.learners = directory, learners
        self.syncer = syncer_root(directory)
        self.disk = DurableVersions.create(self.syncer, [version(0), version(1)])

    def snapshot(self, step: int, *, complete: bool = True, keep: int = 2) -> None:
        self.disk.put(step, {step % 2: version(step)})
        begin_syncer(self.syncer, step, self.disk, b'{"step": %d}' % step)
        for learner in self.learners:
            write_learner(learner_root(self.directory, learner), step, state(learner, step), b"state", keep)
        seal_syncer(self.syncer, step, self.learners, complete, keep, run="a7", config={"seed": 3})

    def steps(self) -> list[int]:
        return [info.outer_step for info in list_snapshots(self.directory)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_snapshot_comes_back_whole(run: Run) -> None:
    run.snapshot(10)
    run.disk.put(12, {0: version(99)})  # the run goes on, and forgets what the snapshot keeps
    run.disk.forget(0, 0)
    part = load_syncer(snapshot_dir(run.syncer, 10))
    assert part.disk.kept() == [[0, 10], [0]] and part.machine_state == b'{"step": 10}'
    assert torch.equal(part.disk.at(0, 10).theta, version(10).theta) and torch.equal(part.disk.at(0, 0).theta, version(0).theta)
    assert (part.manifest.run, part.manifest.learners, part.manifest.config) == ("a7", (0, 1), {"seed": 3})
    mine = load_learner_part(snapshot_dir(learner_root(run.directory, 1), 10))
    assert mine.machine_state == b"state" and torch.equal(mine.state["tensors"]["w"], torch.full((4,), 10.0))
    assert mine.state["kept"][0][0] == 10
    assert verify(run.directory, 10) == []
    (info,) = list_snapshots(run.directory)
    assert (info.outer_step, info.complete, info.learners, info.present, info.missing) == (10, True, (0, 1), (0, 1), ())
    assert info.bytes > 3 * 400
    manifest = json.loads((snapshot_dir(run.syncer, 10) / "manifest.json").read_bytes())
    assert list(manifest["files"]) == [
        "machine.json", "versions/0000-000000000.safetensors", "versions/0000-000000010.safetensors",
        "versions/0001-000000000.safetensors",
    ]  # fmt: skip


def ranks_state(rank: int) -> dict[str, Any]:
    return {"state": {"w": torch.full((4,), float(rank)), "none": torch.empty(0, 3)}, "boxes": {"w": ((rank,), (1,))}}


def test_parts_of_ranks_come_back_in_order_read_or_mapped(run: Run) -> None:
    root = learner_root(run.directory, 0)
    write_rank_part(root, 4, 2, ranks_state(2))  # of a snapshot that was given up
    parts = {rank: write_rank_part(root, 5, rank, ranks_state(rank)) for rank in (2, 1)}
    write_learner(root, 5, ranks_state(0), b"state", 2, of_ranks=lambda: parts)
    folder = snapshot_dir(root, 5)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["5"], "nothing is left beside it"
    for mapped in (False, True):
        found = load_learner_part(folder, mapped=mapped).state
        assert [float(part["state"]["w"][0]) for part in found] == [0.0, 1.0, 2.0]
        assert found[1]["state"]["none"].shape == (0, 3) and found[2]["boxes"] == {"w": ((2,), (1,))}
        found[1]["state"]["w"].fill_(9.0)  # what is mapped is this process's own
    (folder / "state-1.safetensors").write_bytes((folder / "state-2.safetensors").read_bytes())
    with pytest.raises(DataError, match=r"state-1\.safetensors is damaged"):
        load_learner_part(folder)


def test_part_that_rank_0_does_not_see_is_named_and_leaves_no_snapshot(run: Run) -> None:
    root = learner_root(run.directory, 0)
    part = write_rank_part(root, 5, 1, ranks_state(1))
    part.path.unlink()
    with pytest.raises(DataError, match=r"5\.rank-1 of rank 1 is not seen by rank 0: .* shared storage"):
        write_learner(root, 5, ranks_state(0), b"state", 2, of_ranks=lambda: {1: part})
    assert not snapshot_dir(root, 5).exists()


def test_versions_are_linked_and_copied_where_links_do_not_work(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.snapshot(10)
    name = Path("versions") / "0000-000000010.safetensors"
    assert (snapshot_dir(run.syncer, 10) / name).stat().st_ino == (run.syncer / name).stat().st_ino

    def no_links(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_links)
    run.snapshot(11)
    assert (snapshot_dir(run.syncer, 11) / name).stat().st_ino != (run.syncer / name).stat().st_ino
    assert verify(run.directory, 11) == []


def test_run_is_restored_by_linking_back(run: Run) -> None:
    run.snapshot(10)
    sha256 = run.disk.theta_sha256()
    run.disk.put(12, {0: version(99)})
    run.snapshot(13)
    part = load_syncer(snapshot_dir(run.syncer, 10))
    with pytest.raises(DataError, match="exists already"):
        part.disk.link_into(run.syncer)
    shutil.rmtree(run.syncer / "versions")
    part.disk.link_into(run.syncer)
    restored = DurableVersions.open(run.syncer)
    restored.retain(part.disk.kept())
    assert restored.theta_sha256() == sha256
    restored.put(12, {0: version(7)})
    assert verify(run.directory, 10) == []


def test_in_flight_messages_join_an_open_snapshot_only(run: Run) -> None:
    assert not add_syncer_file(run.syncer, 10, "in_flight.bin", [b"x"])
    begin_syncer(run.syncer, 10, run.disk, b"")
    assert add_syncer_file(run.syncer, 10, "in_flight.bin", [b"message"])
    assert seal_syncer(run.syncer, 10, (), True, 2)
    assert not add_syncer_file(run.syncer, 10, "in_flight.bin", [b"late"])
    assert (snapshot_dir(run.syncer, 10) / "in_flight.bin").read_bytes() == b"message" and verify(run.directory, 10) == []


def test_older_ones_are_pruned_and_the_last_complete_one_never(run: Run) -> None:
    for step in (10, 20, 30):
        run.snapshot(step)
    assert run.steps() == [20, 30]
    assert sorted(os.listdir(learner_root(run.directory, 0) / "snapshots")) == ["20", "30"]
    run.snapshot(40, keep=0)
    assert run.steps() == [40]
    run.snapshot(50, complete=False, keep=0)
    assert run.steps() == [40]
    assert not seal_syncer(run.syncer, 60, (0,), True, 2)


def test_protected_snapshot_survives_a_row_of_abandoned_ones(run: Run) -> None:
    root = learner_root(run.directory, 0)
    for step in (10, 20, 30, 40):
        write_learner(root, step, state(0, step), b"", 2, protect=(10,))
    assert sorted(os.listdir(root / "snapshots")) == ["10", "30", "40"]


def test_missing_learner_makes_an_older_snapshot_the_newest_usable(run: Run) -> None:
    run.snapshot(10)
    run.snapshot(20)
    shutil.rmtree(snapshot_dir(learner_root(run.directory, 1), 20))
    assert list_snapshots(run.directory)[1].missing == (1,) and list_snapshots(run.directory)[1].present == (0,)
    usable, partly = newest_usable(run.directory), newest_usable(run.directory, need_learners=False)
    assert usable is not None and usable.outer_step == 10
    assert partly is not None and partly.outer_step == 20
    (problem,) = verify(run.directory, 20)
    assert problem.missing and problem.part == snapshot_dir(learner_root(run.directory, 1), 20)


def test_nothing_there_is_no_snapshot(tmp_path: Path) -> None:
    assert list_snapshots(tmp_path) == [] and newest_usable(tmp_path) is None
    assert [(p.part, p.missing) for p in verify(tmp_path, 3)] == [(tmp_path / "syncer" / "snapshots" / "3", True)]


@pytest.mark.parametrize(
    "name",
    ["syncer/snapshots/10/versions/0001-000000000.safetensors", "syncer/snapshots/10/machine.json",
     "learners/0/snapshots/10/state.safetensors", "learners/1/snapshots/10/machine.json"],
)  # fmt: skip
def test_damage_is_found_and_named(run: Run, name: str) -> None:
    run.snapshot(10)
    path = run.directory / name
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
    (problem,) = verify(run.directory, 10)
    assert str(path) in str(problem) and "damaged" in str(problem) and not problem.missing
    assert newest_usable(run.directory) is not None, "sizes alone do not show it"
    load = load_syncer if name.startswith("syncer") else load_learner_part
    with pytest.raises(DataError, match=path.name):
        part = load(snapshot_dir(path.parents[2] if path.parents[1].name == "snapshots" else run.syncer, 10))
        part.disk.at(1, 0)  # type: ignore[union-attr]
    path.write_bytes(whole[:-1])
    (problem,) = verify(run.directory, 10)
    assert str(path) in str(problem) and "bytes, not" in str(problem)
    assert newest_usable(run.directory) is None
    path.unlink()
    assert [str(p) for p in verify(run.directory, 10)] == [f"{path} is missing"] and newest_usable(run.directory) is None


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"snapshot": 1}', b"\xff\xfe", b'{"run": "\xff"}', b'{"config": ' + b"[" * 100_000]
)
def test_damaged_manifest_is_named(run: Run, text: bytes) -> None:
    run.snapshot(10)
    (snapshot_dir(run.syncer, 10) / "manifest.json").write_bytes(text)
    assert newest_usable(run.directory) is None
    (problem,) = verify(run.directory, 10)
    assert "snapshots/10/manifest.json is damaged" in str(problem)


@pytest.mark.parametrize("name", ["../../lock", "/etc/passwd", "", "x" * 5000, "a/" * 3000, "a\0b"])
def test_manifest_names_files_inside_its_directory_or_is_refused(run: Run, name: str) -> None:
    run.snapshot(10)
    path = snapshot_dir(run.syncer, 10) / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["files"][name] = manifest["files"].pop("machine.json")
    path.write_text(json.dumps(manifest))
    assert "not a file inside" in str(verify(run.directory, 10)[0]) and newest_usable(run.directory) is None


# ---------------------------------------------------------------- crashes


class Killed(BaseException):
    pass


def killing(function: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def call(*args: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return function(*args, **keywords)

    return call


def test_killed_at_every_operation_there_is_always_a_snapshot_to_resume_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the new one has the old one's number: a run that was put back gets there a second time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a killed process is not a power cut; the real one takes seconds
    for again in (20, 10):
        for n in range(60):
            run = Run(tmp_path / f"{again}-{n}", learners=(0,))
            run.snapshot(10, keep=1)
            with monkeypatch.context() as patch:
                left = [n]
                for name in ("link", "replace", "fsync", "write", "unlink", "rmdir", "mkdir"):
                    patch.setattr(os, name, killing(getattr(os, name), left))
                # What cleans up after an exception does not run in a killed process.
                patch.setattr(snapshots, "_removed_on_failure", _NoCleanup)
                try:
                    begin_syncer(run.syncer, again, run.disk, b"new")
                    seal_syncer(run.syncer, again, (), True, 1)
                    finished = True
                except Killed:
                    finished = False
            begin_syncer(run.syncer, 30, run.disk, b"next")  # the next one clears what the crash left
            whole = [info.outer_step for info in list_snapshots(run.directory) if info.complete]
            assert whole and all(verify(run.directory, step) == [] for step in whole)
            left_over = set(os.listdir(run.syncer / "snapshots")) - {"30.open"}
            assert left_over == {str(step) for step in whole}
            shutil.rmtree(run.directory)
            if finished:
                assert n > 12
                break
        else:
            pytest.fail("never finished")


class _NoCleanup:
    def __init__(self, target: Path) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_unsealed_remainder_is_ignored_and_cleared_by_the_next(run: Run) -> None:
    run.snapshot(10)
    begin_syncer(run.syncer, 20, run.disk, b"")
    assert [(info.outer_step, info.complete) for info in list_snapshots(run.directory)] == [(10, True), (20, False)]
    usable = newest_usable(run.directory)
    assert usable is not None and usable.outer_step == 10
    begin_syncer(run.syncer, 30, run.disk, b"")
    assert run.steps() == [10, 30]


def test_full_disk_leaves_nothing_of_the_new_one_and_the_old_one_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.snapshot(10)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    root = learner_root(run.directory, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageFailed, match=r"state\.safetensors.*No space"):
            write_learner(root, 20, state(0, 20), b"", 2)
        with pytest.raises(StorageFailed, match=r"machine\.json.*No space"):
            begin_syncer(run.syncer, 20, run.disk, b"state")
    assert os.listdir(root / "snapshots") == ["10"] and run.steps() == [10] and verify(run.directory, 10) == []
    run.snapshot(20)
    assert run.steps() == [10, 20]


def test_parts_of_ranks_that_are_gone_are_removed_and_others_stay(run: Run) -> None:
    root, folder = learner_root(run.directory, 0), learner_root(run.directory, 0) / "snapshots"
    for rank in (1, 2, 12):
        write_rank_part(root, 5, rank, ranks_state(rank))
    (folder / "6.rank-2.partial").touch()
    (folder / "7.open").mkdir()
    remove_rank_parts(root, {2})
    assert sorted(path.name for path in folder.iterdir()) == ["5.rank-1", "5.rank-12", "7.open"]
    remove_rank_parts(root)
    assert [path.name for path in folder.iterdir()] == ["7.open"]
    remove_rank_parts(root / "nowhere")
