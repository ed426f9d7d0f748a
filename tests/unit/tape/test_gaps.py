"""A learner's tape on a full disk: what was written is good, what is missing is named, and nothing beyond is checked."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from atoll.config import load
from atoll.errors import TapeError
from atoll.ids import SYNCER, WorkerId
from atoll.protocol.vocabulary import Effect, Event, Received, StepDone
from atoll.sim.cluster import VirtualCluster
from atoll.tape.format import Gap, Header, Tape, TapeWriter
from atoll.tape.gaps import LossyTapeWriter
from atoll.tape.replay import replay
from atoll.tape.tail import Tail
from atoll.tape.weave import Woven

CONFIG = load(preset_name="decoupled", overrides={
    "learners": 3, "total_steps": 24, "protocol": {"fragments": 4, "local_steps_per_round": 4},
})  # fmt: skip


def header(worker: WorkerId | None = None) -> Header:
    return Header(
        config=msgspec.to_builtins(CONFIG), code_version="0", data_fingerprint="none", threads=1,
        torch_version="none", cpu_capability="none", tensors=False, run="a7", worker=worker,
    )  # fmt: skip


class Disk:
    """Takes bytes, or refuses them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.full = self.stuck = False
        self.room = 0
        """Bytes that a full disk still takes, so that a line may be cut."""
        self._file = path.open("xb", buffering=0)
        self.name = str(path)

    def write(self, data: bytes) -> int:
        if not self.full:
            return self._file.write(data)
        taken, self.room = min(self.room, len(data)), max(0, self.room - len(data))
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data[:taken])

    def truncate(self, size: int) -> int:
        if self.stuck:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._file.truncate(size)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


class Taped:
    def __init__(self, path: Path, *, full: bool = False) -> None:
        self.said: list[str] = []
        self.disk = Disk(path)
        self.disk.full = full
        self.path = path
        self.writer = LossyTapeWriter(self.disk, header(0), self.said.append)  # type: ignore[arg-type]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.writer.append(0, 0, StepDone(1, 1, 1, None), ())


@pytest.fixture
def taped(tmp_path: Path) -> Taped:
    return Taped(tmp_path / "0.tape")


@pytest.mark.parametrize("room", [0, 1, 40])
def test_full_disk_leaves_a_gap_and_the_tape_goes_on_when_there_is_space(taped: Taped, room: int) -> None:
    taped.steps(3)
    taped.disk.full, taped.disk.room = True, room
    taped.steps(5)
    taped.disk.full = False
    taped.steps(2)
    taped.writer.close()
    tape = Tape(taped.path)
    assert [r.number for r in tape.records()] == [1, 2, 3, 9, 10]
    assert tape.gaps == [Gap(4, 8, os.strerror(errno.ENOSPC))] and not tape.cut
    assert len(taped.said) == 3 and taped.writer.lost == 5
    assert [r.number for r in Tail(Tape(taped.path)).more()] == [1, 2, 3, 9, 10]


def test_disk_that_stays_full_ends_the_tape_at_a_whole_record(taped: Taped) -> None:
    taped.steps(3)
    taped.disk.full, taped.disk.room = True, 20
    taped.steps(5)
    taped.writer.close()
    tape = Tape(taped.path)
    assert len(list(tape.records())) == 3 and tape.cut and tape.gaps == []


def test_disk_that_is_full_at_the_start_gets_its_header_later(tmp_path: Path) -> None:
    taped = Taped(tmp_path / "0.tape", full=True)
    taped.steps(2)
    taped.disk.full = False
    taped.steps(1)
    taped.writer.close()
    tape = Tape(taped.path)
    assert [r.number for r in tape.records()] == [3] and tape.gaps[0].first == 1


def test_line_that_can_neither_be_written_nor_taken_back_is_the_last(taped: Taped) -> None:
    taped.steps(3)
    taped.disk.full = taped.disk.stuck = True
    taped.disk.room = 20
    taped.steps(2)
    taped.disk.full = taped.disk.stuck = False
    taped.steps(2)
    taped.writer.close()
    tape = Tape(taped.path)
    assert len(list(tape.records())) == 3 and tape.cut


def test_gap_that_does_not_fit_the_records_is_refused(taped: Taped, tmp_path: Path) -> None:
    taped.steps(2)
    taped.writer.append_gap(Gap(5, 9, ""))
    taped.writer.close()
    with pytest.raises(TapeError, match="the gap after record 2 does not match"):
        list(Tape(taped.path).records())


# ---------------------------------------------------------------- a run's tapes


def live_tapes(directory: Path, *, full: range, closed: bool = True) -> list[Path]:
    """A virtual run on tapes of its workers; learner 1's disk is full while it has so many records."""
    writers: dict[WorkerId, TapeWriter] = {}
    disk = Disk(directory / "1.tape")

    def append(now: int, worker: WorkerId, event: Event, effects: list[Effect]) -> None:
        if worker not in writers and worker == 1:
            writers[1] = LossyTapeWriter(disk, header(1), lambda text: None)  # type: ignore[arg-type]
        elif worker not in writers:
            writers[worker] = TapeWriter.create(directory / f"{worker}.tape", header(worker), flush_each=True)
        disk.full = worker == 1 and writers[1].count in full
        writers[worker].append(now, worker, event, effects)

    VirtualCluster(CONFIG, observers=[append]).run(until_seconds=4000)
    disk.full = not closed
    for writer in writers.values():
        writer.close()
    return [directory / f"{worker}.tape" for worker in (SYNCER, 0, 1, 2)]


def test_replay_of_a_run_with_a_gap_checks_everything_else_and_says_so(tmp_path: Path) -> None:
    woven = Woven(tmp_path, [Tape(path) for path in live_tapes(tmp_path, full=range(30, 60))])
    checked: list[WorkerId] = []
    unchecked: list[WorkerId] = []
    outcome = replay(woven, observe=lambda r, machine: (checked if machine else unchecked).append(r.worker))
    (missing,) = outcome.missing
    assert (missing.worker, missing.after, missing.records) == (1, 30, 30) and "1.tape" in str(missing)
    assert set(unchecked) == {1} and checked.count(1) == 30
    assert outcome.outer_step == 24 and outcome.fates is not None and outcome.fates.add_up()


def test_replay_of_a_tape_that_ends_before_its_learner_says_so(tmp_path: Path) -> None:
    paths = live_tapes(tmp_path, full=range(30, 10**6), closed=False)
    outcome = replay(Woven(tmp_path, [Tape(path) for path in paths]))
    (missing,) = outcome.missing
    assert (missing.worker, missing.after, missing.records) == (1, 30, None)
    assert outcome.outer_step == 24


def test_replay_of_a_tape_that_was_ended_in_order_still_demands_every_message(tmp_path: Path) -> None:
    """Only what is cut or has a gap may lack what it sent."""
    paths = live_tapes(tmp_path, full=range(0))
    with TapeWriter.create(tmp_path / "short.tape", header(1), flush_each=True) as short:
        for record in list(Tape(paths[2]).records())[:30]:
            short.append(record.now, 1, record.event, record.effects)
    with pytest.raises(TapeError, match="no tape sends"):
        replay(Woven(tmp_path, [Tape(path) for path in (*paths[:2], tmp_path / "short.tape", paths[3])]))


def test_replay_of_one_learners_tape_goes_up_to_its_gap(tmp_path: Path) -> None:
    path = live_tapes(tmp_path, full=range(30, 60))[2]
    outcome = replay(Tape(path))
    assert len(outcome.missing) == 1
    assert any(isinstance(r.event, Received) for r in Tape(path).records())
