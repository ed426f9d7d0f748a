"""Cluster stories with exact expected strips: a plan, dashes, and what every worker then did, in order.

A strip leaves out the events on which nobody decided anything. It is rewritten by --rewrite-transcripts and read in the diff.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atoll.chaos import ChaosPlan, Kill, KillSyncer, Slow
from atoll.config import Config, load
from atoll.ids import Nanos, WorkerId, nanos
from atoll.protocol.vocabulary import ConnectionLost, Effect, Event, FixParticipants, Recovered, Started, Stored
from atoll.sim.checkers import Safety
from atoll.sim.cluster import VirtualCluster
from atoll.tape.format import Record
from atoll.views.strip import strip_lines

EXPECTED = Path(__file__).parent / "expected"
NAMED = (Started, ConnectionLost, Stored)
"""Events that belong to a story even where nothing was decided on them."""


def config(*, fragments: int = 2, overlap: int = 1, total_steps: int = 12, **protocol: object) -> Config:
    protocol = {"fragments": fragments, "local_steps_per_round": fragments, "overlap": overlap} | protocol
    cluster = {"step_noise": 0.0, "detect_seconds": 1.0}
    return load(preset_name="decoupled", overrides={
        "learners": 3, "total_steps": total_steps, "protocol": protocol, "cluster": cluster,
    })  # fmt: skip


def played(config: Config, plan: ChaosPlan) -> list[Record]:
    records: list[Record] = []

    def watch(now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        records.append(Record(len(records) + 1, now, worker, event, tuple(effects)))

    safety = Safety(config)
    cluster = VirtualCluster(config, plan=plan, observers=[watch, safety])
    safety.attach(cluster)
    cluster.run(until_seconds=200)
    return records


def strip(records: Sequence[Record], plan: ChaosPlan, since: float, until: float) -> str:
    lines = [str(plan), "-" * 8]
    for record, line in zip(records, strip_lines(records), strict=True):
        if nanos(since) <= record.now <= nanos(until) and (decided(line) or isinstance(record.event, NAMED)):
            lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


def decided(line: str) -> bool:
    """There is something in the column of effects."""
    head = len(f"{0:>7} {0.0:>12.4f} {'':<10} ")
    return bool(line[head + 44 :].strip())


def compare(name: str, found: str, rewrite: bool) -> None:
    path = EXPECTED / f"{name}.txt"
    if rewrite:
        path.write_text(found, encoding="utf8")
    assert found == path.read_text(encoding="utf8")


def test_learner_killed_comes_back_through_a_peer(rewrite: bool) -> None:
    plan = ChaosPlan((Kill(3.5, 2, 2.0),))
    records = played(config(), plan)
    (recovered,) = [e for r in records for e in r.effects if isinstance(e, Recovered) and r.now > nanos(1.0)]
    assert (recovered.learner, recovered.source) == (2, 0)
    compare("learner_killed_comes_back_through_a_peer", strip(records, plan, 3.0, 9.3), rewrite)


def test_syncer_killed_resumes_at_the_last_stored_outer_step(rewrite: bool) -> None:
    plan = ChaosPlan((KillSyncer(4.16, 2.0),))  # while the fragment of a round is on its way up
    records = played(config(), plan)
    stored = [r.event.outer_step for r in records if isinstance(r.event, Stored)]
    assert stored == list(range(1, 13))
    compare("syncer_killed_resumes_at_the_last_stored_outer_step", strip(records, plan, 3.0, 8.3), rewrite)


def test_straggler_gives_its_last_copy_and_one_that_stalls_is_left_out(rewrite: bool) -> None:
    plan = ChaosPlan((Slow(6.5, 2, 6.0, 5.0),))  # one step of 6 s: in round 9 with its copy, in round 10 no more
    records = played(config(fragments=4, overlap=3, total_steps=14, quorum=2, pace=0.0), plan)
    fixed = {e.outer_step: e for r in records for e in r.effects if isinstance(e, FixParticipants)}
    assert (fixed[9].participants, fixed[10].participants) == ((0, 1, 2), (0, 1))
    compare("straggler_gives_its_last_copy_and_one_that_stalls_is_left_out", strip(records, plan, 8.0, 11.2), rewrite)


def test_every_expected_strip_belongs_to_a_story_here() -> None:
    stories = Path(__file__).read_text(encoding="utf8")
    assert all(f"def test_{path.stem}(" in stories for path in EXPECTED.glob("*.txt"))
