"""The files of an index: rows that are only ever appended, each kind with a table of offsets, so that any range is read alone.

    manifest.json            which run it is of
    0.rows, 0.table          a row for each round
    1.rows, 1.table, ...     bins of 4, 16, 64, ... rounds
    events.rows, events.table
    complete.json            the run is over, or its tape ends here: nothing will follow
    000002.state             of a live run: where the index stood when segment 2 of the tape began (state.py)

A row is msgpack, compressed. A table has 16 bytes for each row: where the row ends, and its time. The table's entry is written
after the row, so an entry that is there stands for a whole row.

Who goes on with an index folds the tape again, from its start or from a state; what is in the files already is compared and
kept, and from the first difference on it is written anew. So an index that was continued equals one that was built at once.
"""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from atoll.errors import UNDECODABLE, TapeError
from atoll.ids import Nanos, OuterStep
from atoll.tape.format import Header
from atoll.views.index.rows import FACTOR, EventRow, RoundBin, RoundRow, bin_of, join_bins

INDEX_FOLDER: Final = "index"
INDEX_FORMAT: Final = 1
LEVELS: Final = 12
"""Of bins: 4 to the 12th is 16 million rounds."""
ROW_MAX: Final = 1 << 22
"""Bytes of a row: one of 1,024 learners has some 50,000."""
MANIFEST, COMPLETE, STATE = "manifest.json", "complete.json", ".state"
_ENTRY = struct.Struct("<QQ")
_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class IndexManifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int = INDEX_FORMAT
    run: str
    """Name of a live run; empty: a virtual one."""
    epoch: int
    """Of a live run: the wall-clock nanoseconds of time 0."""
    config: dict[str, Any]
    steady: bool = True
    """The run's time goes on as the wall clock does. Ranks of torch's stop theirs for a held-out loss."""


class Complete(msgspec.Struct, frozen=True):
    records: int
    cut: bool
    """The tape has no footer: the run did not end in order."""


class _RowFile:
    """Rows of one kind and their table."""

    def __init__(self, directory: Path, name: str, count: int = 0) -> None:
        """`count`: so many rows are there, and more are put behind them."""
        self._rows = os.open(directory / f"{name}.rows", os.O_RDWR | os.O_CREAT, 0o644)
        self._table = os.open(directory / f"{name}.table", os.O_RDWR | os.O_CREAT, 0o644)
        self._there = _whole_rows(self._rows, self._table)
        if count > self._there:
            raise TapeError(f"index {directory}: lacks rows that it had")
        self.count, self._end = count, _end_of(self._table, count)
        self._trimmed = False
        """Nothing lies beyond the rows that were put: a torn row, or what a tape said before it was cut."""

    def put(self, row: msgspec.Struct, at: Nanos) -> bool:
        """False: the row was there already."""
        body = zlib.compress(_encode(row), 1)
        end = self._end + len(body)
        if self.count < self._there and not self._has(body, end, at):
            self._there = self.count
        new = self.count == self._there
        if new:
            self._write(body, end, at)
            self._there += 1
        self.count, self._end = self.count + 1, end
        return new

    def _has(self, body: bytes, end: int, at: Nanos) -> bool:
        entry = os.pread(self._table, _ENTRY.size, self.count * _ENTRY.size)
        return entry == _ENTRY.pack(end, at) and os.pread(self._rows, len(body), self._end) == body

    def _write(self, body: bytes, end: int, at: Nanos) -> None:
        if not self._trimmed:  # the table first: no entry without its row
            os.ftruncate(self._table, self.count * _ENTRY.size)
            os.ftruncate(self._rows, self._end)
            self._trimmed = True
        for file, data, offset in ((self._rows, body, self._end), (self._table, _ENTRY.pack(end, at), self.count * _ENTRY.size)):
            while data:
                written = os.pwrite(file, data, offset)
                data, offset = data[written:], offset + written

    def close(self, *, cut: bool) -> None:
        """`cut`: what is there beyond the rows that were put is not of this run."""
        if cut:
            os.ftruncate(self._table, self.count * _ENTRY.size)
            os.ftruncate(self._rows, self._end)
        os.close(self._rows)
        os.close(self._table)


def _whole_rows(rows: int, table: int) -> int:
    count, size = os.fstat(table).st_size // _ENTRY.size, os.fstat(rows).st_size
    while _end_of(table, count) > size:
        count -= 1
    return count


def _end_of(table: int, count: int) -> int:
    """Where so many rows end."""
    if count == 0:
        return 0
    end: int = _ENTRY.unpack(os.pread(table, _ENTRY.size, (count - 1) * _ENTRY.size))[0]
    return end


class WriterState(msgspec.Struct, frozen=True):
    """How far an index is written."""

    levels: tuple[int, ...] = (0,)
    """Rows of each."""
    events: int = 0
    pending: tuple[tuple[RoundBin, ...], ...] = ()
    """Of each level: bins that wait for others of the same bin."""


NOTHING_WRITTEN: Final = WriterState()


class IndexWriter:
    """Where `IndexFold` puts its rows. Every row is with the operating system when its `put` returns."""

    def __init__(self, directory: Path, header: Header, state: WriterState = NOTHING_WRITTEN) -> None:
        """`state`: of an index that is there, and goes on."""
        manifest = IndexManifest(run=header.run, epoch=header.epoch, config=header.config, steady=header.derivable)
        directory.mkdir(parents=True, exist_ok=True)
        if manifest_in(directory) != manifest:
            _empty(directory)
            (directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        self._directory, self._complete = directory, complete_in(directory) is not None
        self._levels = [_RowFile(directory, str(level), count) for level, count in enumerate(state.levels)]
        self._events = _RowFile(directory, "events", state.events)
        self._pending: list[list[RoundBin]] = [[] for _ in range(LEVELS + 1)]
        for pending, parts in zip(self._pending, state.pending, strict=False):
            pending.extend(parts)

    def state(self) -> WriterState:
        pending = tuple(tuple(parts) for parts in self._pending)
        return WriterState(tuple(file.count for file in self._levels), self._events.count, pending)

    def put_event(self, row: EventRow) -> None:
        self._put(self._events, row, row.at)

    def put_round(self, row: RoundRow) -> None:
        self._put(self._levels[0], row, row.closed_at)
        self._put_bin(bin_of(row), 1)

    def _put(self, file: _RowFile, row: msgspec.Struct, at: Nanos) -> None:
        if file.put(row, at) and self._complete:
            self._complete = False
            (self._directory / COMPLETE).unlink(missing_ok=True)

    def _put_bin(self, part: RoundBin, level: int) -> None:
        if level > LEVELS:
            return
        pending = self._pending[level]
        pending.append(part)
        if len(pending) == FACTOR:
            whole = join_bins(pending)
            pending.clear()
            if level == len(self._levels):
                self._levels.append(_RowFile(self._directory, str(level)))
            self._put(self._levels[level], whole, whole.closed_at)
            self._put_bin(whole, level + 1)

    def close(self, complete: Complete | None = None) -> None:
        """`complete`: nothing will follow. Without it the index waits for whoever goes on with the run."""
        for file in (*self._levels, self._events):
            file.close(cut=complete is not None)
        if complete is not None:
            for path in self._directory.glob("*.table"):
                if path.stem.isdecimal() and int(path.stem) >= len(self._levels):
                    path.unlink()
                    path.with_suffix(".rows").unlink(missing_ok=True)
            for path in self._directory.glob(f"*{STATE}"):
                path.unlink()
            (self._directory / COMPLETE).write_bytes(msgspec.json.encode(complete))


def manifest_in(directory: Path) -> IndexManifest | None:
    """None: no index of this format is there."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=IndexManifest)
    except (*UNDECODABLE, OSError):
        return None
    return manifest if manifest.format == INDEX_FORMAT else None


def complete_in(directory: Path) -> Complete | None:
    try:
        return msgspec.json.decode((directory / COMPLETE).read_bytes(), type=Complete)
    except (*UNDECODABLE, OSError):
        return None


def _empty(directory: Path) -> None:
    for kind in (".rows", ".table", ".json", STATE):
        for path in directory.glob(f"*{kind}"):
            path.unlink()


def remove_index(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


class _RowReader:
    """Opens its files anew for each look: an index that is begun anew replaces them."""

    def __init__(self, directory: Path, name: str) -> None:
        self._rows_path, self._table_path = directory / f"{name}.rows", directory / f"{name}.table"

    def count(self) -> int:
        try:
            return self._table_path.stat().st_size // _ENTRY.size
        except OSError:
            return 0

    def read(self, first: int, last: int, kind: type[T]) -> list[T]:
        """Rows `first` up to but without `last`, as far as they are there."""
        first, last = max(0, first), min(last, self.count())
        if first >= last:
            return []
        with self._table_path.open("rb", buffering=0) as table, self._rows_path.open("rb", buffering=0) as rows:
            skip = max(0, first - 1)
            entries = os.pread(table.fileno(), (last - skip) * _ENTRY.size, skip * _ENTRY.size)
            ends = [end for end, _ in _ENTRY.iter_unpack(entries)]
            starts = [0, *ends] if first == 0 else ends
            if starts != sorted(starts) or starts[-1] > os.fstat(rows.fileno()).st_size:
                raise self._damaged("its table does not fit")
            data = os.pread(rows.fileno(), starts[-1] - starts[0], starts[0])
        return [self._decode(data[a - starts[0] : b - starts[0]], kind) for a, b in pairwise(starts)]

    def _decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(zlib.decompressobj().decompress(body, ROW_MAX), type=kind)
        except (*UNDECODABLE, zlib.error) as error:
            raise self._damaged(str(error)) from None

    def _damaged(self, why: str) -> TapeError:
        return TapeError(f"index {self._rows_path}: is damaged ({why}); remove its folder, and it is built anew")

    def after(self, time: Nanos) -> int:
        """The number of the first row of a later time than this."""
        low, high = 0, self.count()
        with self._table_path.open("rb", buffering=0) if high else open(os.devnull, "rb") as table:
            while low < high:
                middle = (low + high) // 2
                _, at = _ENTRY.unpack(os.pread(table.fileno(), _ENTRY.size, middle * _ENTRY.size))
                low, high = (middle + 1, high) if at <= time else (low, middle)
        return low


class IndexReader:
    """Reads ranges of an index, of one that grows too."""

    def __init__(self, directory: Path) -> None:
        manifest = manifest_in(directory)
        if manifest is None:
            raise TapeError(f"index {directory}: is not there, or of another format; atoll watch builds it anew")
        self.directory, self.manifest = directory, manifest
        self._levels = [_RowReader(directory, str(level)) for level in range(LEVELS + 1)]
        self._events = _RowReader(directory, "events")

    @property
    def complete(self) -> Complete | None:
        return complete_in(self.directory)

    @property
    def rounds(self) -> int:
        return self._levels[0].count()

    @property
    def events(self) -> int:
        return self._events.count()

    def rows(self, first: int, last: int) -> list[RoundRow]:
        """By number, from 0; `last` is not among them."""
        return self._levels[0].read(first, last, RoundRow)

    def row_of(self, outer_step: OuterStep) -> int | None:
        """Outer steps follow each other without gaps; a resumed run does not begin with 1."""
        begin = self.rows(0, 1)
        number = outer_step - begin[0].outer_step if begin else -1
        return number if 0 <= number < self.rounds else None

    def row_at(self, time: Nanos) -> RoundRow | None:
        """The round that was closed first at or after this time; the newest, if there is none."""
        number = min(self._levels[0].after(time - 1) if time else 0, self.rounds - 1)
        return next(iter(self.rows(number, number + 1)), None)

    def bins(self, begins_at: Nanos, ends_at: Nanos, most: int) -> list[RoundBin]:
        """Bins that cover the rounds of this span of time, on the finest level with at most so many. Of the newest rounds, which
        have no bin of that level yet, some of finer levels follow."""
        first = self._levels[0].after(begins_at)
        last = min(self._levels[0].after(ends_at - 1) + 1, self.rounds)
        level = 0
        while level < LEVELS and (last - first) > most * FACTOR**level:
            level += 1
        return self._cover(level, first, last)

    def _cover(self, level: int, first: int, last: int) -> list[RoundBin]:
        if first >= last:
            return []
        if level == 0:
            return [bin_of(row) for row in self.rows(first, last)]
        each = FACTOR**level
        there = self._levels[level].count()
        found = self._levels[level].read(first // each, min(-(-last // each), there), RoundBin)
        return found + self._cover(level - 1, max(first, there * each), last)

    def events_between(self, begins_at: Nanos, ends_at: Nanos, most: int) -> tuple[int, Sequence[EventRow]]:
        """How many there are in this span of time, and the last of them."""
        first, last = self._events.after(begins_at - 1) if begins_at else 0, self._events.after(ends_at)
        return last - first, self._events.read(max(first, last - most), last, EventRow)
