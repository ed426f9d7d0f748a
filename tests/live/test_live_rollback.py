"""`atoll rollback` on a live run: while its syncer runs, and while it is dead."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from harness import judge, retrain, run, sends, small
from typer.testing import CliRunner

from atoll.chaos import KillSyncer
from atoll.cli.app import app
from atoll.errors import UserError
from atoll.protocol.messages import Loaded, TakeRollback
from atoll.protocol.vocabulary import AnswerRollback, LoadTheta, Received, Stored
from atoll.runtime.local.cluster import LocalCluster
from atoll.store.lock import is_locked
from atoll.tape.format import Record, Tape


class Operator(threading.Thread):
    """Rolls a running syncer back, and then one that was killed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.killed = threading.Event()
        self.said: list[str] = []
        self.kept: list[int] = []

    def run(self) -> None:
        self.kept = json.loads(self._call("--json"))["steps"]
        self._call("--to", str(self.kept[0]), "--reason", "the loss went up")
        assert self.killed.wait(60), "no learner loaded what the run was rolled back to"
        pause = threading.Event()
        while is_locked(self._folder / "syncer"):
            pause.wait(0.01)
        self._call("--to", str(self.kept[0]), "--reset-optimizer")

    def _call(self, *words: str) -> str:
        done = CliRunner().invoke(app, ["rollback", str(self._folder), *words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        self.said.append(done.stdout)
        return done.stdout


def test_running_and_killed_syncers_roll_back_and_replay_has_every_theta(tmp_path: Path) -> None:
    config = small(2, total_steps=220, protocol={"rollback_interval": 10}, limits={"rollback_points": 20})
    operator = Operator(tmp_path)

    tickets: set[int] = set()

    def watch(cluster: LocalCluster, record: Record) -> None:
        if isinstance(record.event, Stored) and record.event.outer_step == 20:
            operator.start()
        tickets.update(envelope.body.ticket for envelope in sends(record, TakeRollback))
        if loads_one_of(tickets, record) and not operator.killed.is_set():
            cluster.inject(KillSyncer(0.0, 3.0))
            operator.killed.set()

    run(tmp_path, config, watch=watch)
    operator.join()
    judge(tmp_path, config)
    retrain(tmp_path)
    records = list(Tape(tmp_path / "syncer" / "run.tape").records())
    answers = [e for r in records for e in r.effects if isinstance(e, AnswerRollback)]
    assert [a.to for a in answers] == [operator.kept[0]] * 2 and all(a.outer_step for a in answers)
    stored = {r.event.outer_step: r.event.digest for r in records if isinstance(r.event, Stored)}
    assert stored[answers[0].outer_step] == stored[answers[1].outer_step], "the same weights twice"
    loads = [e for m in (0, 1) for r in tape_of(tmp_path, m) for e in r.effects if isinstance(e, LoadTheta)]
    assert {True, False} <= {load.keep_optimizer for load in loads}, "kept the first time, reset the second"
    assert not (tmp_path / "syncer" / "rollback.json").exists()
    with pytest.raises(UserError, match="is over"):
        CliRunner().invoke(app, ["rollback", str(tmp_path), "--to", "10"], catch_exceptions=False)


def loads_one_of(tickets: set[int], record: Record) -> bool:
    body = record.event.envelope.body if isinstance(record.event, Received) else None
    return isinstance(body, Loaded) and body.ticket in tickets


def tape_of(folder: Path, learner: int) -> list[Record]:
    return [r for path in sorted((folder / "learners" / str(learner)).glob("*.tape")) for r in Tape(path).records()]
