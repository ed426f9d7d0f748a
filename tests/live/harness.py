"""Live runs for tests: real processes on loopback, and a judge that reads their tapes afterwards.

A run is small (a nano decoder, few fragments), but nothing in it is played: syncer and learners are processes, kills are
SIGKILL, links fail in a proxy. `judge` feeds the tapes to new machines, demands every taped decision, and asks the same
invariant checker as the simulator after every event.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from atoll.chaos import ChaosPlan, Fault, Slow
from atoll.config import Config, load
from atoll.executor.environment import use_threads
from atoll.executor.merging import remerge_for
from atoll.ids import SYNCER, LearnerId
from atoll.protocol.interface import Machine
from atoll.protocol.learner import LearnerMachine
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import Effect, Send, Started
from atoll.runtime.local import cluster as cluster_module
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.forkserver import Child, ForkServer
from atoll.runtime.local.summary import executor_for_replay
from atoll.runtime.metrics import MetricsAt
from atoll.sim.checkers import Safety
from atoll.sim.run import replay_run
from atoll.store.striped import open_versions
from atoll.tape.format import Record
from atoll.tape.replay import Outcome, replay
from atoll.tape.weave import open_run
from atoll.tasks.registry import task_for

Watch = Callable[[LocalCluster, Record], None]


UNHURRIED = 3.0
"""Learners are slowed by so much: steps last longer than they cost, and one machine has room for all processes."""
LONG = 3000
"""Steps of a run that ends when the test has seen enough (`until`): they bound its patience, to about a minute."""
STEADY = {"warmup_share": 0.0, "schedule": "constant"}
"""Of [inner], for such a run: the usual schedule counts on its length."""
PATIENT = {"silence_steps": 1e4, "patience_seconds": 60.0, "recovery_intervals": 1e4}
"""Of [limits], where a test is about something else than a learner that is slow to answer: any process may stall for seconds."""


def small(learners: int = 3, *, preset: str = "decoupled", total_steps: int = 150, **sections: Any) -> Config:
    """Steps of a few milliseconds, slowed to some twenty: 50 outer steps a second. Tapes go on in a new segment every second or
    two, so that whatever is killed is killed between segments too, and whatever reads tapes reads many."""
    overrides: dict[str, Any] = {
        "learners": learners,
        "total_steps": total_steps,
        "data": {"max_bytes": 200_000, "seq_len": 32, "batch_size": 4, "heldout_batches": 2},
        "inner": {"learning_rate": 0.003},
        "limits": {"tape_segment_bytes": 30_000},
        "model": {"numbers": {"width": 16, "layers": 1, "heads": 2}},
    }
    if preset == "decoupled":
        overrides["protocol"] = {"fragments": 6, "local_steps_per_round": 6}
    for section, keys in sections.items():
        overrides[section] = overrides.get(section, {}) | keys
    return load(preset_name=preset, overrides=overrides)


class SharedForkServer:
    """One fork server for all runs of the session, since importing torch takes seconds of a core. A run that ends kills its
    own children alone. Its children are where this process is when they are asked for."""

    _server: ClassVar[ForkServer | None] = None

    def __init__(self) -> None:
        if SharedForkServer._server is None:
            SharedForkServer._server = ForkServer([str(Path(__file__).with_name("crashing_syncer.py"))])
        self._children: list[Child] = []

    def spawn(self, argv: Sequence[str], log: Path) -> Child:
        assert self._server is not None
        self._children.append(self._server.spawn([str(Path.cwd()), *argv], log.absolute()))
        return self._children[-1]

    def close(self) -> None:
        for child in self._children:
            child.signal(signal.SIGKILL)
        for child in self._children:
            child.wait(10.0)

    @classmethod
    def end(cls) -> None:
        """With the session."""
        if cls._server is not None:
            cls._server.close()
        cls._server = None


@contextmanager
def forks_of(fork_server: type[ForkServer] | type[SharedForkServer] = SharedForkServer) -> Iterator[None]:
    """Live runs begun here, by a command too, get their processes from this one."""
    with patch.object(cluster_module, "ForkServer", fork_server):
        yield


def run(
    directory: Path, config: Config, *faults: Fault, watch: Watch | None = None, until: Callable[[], bool] | None = None,
    resume: tuple[Path, int] | None = None, fork_server: type[ForkServer] | type[SharedForkServer] = SharedForkServer,
    metrics: MetricsAt | None = None, syncer_words: Sequence[str] = (),
) -> LocalCluster:  # fmt: skip
    """To the end, or until enough was seen: then all its processes are killed. `watch` sees the syncer's records as they come,
    and may strike; `until` is asked after each. `syncer_words`: more options of the syncer."""
    cluster: LocalCluster

    def seen(record: Record) -> None:
        if watch is not None:
            watch(cluster, record)
        if until is not None and until():
            raise _Enough

    slow = [Slow(0.0, m, UNHURRIED, 1e6) for m in range(config.learners)]
    cluster = LocalCluster(
        config, directory, ChaosPlan((*slow, *faults)), watch=seen, resume=resume, metrics=metrics, words=((), syncer_words)
    )
    with forks_of(fork_server), suppress(_Enough):
        cluster.run()
    return cluster


def holders_of(file: Path) -> list[int]:
    """Processes that have this file open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if any(os.readlink(handle) == str(file) for handle in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


class _Enough(BaseException):
    """As Ctrl-C would, it goes through whatever runs the cluster."""


def learner_argv(directory: Path, address: str, learner: LearnerId) -> list[str]:
    """One more learner of a run, as after `atoll`."""
    token, out = str(directory / "syncer" / "token"), str(directory / "learners" / str(learner))
    return ["learner", "--syncer", address, "--token", token, "--id", str(learner), "--out", out]


class _Cast:
    """What the checker asks of a cluster, from machines that are re-derived."""

    def __init__(self) -> None:
        self._syncer: SyncerMachine | None = None
        self._learners: dict[LearnerId, LearnerMachine] = {}

    @property
    def syncer(self) -> SyncerMachine:
        assert self._syncer is not None
        return self._syncer

    def learner(self, learner: LearnerId) -> LearnerMachine | None:
        return self._learners.get(learner)

    def learn(self, record: Record, machine: Machine) -> None:
        if isinstance(record.event, Started):
            if isinstance(machine, SyncerMachine):
                self._syncer = machine
            elif isinstance(machine, LearnerMachine):
                self._learners[record.worker] = machine


def judge(directory: Path, config: Config, *, whole: bool = True) -> Outcome:
    """Every decision as taped, every invariant held after every event, and the fates of all tokens add up. `whole`: and the
    run took all of its steps."""
    cast, safety = _Cast(), Safety(config)
    safety.attach(cast)  # type: ignore[arg-type]

    def observe(record: Record, machine: Machine | None) -> None:
        if machine is None:
            return  # beyond a gap of its tape
        cast.learn(record, machine)
        safety(record.now, record.worker, record.event, record.effects)

    outcome = replay(open_run(directory), observe=observe)
    assert outcome.fates is not None and outcome.fates.add_up()
    assert outcome.outer_step == config.total_steps or not whole
    return outcome


def retrain(directory: Path, *, whole: bool = True) -> None:
    """Train it all again from the tapes, and demand the live run's Theta bit for bit: every one that is taped, and of a `whole`
    run the last on disk. (A syncer that is killed may have stored one more than it taped.)"""
    use_threads(1)
    _, theta, _ = replay_run(open_run(directory), weights=True, executor_of=executor_for_replay(directory))
    if whole:
        task = task_for(load(directory / "config.toml"))
        remerge = remerge_for(task.config, task.layout.fragments)
        assert theta == open_versions(directory / "syncer", remerge).theta_sha256()


def effects_of(directory: Path, *kinds: type[Effect]) -> list[Any]:
    """The syncer's decisions of these kinds, in order."""
    found = (e for r in open_run(directory).records() if r.worker == SYNCER for e in r.effects)
    return [e for e in found if isinstance(e, kinds)]


def sends(record: Record, kind: type[Any]) -> list[Any]:
    return [e.envelope for e in record.effects if isinstance(e, Send) and isinstance(e.envelope.body, kind)]
