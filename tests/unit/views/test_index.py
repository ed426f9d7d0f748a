"""The index of a run: what its rows say, that zoom levels add up, and that one that was continued equals one built at once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from atoll.chaos import ChaosPlan, Kill, KillSyncer, Partition, Pause
from atoll.config import Config, load
from atoll.ids import SYNCER
from atoll.protocol.vocabulary import FixParticipants
from atoll.sim.run import run_virtual
from atoll.tape.format import Tape
from atoll.tape.replay import replay
from atoll.tape.tail import Tail
from atoll.views.index.build import IndexBuilder, build_index
from atoll.views.index.files import Complete, IndexReader, complete_in
from atoll.views.index.rows import FACTOR, EventKind, LaneState, bin_of, join_bins
from atoll.views.run import RunView

FAULTS = ChaosPlan((Kill(6.0, 0, 4.0), Pause(14.0, 1, 3.0), KillSyncer(20.0, 2.0), Partition(30.0, 2, SYNCER, 4.0)))
FOREVER = 10**18


def settings() -> Config:
    return load(preset_name="decoupled", overrides={"learners": 3, "total_steps": 75, "protocol": {"fragments": 4}})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three learners with four faults: its tape."""
    directory = tmp_path_factory.mktemp("indexed")
    run_virtual(settings(), FAULTS, directory / "run", tensors=False)
    return directory / "run" / "run.tape"


@pytest.fixture(scope="module")
def index(run: Path) -> IndexReader:
    build_index(Tape(run), run.parent / "index")
    return IndexReader(run.parent / "index")


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_every_outer_step_has_a_row_with_the_decision_that_is_on_the_tape(run: Path, index: IndexReader) -> None:
    fixed = {e.outer_step: e for r in Tape(run).records() for e in r.effects if isinstance(e, FixParticipants)}
    rows = index.rows(0, index.rounds)
    assert [row.outer_step for row in rows] == list(range(1, 76))
    for row in rows:
        last = fixed[row.outer_step]
        assert (row.participants, row.text, row.why) == (last.participants, str(last.reason), last.reason.why.value)
        assert row.begins_at <= row.closed_at and row.opened_at <= row.quorum_at <= row.fixed_at <= row.closed_at
        assert set(row.merged) <= set(row.participants)


def test_fates_and_bytes_are_those_of_the_replay_and_of_the_summary(run: Path, index: IndexReader) -> None:
    view = RunView(3).feed(Tape(run).records())
    fates = replay(Tape(run)).fates
    assert fates is not None
    (all_of_it,) = index.bins(0, FOREVER, 1)[-1:]
    assert all_of_it.fates.trained <= fates.trained and all_of_it.fates.trained > 0.9 * fates.trained
    row = index.rows(74, 75)[0].fates
    assert row.trained == row.merged + row.in_flight + sum(row.discarded.values()), "of every token the fate is known"
    whole = join_bins([bin_of(row) for row in index.rows(0, index.rounds)])
    assert {lane.learner: lane.bytes_up for lane in whole.learners} == dict(view.up)
    assert whole.recovered == len(view.recoveries) > 0


def test_lanes_show_the_kill_the_pause_and_the_partition_and_time_adds_up(index: IndexReader) -> None:
    rows = index.rows(0, index.rounds)
    for row in rows[1:]:
        for lane in row.learners:
            assert sum(lane.nanos) == row.closed_at - row.begins_at, "every nanosecond of a lane has one state"
    whole = join_bins([bin_of(row) for row in rows])
    lost = {lane.learner: lane.nanos[LaneState.LOST] for lane in whole.learners}
    assert lost[0] > 3e9, "killed for four seconds"
    _, events = index.events_between(0, FOREVER, 1000)
    kinds = {event.kind for event in events}
    assert {EventKind.STANDING, EventKind.RECOVERED, EventKind.SYNCER_STARTED, EventKind.FINISHED} <= kinds
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert len({(event.at, event.learner, event.text) for event in events}) == len(events), "nothing is said twice"


@pytest.mark.parametrize("most", [1, 3, 10, 40, 100])
def test_bins_of_every_level_cover_the_run_and_add_up(index: IndexReader, most: int) -> None:
    bins = index.bins(0, FOREVER, most)
    assert len(bins) <= most + FACTOR * 4
    assert bins[0].first == 1 and bins[-1].last == 75
    assert all(a.last + 1 == b.first and a.closed_at == b.begins_at for a, b in pairwise(bins))
    assert join_bins(bins) == join_bins([bin_of(row) for row in index.rows(0, 75)])


def test_span_of_time_is_read_alone(index: IndexReader) -> None:
    middle = index.rows(40, 50)
    bins = index.bins(middle[0].closed_at - 1, middle[-1].closed_at, 100)
    assert [b.first for b in bins] == [row.outer_step for row in middle]
    count, events = index.events_between(middle[0].closed_at, middle[-1].closed_at, 2)
    assert len(events) == min(2, count)


@pytest.mark.parametrize("cut_at", [1, 9, 200, 333, 700])
def test_index_that_was_continued_equals_one_built_at_once(run: Path, index: IndexReader, tmp_path: Path, cut_at: int) -> None:
    """A syncer that was killed left rows, one of them torn; its successor folds the tape again from the start."""
    records = list(Tape(run).records())
    first = IndexBuilder(Tape(run), tmp_path)
    first.feed(records[:cut_at])
    first.close()
    with (tmp_path / "0.rows").open("ab") as torn:
        torn.write(b"half a row")
    with (tmp_path / "events.table").open("ab") as torn:
        torn.write(b"\1\2\3")
    again = IndexBuilder(Tape(run), tmp_path)
    again.feed(records)
    again.close(Complete(len(records), cut=False))
    assert files(tmp_path) == files(index.directory)


def test_index_of_a_tape_that_was_cut_and_went_another_way_is_mended(run: Path, tmp_path: Path, index: IndexReader) -> None:
    """The index knows of records that the tape lost, because only the tape is fsynced, and only at times."""
    records = list(Tape(run).records())
    builder = IndexBuilder(Tape(run), tmp_path)
    builder.feed(records)
    builder.close()
    kept = records[:400]
    shorter = IndexBuilder(Tape(run), tmp_path)
    shorter.feed(kept)
    shorter.close(Complete(len(kept), cut=True))
    anew = IndexBuilder(Tape(run), tmp_path / "anew")
    anew.feed(kept)
    anew.close(Complete(len(kept), cut=True))
    assert files(tmp_path) == files(tmp_path / "anew")


def test_following_a_growing_tape_gives_the_same_rows(run: Path, tmp_path: Path, index: IndexReader) -> None:
    data, growing = run.read_bytes(), tmp_path / "run.tape"
    growing.write_bytes(data[: len(data) // 3])
    tape = Tape(growing)
    tail, builder = Tail(tape), IndexBuilder(tape, tmp_path / "index")
    for part in range(3, 0, -1):
        growing.write_bytes(data[: len(data) // part])
        builder.feed(tail.more())
    builder.close(Complete(builder.records, cut=False))
    assert files(tmp_path / "index") == files(index.directory)


def test_cut_tape_is_indexed_up_to_its_last_whole_record(run: Path, tmp_path: Path) -> None:
    data = run.read_bytes()
    (tmp_path / "run.tape").write_bytes(data[: len(data) // 2])
    build_index(Tape(tmp_path / "run.tape"), tmp_path / "index")
    complete = complete_in(tmp_path / "index")
    assert complete is not None and complete.cut
    assert 20 < IndexReader(tmp_path / "index").rounds < 60
