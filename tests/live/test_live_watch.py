"""A live run and those who watch it: the index that its syncers append, faults asked for from outside, and the page meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import pytest

from atoll.chaos import ChaosPlan, Kill, KillSyncer, Pause, Slow
from atoll.errors import UserError
from atoll.protocol.vocabulary import FixParticipants
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.watch.answers import RunState
from atoll.runtime.watch.source import WatchedRun
from atoll.tape.folder import RunFolder
from atoll.tape.format import Record, Tape
from atoll.views.index.build import build_index
from atoll.views.index.files import IndexReader, complete_in
from atoll.views.index.rows import EventKind, LaneState

pytestmark = pytest.mark.live

ROUNDS = 120
SEGMENTS = {"tape_segment_bytes": 1 << 16}
"""Of [limits]: the syncers that come back go on from a checkpoint."""


def test_index_that_killed_syncers_appended_is_the_one_that_the_tape_gives(tmp_path: Path) -> None:
    """A learner is killed by a request from outside, as the page's button does, and then the syncer, by the cluster. Each at a
    step and not after so many seconds, in which a quick machine is done with the run. While the learner is away the others are
    slow: on a full machine its process takes seconds to come back, and a run that had ended would have nothing to recover."""
    run, config = tmp_path / "run", harness.small(3, total_steps=ROUNDS, limits=SEGMENTS)
    watched = WatchedRun(RunFolder(run, run / "syncer"), chaos=("kill",))
    seen: list[Any] = []
    struck: list[Kill | KillSyncer] = []

    def watch(cluster: LocalCluster, record: Record) -> None:
        step = max((e.outer_step for e in record.effects if isinstance(e, FixParticipants)), default=0)
        if step >= 20 and not struck:
            struck.append(Kill(0.0, 1, 0.5))
            cluster.ask_fault(struck[0])
            for other in (0, 2):
                cluster.inject(Slow(0.0, other, 3.0, 4.0))
        elif step >= 40 and len(struck) == 1:
            struck.append(KillSyncer(0.0, 0.5))
            cluster.inject(struck[1])
        if step and step % 10 == 0:
            seen.append(watched.status())

    before = watched.status()
    cluster = harness.run(run, config, watch=watch)
    assert before.state is RunState.STARTING and before.rounds == 0
    assert [line.split()[2] for line in cluster.struck if "kill" in line].count("kill") == 2
    live = [status for status in seen if status.state is RunState.LIVE]
    assert live and live[0].chaos == ("kill",) and live[-1].rounds > live[0].rounds, "it grows while the run goes on"
    assert watched.status().state is RunState.FINISHED

    appended = run / "syncer" / "index"
    assert complete_in(appended) is not None and len(Tape(run / "syncer" / "run.tape").segments()) > 2
    build_index(Tape(run / "syncer" / "run.tape"), tmp_path / "anew")
    names = sorted(path.name for path in appended.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "anew").iterdir())
    for name in names:
        assert (appended / name).read_bytes() == (tmp_path / "anew" / name).read_bytes(), name

    index = IndexReader(appended)
    _, events = index.events_between(0, 1 << 62, 1000)
    mine = [event for event in events if event.learner == 1]
    assert any(event.state is LaneState.LOST for event in mine) and any(event.kind is EventKind.RECOVERED for event in mine)
    assert any(event.kind is EventKind.SYNCER_STARTED for event in events)
    assert index.rounds == ROUNDS and index.rows(ROUNDS - 1, ROUNDS)[0].loss is not None


def test_fault_asked_for_before_the_run_begins_or_of_nobody_is_refused(tmp_path: Path) -> None:
    cluster = LocalCluster(harness.small(2), tmp_path / "run", ChaosPlan())
    with pytest.raises(UserError, match="has not begun"):
        cluster.ask_fault(Pause(0.0, 1, 1.0))
    with pytest.raises(UserError, match="learners are 0 to 1"):
        cluster.ask_fault(Kill(0.0, 2, 1.0))
