"""Learners die while they train, while they recover, and while they serve a recovery. Training goes on."""

from __future__ import annotations

from pathlib import Path

from harness import effects_of, judge, retrain, run, sends, small

from atoll.chaos import Clog, Kill
from atoll.protocol.vocabulary import Recovered, Ticket
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.summary import verdict
from atoll.tape.format import Record
from atoll.tape.weave import open_run


def test_learner_killed_while_it_trains_comes_back_through_a_peer(tmp_path: Path) -> None:
    config = small(3, total_steps=100)
    run(tmp_path, config, Kill(at=0.6, learner=1, lasts=0.2))
    judge(tmp_path, config)
    recoveries = [r for r in effects_of(tmp_path, Recovered) if r.learner == 1]
    assert len(recoveries) == 2 and recoveries[-1].source in (0, 2)
    summary = verdict(config, tmp_path)
    assert summary.waited_seconds == 0
    assert summary.loss_final is not None and summary.loss_first is not None
    assert summary.loss_final < 0.8 * summary.loss_first
    retrain(tmp_path)


def test_newcomer_and_serving_peer_killed_in_the_middle_of_a_recovery(tmp_path: Path) -> None:
    """A transfer is held up in the link between them, so that the kill hits its middle: first the newcomer dies, then, at
    its second attempt, the peer that serves it. The third attempt ends: through another peer, or with Theta where none is
    reachable in time."""
    config = small(3, total_steps=130)
    tickets: list[int] = []

    def watch(cluster: LocalCluster, record: Record) -> None:
        for envelope in sends(record, Ticket):
            peer = envelope.body.peer
            tickets.append(peer)
            if len(tickets) == 1:
                cluster.inject(Kill(0.0, envelope.receiver, 0.2))
            elif len(tickets) == 2:
                cluster.inject(Kill(0.0, peer, 0.2))

    held = [Clog(at=0.3, a=0, b=1, lasts=2.0)]
    run(tmp_path, config, *held, Kill(at=0.6, learner=2, lasts=0.2), watch=watch)
    judge(tmp_path, config)
    assert len(tickets) >= 3
    back = [r.learner for r in effects_of(tmp_path, Recovered)]
    assert back.count(2) >= 2, "it joined, and it recovered"
    assert 2 in {r.worker for r in list(open_run(tmp_path).records())[-200:]}, "it trains at the end"
