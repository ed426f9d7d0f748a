"""Consistent, non-blocking snapshots: the syncer's side on stage, and the cut itself in a whole cluster."""

from __future__ import annotations

from collections import defaultdict

import pytest
from stage import LearnerStage, SyncerStage, arrival, of

from atoll.chaos import ChaosPlan, Kill
from atoll.config import Config, load
from atoll.ids import SYNCER
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.snapshot import IN_FLIGHT_MAX, marker_of
from atoll.protocol.vocabulary import (
    Adopt,
    Announce,
    ConnectionLost,
    Effect,
    Event,
    LoadState,
    Received,
    RecordInFlight,
    RecordState,
    RecordSyncer,
    Report,
    SealSnapshot,
    Started,
    StepDone,
)  # fmt: skip
from atoll.sim.cluster import VirtualCluster


def test_marker_is_the_newest_multiple_and_zero_is_none() -> None:
    assert [marker_of(t, 4) for t in (0, 3, 4, 7, 8)] == [0, 0, 4, 4, 8]
    assert marker_of(100, 0) == 0


def begun(learners: int = 2) -> SyncerStage:
    """A snapshot every two outer steps; the one of outer step 2 has just begun."""
    s = SyncerStage(arrival(learners, snapshot_interval=2), joined=learners)
    s.full_round(who=[0])
    s.steps(0)
    s.contributes(0, 2, 0)
    effects = s.stored(2)
    assert [e.snapshot for e in of(effects, RecordSyncer)] == [2]
    names = [type(e).__name__ for e in effects]
    assert names.index("RecordSyncer") < names.index("Send")  # recorded before anything later goes out
    return s


def returned(s: SyncerStage, *learners: int) -> list[Effect]:
    """They return the marker of outer step 2, and their part is written."""
    effects: list[Effect] = []
    for learner in learners:
        effects = [*s.steps(learner, snapshot=2), *s.wrote(learner, 2)]
    return effects


def test_snapshot_completes_when_every_learner_has_written_its_part() -> None:
    s = begun()
    assert of(s.steps(0, snapshot=2), SealSnapshot) == of(s.steps(1, snapshot=2), SealSnapshot) == []
    assert of(s.wrote(1, 2), SealSnapshot) == []
    assert of(s.wrote(0, 2), SealSnapshot) == [SealSnapshot(2, (0, 1), True, Reason(Why.PARTS_WRITTEN))]


def test_snapshot_leaves_out_a_learner_whose_part_is_not_written() -> None:
    """A full disk: the marker alone is no state to resume from."""
    s = begun()
    returned(s, 0)
    s.steps(1, snapshot=2)
    (sealed,) = of(s.wrote(1, 2, Reason(Why.NOT_WRITTEN, "no space left")), SealSnapshot)
    assert (sealed.learners, sealed.complete, sealed.left_out, sealed.reason.why) == ((0,), True, (1,), Why.LEARNER_LEFT_OUT)


def test_snapshot_part_of_another_snapshot_or_before_the_marker_counts_for_nothing() -> None:
    s = begun()
    s.wrote(0, 2)
    s.steps(0, snapshot=2)
    s.wrote(0, 1)
    returned(s, 1)
    assert s.machine.snapshot.open
    assert of(s.wrote(0, 2), SealSnapshot) != []
    assert of(s.wrote(0, 2), SealSnapshot) == []


def test_snapshot_leaves_out_a_learner_that_withholds_the_marker() -> None:
    s = begun(learners=3)
    returned(s, 0, 2)
    recorded = sealed = 0
    for _ in range(IN_FLIGHT_MAX + 5):
        effects = s.hears(1, s.report(1))
        recorded += len(of(effects, RecordInFlight))
        sealed += len(of(effects, SealSnapshot))
    assert (recorded, sealed, s.machine.snapshot.open) == (IN_FLIGHT_MAX, 1, False)


def test_snapshot_due_again_is_sealed_without_the_few_that_are_late() -> None:
    """Or a single learner could prevent every snapshot."""
    s = begun(learners=4)
    for learner in (0, 1, 2):
        s.hears(learner, s.report(learner, snapshot=2))
        s.wrote(learner, 2)
    s.hears(3, s.report(3, snapshot=2))
    s.full_round(who=[0])
    s.steps(0)
    s.contributes(0, 4, 0)
    (sealed,) = of(s.stored(4), SealSnapshot)
    assert (sealed.learners, sealed.complete, sealed.left_out) == ((0, 1, 2), True, (3,))
    assert sealed.reason.why is Why.NEXT_SNAPSHOT_DUE


def test_snapshot_records_what_arrives_before_the_marker_as_in_flight() -> None:
    s = begun()
    seq = s.cast[1].seq[0]
    (recorded,) = of(s.steps(1), RecordInFlight)  # sent before it saw the marker
    assert (recorded.snapshot, recorded.envelope.sender, recorded.envelope.seq) == (2, 1, seq)
    assert of(s.steps(1, snapshot=2), RecordInFlight) == []
    assert of(s.steps(1, snapshot=2), RecordInFlight) == []


def test_snapshot_leaves_out_the_dead() -> None:
    s = begun()
    returned(s, 0)
    (sealed,) = of(s.on(ConnectionLost(1, "gone")), SealSnapshot)
    assert (sealed.learners, sealed.complete, sealed.left_out, sealed.reason.why) == ((0,), True, (1,), Why.LEARNER_LEFT_OUT)


def test_snapshot_leaves_out_one_that_died_after_it_recorded() -> None:
    s = begun()
    returned(s, 0)
    s.on(ConnectionLost(0, "gone"))
    assert of(returned(s, 1), SealSnapshot)[0].learners == (1,)


def test_snapshot_not_complete_when_the_next_is_due_is_abandoned() -> None:
    s = begun()
    s.full_round(who=[0])
    s.steps(0)
    s.contributes(0, 4, 0)
    effects = s.stored(4)
    sealed, begun_anew = of(effects, SealSnapshot, RecordSyncer)
    assert sealed == SealSnapshot(2, (), False, Reason(Why.NEXT_SNAPSHOT_DUE, "snapshot 4 is due and this one is not complete"))
    assert isinstance(begun_anew, RecordSyncer) and begun_anew.snapshot == 4


def test_snapshot_open_when_the_syncer_restarts_is_abandoned() -> None:
    s = begun()
    assert of(s.on(Started(1)), SealSnapshot) == [SealSnapshot(2, (), False, Reason(Why.SYNCER_RESTARTED))]


def test_snapshot_open_at_the_end_is_abandoned() -> None:
    s = SyncerStage(arrival(2, snapshot_interval=2, total_steps=3), joined=2)
    for _ in range(2):
        s.full_round(who=[0])
    s.steps(0)
    s.contributes(0, 3, 1)
    assert of(s.stored(3), SealSnapshot) == [SealSnapshot(2, (), False, Reason(Why.RUN_OVER))]


def test_snapshot_never_stops_the_rounds() -> None:
    s = begun()
    assert s.full_round(who=[0]) == 3


def test_marker_travels_as_the_clock_of_any_message_of_the_syncer() -> None:
    stage = LearnerStage(arrival(2, snapshot_interval=2))
    stage.enters()
    stage.syncer_clock = 2
    stage.hears(Announce(1, 1, 0, ()))
    assert [e.snapshot for e in of(stage.steps(), RecordState)] == [2]


# ---------------------------------------------------------------- a consistent cut


class Cut:
    """Watches a cluster: which versions each learner held when it recorded, and which messages crossed the cut."""

    def __init__(self) -> None:
        self.held: dict[int, dict[int, int]] = defaultdict(dict)
        self.recorded: dict[tuple[int, int], dict[int, int]] = {}
        self.local_steps: dict[tuple[int, int], int] = {}
        self.steps: dict[int, int] = defaultdict(int)
        self.begun: dict[int, dict[int, int]] = {}
        self.reported: dict[int, int] = defaultdict(int)
        self.in_flight: dict[int, list[Report]] = defaultdict(list)
        self.sealed: list[SealSnapshot] = []

    def __call__(self, now: int, worker: int, event: Event, effects: list[Effect]) -> None:
        body = event.envelope.body if isinstance(event, Received) else None
        if worker == SYNCER and isinstance(event, Received):
            for effect in of(effects, RecordInFlight):
                if isinstance(body, Report):
                    self.in_flight[effect.snapshot].append(body)
            if isinstance(body, Report):
                self.reported[event.envelope.sender] = max(self.reported[event.envelope.sender], body.local_step)
        if isinstance(event, StepDone):
            self.steps[worker] += 1
        for effect in effects:
            match effect:
                case Adopt(fragment=p, version=v):
                    self.held[worker][p] = v
                case LoadState(held=held):
                    self.held[worker] = dict(enumerate(held))
                case RecordState(snapshot=marker):
                    self.recorded[marker, worker] = dict(self.held[worker])
                    self.local_steps[marker, worker] = self.steps[worker]
                case RecordSyncer(snapshot=marker):
                    self.begun[marker] = dict(self.reported)
                case SealSnapshot():
                    self.sealed.append(effect)
                case _:
                    pass


def small(preset: str) -> Config:
    protocol = {"local_steps_per_round": 4, "fragments": 4, "snapshot_interval": 8}
    protocol |= {"overlap": 4} if preset == "async_diloco" else {}
    protocol |= {"fragmentation": "balanced"} if preset == "streaming" else {}
    return load(preset_name=preset, overrides={"learners": 4, "total_steps": 80, "protocol": protocol})


@pytest.mark.parametrize("preset", ["decoupled", "decoupled_ramp", "streaming", "diloco", "async_diloco", "fedavg"])
def test_recorded_learner_state_holds_no_version_later_than_the_marker(preset: str) -> None:
    cut = Cut()
    VirtualCluster(small(preset), observers=[cut]).run(until_seconds=2000)
    complete = [s for s in cut.sealed if s.complete]
    assert len(complete) >= 5
    for seal in complete:
        assert seal.learners == (0, 1, 2, 3)
        for learner in seal.learners:
            assert all(version <= seal.snapshot for version in cut.recorded[seal.snapshot, learner].values())


def test_recorded_state_and_in_flight_reports_leave_no_gap_and_no_overlap() -> None:
    """What the syncer knew at its record, and the reports in flight, reach up to the learner's recorded step, not beyond."""
    cut = Cut()
    VirtualCluster(small("decoupled"), observers=[cut]).run(until_seconds=2000)
    checked = 0
    for seal in [s for s in cut.sealed if s.complete]:
        for learner in seal.learners:
            flying = [r.local_step for r in cut.in_flight[seal.snapshot] if r.stream == learner]
            known = cut.begun[seal.snapshot].get(learner, 0)
            at = cut.local_steps[seal.snapshot, learner]
            assert flying == list(range(known + 1, known + 1 + len(flying)))
            assert known + len(flying) <= at <= known + len(flying) + 1  # the report of the step just done returns the marker
            checked += 1
    assert checked >= 20


def test_snapshots_with_a_learner_killed_still_complete_and_leave_it_out() -> None:
    cut = Cut()
    plan = ChaosPlan((Kill(20.3, 2, 15.0),))
    VirtualCluster(small("decoupled"), plan=plan, observers=[cut]).run(until_seconds=2000)
    assert any(s.complete and 2 not in s.learners and len(s.learners) == 3 for s in cut.sealed)
    assert any(s.complete and s.learners == (0, 1, 2, 3) for s in cut.sealed)
