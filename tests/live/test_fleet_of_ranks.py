"""One run of learners of one, two, three and four ranks, and a syncer of two shards: whatever is killed comes back, and nobody
waits for it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from harness import PATIENT, STEADY, SharedForkServer, effects_of, judge, run, sends, small

from atoll.chaos import Kill, KillSyncer
from atoll.protocol.vocabulary import FixParticipants, Recovered, Stored, Ticket
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.forkserver import Child
from atoll.runtime.local.summary import verdict
from atoll.tape.format import Record

pytestmark = [pytest.mark.live, pytest.mark.soak]
LAYOUTS = {1: ("2", "ddp"), 2: ("3", "fsdp2"), 3: ("4", "hsdp")}
"""By learner its ranks; learner 0 is one process."""
BACK_SECONDS = 0.2
STEPS_MAX = 100_000
"""One process goes on alone while ranks start, and they take a while on two cores."""
APART = 12
"""Rounds with all learners between two kills."""


class Fleet(SharedForkServer):
    """Gives every learner its layout, and the syncer its shards."""

    children: ClassVar[dict[int, Child]] = {}

    def spawn(self, argv: Sequence[str], log: Path) -> Child:
        if argv[0] == "syncer":
            return super().spawn([*argv, "--shards", "2"], log)
        if argv[0] != "learner":
            return super().spawn(argv, log)
        learner = int(argv[list(argv).index("--id") + 1])
        ranks, parallel = LAYOUTS.get(learner, ("1", "ddp"))
        child = super().spawn([*argv, "--ranks", ranks, "--parallel", parallel], log)
        self.children[learner] = child
        return child


def kill_a_rank(learner: int) -> None:
    """The last: rank 0 is the one that the syncer knows."""
    launcher = Fleet.children[learner].pid
    os.kill(int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[-1]), signal.SIGKILL)


def kill_a_shard(directory: Path) -> None:
    locks = sorted((directory / "syncer" / "versions").glob("shard*/lock"))
    os.kill(int(locks[-1].read_text()), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_ranks_learners_shards_and_the_syncer_are_killed_and_the_verdict_is_clean(tmp_path: Path) -> None:
    """A rank of three; a rank of four, whose peer is killed while it serves; the learner of two ranks; a shard; the syncer. The
    next is struck when rounds have had all four learners again."""
    limits = PATIENT | {"start_wait_seconds": 600.0, "outlier_factor": 1e9}  # one process is far ahead when four ranks come
    config = small(4, total_steps=STEPS_MAX, limits=limits, inner=STEADY, data={"batch_size": 6})
    whole, struck, armed = 0, list[str](), False
    recovered: list[tuple[int, int]] = []

    def strike(cluster: LocalCluster) -> None:
        nonlocal armed
        match len(struck):
            case 0:
                kill_a_rank(2)
            case 1:
                kill_a_rank(3)
                armed = True
            case 2:
                cluster.inject(Kill(0.0, 1, BACK_SECONDS))
            case 3:
                kill_a_shard(tmp_path)
            case 4:
                cluster.inject(KillSyncer(0.0, BACK_SECONDS))
        struck.append("")

    def watch(cluster: LocalCluster, record: Record) -> None:
        nonlocal whole, armed
        for envelope in sends(record, Ticket):
            if armed and envelope.receiver != envelope.body.peer and len(struck) == 2:
                cluster.inject(Kill(0.0, envelope.body.peer, BACK_SECONDS))
                armed = False
        for effect in record.effects:
            if isinstance(effect, Recovered):
                recovered.append((effect.learner, effect.source))
            elif isinstance(effect, FixParticipants):
                whole += set(effect.participants) == {0, 1, 2, 3}
        if isinstance(record.event, Stored) and whole >= APART * (1 + len(struck)) and len(struck) < 5:
            whole = APART * (1 + len(struck))
            strike(cluster)

    run(tmp_path, config, watch=watch, until=lambda: len(struck) == 5 and whole >= APART * 6, fork_server=Fleet)
    judge(tmp_path, config, whole=False)
    assert not armed, "a peer was killed while it served"
    summary = verdict(config, tmp_path)
    assert summary.waited_seconds == 0
    assert {learner for learner, _ in recovered} >= {1, 2, 3}
    assert len(effects_of(tmp_path, FixParticipants)) > 6 * APART
    assert summary.loss_final is not None and summary.loss_first is not None and summary.loss_final < summary.loss_first
