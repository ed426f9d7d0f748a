"""A syncer of several shards: processes that are killed at work, snapshots, and runs that go on with another number of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from harness import LONG, PATIENT, STEADY, judge, retrain, run, small
from test_syncer import syncer_argv

from atoll.ids import SYNCER
from atoll.protocol.vocabulary import Merge, Started, Stored, Wait
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.forkserver import ForkServer
from atoll.store.lock import LOCK_FILE
from atoll.store.snapshots import list_snapshots, verify
from atoll.store.version_folder import shard_folder, shard_folders
from atoll.tape.format import Record, Tape
from atoll.tape.weave import open_run


def kill_shard(run_folder: Path, shard: int, shards: int) -> int:
    pid = int((shard_folder(run_folder / "syncer", shard, shards) / LOCK_FILE).read_text("ascii"))
    os.kill(pid, signal.SIGKILL)
    return pid


class Strikes:
    """Kills a shard, the other one in the middle of a merge, and the syncer, one after the other. Each waits until the run has
    gone on for some steps since the last."""

    APART = 8

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self._next_at = 12
        self.done: list[str] = []

    def __call__(self, cluster: LocalCluster, record: Record) -> None:
        if isinstance(record.event, Stored) and record.event.outer_step >= self._next_at and len(self.done) in (0, 2):
            if self.done:
                cluster.syncer_child().signal(signal.SIGKILL)
            else:
                kill_shard(self._folder, 1, 2)
            self._struck("syncer" if self.done else "shard 1", record.event.outer_step)
        merges = [effect for effect in record.effects if isinstance(effect, Merge)]
        if merges and len(self.done) == 1 and merges[0].outer_step >= self._next_at:
            kill_shard(self._folder, 0, 2)
            self._struck("shard 0", merges[0].outer_step)

    def _struck(self, what: str, outer_step: int) -> None:
        self.done.append(what)
        self._next_at = outer_step + self.APART


def test_killed_shards_and_a_killed_syncer_stall_rounds_and_no_learner(tmp_path: Path) -> None:
    config, strikes = small(3, total_steps=120, limits=PATIENT), Strikes(tmp_path)
    run(tmp_path, config, watch=strikes, syncer_words=["--shards", "2"])
    assert strikes.done == ["shard 1", "shard 0", "syncer"]
    judge(tmp_path, config)
    records = list(open_run(tmp_path).records())
    stored = [r.event.outer_step for r in records if isinstance(r.event, Stored)]
    assert stored == sorted(set(stored)), "a stored round never reopens"
    lives = [r.worker for r in records if isinstance(r.event, Started)]
    assert lives.count(SYNCER) == 4, "each strike took a life of the syncer"
    assert all(lives.count(m) == 1 for m in range(3)), "learners train on"
    assert not any(isinstance(e, Wait) for r in records if r.worker != SYNCER for e in r.effects), "nobody waits for the syncer"
    retrain(tmp_path)


@pytest.mark.parametrize(
    ("before", "after"), [(2, 3), pytest.param(1, 2, marks=pytest.mark.soak), pytest.param(3, 1, marks=pytest.mark.soak)]
)
def test_run_resumes_from_a_snapshot_with_another_number_of_shards(before: int, after: int, tmp_path: Path) -> None:
    config = small(2, total_steps=LONG, limits=PATIENT, protocol={"snapshot_interval": 12}, inner=STEADY)
    first, second = tmp_path / "first", tmp_path / "second"

    def whole() -> list[int]:
        return [found.outer_step for found in list_snapshots(first) if found.complete and found.present == (0, 1)]

    run(first, config, until=lambda: bool(whole()), syncer_words=["--shards", str(before)])
    snapshot = whole()[-1]
    assert verify(first, snapshot) == []
    stored: list[int] = []

    def watch(cluster: LocalCluster, record: Record) -> None:
        if isinstance(record.event, Stored):
            stored.append(record.event.outer_step)

    run(
        second, config, watch=watch, until=lambda: len(stored) > 12, resume=(first, snapshot),
        syncer_words=["--shards", str(after)],
    )  # fmt: skip
    assert len(shard_folders(second / "syncer")) == (after if after > 1 else 0)
    assert stored[0] > snapshot
    judge(second, config, whole=False)
    retrain(second, whole=False)


def test_directory_goes_on_with_the_shards_that_it_has(tmp_path: Path) -> None:
    """Without the option it has them again; another number is refused, and nothing is lost by that."""
    config = small(1, total_steps=LONG, limits=PATIENT, inner=STEADY)
    stored: list[int] = []

    def watch(cluster: LocalCluster, record: Record) -> None:
        if isinstance(record.event, Stored):
            stored.append(record.event.outer_step)

    run(tmp_path, config, watch=watch, until=lambda: len(stored) > 3, syncer_words=["--shards", "2"])
    server, log = ForkServer(), tmp_path / "again.log"
    try:
        argv = syncer_argv(tmp_path, config, "127.0.0.1:0")
        other = server.spawn([*argv, "--shards", "3"], log)
        other.wait(60)
        assert other.poll() == 2 and other.failure is not None
        assert "holds a run with 2 shards" in other.failure.message, other.failure.message
        same = server.spawn(argv, log)
        tape = tmp_path / "syncer" / "run.tape"
        begun = _starts(tape)
        while _starts(tape) == begun:
            assert same.poll() is None, log.read_text()
            same.wait(0.1)
    finally:
        server.close()
    assert len(shard_folders(tmp_path / "syncer")) == 2


def _starts(tape: Path) -> int:
    return sum(isinstance(record.event, Started) for record in Tape(tape).records())
