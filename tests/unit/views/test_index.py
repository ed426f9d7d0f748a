"""The index of a run: what its rows say, that zoom levels add up, and that one that was continued equals one built at once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from atoll.chaos import ChaosPlan, Kill, KillSyncer, Partition, Pause, Rollback
from atoll.config import Config, load
from atoll.errors import TapeError
from atoll.executor.environment import tape_header
from atoll.ids import SYNCER
from atoll.protocol.checkpoint import checkpoint, thaw
from atoll.protocol.reasons import Why
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import FixParticipants
from atoll.sim.cluster import VirtualCluster
from atoll.sim.run import run_virtual
from atoll.tape.format import Record, Tape, TapeWriter
from atoll.tape.replay import replay
from atoll.tape.segments import Segment, tidy
from atoll.tape.tail import Tail
from atoll.views.index.build import IndexBuilder, build_index
from atoll.views.index.files import Complete, IndexReader, IndexWriter, WriterState, complete_in
from atoll.views.index.fold import IndexFold
from atoll.views.index.rows import FACTOR, EventKind, LaneState, bin_of, join_bins
from atoll.views.index.state import IndexState, read_index_state, write_index_state
from atoll.views.index.sums import FoldState
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


def test_rollback_is_a_row_of_its_own_with_its_reason(tmp_path: Path) -> None:
    protocol = {"fragments": 4, "rollback_interval": 8}
    config = load(preset_name="decoupled", overrides={"learners": 3, "total_steps": 40, "protocol": protocol})
    run_virtual(config, ChaosPlan((Rollback(20.0),)), tmp_path / "run", tensors=False)
    build_index(Tape(tmp_path / "run" / "run.tape"), tmp_path / "index")
    index = IndexReader(tmp_path / "index")
    (row,) = (row for row in index.rows(0, index.rounds) if row.why == Why.ROLLED_BACK.value)
    assert row.participants == () and "the chaos plan" in row.text
    assert [each.outer_step for each in index.rows(0, index.rounds)] == list(range(1, index.rounds + 1))


SYNCERS_CONFIG = load(preset_name="decoupled", overrides={"learners": 3, "total_steps": 40})
EVERY = 60


@pytest.fixture(scope="module")
def syncers_records() -> list[Record]:
    found: list[Record] = []

    def observe(now: int, worker: int, event: Any, effects: Any) -> None:
        if worker == SYNCER:
            found.append(Record(len(found) + 1, now, worker, event, tuple(effects)))

    VirtualCluster(SYNCERS_CONFIG, plan=ChaosPlan((Kill(6.0, 0, 4.0), Pause(14.0, 1, 3.0))), observers=[observe]).run()
    return found


def syncers_tape(path: Path, records: list[Record]) -> Tape:
    header = tape_header(SYNCERS_CONFIG, data_fingerprint="", tensors=False, plan=[], run="r", worker=SYNCER, epoch=0)
    writer, machine = TapeWriter.create(path, header, flush_each=True), SyncerMachine(SYNCERS_CONFIG)
    for record in records:
        machine.on(record.event, record.now)
        writer.append(record.now, record.worker, record.event, record.effects)
        if record.number % EVERY == 0:
            writer.roll(checkpoint(machine))
    writer.close()
    return Tape(path)


def test_fold_that_went_on_from_its_state_in_every_segment_gives_the_same_files(
    syncers_records: list[Record], tmp_path: Path
) -> None:
    """Every segment by a new machine and a new writer, as if the syncer had been killed in each; some rows are there already."""
    tape = syncers_tape(tmp_path / "run.tape", syncers_records)
    build_index(tape, tmp_path / "at once")
    again = tmp_path / "again"
    for number in tape.segments():
        segment = Tape(tape.path, begin=number)
        begins, machine = segment.begins_with(), SyncerMachine(SYNCERS_CONFIG)
        state = read_index_state(again, begins[1]) if begins is not None else None
        if begins is not None:
            thaw(begins[0], machine)
        writer = IndexWriter(again, segment.header, state.written) if state else IndexWriter(again, segment.header)
        fold = IndexFold(machine, writer, state.fold if state else None)
        first = segment.header.segment.records if segment.header.segment is not None else 0
        for record in syncers_records[first : first + EVERY + 7]:  # seven of the next segment: its successor finds their rows
            if record.number == first + EVERY + 1:
                write_index_state(again, number + 1, IndexState(first + EVERY, writer.state(), fold.state))
            machine.on(record.event, record.now)
            fold(record.now, SYNCER, record.event, record.effects)
        last = number == tape.segments().stop - 1
        writer.close(Complete(len(syncers_records), cut=False) if last else None)
    assert files(again) == files(tmp_path / "at once")


def test_tape_without_its_older_segments_is_indexed_from_where_it_begins(syncers_records: list[Record], tmp_path: Path) -> None:
    tape = syncers_tape(tmp_path / "run.tape", syncers_records)
    build_index(tape, tmp_path / "whole")
    whole = IndexReader(tmp_path / "whole")
    tidy(tape.path, keep_bytes=1)
    build_index(Tape(tape.path), tmp_path / "rest")
    rest = IndexReader(tmp_path / "rest")
    rows, last = rest.rows(0, rest.rounds), whole.rows(whole.rounds - rest.rounds, whole.rounds)
    assert 0 < len(rows) < whole.rounds and [row.outer_step for row in rows] == [row.outer_step for row in last]
    assert [row.text for row in rows] == [row.text for row in last] and rows[-1] == last[-1]
    assert all(lane.steps < 5 for lane in rows[0].learners), "what a learner did before is not counted in the first row"


def test_state_of_another_tape_and_an_index_that_lacks_rows_are_refused(syncers_records: list[Record], tmp_path: Path) -> None:
    segment = Segment(2, 60, 0, 3, 0, "", ())
    with pytest.raises(TapeError, match="cannot be read"):
        read_index_state(tmp_path, segment)
    write_index_state(tmp_path, 2, IndexState(59, WriterState(), FoldState()))
    with pytest.raises(TapeError, match="is of another tape"):
        read_index_state(tmp_path, segment)
    (tmp_path / "000002.state").write_bytes(b"\xc1")
    with pytest.raises(TapeError, match="is damaged"):
        read_index_state(tmp_path, segment)
    tape = syncers_tape(tmp_path / "run.tape", syncers_records)
    with pytest.raises(TapeError, match="lacks rows that it had"):
        IndexWriter(tmp_path / "index", tape.header, WriterState((1,)))
