"""The syncer dies in every phase of a round and comes back on its directory; its disk fills up. Nothing announced is lost."""

from __future__ import annotations

import resource
import signal
import socket
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from crashing_syncer import MOMENTS
from harness import judge, learner_argv, retrain, run, small

from atoll.config import Config, to_toml
from atoll.protocol.vocabulary import Started, Stored
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.forkserver import Child, ForkServer
from atoll.tape.format import Record, Tape
from atoll.tape.weave import open_run


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
    return socket.create_server((host, int(port)))


def wait_for_words(words: str, log: Path, child: Child) -> None:
    pause = threading.Event()
    while words not in log.read_text():
        assert child.poll() is None, f"it ended and never said {words!r}"
        pause.wait(0.05)


@pytest.mark.parametrize("moments", [("stored, not taped",), pytest.param(MOMENTS, marks=pytest.mark.soak)])
def test_syncer_killed_in_the_phases_of_a_round_goes_on_where_it_was(tmp_path: Path, moments: tuple[str, ...]) -> None:
    """One run. Each syncer dies at another moment of its third round; the learners are the same processes throughout."""
    config = small(2, total_steps=20 + 6 * len(moments))
    fork_server = ForkServer([str(Path(__file__).with_name("crashing_syncer.py"))])
    log, address = tmp_path / "syncer.log", "127.0.0.1:0"
    learners: list[Child] = []
    try:
        for moment in moments:
            syncer = fork_server.spawn(["crash", moment, "3", *syncer_argv(tmp_path, config, address)], log)
            if not learners:
                address = wait_for(tmp_path / "syncer" / "address", syncer)
                learners = [fork_server.spawn(learner_argv(tmp_path, address, m), tmp_path / f"{m}.log") for m in range(2)]
            syncer.wait(60)
            assert syncer.poll() == -signal.SIGKILL, f"it should have died when {moment}"
            assert all(learner.poll() is None for learner in learners), "learners train on"
        with occupied(address):
            last = [fork_server.spawn(syncer_argv(tmp_path, config, address), log), *learners]
            wait_for_words("another attempt", log, last[0])
        for child in last:
            child.wait(60)
        assert [child.poll() for child in last] == [0, 0, 0]
    finally:
        fork_server.close()
    judge(tmp_path, config)
    tape = list(Tape(tmp_path / "syncer" / "run.tape").records())
    assert sum(isinstance(r.event, Started) for r in tape) == len(moments) + 1
    stored = [r.event.outer_step for r in tape if isinstance(r.event, Stored)]
    assert stored == sorted(set(stored)), "a stored round never reopens"
    retrain(tmp_path)


def test_full_disk_stops_announcing_and_loses_nothing(tmp_path: Path) -> None:
    """The kernel refuses the syncer's files to grow (RLIMIT_FSIZE) for a while: tape and versions alike."""
    config = small(2, total_steps=60)
    freed = threading.Event()

    def watch(cluster: LocalCluster, record: Record) -> None:
        if not isinstance(record.event, Stored) or record.event.outer_step != 15 or freed.is_set():
            return
        pid = cluster.syncer_child().pid
        size = (tmp_path / "syncer" / "run.tape").stat().st_size
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
        freed.set()
        threading.Timer(2.0, lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))).start()

    run(tmp_path, config, watch=watch)
    assert freed.is_set()
    judge(tmp_path, config)
    log = (tmp_path / "syncer.log").read_text()
    assert "the run stands still" in log and "the run goes on" in log
    syncer = [r.now / 1e9 for r in open_run(tmp_path).records() if r.worker == -1]
    assert max(b - a for a, b in pairwise(syncer)) > 1.0, "it stood still while it could not write"
