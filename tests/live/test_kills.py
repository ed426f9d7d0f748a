"""Learners die while they train, while they recover, and while they serve a recovery. Training goes on."""

from __future__ import annotations

from pathlib import Path

from harness import LONG, PATIENT, STEADY, judge, retrain, run, sends, small

from atoll.chaos import Clog, Kill
from atoll.protocol.vocabulary import FixParticipants, Recovered, Stored, Ticket
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.summary import verdict
from atoll.tape.format import Record

KILLED_AT = 12
"""An outer step: before the first is merged there is nothing to recover, and a newcomer is sent Theta."""


def test_learner_killed_while_it_trains_comes_back_through_a_peer(tmp_path: Path) -> None:
    config = small(3, total_steps=LONG, limits=PATIENT, inner=STEADY)
    back: list[int] = []
    rounds = 0

    def watch(cluster: LocalCluster, record: Record) -> None:
        nonlocal rounds
        if isinstance(record.event, Stored) and record.event.outer_step == KILLED_AT:
            cluster.inject(Kill(0.0, 1, 0.2))
        for effect in record.effects:
            if isinstance(effect, Recovered) and effect.learner == 1:
                back.append(effect.source)
            elif isinstance(effect, FixParticipants) and len(back) > 1:
                rounds += 1 in effect.participants

    run(tmp_path, config, watch=watch, until=lambda: rounds > 40)
    judge(tmp_path, config, whole=False)
    assert len(back) == 2 and back[-1] in (0, 2) and rounds > 40
    summary = verdict(config, tmp_path)
    assert summary.waited_seconds == 0 and summary.kernels == "torch", "the fragments are small"
    assert all(summary.stages[name] > 0 for name in ("gather", "merge", "store", "between_commits")), summary.stages
    assert summary.loss_final is not None and summary.loss_first is not None
    assert summary.loss_final < 0.8 * summary.loss_first
    retrain(tmp_path, whole=False)


def test_newcomer_and_serving_peer_killed_in_the_middle_of_a_recovery(tmp_path: Path) -> None:
    """A transfer is held up in the link between them, so that the kill hits its middle: first the newcomer dies, then, at
    its second attempt, the peer that serves it. The third attempt ends: through another peer, or with Theta where none is
    reachable in time."""
    config = small(3, total_steps=LONG, limits=PATIENT)
    tickets: list[int] = []
    back = rounds = 0

    def watch(cluster: LocalCluster, record: Record) -> None:
        nonlocal back, rounds
        if isinstance(record.event, Stored) and record.event.outer_step == KILLED_AT:
            cluster.inject(Kill(0.0, 2, 0.2))
        for envelope in sends(record, Ticket):
            peer = envelope.body.peer
            tickets.append(peer)
            if len(tickets) == 1:
                cluster.inject(Kill(0.0, envelope.receiver, 0.2))
            elif len(tickets) == 2:
                cluster.inject(Kill(0.0, peer, 0.2))
        for effect in record.effects:
            if isinstance(effect, Recovered) and effect.learner == 2:
                back += 1
            elif isinstance(effect, FixParticipants) and back > 1 and len(tickets) > 2:
                rounds += 2 in effect.participants

    run(tmp_path, config, Clog(at=0.3, a=0, b=1, lasts=2.0), watch=watch, until=lambda: rounds > 20)
    judge(tmp_path, config, whole=False)
    assert len(tickets) >= 3
    assert back >= 2, "it joined, and it recovered"
    assert rounds > 20, "it trains at the end"
