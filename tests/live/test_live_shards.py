"""A syncer of several shards: processes that are killed at work, snapshots, and runs that go on with another number of them."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from harness import LONG, PATIENT, STEADY, SharedForkServer, judge, retrain, run, small
from ports import unused_port
from test_syncer import syncer_argv

from atoll.config import Config
from atoll.errors import DataError
from atoll.ids import SYNCER
from atoll.protocol.vocabulary import Contribution, Merge, Received, Started, Stored, Wait
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.forkserver import Child, ForkServer
from atoll.runtime.payload import bytes_of_part
from atoll.store.lock import LOCK_FILE
from atoll.store.snapshots import list_snapshots, load_syncer, verify
from atoll.store.striped import open_versions
from atoll.store.version_folder import shard_folder, shard_folders
from atoll.tape.format import Record, Tape
from atoll.tape.weave import open_run
from atoll.tasks.task import language_task
from atoll.transport.keys import make_keys


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
    config, strikes = small(3, total_steps=70, limits=PATIENT), Strikes(tmp_path)
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


@pytest.mark.soak
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


class Elsewhere:
    """Shards, a syncer and learners, started one by one, as on machines of their own."""

    def __init__(self, root: Path, config: Config, shards: int) -> None:
        make_keys(root / "keys", learners=config.learners, shards=shards)
        self.root, self.config, self.shards = root, config, shards
        self.server = SharedForkServer()
        first = unused_port(shards + 1)
        self.address, self.ports = f"127.0.0.1:{first}", range(first + 1, first + 1 + shards)

    def shard(self, shard: int) -> Child:
        keys = ["--keys", str(self.root / "keys"), "--name", f"shard-{shard}"]
        argv = ["shard", "--dir", str(self.root / f"shard{shard}"), "--listen", f"127.0.0.1:{self.ports[shard]}", *keys]
        return self.server.spawn(argv, self.log(f"shard{shard}"))

    def syncer(self, *words: str) -> Child:
        at = [word for port in self.ports for word in ("--shard-at", f"127.0.0.1:{port}")]
        argv = syncer_argv(self.root, self.config, self.address)
        return self.server.spawn([*argv, "--keys", str(self.root / "keys"), *at, *words], self.log("syncer"))

    def syncer_with_its_own(self) -> Child:
        argv = syncer_argv(self.root, self.config, self.address)
        words = ["--keys", str(self.root / "keys"), "--shards", str(self.shards)]
        return self.server.spawn([*argv, *words], self.log("syncer"))

    def learner(self, learner: int) -> Child:
        keys = ["--keys", str(self.root / "keys"), "--name", f"learner-{learner}"]
        return self.server.spawn([*learner_argv(self.root, self.address, learner), *keys], self.log(f"{learner}"))

    def log(self, name: str) -> Path:
        return self.root / f"{name}.log"


def learner_argv(directory: Path, address: str, learner: int) -> list[str]:
    out = str(directory / "learners" / str(learner))
    return ["learner", "--syncer", address, "--id", str(learner), "--out", out]


def contribution_sizes(tape: Path) -> set[int]:
    received = [r.event for r in Tape(tape).records() if isinstance(r.event, Received)]
    found = {e.payload_bytes for e in received if isinstance(e.envelope.body, Contribution)}
    assert found
    return found


def part_sizes(config: Config) -> set[int]:
    """Of contributions that come in parts, all parts together."""
    numels = [fragment.numel for fragment in language_task(config).layout.fragments]
    return {bytes_of_part(config.protocol.codec_up, numel, 0) for numel in numels}


def stored_on(tape: Path) -> int:
    if not tape.exists():
        return 0
    return max((r.event.outer_step for r in Tape(tape).records() if isinstance(r.event, Stored)), default=0)


def test_shards_beside_their_syncer_send_learners_what_is_announced_over_tls(tmp_path: Path) -> None:
    """One is killed at work: learners lose their connections to it, and are sent what they lack by the next one."""
    config = small(2, total_steps=80, limits=PATIENT)
    there, tape, pause = Elsewhere(tmp_path, config, 2), tmp_path / "syncer" / "run.tape", threading.Event()
    try:
        children = [there.syncer_with_its_own(), there.learner(0), there.learner(1)]
        while stored_on(tape) < 30:
            assert all(child.poll() is None for child in children), there.log("syncer").read_text()
            pause.wait(0.05)
        kill_shard(tmp_path, 1, 2)
        for child in children:
            child.wait(120)
        log = there.log("syncer").read_text()
        assert [child.poll() for child in children] == [0, 0, 0], log
    finally:
        there.server.close()
    assert log.count("each of its 2 shards exchanges its stripes with learners") == 2, "in either life"
    assert contribution_sizes(tape) <= part_sizes(config), "all contributions came in parts, to the shards"
    judge(tmp_path, config)
    retrain(tmp_path)


@pytest.mark.parametrize("hidden", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["dialled", "hidden"])
def test_shards_on_machines_of_their_own(hidden: bool, tmp_path: Path) -> None:
    """Over TLS. One is killed and started again; what it stores is not on the syncer's machine until somebody copies it."""
    config = small(2, total_steps=80, limits=PATIENT | {"snapshots_kept": 1}, protocol={"snapshot_interval": 20})
    there, tape, pause = Elsewhere(tmp_path, config, 2), tmp_path / "syncer" / "run.tape", threading.Event()
    try:
        shards = [there.shard(0), there.shard(1)]
        others = [there.syncer(*(["--hide-shards"] if hidden else [])), there.learner(0), there.learner(1)]
        while stored_on(tape) < 25:
            assert all(child.poll() is None for child in others), there.log("syncer").read_text()
            pause.wait(0.05)
        shards[1].signal(signal.SIGKILL)
        shards[1].wait()
        shards[1] = there.shard(1)
        for child in others:
            child.wait(120)
        log = there.log("syncer").read_text()
        assert [child.poll() for child in others] == [0, 0, 0], log
        assert [child.poll() for child in shards] == [None, None], "they wait for the next syncer"
    finally:
        there.server.close()
    if hidden:
        assert "exchanges its stripes with learners" not in log
    else:
        assert log.count("each of its 2 shards exchanges its stripes with learners") == 2, "in either life"
        assert contribution_sizes(tape) <= part_sizes(config), "all contributions came in parts, to the shards"
    judge(tmp_path, config)
    retrain(tmp_path, whole=False)
    with pytest.raises(DataError, match="copy them"):
        open_versions(tmp_path / "syncer")
    (snapshot,) = (tmp_path / "syncer" / "snapshots").iterdir()
    for shard in range(2):
        (kept,) = (tmp_path / f"shard{shard}" / "snapshots").iterdir()
        assert kept.name == snapshot.name, "a shard keeps those that the syncer keeps"
        copied(tmp_path / f"shard{shard}", tmp_path / "syncer", shard)
        copied(kept, snapshot, shard)
    retrain(tmp_path)
    assert verify(tmp_path, int(snapshot.name)) == []
    load_syncer(snapshot)


def copied(source: Path, target: Path, shard: int) -> None:
    shutil.copytree(source / "versions", shard_folder(target, shard, 2) / "versions")


@pytest.mark.soak
def test_shard_serves_one_run_and_a_syncer_needs_all_of_its_shards(tmp_path: Path) -> None:
    config = small(1, total_steps=LONG, limits=PATIENT, inner=STEADY)
    there, tape, pause = Elsewhere(tmp_path, config, 1), tmp_path / "syncer" / "run.tape", threading.Event()
    try:
        shard = there.shard(0)
        others = [there.syncer(), there.learner(0)]
        while stored_on(tape) < 5:
            assert all(child.poll() is None for child in others), there.log("syncer").read_text()
            pause.wait(0.05)
        for child in others:
            child.signal(signal.SIGKILL)
            child.wait()
        second = there.syncer("--dir", str(tmp_path / "another"))
        second.wait(60)
        assert second.poll() == 2 and second.failure is not None and "holds stripes of run" in second.failure.message
        wrong = there.syncer("--shard-at", f"127.0.0.1:{unused_port()}")
        wrong.wait(60)
        assert wrong.poll() == 2 and wrong.failure is not None and "names 2" in wrong.failure.message
        assert shard.poll() is None
    finally:
        there.server.close()


def _starts(tape: Path) -> int:
    return sum(isinstance(record.event, Started) for record in Tape(tape).records())
