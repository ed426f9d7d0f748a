"""Disks of learners fill up while they train: a limit on the size of files refuses bytes like a full disk."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import pytest
from harness import LONG, PATIENT, STEADY, holders_of, judge, retrain, run, small

from atoll.errors import TapeError
from atoll.protocol.vocabulary import SealSnapshot
from atoll.runtime.doctor.examine import examine
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.summary import verdict
from atoll.store.snapshots import list_snapshots, verify
from atoll.tape.format import Record, Tape

pytestmark = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of other processes are Linux's")


def limit_files(tape: Path, most: int) -> None:
    """The learner that writes this tape can write no file beyond `most` bytes."""
    for process in holders_of(tape):
        with suppress(OSError):  # it has ended
            hard = resource.prlimit(process, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(process, resource.RLIMIT_FSIZE, (most, hard))


class Disks:
    """Learner 1's disk is full for a while, learner 2's until the end. Each change waits for a snapshot that shows the one
    before: of everybody, then without the two, then with learner 1 again."""

    def __init__(self, tapes: dict[int, Path]) -> None:
        self._tapes = tapes
        self.sealed: list[SealSnapshot] = []
        self.filled = self.freed = self.seen = False

    def watch(self, cluster: LocalCluster, record: Record) -> None:
        for effect in record.effects:
            if isinstance(effect, SealSnapshot):
                self.sealed.append(effect)
                if effect.complete:
                    self._next(effect)

    def _next(self, snapshot: SealSnapshot) -> None:
        if not self.filled and snapshot.learners == (0, 1, 2, 3):
            self.filled = True
            for tape in self._tapes.values():
                limit_files(tape, 1000)
        elif self.filled and not self.freed and {1, 2} <= set(snapshot.left_out):
            self.freed = True
            limit_files(self._tapes[1], resource.RLIM_INFINITY)
        elif self.freed and 1 in snapshot.learners and 2 in snapshot.left_out:
            self.seen = True


def test_learners_with_full_disks_train_on_and_their_tapes_say_what_they_lack(tmp_path: Path) -> None:
    limits = PATIENT | {"snapshots_kept": 2}
    config = small(4, total_steps=LONG, protocol={"snapshot_interval": 20}, limits=limits, inner=STEADY)
    tapes = {m: tmp_path / "learners" / str(m) / "0.tape" for m in (1, 2)}
    disks = Disks(tapes)
    run(tmp_path, config, watch=disks.watch, until=lambda: disks.seen)
    assert disks.seen, disks.sealed
    outcome = judge(tmp_path, config, whole=False)
    found = {each.worker: each for each in outcome.missing}
    assert sorted(found) == [1, 2] and found[1].records is not None and found[2].records is None

    whole = Tape(tapes[1])
    after = [r for r in whole.records() if r.number > found[1].after]
    assert len(whole.gaps) == 1 and after and after[0].number == found[1].after + found[1].records + 1

    summary = verdict(config, tmp_path)
    assert {each.worker for each in summary.missing} == {1, 2}
    assert summary.loss_final is not None and summary.loss_first is not None and summary.loss_final < 0.8 * summary.loss_first
    assert max(int(n) for n in summary.participants) == 4
    with pytest.raises(TapeError, match=r"learners/[12]/0\.tape|learner[12]"):
        retrain(tmp_path)

    report = examine(tmp_path)
    assert report.healthy and len([note for note in report.notes if "are missing" in note]) == 1, report.problems
    without = [s for s in disks.sealed if s.complete and 2 in s.left_out]
    assert without and all(2 not in s.learners for s in without)
    kept = list_snapshots(tmp_path)
    assert kept[0].learners == (0, 1, 2, 3) and not kept[0].missing, "the last of everybody stays"
    assert all(verify(tmp_path, info.outer_step) == [] for info in kept if info.complete), "one may be open still"
