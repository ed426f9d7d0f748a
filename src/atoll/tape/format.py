"""The tape: one JSON line per record, append-only. Each line has a checksum that is chained to the line before.

    {"c":"5f1d0c2a","header":{...}}                       line 0
    {"c":"93ab01ff","n":1,"t":0,"w":-1,"e":{...},"f":[...]}   a record: number, time, worker, event, effects
    {"c":"51c07aa3","gap":{"first":7,"last":9,"why":"..."}}  records that a learner could not write: its disk was full
    {"c":"7710d9e4","next":2}                             the segment ends here, and segment 2 goes on (`segments.py`)
    {"c":"0be4711d","end":8122}                           the footer of a run that ended; after a crash there is none

By the chain a reader detects a missing, swapped or altered line like a damaged one. A killed writer may leave a last line
without its newline; the lines before it are good.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any

import msgspec
from msgspec import Meta

from atoll.errors import UNDECODABLE, TapeError
from atoll.ids import SYNCER, Nanos, WorkerId
from atoll.protocol.checkpoint import Checkpoint
from atoll.protocol.vocabulary import Effect, Event
from atoll.tape.segments import (
    UNREADABLE,
    Segment,
    begun,
    finish_roll,
    machine_state,
    open_past,
    past_numbers,
    state_file,
    write_durably,
)  # fmt: skip

FORMAT = 5
NOT_KEPT = "older segments were dropped, or are not read"
LINE_MAX = 1 << 28
"""Bytes of one line. The longest are of the syncer's commits: a message to each member for each fragment that is due."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a bit-exact replay depends on."""

    format: int = FORMAT
    config: dict[str, Any]
    code_version: str
    data_fingerprint: str
    threads: Annotated[int, Meta(ge=1, le=4096)]
    compute: str = ""
    """Precision and compilation of the inner steps, as resolved where they ran; empty: this tape is no learner's."""
    kernels: str = ""
    """What computes the merges; empty: this tape is no syncer's, or a learner was to upload the model. It changes no byte."""
    device: str = "cpu"
    torch_version: str
    cpu_capability: str
    tensors: bool
    """False: decisions only, without training."""
    plan: list[dict[str, Any]] = []
    hardware: dict[str, Any] = {}
    """Of a synthetic history: the number of chips, the failure model's constants, the seed."""
    run: str = ""
    """Name of a live run, equal on the tapes of all its workers."""
    worker: WorkerId | None = None
    """The worker that wrote this tape; None: a virtual run's tape, of all workers."""
    epoch: int = 0
    """Of a live run: the wall-clock nanoseconds of time 0."""
    segment: Segment | None = None
    """None: this is the tape's first."""
    digests: str = ""
    """How versions are digested: "blocks", or the whole vectors, as runs did before they could have shards."""
    derivable: bool = True
    """False: no machine decided what is on it (torch's data-parallel training), so there is nothing to derive again."""

    @property
    def number(self) -> int:
        """Of its segment."""
        return self.segment.number if self.segment is not None else 1


class Record(msgspec.Struct, frozen=True, rename={"number": "n", "now": "t", "worker": "w", "event": "e", "effects": "f"}):
    number: int
    now: Nanos
    worker: WorkerId
    event: Event
    effects: tuple[Effect, ...]


class Gap(msgspec.Struct, frozen=True):
    """Records that a tape lacks. A machine cannot be derived beyond it."""

    first: int
    last: int
    why: str


class Missing(msgspec.Struct, frozen=True):
    """What a run's tapes lack."""

    tape: str
    worker: WorkerId | None
    after: int
    """The number of the last record before it. The worker's decisions are checked up to there."""
    records: int | None
    """None: all that follow, an unknown number."""
    why: str

    def __str__(self) -> str:
        what = "all records" if self.records is None else f"{self.records:,} records"
        return f"tape {self.tape}: {what} after record {self.after} are missing ({self.why})"


class _GapLine(msgspec.Struct):
    gap: Gap


class _HeaderLine(msgspec.Struct):
    header: Header


class _FooterLine(msgspec.Struct, forbid_unknown_fields=True):
    end: int


class _NextLine(msgspec.Struct, forbid_unknown_fields=True):
    next: int


def read_line(file: IO[bytes], path: Path) -> bytes:
    """The next line with its end, the last one perhaps without it, or nothing. A tape whose line ends are lost is refused and not
    read whole."""
    try:
        line = file.readline(LINE_MAX + 1)
    except UNREADABLE as error:
        raise TapeError(f"tape {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(line) > LINE_MAX:
        raise TapeError(f"tape {path}: has a line of more than {LINE_MAX >> 20} MiB; it is damaged, or no tape")
    return line


_encode = msgspec.json.Encoder().encode
_decode_record = msgspec.json.Decoder(Record).decode
_PREFIX = len(b'{"c":"00000000",')


def _seal(body: bytes, chain: int) -> tuple[bytes, int]:
    chain = zlib.crc32(body, chain)
    return b'{"c":"%08x",%b\n' % (chain, body[1:]), chain


class TapeWriter:
    """A driver appends a record before it executes its effects. With `flush_each`, `append` passes the line to the operating
    system before it returns. An append that fails (a full disk) leaves the tape unchanged and may be repeated."""

    def __init__(self, file: IO[bytes], header: Header, *, flush_each: bool = False) -> None:
        self._start(file, header, flush_each)
        self._put_header()

    def _start(self, file: IO[bytes], header: Header, flush_each: bool, count: int = 0, chain: int = 0, size: int = 0) -> None:
        self._file = file
        self.header = header
        self._flush_each = flush_each
        self.count = count
        self._chain = chain
        self.segment_bytes = size
        """Of the segment that is being written."""
        self._begun: tuple[int, int, Header] | None = None
        """A segment that ended, and whose successor could not be put in its place yet: the successor's size, chain and header."""

    @classmethod
    def create(cls, path: Path, header: Header, *, flush_each: bool = False) -> TapeWriter:
        try:
            return cls(path.open("xb", buffering=0 if flush_each else 1 << 18), header, flush_each=flush_each)
        except FileExistsError:
            raise TapeError(f"tape {path}: exists already; a tape is never overwritten, choose another --out") from None
        except OSError as error:
            raise TapeError(f"tape {path}: cannot be written ({error.strerror})") from None

    @classmethod
    def reopen(cls, tape: Tape) -> TapeWriter:
        """Append to a tape that was read to its end. The incomplete last line of a killed writer is cut off."""
        file = tape.path.open("r+b", buffering=0)
        file.truncate(tape.good_bytes)
        file.seek(tape.good_bytes)
        writer = cls.__new__(cls)
        writer._start(file, tape.newest, True, tape.whole_records, tape.chain, tape.good_bytes)
        return writer

    @property
    def path(self) -> Path:
        return Path(self._file.name)

    def append(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect], *, sync: bool = False) -> None:
        """`sync`: the record is on the physical disk when this returns; if that fails, it is not on the tape."""
        self._put(_encode(Record(self.count + 1, now, worker, event, tuple(effects))), sync)
        self.count += 1

    def _put_header(self) -> None:
        self._put(_encode(_HeaderLine(self.header)))

    def append_gap(self, gap: Gap) -> None:
        self._put(_encode(_GapLine(gap)))

    def roll(self, at: Checkpoint) -> None:
        """Ends this segment and begins the next, with the machine that has seen all records so far. An OSError leaves the tape as
        it was, or, if the segment has ended already, is raised again by `append` until the next one is in place."""
        path, number = self.path, 1 + self.header.number
        ends = _encode(_NextLine(number))
        _, chain = _seal(ends, self._chain)
        digest = hashlib.sha256(at.state).hexdigest()
        segment = Segment(number, self.count, chain, at.outer_step, at.incarnation, digest, at.sent)
        header = msgspec.structs.replace(self.header, segment=segment)
        line, begins = _seal(_encode(_HeaderLine(header)), chain)
        write_durably(state_file(path, number), at.state)
        write_durably(begun(path), line)
        self._put(ends, True)
        self._begun = (len(line), begins, header)
        self._switch()

    def _switch(self) -> None:
        """From a segment that ended to its successor."""
        assert self._begun is not None
        size, chain, header = self._begun
        assert header.segment is not None
        path = self.path
        finish_roll(path, header.segment.number - 1)
        file = path.open("r+b", buffering=0)
        file.seek(size)
        self._file.close()
        self._file, self.header, self._chain, self.segment_bytes, self._begun = file, header, chain, size, None

    def _put(self, body: bytes, sync: bool = False) -> None:
        if self._begun is not None:
            self._switch()
        line, chain = _seal(body, self._chain)
        if self._flush_each:
            self._write_whole(line, sync)
        else:
            self._file.write(line)
        self._chain, self.segment_bytes = chain, self.segment_bytes + len(line)

    def _write_whole(self, line: bytes, sync: bool) -> None:
        """Unbuffered, so that a line of which the disk took only a part can be cut off again. One call of the system: each gives
        up the interpreter's lock, and another thread may keep it for a while."""
        begin = self.segment_bytes
        try:
            done = self._file.write(line)
            while done < len(line):
                done += self._file.write(line[done:])
            if sync:
                os.fsync(self._file.fileno())
        except OSError:
            self._cut_off(begin)
            raise

    def _cut_off(self, begin: int) -> None:
        try:
            self._file.truncate(begin)
            self._file.seek(begin)
        except OSError as error:
            raise TapeError(f"tape {self._file.name}: a line could neither be written nor cut off ({error.strerror})") from None

    def sync(self) -> None:
        """All appended records are on the physical disk when this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write the footer of a run that ended. A tape without a footer reads as cut by a crash."""
        self._put(_encode(_FooterLine(self.count)))
        self._file.close()

    def __enter__(self) -> TapeWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


class Tape:
    """A tape to read, from its first segment that is kept, or from a later one. `cut` means that the footer is missing; it is set
    when `records` has been read to its end."""

    def __init__(self, path: Path, *, begin: int | None = None) -> None:
        """`begin`: the number of the segment to begin with."""
        self.path = path
        self.cut = False
        self.whole_records = 0
        self.good_bytes = 0
        """Of the segment that is being read, up to the last whole line."""
        self.chain = 0
        self.reading = path
        self.gaps: list[Gap] = []
        """Those that `records` or `following` came upon so far."""
        with self._current() as file:
            self.header, _ = self._read_header(read_line(file, path))
        self.newest = self.header
        """The header of the segment that is being written, or that was when it was last looked at."""
        self._begin = self._first(begin)
        if self._begin != self.header.number:
            with self._open(self._begin) as file:
                self.header, _ = self._read_header(read_line(file, self.reading))

    def segments(self) -> range:
        """The numbers of those that are kept, the current one among them."""
        last = self.newest.number
        first, kept = last, set(past_numbers(self.path))
        while first - 1 in kept:
            first -= 1
        return range(first, last + 1)

    def _first(self, wanted: int | None) -> int:
        kept = self.segments()
        if wanted is not None and wanted not in kept:
            raise TapeError(f"tape {self.path}: segment {wanted} is not there; {kept.start} to {kept.stop - 1} are")
        return kept.start if wanted is None else wanted

    def at(self, outer_step: int) -> Tape:
        """The same tape from the last segment that begins at or before an outer step."""
        for number in reversed(self.segments()):
            tape = Tape(self.path, begin=number)
            if tape.header.segment is None or tape.header.segment.outer_step <= outer_step:
                return tape
        first = Tape(self.path).header.segment
        assert first is not None
        raise TapeError(f"tape {self.path}: what came before outer step {first.outer_step} is not kept; give that or a later one")

    def newest_segment(self) -> Tape:
        """The same tape from its last segment: what a restart reads."""
        return Tape(self.path, begin=self.newest.number)

    def begins_with(self, key: int = SYNCER) -> tuple[bytes, Segment] | None:
        """The machine's state before the first record that is read. None: it is a new machine."""
        segment = self.header.segment
        return None if segment is None else (machine_state(self.path, segment), segment)

    def _current(self) -> IO[bytes]:
        try:
            return self.path.open("rb")
        except FileNotFoundError:
            raise TapeError(f"tape {self.path}: no such file") from None
        except OSError as error:
            raise TapeError(f"tape {self.path}: cannot be read ({error.strerror})") from None

    def _open(self, number: int) -> IO[bytes]:
        found = open_past(self.path, number)
        if found is None:
            self.reading = self.path
            return self._current()
        file, self.reading = found
        return file

    def _read_header(self, line: bytes) -> tuple[Header, int]:
        """It is checked against the chain that it says it continues; the reader compares that with the segment before."""
        try:
            header = msgspec.json.decode(b"{" + line[_PREFIX:], type=_HeaderLine).header if line.endswith(b"\n") else None
        except UNDECODABLE as error:
            self._unseal(line, 0, 0)
            raise TapeError(f"tape {self.reading}: the header cannot be read: {error}") from None
        follows = header.segment.chain if header is not None and header.segment is not None else 0
        _, chain = self._unseal(line, follows, 0)
        assert header is not None
        if header.format != FORMAT:
            raise TapeError(
                f"tape {self.reading}: was recorded in format {header.format}, and this atoll reads format {FORMAT}; "
                f"read it with the atoll that recorded it"
            )
        return header, chain

    def _unseal(self, line: bytes, chain: int, number: int) -> tuple[bytes, int]:
        where = f"tape {self.reading}: " + (f"record {number}" if number else "the header")
        if len(line) < _PREFIX + 2 or not line.startswith(b'{"c":"') or line[14:16] != b'",' or not line.endswith(b"\n"):
            raise TapeError(f"{where} is damaged or truncated")
        body = b"{" + line[_PREFIX:-1]
        chain = zlib.crc32(body, chain)
        if line[6:14] != b"%08x" % chain:
            raise TapeError(f"{where} is damaged, or a record before it is missing: its checksum does not fit")
        return body, chain

    def _enter(self, file: IO[bytes], number: int, *, first: bool) -> bool:
        """Reads a segment's header. False: this is not the segment that follows; it is not there yet."""
        line = read_line(file, self.reading)
        if not first and not line.endswith(b"\n"):
            return False
        header, chain = self._read_header(line)
        if header.number != number:
            return False
        segment = header.segment
        if first:
            self.whole_records = segment.records if segment is not None else 0
            self.gaps.clear()
        elif segment is None or (segment.records, segment.chain) != (self.whole_records, self.chain):
            raise TapeError(f"tape {self.reading}: does not continue the segment before it; lines are missing in between")
        self.newest = header
        self.good_bytes, self.chain = len(line), chain
        return True

    def records(self) -> Iterator[Record]:
        """Those that are there. `gaps` says which are not."""
        at, ended = self._begin, False
        while True:
            with self._open(at) as file:
                if not self._enter(file, at, first=at == self._begin):
                    self._refuse_short()
                    break  # its writer was killed between two segments
                while line := read_line(file, self.reading):
                    if not line.endswith(b"\n"):
                        break  # the writer was killed in the middle of this line
                    taken = self._take(line)
                    if isinstance(taken, Record):
                        yield taken
                    elif isinstance(taken, _FooterLine):
                        self._check_footer(taken, file.read(1))
                        return
                    elif ended := isinstance(taken, _NextLine):
                        break
            if not ended:
                self._refuse_short()
                break
            at, ended = at + 1, False
        self.cut = True

    def _refuse_short(self) -> None:
        """Only the segment that is being written may end anywhere."""
        if self.reading != self.path:
            raise TapeError(f"tape {self.reading}: is no whole segment; it is damaged or truncated")

    def following(self) -> Iterator[Record | None]:
        """Records as they are appended; None while there are no more. A restarted syncer may cut off an incomplete line and
        write another in its place, so only whole lines count."""
        at = self._begin
        while True:
            with self._open(at) as file:
                there = self._enter(file, at, first=at == self._begin)
                while there:
                    line = read_line(file, self.reading)
                    if not line.endswith(b"\n"):
                        file.seek(self.good_bytes)
                        yield None
                        continue
                    taken = self._take(line)
                    if isinstance(taken, Record):
                        yield taken
                    elif isinstance(taken, _FooterLine):
                        return
                    elif isinstance(taken, _NextLine):
                        at += 1
                        break
            if not there:
                yield None

    def _take(self, line: bytes) -> Record | Gap | _NextLine | _FooterLine:
        number = self.whole_records + 1
        body, chain = self._unseal(line, self.chain, number)
        taken: Record | Gap | _NextLine | _FooterLine
        if body.startswith(b'{"end"'):
            return _FooterLine(self._number_in(body, _FooterLine))
        if body.startswith(b'{"next"'):
            taken = _NextLine(self._number_in(body, _NextLine))
            if taken.next != self.newest.number + 1:
                raise TapeError(f"tape {self.reading}: segment {self.newest.number} is followed by {taken.next}")
        elif body.startswith(b'{"gap"'):
            taken = self._take_gap(body)
            self.whole_records = taken.last
        else:
            taken = self._decode(body, number)
            self.whole_records = number
        self.good_bytes, self.chain = self.good_bytes + len(line), chain
        return taken

    @staticmethod
    def _number_in(body: bytes, kind: type[_FooterLine | _NextLine]) -> int:
        try:
            found = msgspec.json.decode(body, type=kind)
        except UNDECODABLE:
            return -1
        return found.end if isinstance(found, _FooterLine) else found.next

    def _take_gap(self, body: bytes) -> Gap:
        number = self.whole_records
        try:
            gap = msgspec.json.decode(body, type=_GapLine).gap
        except UNDECODABLE as error:
            raise TapeError(f"tape {self.reading}: the gap after record {number} cannot be decoded: {error}") from None
        if gap.first != number + 1 or gap.last < gap.first:
            raise TapeError(f"tape {self.reading}: the gap after record {number} does not match the records")
        self.gaps.append(gap)
        return gap

    def _decode(self, body: bytes, number: int) -> Record:
        try:
            return _decode_record(body)
        except UNDECODABLE as error:
            raise TapeError(f"tape {self.reading}: record {number} cannot be decoded: {error}") from None

    def gap_before(self, key: int) -> Gap | None:
        """Records are missing before the one that `sourced` yielded last."""
        return self.gaps[0] if self.gaps else None

    def missing(self) -> list[Missing]:
        worker, segment = self.header.worker, self.header.segment
        dropped = [Missing(str(self.path), worker, 0, segment.records, NOT_KEPT)] if segment is not None else []
        return dropped + [Missing(str(self.path), worker, g.first - 1, g.last - g.first + 1, g.why) for g in self.gaps]

    def headers(self) -> list[Header]:
        return [self.header]

    def sourced(self) -> Iterator[tuple[int, Record]]:
        """(machine key, record). On a tape of all workers the key is the worker."""
        for record in self.records():
            yield record.worker, record

    def _check_footer(self, footer: _FooterLine, rest: bytes) -> None:
        if footer.end != self.whole_records or rest:
            raise TapeError(f"tape {self.reading}: the footer after record {self.whole_records} does not match the records")
