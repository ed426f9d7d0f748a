"""Learners come and go: many joins and leaves, a run resumed with another number of learners."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from harness import LONG, PATIENT, STEADY, effects_of, judge, learner_argv, retrain, run, small

from atoll.chaos import Scavenge
from atoll.protocol.vocabulary import FixParticipants, Goodbye, Membership, Received, Recovered, Resumed, StepDone, Stored
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
        self.goodbyes = 0
        self._asked: set[Child] = set()

    def watch(self, cluster: LocalCluster, record: Record) -> None:
        self.goodbyes += is_goodbye(record)
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


def is_goodbye(record: Record) -> bool:
    return isinstance(record.event, Received) and isinstance(record.event.envelope.body, Goodbye)


@pytest.mark.parametrize("joins", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_many_joins_and_polite_leaves(joins: int, tmp_path: Path) -> None:
    config = small(2, total_steps=LONG, limits=PATIENT)
    scavengers = Scavengers(tmp_path, joins, min(4, joins - 1))
    # One that has gone has sent its last word; the syncer reads it when it gets a turn.
    run(tmp_path, config, watch=scavengers.watch, until=lambda: len(scavengers.codes) == scavengers.goodbyes == joins)
    judge(tmp_path, config, whole=False)
    goodbyes = [record for record in open_run(tmp_path).records() if is_goodbye(record)]
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
    assert any(map(is_goodbye, records))
    assert [r.learner for r in effects_of(tmp_path, Recovered) if r.learner == 2] == [2]


def test_run_resumed_from_a_snapshot_with_other_numbers_of_learners(tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    snapshots, inner = {"snapshot_interval": 12}, {"inner": STEADY}
    config = small(2, total_steps=LONG, limits=PATIENT, protocol=snapshots, **inner)
    sealed: list[int] = []

    def whole() -> list[int]:
        of_both = [found for found in list_snapshots(first) if found.complete and found.present == (0, 1)]
        return [found.outer_step for found in of_both if found.outer_step > 40]

    def watch(cluster: LocalCluster, record: Record) -> None:
        if isinstance(record.event, Stored):  # a snapshot is taped first, and then sealed on disk
            sealed[:] = whole()

    run(first, config, watch=watch, until=lambda: bool(sealed))
    judge(first, config, whole=False)
    assert whole(), list_snapshots(first)
    at = whole()[-1]  # that which was seen may be gone: the run went on until its processes were dead
    assert verify(first, at) == []
    # The first round waits for three, and the third for a broadcast: it is the short patience that ends this, with Theta.
    longer = small(3, total_steps=LONG, limits=PATIENT | {"patience_seconds": 0.5}, protocol=snapshots, **inner)
    rounds = 0

    def count(cluster: LocalCluster, record: Record) -> None:
        nonlocal rounds
        rounds += sum(isinstance(e, FixParticipants) and e.participants == (0, 1, 2) for e in record.effects)

    run(again, longer, watch=count, until=lambda: rounds > 20, resume=(first, at))
    judge(again, longer, whole=False)
    assert rounds > 20, "all three train together"
    records = list(open_run(again).records())
    assert {r.worker for r in records if isinstance(r.event, Resumed)} == {0, 1}
    assert 2 in {r.worker for r in records if isinstance(r.event, StepDone)}, "a third joined as a newcomer"
    summary, before = verdict(longer, again), verdict(config, first)
    assert summary.loss_final is not None and before.loss_first is not None and summary.loss_first is not None
    assert summary.loss_first < 0.85 * before.loss_first, "it goes on from what the first had learnt"
    assert summary.loss_final < 0.85 * before.loss_first, "and stays there"
    retrain(again, whole=False)
