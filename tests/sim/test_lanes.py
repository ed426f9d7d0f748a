"""Two lanes on a slow link: a long contribution does not hold back the reports that let the next round begin."""

from __future__ import annotations

import pytest
from resumption import RecordingExecutor, Run

from atoll.config import Config, load
from atoll.config.codecs import wire_bits
from atoll.ids import SYNCER
from atoll.protocol.vocabulary import (
    Contribution,
    Envelope,
    Received,
    RecordState,
    Report,
    SealSnapshot,
    Send,
)
from atoll.sim import network

STEPS = 120


def slow_link(upload_steps: float, fragments: int = 8, **protocol: object) -> Config:
    """Decoupled, tau = 2, a fragment due every third step; sending one up takes so many inner steps."""
    parameters = 1_000_000
    sizes = {"fragments": fragments, "local_steps_per_round": 24, "overlap": 2} | protocol
    bits = parameters / fragments * wire_bits(load(preset_name="decoupled").protocol.codec_up)
    cluster = {"parameters": parameters, "up_gbit": bits / (upload_steps * 1e9), "step_seconds": 1.0}
    return load(preset_name="decoupled", overrides={
        "learners": 3, "total_steps": STEPS, "protocol": sizes, "cluster": cluster,
    })  # fmt: skip


def run(config: Config) -> Run:
    return Run(config, RecordingExecutor(config)).whole()


def fifo_seconds(upload_steps: float) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "may_overtake", lambda envelope: False)
        return run(slow_link(upload_steps)).cluster.virtual_seconds()


def test_slow_uploads_keep_the_paced_rate_with_lanes_and_lose_it_without() -> None:
    paced = run(slow_link(0.05)).cluster.virtual_seconds()
    slow = run(slow_link(1.5)).cluster.virtual_seconds()
    assert slow < 1.03 * paced, "the overlap that tau promises hides the transfer"
    assert fifo_seconds(1.5) > 1.1 * slow, "a report behind a contribution comes a step late"


def test_the_slower_the_link_the_more_the_lanes_save() -> None:
    saved = [fifo_seconds(steps) - run(slow_link(steps)).cluster.virtual_seconds() for steps in (0.5, 1.0, 1.9)]
    assert saved[0] < saved[1] < saved[2]


def test_fast_link_is_the_same_with_one_lane_or_two() -> None:
    assert fifo_seconds(0.05) == run(slow_link(0.05)).cluster.virtual_seconds()


class Crossing:
    """For each message to the syncer: how many messages sent before it by the same learner were still on their way."""

    def __init__(self, log: Run) -> None:
        flying: dict[int, list[Envelope]] = {}
        self.overtook: list[tuple[Envelope, list[Envelope]]] = []
        for _, worker, event, effects in log.log:
            if worker == SYNCER and isinstance(event, Received):
                mine = flying[event.envelope.sender]
                at = mine.index(event.envelope)
                self.overtook.append((event.envelope, mine[:at]))
                del mine[at]
            for effect in effects:
                if worker != SYNCER and isinstance(effect, Send) and effect.envelope.receiver == SYNCER:
                    flying.setdefault(worker, []).append(effect.envelope)


def test_only_reports_and_the_like_overtake_and_only_contributions_are_overtaken() -> None:
    crossing = Crossing(run(slow_link(1.5)))
    passed = [(type(e.body), {type(o.body) for o in over}) for e, over in crossing.overtook if over]
    assert len(passed) > STEPS
    assert {kind for kind, _ in passed} == {Report}
    assert all(over == {Contribution} for _, over in passed)


def test_report_that_returns_a_snapshots_marker_overtakes_nothing() -> None:
    """What was sent before it was in flight at the cut; it must not arrive behind the marker. A fragment is due at every
    step, so that one is on its way whenever a snapshot begins."""
    done = run(slow_link(1.5, fragments=24, snapshot_interval=7))
    assert len([e for e in done.effects(SealSnapshot) if isinstance(e, SealSnapshot) and e.complete]) > 10
    recorded = {(w, e.snapshot) for _, w, _, fx in done.log for e in fx if isinstance(e, RecordState)}
    returned: set[tuple[int, int]] = set()
    for envelope, over in Crossing(done).overtook:
        body = envelope.body
        key = (envelope.sender, body.snapshot) if isinstance(body, Report) else None
        if key in recorded and key not in returned:
            returned.add(key)  # type: ignore[arg-type]
            assert not over
    assert len(returned) > 30
