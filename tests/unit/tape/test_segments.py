"""A tape in segments: readers see one tape, a restart reads the newest, and a kill at any step of a roll loses nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.config import Config, load
from atoll.errors import TapeError
from atoll.executor.environment import tape_header
from atoll.ids import SYNCER
from atoll.protocol.checkpoint import checkpoint, thaw
from atoll.protocol.syncer import SyncerMachine
from atoll.sim.cluster import VirtualCluster
from atoll.tape import segments
from atoll.tape.format import Header, Record, Tape, TapeWriter
from atoll.tape.replay import replay
from atoll.tape.segments import begun, compressed, past, past_numbers, settle, state_file, tidy

EVERY = 60


def config() -> Config:
    return load(preset_name="decoupled", overrides={"learners": 3, "total_steps": 40})


def head() -> Header:
    return tape_header(config(), data_fingerprint="", tensors=False, plan=[], run="r", worker=SYNCER, epoch=0)


def syncers_records() -> list[Record]:
    """What the syncer of a small run was told, and decided."""
    found: list[Record] = []

    def observe(now: int, worker: int, event: object, effects: object) -> None:
        if worker == SYNCER:
            found.append(Record(len(found) + 1, now, worker, event, tuple(effects)))  # type: ignore[arg-type]

    VirtualCluster(config(), observers=[observe]).run()
    return found


RECORDS = syncers_records()


def write(path: Path, *, until: int = len(RECORDS), every: int = EVERY, close: bool = True) -> TapeWriter:
    """As a driver does: ask the machine, append, and roll between two events."""
    writer, machine = TapeWriter.create(path, head(), flush_each=True), SyncerMachine(config())
    for record in RECORDS[:until]:
        machine.on(record.event, record.now)
        writer.append(record.now, record.worker, record.event, record.effects)
        if record.number % every == 0:
            writer.roll(checkpoint(machine))
    if close:
        writer.close()
    return writer


def killed(writer: TapeWriter) -> None:
    """As the operating system does: the file is closed and nothing is written."""
    writer._file.close()


def machine_at_the_end(tape: Tape) -> SyncerMachine:
    begins = tape.begins_with()
    machine = SyncerMachine(config())
    if begins is not None:
        thaw(begins[0], machine)
    for record in tape.records():
        assert tuple(machine.on(record.event, record.now)) == record.effects
    return machine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.tape"


def test_readers_see_one_tape(path: Path) -> None:
    write(path)
    tape = Tape(path)
    assert list(tape.records()) == RECORDS
    assert (tape.cut, tape.whole_records, tape.missing()) == (False, len(RECORDS), [])
    assert len(tape.segments()) == 1 + len(RECORDS) // EVERY > 4


def test_compressed_segments_read_the_same_and_are_smaller(path: Path) -> None:
    write(path)
    plain = sum(past(path, n).stat().st_size for n in past_numbers(path))
    tidy(path, keep_bytes=1 << 30)
    assert not any(past(path, n).exists() for n in past_numbers(path))
    assert sum(compressed(path, n).stat().st_size for n in past_numbers(path)) < plain / 5
    assert list(Tape(path).records()) == RECORDS


def test_restart_reads_the_newest_segment_and_is_the_same_machine(path: Path) -> None:
    killed(write(path, close=False))
    whole, newest = Tape(path), Tape(path).newest_segment()
    fed = machine_at_the_end(newest)
    assert newest.whole_records == len(RECORDS)
    assert newest.header.segment is not None and newest.header.segment.records > len(RECORDS) - EVERY
    assert checkpoint(fed) == checkpoint(machine_at_the_end(whole))
    TapeWriter.reopen(newest).close()
    assert list(Tape(path).records()) == RECORDS


def test_oldest_are_dropped_and_the_rest_replays_from_a_state(path: Path) -> None:
    write(path)
    tidy(path, keep_bytes=1 << 30)
    sizes = [compressed(path, n).stat().st_size for n in past_numbers(path)]
    tidy(path, keep_bytes=sum(sizes[-2:]))
    tape = Tape(path)
    assert len(tape.segments()) == 3
    kept = list(tape.records())
    assert kept == RECORDS[-len(kept) :] and len(kept) < len(RECORDS)
    assert tape.missing()[0].records == len(RECORDS) - len(kept)
    outcome = replay(Tape(path))
    assert outcome.fates == replayed_from_the_start().fates() and outcome.outer_step == 40
    assert not state_file(path, 2).exists() and state_file(path, tape.segments().start).exists()


def replayed_from_the_start() -> SyncerMachine:
    machine = SyncerMachine(config())
    for record in RECORDS:
        machine.on(record.event, record.now)
    return machine


def test_reading_begins_at_an_outer_step(path: Path) -> None:
    write(path)
    tape = Tape(path).at(20)
    segment = tape.header.segment
    assert segment is not None and 0 < segment.outer_step <= 20
    assert machine_at_the_end(tape).outer_step == 40
    assert Tape(path).at(0).header.segment is None
    tidy(path, keep_bytes=0)
    with pytest.raises(TapeError, match="is not kept; give that or a later one"):
        Tape(path).at(1)


def test_reader_that_follows_passes_from_segment_to_segment(path: Path) -> None:
    writer, machine = TapeWriter.create(path, head(), flush_each=True), SyncerMachine(config())
    reader = Tape(path).following()
    seen: list[Record] = []

    def catch_up() -> None:
        for record in reader:
            if record is None:
                return
            seen.append(record)

    for record in RECORDS:
        machine.on(record.event, record.now)
        writer.append(record.now, record.worker, record.event, record.effects)
        if record.number % 37 == 0:
            catch_up()
        if record.number % EVERY == 0:
            writer.roll(checkpoint(machine))
        if record.number % (3 * EVERY) == 0:
            tidy(path, keep_bytes=1 << 30)
    writer.close()
    catch_up()
    assert seen == RECORDS


class Killed(BaseException):
    """Nothing of the writer's runs after it, as after SIGKILL."""


class Fuse:
    """Kills at the n-th open, fsync, link or rename; with an error that one fails, and those after it do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int, error: OSError | None = None) -> None:
        self.left, self._error = steps, error
        for owner, name in ((os, "fsync"), (os, "link"), (Path, "rename"), (Path, "open")):
            monkeypatch.setattr(owner, name, self._burning(getattr(owner, name)))

    def _burning(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left < 0 and self._error is None:
                raise Killed
            if self.left == -1 and self._error is not None:
                raise self._error
            return real(*arguments, **named)

        return call


@pytest.mark.parametrize("steps", range(14))
def test_kill_at_any_step_of_a_roll_loses_nothing(path: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, writer = SyncerMachine(config()), write(path, until=150, close=False)
    for record in RECORDS[:150]:
        machine.on(record.event, record.now)
    state = checkpoint(machine)
    with monkeypatch.context() as patch:
        Fuse(patch, steps)
        if steps < 13:
            with pytest.raises(Killed):
                writer.roll(state)
        else:
            writer.roll(state)
    killed(writer)
    settle(path)
    tape = Tape(path).newest_segment()
    assert checkpoint(machine_at_the_end(tape)) == state
    writer, record = TapeWriter.reopen(tape), RECORDS[150]
    writer.append(record.now, record.worker, record.event, record.effects)
    writer.close()
    assert list(Tape(path).records()) == RECORDS[:151]


@pytest.mark.parametrize("steps", range(13))
def test_one_refusal_at_any_step_of_a_roll_loses_nothing(path: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, writer = SyncerMachine(config()), TapeWriter.create(path, head(), flush_each=True)
    for record in RECORDS[:150]:
        machine.on(record.event, record.now)
        writer.append(record.now, record.worker, record.event, record.effects)
    with monkeypatch.context() as patch:
        Fuse(patch, steps, OSError(28, "No space left on device"))
        with contextlib.suppress(OSError):  # a file system without links is worked around
            writer.roll(checkpoint(machine))
        record = RECORDS[150]
        writer.append(record.now, record.worker, record.event, record.effects)
    writer.close()
    assert list(Tape(path).records()) == RECORDS[:151]


def test_full_disk_behind_the_last_line_is_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, machine = TapeWriter.create(path, head(), flush_each=True), SyncerMachine(config())
    first, second = RECORDS[:2]
    machine.on(first.event, first.now)
    writer.append(first.now, first.worker, first.event, first.effects)

    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("atoll.tape.format.finish_roll", refuse)
        with pytest.raises(OSError, match="No space"):
            writer.roll(checkpoint(machine))
        with pytest.raises(OSError, match="No space"):
            writer.append(second.now, second.worker, second.event, second.effects)
    writer.append(second.now, second.worker, second.event, second.effects)
    writer.close()
    assert list(Tape(path).records()) == RECORDS[:2]


def cut_short(path: Path) -> None:
    past(path, 2).write_bytes(past(path, 2).read_bytes()[:-10])


def swapped(path: Path) -> None:
    past(path, 2).write_bytes(past(path, 3).read_bytes())


def altered(path: Path) -> None:
    content = bytearray(past(path, 2).read_bytes())
    content[len(content) // 2] ^= 1
    past(path, 2).write_bytes(bytes(content))


def cut_when_compressed(path: Path) -> None:
    tidy(path, keep_bytes=1 << 30)
    content = compressed(path, 2).read_bytes()
    compressed(path, 2).write_bytes(content[: len(content) // 2])


def altered_when_compressed(path: Path) -> None:
    tidy(path, keep_bytes=1 << 30)
    content = bytearray(compressed(path, 2).read_bytes())
    content[len(content) // 2] ^= 1
    compressed(path, 2).write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [cut_short, swapped, altered, cut_when_compressed, altered_when_compressed])
def test_damage_in_an_older_segment_is_found_and_named(path: Path, damage: Callable[[Path], None]) -> None:
    write(path)
    damage(path)
    with pytest.raises(TapeError, match=r"run\.tape\.00000[23]"):
        list(Tape(path).records())


def test_state_that_was_altered_is_refused(path: Path) -> None:
    write(path)
    number = Tape(path).segments().stop - 1
    state_file(path, number).write_bytes(state_file(path, number).read_bytes()[:-1])
    with pytest.raises(TapeError, match="its digest is not the one in the header"):
        Tape(path).newest_segment().begins_with()


def test_without_zstandard_segments_stay_as_they_are(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path)
    monkeypatch.setattr(segments, "zstandard", None)
    tidy(path, keep_bytes=1 << 30)
    assert list(Tape(path).records()) == RECORDS
    assert not begun(path).exists()
