"""The tape: one JSON line per record, append-only. Each line has a checksum that is chained to the line before.

    {"c":"5f1d0c2a","header":{...}}                       line 0
    {"c":"93ab01ff","n":1,"t":0,"w":-1,"e":{...},"f":[...]}   a record: number, time, worker, event, effects
    {"c":"51c07aa3","gap":{"first":7,"last":9,"why":"..."}}  records that a learner could not write: its disk was full
    {"c":"0be4711d","end":8122}                           the footer of a run that ended; after a crash there is none

By the chain a reader detects a missing, swapped or altered line like a damaged one. A killed writer may leave a last line
without its newline; the lines before it are good.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any

import msgspec
from msgspec import Meta

from atoll.errors import UNDECODABLE, TapeError
from atoll.ids import Nanos, WorkerId
from atoll.protocol.vocabulary import Effect, Event

FORMAT = 4
LINE_MAX = 1 << 28
"""Bytes of one line. The longest are of the syncer's commits: a message to each member, with a clock that has an entry for each.
In a run of 1,024 members with 24 fragments due at once that is 182 MB."""


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
    derivable: bool = True
    """False: no machine decided what is on it (torch's data-parallel training), so there is nothing to derive again."""


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


def read_line(file: IO[bytes], path: Path) -> bytes:
    """The next line with its end, the last one perhaps without it, or nothing. A tape whose line ends are lost is refused and not
    read whole."""
    try:
        line = file.readline(LINE_MAX + 1)
    except OSError as error:
        raise TapeError(f"tape {path}: cannot be read ({error.strerror})") from None
    if len(line) > LINE_MAX:
        raise TapeError(f"tape {path}: has a line of more than {LINE_MAX >> 20} MiB; it is damaged, or no tape")
    return line


_encode = msgspec.json.Encoder().encode
_decode_record = msgspec.json.Decoder(Record).decode
_PREFIX = len(b'{"c":"00000000",')


def _seal(body: bytes, chain: int) -> tuple[bytes, int]:
    chain = zlib.crc32(body, chain)
    return b'{"c":"%08x",' % chain + body[1:] + b"\n", chain


class TapeWriter:
    """A driver appends a record before it executes its effects. With `flush_each`, `append` passes the line to the operating
    system before it returns. An append that fails (a full disk) leaves the tape unchanged and may be repeated."""

    def __init__(
        self, file: IO[bytes], header: Header | None, *, flush_each: bool = False, count: int = 0, chain: int = 0
    ) -> None:
        self._file = file
        self._flush_each = flush_each
        self.count = count
        self._chain = chain
        if header is not None:
            self._put_header(header)

    @classmethod
    def create(cls, path: Path, header: Header, *, flush_each: bool = False) -> TapeWriter:
        try:
            return cls(path.open("xb", buffering=0 if flush_each else -1), header, flush_each=flush_each)
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
        return cls(file, None, flush_each=True, count=tape.whole_records, chain=tape.chain)

    def append(
        self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect], *, sync: bool = False
    ) -> None:
        """`sync`: the record is on the physical disk when this returns; if that fails, it is not on the tape."""
        self._put(_encode(Record(self.count + 1, now, worker, event, tuple(effects))), sync=sync)
        self.count += 1

    def _put_header(self, header: Header) -> None:
        self._put(_encode(_HeaderLine(header)))

    def append_gap(self, gap: Gap) -> None:
        self._put(_encode(_GapLine(gap)))

    def _put(self, body: bytes, *, sync: bool = False) -> None:
        line, chain = _seal(body, self._chain)
        if self._flush_each:
            self._write_whole(line, sync)
        else:
            self._file.write(line)
        self._chain = chain

    def _write_whole(self, line: bytes, sync: bool) -> None:
        """Unbuffered, so that a line of which the disk took only a part can be cut off again."""
        begin = self._file.tell()
        try:
            done = 0
            while done < len(line):
                done += self._file.write(line[done:])
            self._file.flush()
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
    """A tape to read. `cut` means that the footer is missing; it is set when `records` has been read to its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut = False
        self.whole_records = 0
        self.good_bytes = 0
        self.chain = 0
        self.gaps: list[Gap] = []
        """Those that `records` or `following` came upon so far."""
        with self._open() as file:
            self.header, self._chain0 = self._read_header(read_line(file, path))

    def _open(self) -> IO[bytes]:
        try:
            return self.path.open("rb")
        except FileNotFoundError:
            raise TapeError(f"tape {self.path}: no such file") from None
        except OSError as error:
            raise TapeError(f"tape {self.path}: cannot be read ({error.strerror})") from None

    def _read_header(self, line: bytes) -> tuple[Header, int]:
        body, chain = self._unseal(line, 0, 0)
        try:
            header = msgspec.json.decode(body, type=_HeaderLine).header
        except UNDECODABLE as error:
            raise TapeError(f"tape {self.path}: the header cannot be read: {error}") from None
        if header.format != FORMAT:
            raise TapeError(
                f"tape {self.path}: was recorded in format {header.format}, and this atoll reads format {FORMAT}; "
                f"read it with the atoll that recorded it"
            )
        return header, chain

    def _unseal(self, line: bytes, chain: int, number: int) -> tuple[bytes, int]:
        where = f"tape {self.path}: " + (f"record {number}" if number else "the header")
        if len(line) < _PREFIX + 2 or not line.startswith(b'{"c":"') or line[14:16] != b'",' or not line.endswith(b"\n"):
            raise TapeError(f"{where} is damaged or truncated")
        body = b"{" + line[_PREFIX:-1]
        chain = zlib.crc32(body, chain)
        if line[6:14] != b"%08x" % chain:
            raise TapeError(f"{where} is damaged, or a record before it is missing: its checksum does not fit")
        return body, chain

    def records(self) -> Iterator[Record]:
        """Those that are there. `gaps` says which are not."""
        chain, number = self._chain0, 0
        self.gaps.clear()
        with self._open() as file:
            self.good_bytes, self.chain = len(read_line(file, self.path)), chain
            while line := read_line(file, self.path):
                if not line.endswith(b"\n"):
                    break  # the writer was killed in the middle of this line
                body, chain = self._unseal(line, chain, number + 1)
                if body.startswith(b'{"end"'):
                    self._check_footer(body, number, file.read(1))
                    return
                if body.startswith(b'{"gap"'):
                    number = self._take_gap(body, number)
                    self.good_bytes, self.chain, self.whole_records = self.good_bytes + len(line), chain, number
                    continue
                number += 1
                record = self._decode(body, number)
                self.whole_records = number
                self.good_bytes, self.chain = self.good_bytes + len(line), chain
                yield record
        self.cut = True

    def following(self) -> Iterator[Record | None]:
        """Records as they are appended; None while there are no more. A restarted syncer may cut off an incomplete line and
        write another in its place, so only whole lines count."""
        chain, number = self._chain0, 0
        with self._open() as file:
            at = len(read_line(file, self.path))
            while True:
                file.seek(at)
                line = read_line(file, self.path)
                if not line.endswith(b"\n"):
                    yield None
                    continue
                body, chain = self._unseal(line, chain, number + 1)
                at += len(line)
                if body.startswith(b'{"end"'):
                    return
                if body.startswith(b'{"gap"'):
                    number = self._take_gap(body, number)
                    continue
                number += 1
                yield self._decode(body, number)

    def _take_gap(self, body: bytes, number: int) -> int:
        """The number of the last record that it stands for."""
        try:
            gap = msgspec.json.decode(body, type=_GapLine).gap
        except UNDECODABLE as error:
            raise TapeError(f"tape {self.path}: the gap after record {number} cannot be decoded: {error}") from None
        if gap.first != number + 1 or gap.last < gap.first:
            raise TapeError(f"tape {self.path}: the gap after record {number} does not match the records")
        self.gaps.append(gap)
        return gap.last

    def _decode(self, body: bytes, number: int) -> Record:
        try:
            return _decode_record(body)
        except UNDECODABLE as error:
            raise TapeError(f"tape {self.path}: record {number} cannot be decoded: {error}") from None

    def gap_before(self, key: int) -> Gap | None:
        """Records are missing before the one that `sourced` yielded last."""
        return self.gaps[0] if self.gaps else None

    def missing(self) -> list[Missing]:
        worker = self.header.worker
        return [Missing(str(self.path), worker, gap.first - 1, gap.last - gap.first + 1, gap.why) for gap in self.gaps]

    def headers(self) -> list[Header]:
        return [self.header]

    def sourced(self) -> Iterator[tuple[int, Record]]:
        """(machine key, record). On a tape of all workers the key is the worker."""
        for record in self.records():
            yield record.worker, record

    def _check_footer(self, body: bytes, number: int, rest: bytes) -> None:
        try:
            end = msgspec.json.decode(body, type=_FooterLine).end
        except UNDECODABLE:
            end = -1
        if end != number or rest:
            raise TapeError(f"tape {self.path}: the footer after record {number} does not match the records")
