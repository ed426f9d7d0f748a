"""Disks of learners fill up while they train: a limit on the size of files refuses bytes like a full disk."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from harness import judge, retrain, run, small

from atoll.errors import TapeError
from atoll.protocol.vocabulary import SealSnapshot, Stored
from atoll.runtime.doctor.examine import examine
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.summary import verdict
from atoll.store.snapshots import list_snapshots, verify
from atoll.tape.format import Record, Tape

pytestmark = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of other processes are Linux's")


def limit_files(tape: Path, most: int) -> None:
    """The learner that writes this tape can write no file beyond `most` bytes."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(handle) == str(tape) for handle in (process / "fd").iterdir()):
                hard = resource.prlimit(int(process.name), resource.RLIMIT_FSIZE)[1]
                resource.prlimit(int(process.name), resource.RLIMIT_FSIZE, (most, hard))
        except OSError:
            continue  # it has ended


def test_learners_with_full_disks_train_on_and_their_tapes_say_what_they_lack(tmp_path: Path) -> None:
    """Learner 1's disk is full for a while, learner 2's until the end."""
    config = small(4, total_steps=90, protocol={"snapshot_interval": 10}, limits={"snapshots_kept": 2})
    tapes = {m: tmp_path / "learners" / str(m) / "0.tape" for m in (1, 2)}
    sealed: list[SealSnapshot] = []

    def watch(cluster: LocalCluster, record: Record) -> None:
        sealed.extend(e for e in record.effects if isinstance(e, SealSnapshot))
        match record.event:
            case Stored(outer_step=25):
                for tape in tapes.values():
                    limit_files(tape, 1000)
            case Stored(outer_step=60):
                limit_files(tapes[1], resource.RLIM_INFINITY)

    run(tmp_path, config, watch=watch)
    outcome = judge(tmp_path, config)
    found = {each.worker: each for each in outcome.missing}
    assert sorted(found) == [1, 2] and found[1].records is not None and found[2].records is None

    whole = Tape(tapes[1])
    after = [r for r in whole.records() if r.number > found[1].after]
    assert len(whole.gaps) == 1 and after and after[0].number == found[1].after + found[1].records + 1
    assert not whole.cut, "it ended in order, with the disk free again"

    summary = verdict(config, tmp_path)
    assert {each.worker for each in summary.missing} == {1, 2}
    assert summary.loss_final is not None and summary.loss_first is not None and summary.loss_final < 0.8 * summary.loss_first
    assert max(int(n) for n in summary.participants) == 4
    with pytest.raises(TapeError, match=r"learners/[12]/0\.tape|learner[12]"):
        retrain(tmp_path)

    report = examine(tmp_path)
    assert report.healthy and len([note for note in report.notes if "are missing" in note]) == 1, report.problems
    without = [s for s in sealed if s.complete and 2 in s.left_out]
    assert without and all(2 not in s.learners for s in without)
    kept = list_snapshots(tmp_path)
    assert kept[0].learners == (0, 1, 2, 3) and not kept[0].missing, "the last of everybody stays"
    assert all(verify(tmp_path, info.outer_step) == [] for info in kept)
