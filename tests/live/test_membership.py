"""Learners come and go: many joins and leaves, a run resumed with another number of learners."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from harness import effects_of, judge, learner_argv, retrain, run, small

from atoll.chaos import Scavenge
from atoll.protocol.vocabulary import Goodbye, Membership, Received, Recovered, Resumed, StepDone
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.forkserver import Child
from atoll.runtime.local.summary import verdict
from atoll.store.snapshots import list_snapshots, verify
from atoll.tape.format import Record
from atoll.tape.weave import open_run


class Scavengers:
    """Learners beyond the two that stay: each joins, trains until it is in sync, and is asked to leave (SIGTERM)."""

    def __init__(self, directory: Path, count: int, at_once: int) -> None:
        self._directory = directory
        self._left = count
        self._at_once = at_once
        self.here: dict[int, Child] = {}
        self.codes: list[int] = []
        self._asked: set[Child] = set()

    def watch(self, cluster: LocalCluster, record: Record) -> None:
        for effect in record.effects:
            if isinstance(effect, Membership) and effect.standing == "in_sync":
                child = self.here.get(effect.learner)
                if child is not None and child not in self._asked:  # asked twice it would go at once
                    self._asked.add(child)
                    child.signal(signal.SIGTERM)
        for learner, child in list(self.here.items()):
            code = child.poll()
            if code is not None:
                self.codes.append(code)
                del self.here[learner]
        while self._left and len(self.here) < self._at_once:
            self._left -= 1
            learner = 2 + self._left % 6
            if learner in self.here:
                self._left += 1
                return
            out = self._directory / "learners" / str(learner)
            self.here[learner] = cluster.fork_server.spawn(learner_argv(self._directory, cluster.address, learner), out / "log")


@pytest.mark.parametrize(("joins", "total_steps"), [(3, 130), pytest.param(20, 600, marks=pytest.mark.soak)])
def test_many_joins_and_polite_leaves(joins: int, total_steps: int, tmp_path: Path) -> None:
    config = small(2, total_steps=total_steps)
    scavengers = Scavengers(tmp_path, joins, min(4, joins - 1))
    run(tmp_path, config, watch=scavengers.watch)
    judge(tmp_path, config)
    goodbyes = [
        r for r in open_run(tmp_path).records()
        if isinstance(r.event, Received) and isinstance(r.event.envelope.body, Goodbye)
    ]  # fmt: skip
    assert scavengers.codes == [0] * joins, "all of them came, and went before the run was over"
    assert len(goodbyes) == joins, "each goodbye was heard, also behind a last contribution"
    sources = [r.source for r in effects_of(tmp_path, Recovered) if r.learner >= 2]
    assert len(sources) >= joins
    summary = verdict(config, tmp_path)
    assert summary.waited_seconds == 0 and summary.tokens.merged > 0


@pytest.mark.soak
def test_plan_scavenges_a_learner_that_joins_trains_and_leaves(tmp_path: Path) -> None:
    config = small(2, total_steps=270)
    run(tmp_path, config, Scavenge(0.3, 2, 3.5))
    judge(tmp_path, config)
    records = list(open_run(tmp_path).records())
    assert sum(r.worker == 2 and isinstance(r.event, StepDone) for r in records) > 10
    assert any(isinstance(r.event, Received) and isinstance(r.event.envelope.body, Goodbye) for r in records)
    assert [r.learner for r in effects_of(tmp_path, Recovered) if r.learner == 2] == [2]


def test_run_resumed_from_a_snapshot_with_other_numbers_of_learners(tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    config = small(2, total_steps=50, protocol={"snapshot_interval": 12})
    run(first, config)
    judge(first, config)
    snapshots = list_snapshots(first)
    assert snapshots and snapshots[-1].complete and snapshots[-1].present == (0, 1)
    at = snapshots[-1].outer_step
    assert verify(first, at) == []
    longer = small(3, total_steps=80, protocol={"snapshot_interval": 12})
    run(again, longer, resume=(first, at))
    judge(again, longer)
    records = list(open_run(again).records())
    assert {r.worker for r in records if isinstance(r.event, Resumed)} == {0, 1}
    assert 2 in {r.worker for r in records if isinstance(r.event, StepDone)}, "a third joined as a newcomer"
    summary, before = verdict(longer, again), verdict(config, first)
    assert summary.loss_final is not None and before.loss_first is not None and summary.loss_first is not None
    assert summary.loss_first < 0.85 * before.loss_first, "it goes on from what the first had learnt"
    assert summary.loss_final < 0.85 * before.loss_first, "and stays there"
    retrain(again)
