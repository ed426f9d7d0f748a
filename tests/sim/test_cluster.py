"""Whole clusters under faults that once stopped a run for ever, repeated a message without end, or broke the accounting. Each
story is small and exact, and no chance plays a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from atoll.chaos import ChaosPlan, Clog, Fault, Kill, KillSyncer, Partition, Pause, Scavenge
from atoll.config import load
from atoll.ids import SYNCER
from atoll.protocol.vocabulary import (
    Announce,
    ConnectionLost,
    Contribution,
    Effect,
    Event,
    Goodbye,
    Hello,
    InnerStep,
    LeaveAsked,
    RecordState,
    Recovered,
    Report,
    Send,
    StepDone,
)
from atoll.sim.checkers import Liveness, Safety
from atoll.sim.cluster import VirtualCluster
from atoll.tape.in_flight import RoundsInFlight


class Story:
    def __init__(
        self, preset: str, *faults: Fault, until: float = 3000.0, learners: int = 3, total_steps: int = 60, **sections: Any
    ) -> None:
        self.config = load(preset_name=preset, overrides={"learners": learners, "total_steps": total_steps} | sections)
        self.log: list[tuple[int, int, Event, Sequence[Effect]]] = []
        safety = Safety(self.config)
        self.cluster = VirtualCluster(self.config, plan=ChaosPlan(faults), observers=[safety, self._see])
        safety.attach(self.cluster)
        self.cluster.run(until_seconds=until)
        Liveness(self.cluster).check_end()

    def _see(self, now: int, worker: int, event: Event, effects: Sequence[Effect]) -> None:
        self.log.append((now, worker, event, effects))

    def sent(self, kind: type) -> int:
        return sum(isinstance(e, Send) and isinstance(e.envelope.body, kind) for _, _, _, fx in self.log for e in fx)


@pytest.mark.parametrize(
    ("preset", "protocol"),
    [
        ("diloco", {"local_steps_per_round": 5}),
        ("ddp", {"elastic": True}),
        ("ddp", {"elastic": False}),
        ("streaming", {"local_steps_per_round": 6, "quorum": 3}),
        ("decoupled_ramp", {"ramp": 0.5}),
    ],
)
def test_everybody_late_in_a_pull_comes_back_and_the_run_ends(preset: str, protocol: dict[str, Any]) -> None:
    """A participant that misses its deadline is silent, and waits for that very round: it never reports again."""
    clogs = [Clog(10.5 + 0.01 * m, m, SYNCER, 100.0) for m in range(3)]
    Story(preset, *clogs, protocol=protocol)


def test_uploads_longer_than_the_first_pull_deadline_do_not_stop_the_run_for_ever() -> None:
    story = Story("diloco", learners=2, total_steps=8, until=20_000.0, protocol={"local_steps_per_round": 4},
                  cluster={"parameters": 4_000_000_000})  # fmt: skip
    assert story.cluster.syncer.outer_step == 8


def test_learner_recovering_over_a_slow_link_says_hello_once() -> None:
    """With a lossy codec down, what it has yet to adopt is not what it holds: a difference to it cannot be applied."""
    story = Story("decoupled", Kill(30.0, 1, 5.0), learners=4, total_steps=200, cluster={"parameters": 200_000_000})
    assert story.sent(Hello) <= 4 + 3
    recovered = [e for _, _, _, fx in story.log for e in fx if isinstance(e, Recovered) and e.learner == 1]
    assert recovered[-1].source >= 0, "through a peer, however long it took"


@pytest.mark.parametrize("at", [3.0, 20.3, 41.7])
def test_kill_in_a_round_waits_until_its_victim_takes_part(at: float) -> None:
    story = Story("decoupled", Kill(at, 1, 5.0, in_round=True), learners=3, total_steps=200)
    in_flight, struck = RoundsInFlight(), None
    for now, worker, event, effects in story.log:
        if worker == SYNCER and struck is None and isinstance(event, ConnectionLost) and event.peer == 1:
            struck = now, in_flight.takes_part(1)
        if worker == SYNCER:
            in_flight.note(event, effects)
    assert struck is not None and struck[0] >= at * 1e9 and struck[1]


def test_async_laggard_that_was_sent_the_newest_only_goes_on() -> None:
    faults = (Pause(12.0, 1, 14.0), Partition(30.0, 2, SYNCER, 9.0))
    Story("async_diloco", *faults, protocol={"local_steps_per_round": 2, "overlap": 2})


@pytest.mark.parametrize("at", [8.2, 20.6, 33.3])
def test_learner_with_a_longer_overlap_keeps_its_place_when_the_syncer_comes_back(at: float) -> None:
    """Exactly H steps an interval: no learner trains a step twice."""
    story = Story("streaming", KillSyncer(at, 2.0), learners=2, total_steps=60,
                  protocol={"local_steps_per_round": 12, "overlap": 1, "overlap_by_learner": [1, 5]})  # fmt: skip
    steps = [m.counters.local_step for m in (story.cluster.learner(0), story.cluster.learner(1)) if m]
    assert steps == [60, 60]


def test_newcomer_of_a_preset_with_rare_broadcasts_still_recovers_through_a_peer() -> None:
    story = Story("diloco", Kill(22.0, 1, 3.0), total_steps=80, protocol={"local_steps_per_round": 20})
    late = [e for now, _, _, fx in story.log for e in fx if isinstance(e, Recovered) and now > 20 * 10**9]
    assert [e.source >= 0 for e in late] == [True]


@pytest.mark.parametrize("preset", ["diloco", "streaming", "decoupled"])
def test_snapshot_cut_is_consistent_for_learners_that_wait(preset: str) -> None:
    """Nothing is sent between a learner's record and its marker."""
    protocol: dict[str, Any] = {"snapshot_interval": 3, "local_steps_per_round": 6}
    if preset == "decoupled":
        protocol |= {"quorum": 3, "fragments": 6}
    story = Story(preset, protocol=protocol, cluster={"slow_share": 0.34, "slow_factor": 1.5})
    recorded: dict[int, int] = {}
    crossing = 0
    for _, worker, _, effects in story.log:
        for e in effects:
            if isinstance(e, RecordState):
                recorded[worker] = e.snapshot
            elif isinstance(e, Send) and worker != SYNCER and worker in recorded:
                if isinstance(e.envelope.body, Report) and e.envelope.body.snapshot >= recorded[worker]:
                    del recorded[worker]
                elif isinstance(e.envelope.body, Contribution | Report):
                    crossing += 1
    assert crossing == 0
    assert story.sent(Announce) > 0


def test_no_leased_unit_vanishes_when_connections_break() -> None:
    """Every unit that was granted is drawn by somebody, or is still ahead of somebody, or waits in the pool."""
    faults = [Partition(11.0 + 9 * k, k % 3, SYNCER, 5.0) for k in range(6)]
    story = Story("decoupled", *faults, total_steps=120, protocol={"fragments": 4, "local_steps_per_round": 4})
    drawn = {(e.stream, e.batch // 4) for _, _, _, fx in story.log for e in fx if isinstance(e, InnerStep)}
    leases = story.cluster.syncer.leases
    ahead = {(u.stream, u.index) for held in leases.by_learner.values() for u in held.granted}
    pool = {(u.stream, u.index) for u in leases._pool}
    for stream in range(3):
        for index in range(leases.own_next(stream)):
            assert (stream, index) in drawn | ahead | pool, (stream, index)


def test_pulls_that_overlap_are_timed_each_by_itself_and_slow_uplinks_are_waited_for() -> None:
    """Timed from the newest pull, five that overlap seemed five times as fast as they were: every deadline was too short, and
    what was pulled again queued behind what had been on its way already."""
    story = Story("decoupled", learners=5, total_steps=150, until=1500.0, cluster={"latency_seconds": 0.1, "up_gbit": 1e-4},
                  protocol={"local_steps_per_round": 12, "fragments": 12, "overlap": 5, "quorum": "all", "pace": 0})  # fmt: skip
    assert story.sent(Contribution) == 5 * 150, "each was pulled once"


@pytest.mark.parametrize("learners", [1, 2])
def test_upload_of_any_length_is_merged_in_the_end(learners: int) -> None:
    """Four times the first deadline was the most that anybody ever waited, so that a longer one never was."""
    story = Story("diloco", learners=learners, total_steps=20, until=20_000.0, protocol={"local_steps_per_round": 5},
                  cluster={"up_gbit": 32e6 / 1000 / 1e9})  # fmt: skip
    assert story.cluster.syncer.outer_step == 20
    assert story.sent(Contribution) < learners * (4 + 8), "once the time is known nothing is asked for twice"


@pytest.mark.parametrize("at", [20.3, *(pytest.param(at, marks=pytest.mark.soak) for at in (31.7, 44.4))])
def test_rounds_that_lose_everybody_one_after_the_other_are_all_gathered_again(at: float) -> None:
    """The later had begun to gather again when the earlier did, with a third above it in flight: it was forgotten for ever."""
    cuts = [Partition(at + 0.4 * m, m, SYNCER, 6.0) for m in (1, 0)]
    story = Story("decoupled", *cuts, learners=2, total_steps=80, cluster={"latency_seconds": 0.3, "up_gbit": 2e-5},
                  protocol={"local_steps_per_round": 8, "fragments": 8, "overlap": 4, "quorum": 1})  # fmt: skip
    assert story.cluster.syncer.outer_step == 80


def test_learner_that_leaves_while_it_is_cut_off_ends_in_the_middle_of_a_step() -> None:
    """Nobody hears its Goodbye, so none is sent; its last step is no violation. Found by `bench/kills.py`."""
    story = Story("decoupled", Scavenge(4.0, 2, 26.0), Partition(10.0, 2, SYNCER, 30.0), learners=2, total_steps=40,
                  protocol={"local_steps_per_round": 8, "fragments": 8})  # fmt: skip
    its = [(event, effects) for _, worker, event, effects in story.log if worker == 2]
    after = [e for e, _ in its[next(i for i, (e, _) in enumerate(its) if isinstance(e, LeaveAsked)) :]]
    assert not [e for _, fx in its for e in fx if isinstance(e, Send) and isinstance(e.envelope.body, Goodbye)]
    assert any(isinstance(event, StepDone) for event in after), "a step was running"
    assert story.cluster.syncer.outer_step == 40
