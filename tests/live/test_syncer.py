"""The syncer dies in every phase of a round and comes back on its directory; its disk fills up. Nothing announced is lost."""

from __future__ import annotations

import errno
import resource
import signal
import socket
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from crashing_syncer import MOMENTS
from harness import LONG, PATIENT, STEADY, SharedForkServer, judge, learner_argv, retrain, run, small

from atoll.config import Config, to_toml
from atoll.protocol.vocabulary import ConnectionLost, Started, Stored
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.forkserver import Child
from atoll.store.lock import is_locked
from atoll.store.snapshots import list_snapshots
from atoll.tape.format import Record, Tape
from atoll.tape.weave import open_run

FULL_AT = 15


def syncer_argv(directory: Path, config: Config, listen: str) -> list[str]:
    recipe = directory / "config.toml"
    recipe.write_text(to_toml(config), encoding="utf8")
    return ["syncer", str(recipe), "--dir", str(directory / "syncer"), "--listen", listen]


def wait_for(path: Path, child: Child) -> str:
    pause = threading.Event()
    while not path.exists():
        assert child.poll() is None, "the syncer did not start"
        pause.wait(0.05)
    return path.read_text()


def occupied(address: str) -> socket.socket:
    """Another program listens where the killed syncer did."""
    host, _, port = address.rpartition(":")
    pause = threading.Event()
    while True:
        try:
            return socket.create_server((host, int(port)))
        except OSError as error:  # a learner that dials it may have met itself there
            if error.errno != errno.EADDRINUSE:
                raise
            pause.wait(0.05)


def wait_for_words(words: str, log: Path, child: Child) -> None:
    pause = threading.Event()
    while words not in log.read_text():
        assert child.poll() is None, f"it ended and never said {words!r}"
        pause.wait(0.05)


@pytest.mark.parametrize("moments", [("stored, not taped",), pytest.param(MOMENTS, marks=pytest.mark.soak)])
def test_syncer_killed_in_the_phases_of_a_round_goes_on_where_it_was(tmp_path: Path, moments: tuple[str, ...]) -> None:
    """One run. Each syncer dies at another moment of its third round; the learners are the same processes throughout."""
    config = small(2, total_steps=20 + 6 * len(moments))
    fork_server = SharedForkServer()
    log, address = tmp_path / "syncer.log", "127.0.0.1:0"
    learners: list[Child] = []
    try:
        for moment in moments:
            syncer = fork_server.spawn(["crash", moment, "3", *syncer_argv(tmp_path, config, address)], log)
            if not learners:
                address = wait_for(tmp_path / "syncer" / "address", syncer)
                learners = [fork_server.spawn(learner_argv(tmp_path, address, m), tmp_path / f"{m}.log") for m in range(2)]
            syncer.wait(120)
            assert syncer.poll() == -signal.SIGKILL, f"it should have died when {moment}"
            assert all(learner.poll() is None for learner in learners), "learners train on"
        with occupied(address):
            last = [fork_server.spawn(syncer_argv(tmp_path, config, address), log), *learners]
            wait_for_words("another attempt", log, last[0])
        for child in last:
            child.wait(120)
        assert [child.poll() for child in last] == [0, 0, 0]
    finally:
        fork_server.close()
    judge(tmp_path, config)
    tape = list(Tape(tmp_path / "syncer" / "run.tape").records())
    assert sum(isinstance(r.event, Started) for r in tape) == len(moments) + 1
    stored = [r.event.outer_step for r in tape if isinstance(r.event, Stored)]
    assert stored == sorted(set(stored)), "a stored round never reopens"
    retrain(tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("cuts", [(90, 61, 44), tuple(range(140, 10, -3))], ids=["some", "many"])
def test_syncer_whose_power_is_cut_at_any_write_goes_on_where_it_was(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    """Each syncer is killed at its n-th write, fsync, rename or link, a write half done. The last one's disk refuses some."""
    config = small(2, total_steps=20 + 8 * len(cuts))
    fork_server = SharedForkServer()
    log, address = tmp_path / "syncer.log", "127.0.0.1:0"
    learners: list[Child] = []
    try:
        for cut in cuts:
            syncer = fork_server.spawn(["cut", str(cut), *syncer_argv(tmp_path, config, address)], log)
            if not learners:
                address = wait_for(tmp_path / "syncer" / "address", syncer)
                learners = [fork_server.spawn(learner_argv(tmp_path, address, m), tmp_path / f"{m}.log") for m in range(2)]
            syncer.wait(120)
            assert syncer.poll() == -signal.SIGKILL, f"it should have died at operation {cut}: {log.read_text()[-2000:]}"
        last = [fork_server.spawn(["full", "300", *syncer_argv(tmp_path, config, address)], log), *learners]
        for child in last:
            child.wait(120)
        assert [child.poll() for child in last] == [0, 0, 0], log.read_text()[-3000:]
    finally:
        fork_server.close()
    judge(tmp_path, config)
    stored = [r.event.outer_step for r in Tape(tmp_path / "syncer" / "run.tape").records() if isinstance(r.event, Stored)]
    assert stored == sorted(set(stored)), "a stored round never reopens"
    retrain(tmp_path)


def test_full_disk_stops_announcing_and_loses_nothing(tmp_path: Path) -> None:
    """The kernel refuses the syncer's files to grow (RLIMIT_FSIZE) for a while: tape and versions alike."""
    config, log = small(2, total_steps=LONG), tmp_path / "syncer.log"
    freeing: list[threading.Thread] = []
    rounds = 0

    def watch(cluster: LocalCluster, record: Record) -> None:
        nonlocal rounds
        if not isinstance(record.event, Stored) or record.event.outer_step < FULL_AT:
            return
        if not freeing:
            child, size = cluster.syncer_child(), (tmp_path / "syncer" / "run.tape").stat().st_size
            _, hard = resource.prlimit(child.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (size, hard))
            freeing.append(threading.Thread(target=free, args=(child, hard)))
            freeing[0].start()
        rounds += "the run goes on" in log.read_text()

    def free(child: Child, hard: int) -> None:
        wait_for_words("the run stands still", log, child)
        threading.Event().wait(2.0)  # for so long at least, to be seen on the tape
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (hard, hard))

    run(tmp_path, config, watch=watch, until=lambda: rounds > 20)
    for thread in freeing:
        thread.join(60)
    judge(tmp_path, config, whole=False)
    assert "the run stands still" in log.read_text() and rounds > 20, "and then it went on"
    records = [r for r in open_run(tmp_path).records() if r.worker == -1]
    full = next(n for n, r in enumerate(records) if isinstance(r.event, Stored) and r.event.outer_step == FULL_AT)
    assert max(b.now - a.now for a, b in pairwise(records[full:])) > 1e9, "it stood still while it could not write"


def test_syncer_that_is_asked_to_stop_takes_no_step_as_it_disconnects_learners(tmp_path: Path) -> None:
    """It went on with whoever was disconnected last, and snapshots of that one replaced those of everybody."""
    config = small(3, total_steps=LONG, protocol={"snapshot_interval": 4}, limits=PATIENT, inner=STEADY)
    tape, stopped, pause = tmp_path / "syncer" / "run.tape", threading.Event(), threading.Event()

    def kept() -> list[tuple[int, ...]]:
        """Whose parts are in each: a learner that stalls for four steps is left out of one, so one of everybody need not be the
        last. Three are kept."""
        return [found.learners for found in list_snapshots(tmp_path) if found.complete]

    def watch(cluster: LocalCluster, record: Record) -> None:
        if isinstance(record.event, Stored) and record.event.outer_step >= 30 and kept()[-1:] == [(0, 1, 2)]:
            cluster.syncer_child().signal(signal.SIGTERM)
            while is_locked(tmp_path / "syncer"):
                pause.wait(0.01)
            stopped.set()

    run(tmp_path, config, watch=watch, until=stopped.is_set)
    assert stopped.is_set()
    judge(tmp_path, config, whole=False)
    assert not [r for r in Tape(tape).records() if isinstance(r.event, ConnectionLost)]
    assert (0, 1, 2) in kept()
