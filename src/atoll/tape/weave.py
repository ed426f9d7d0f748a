"""The tapes of a live run's workers, woven into one: the record of a received message follows the record that sent it.

Each worker writes its own tape, so that no process waits for another's disk. Clocks of several machines may disagree, but
the tapes say which message was sent before which. Of the records that may come next, the earliest does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from atoll.errors import TapeError
from atoll.ids import SYNCER, OuterStep, WorkerId
from atoll.protocol.vocabulary import Received, Send, Started
from atoll.tape.folder import TAPE_FILE, find_run
from atoll.tape.format import Gap, Header, Missing, Record, Tape, read_line
from atoll.tape.segments import Segment

ChannelKey = tuple[WorkerId, int, WorkerId, int]


class _TapeReader:
    """One tape, read ahead by one record."""

    def __init__(self, key: int, tape: Tape) -> None:
        self.key = key
        self.tape = tape
        self.gap: Gap | None = None
        """Records are missing before the one that was taken last."""
        self._records = tape.records()
        self.head: Record | None = next(self._records, None)
        first = self.head.event if self.head is not None else None
        self.begins = tape.header.segment
        self.incarnation = first.incarnation if isinstance(first, Started) else -1
        if self.begins is not None and tape.header.worker != SYNCER:
            self.incarnation = self.begins.incarnation

    @property
    def worker(self) -> tuple[WorkerId | None, int]:
        return self.tape.header.worker, self.incarnation

    @property
    def is_lossy(self) -> bool:
        """What comes next on this tape, if anything does, is not what came next in the run."""
        return bool(self.tape.gaps) or (self.head is None and self.tape.cut)

    def take(self) -> Record:
        record = self.head
        assert record is not None
        self.gap = self.tape.gaps[0] if self.tape.gaps else None
        self.head = next(self._records, None)
        return record


class Woven:
    """Reads like a tape. `header` is the syncer's."""

    def __init__(self, path: Path, tapes: list[Tape]) -> None:
        self.path = path
        self.tapes = tapes
        self.header: Header = tapes[0].header
        self.cut = False
        self.whole_records = 0
        self._readers: list[_TapeReader] = []
        self._ends_early: set[int] = set()
        for tape in tapes:
            if tape.header.run != self.header.run:
                raise TapeError(f"tape {tape.path}: belongs to run {tape.header.run}, not to {self.header.run}")

    def headers(self) -> list[Header]:
        return [tape.header for tape in self.tapes]

    def gap_before(self, key: int) -> Gap | None:
        return self._readers[key].gap

    def begins_with(self, key: int = 0) -> tuple[bytes, Segment] | None:
        return self.tapes[key].begins_with()

    def missing(self) -> list[Missing]:
        """Of a tape that ends before its learner did, too: others received what it does not send."""
        early = [self.tapes[key] for key in sorted(self._ends_early)]
        ends = [Missing(str(t.path), t.header.worker, t.whole_records, None, "the tape ends before its learner") for t in early]
        return [each for tape in self.tapes for each in tape.missing()] + ends

    def sourced(self) -> Iterator[tuple[int, Record]]:
        """(number of the tape, record). Records are renumbered."""
        readers = self._readers = [_TapeReader(key, tape) for key, tape in enumerate(self.tapes)]
        taped = {reader.worker: reader for reader in readers}
        sent = _sent_before(readers)
        while open_ := [t for t in readers if t.head is not None]:
            ready = [t for t in open_ if self._is_ready(t.head, sent, taped)]
            if not ready:
                stuck = open_[0]
                assert stuck.head is not None
                raise TapeError(f"tape {stuck.tape.path}: record {stuck.head.number} receives a message that no tape sends")
            reader = min(ready, key=lambda t: t.head.now if t.head is not None else 0)
            record = reader.take()
            for effect in record.effects:
                if isinstance(effect, Send):
                    e = effect.envelope
                    sent[e.sender, e.incarnation, e.receiver, e.body.lane] = e.seq
            self.whole_records += 1
            yield reader.key, msgspec.structs.replace(record, number=self.whole_records)
        self.cut = readers[0].tape.cut

    def records(self) -> Iterator[Record]:
        for _, record in self.sourced():
            yield record

    def _is_ready(
        self, record: Record | None, sent: dict[ChannelKey, int], taped: dict[tuple[WorkerId | None, int], _TapeReader]
    ) -> bool:
        """The message it received has been sent, or the sender's tape is not here or lacks what it sent."""
        if record is None or not isinstance(record.event, Received):
            return True
        e = record.event.envelope
        channel = (e.sender, e.incarnation, e.receiver, e.body.lane)
        reader = taped.get((e.sender, e.incarnation))
        if sent.get(channel, -1) >= e.seq or (reader is None and e.sender != SYNCER):
            return True
        begins = self._readers[0].begins
        if e.sender == SYNCER and begins is not None and e.incarnation < begins.incarnation:
            return True  # the syncer's tape is of all its incarnations, and this one's is not kept
        if reader is None or e.sender == SYNCER or not reader.is_lossy:
            return False
        if not reader.tape.gaps:
            self._ends_early.add(reader.key)
        return True


def _sent_before(readers: list[_TapeReader]) -> dict[ChannelKey, int]:
    """What was sent on segments that are not read."""
    sent: dict[ChannelKey, int] = {}
    for reader in readers:
        worker, begins = reader.tape.header.worker, reader.begins
        if begins is not None and worker is not None:
            for receiver, *counts in begins.sent:
                sent |= {(worker, begins.incarnation, receiver, lane): count - 1 for lane, count in enumerate(counts)}
    return sent


_TAPE = re.compile(r"(\d+)\.tape")


def live_tapes(run: Path) -> list[Path]:
    """The syncer's first, then every incarnation of every learner."""
    learners = [
        (int(folder.name), int(match[1]), path)
        for folder in (run / "learners").glob("[0-9]*")
        for path in folder.iterdir()
        if (match := _TAPE.fullmatch(path.name)) is not None
    ]
    return [run / "syncer" / "run.tape", *(path for _, _, path in sorted(learners))]


def _has_begun(path: Path) -> bool:
    """A learner that was killed before its tape had a header sent no message."""
    with path.open("rb") as file:
        return read_line(file, path).endswith(b"\n")


def open_run(path: Path, since: OuterStep | None = None) -> Tape | Woven:
    """The tapes of the run in a folder (see `find_run`); of a file, that tape alone. `since`: from the last checkpoints at or
    before this outer step."""
    if path.is_file():
        return _begin(Tape(path), since)
    run = find_run(path)
    if not run.tape.exists():
        raise TapeError(f"run {path}: holds no {TAPE_FILE}")
    if run.home == run.folder:
        return _begin(Tape(run.tape), since)
    first, *rest = live_tapes(run.folder)
    tapes = [Tape(first), *(Tape(found) for found in rest if _has_begun(found))]
    return Woven(run.folder, [_begin(tape, since) for tape in tapes])


def _begin(tape: Tape, since: OuterStep | None) -> Tape:
    if since is None or (tape.header.worker != SYNCER and tape.header.segment is not None):
        return tape
    return tape.at(since)
