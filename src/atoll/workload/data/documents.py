"""Documents from the user's files: plain text, JSON lines and Parquet, compressed or not, by path, folder or glob.

Files are read as streams, once to count and once to encode, so that text may be larger than memory. The data is the user's
own, so a document that cannot be read ends the run with an error that names the file and the line. Empty documents are left
out, counted and named.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec

from atoll.errors import DataError
from atoll.workload.data.corpus import CUT_BYTES, Progress, Skips
from atoll.workload.data.packing import PACKED, expand_home, import_optional, open_unpacked, relative_path_note

DOCUMENT_BYTES_MAX: Final = 1 << 28
ROWS_AT_ONCE: Final = 256
_BLOCK: Final = 1 << 20

_LINES: Final = (".jsonl", ".ndjson", ".json")
_PARQUET: Final = ".parquet"
_PLAIN: Final = (".txt", ".py")
_BOM: Final = b"\xef\xbb\xbf"
"""The byte-order mark that some editors put before UTF-8. Only at the beginning of a file it is not part of the text."""
_KINDS: Final = ", ".join((*_PLAIN, *_LINES, _PARQUET))
IN_FOLDERS: Final = (*(suffix + packed for suffix in (*_PLAIN, *_LINES) for packed in ("", *PACKED)), _PARQUET)


@dataclass(frozen=True)
class Source:
    path: Path
    name: str
    """Without the folders that differ between machines: the fingerprint covers the name and not the path."""

    @property
    def unpacked_name(self) -> str:
        """The name without the suffix of its compression, in lower case: suffixes in capitals count too."""
        name = self.path.name.lower()
        return next((name.removesuffix(packed) for packed in PACKED if name.endswith(packed)), name)

    @property
    def is_lines(self) -> bool:
        return self.unpacked_name.endswith(_LINES)

    @property
    def is_parquet(self) -> bool:
        return self.path.name.lower().endswith(_PARQUET)

    @property
    def is_text(self) -> bool:
        return not self.is_lines and not self.is_parquet


@dataclass
class FoundFiles:
    sources: list[Source]
    duplicates: list[Path]
    """Named or linked more than once, and read once."""
    ignored: list[Path]
    """Files in folders whose names are not those of text."""

    def notes(self, key: str) -> Iterator[str]:
        skips = Skips()
        for path in self.duplicates:
            skips.add(str(path), "named twice and read once")
        if sentence := skips.sentence(key):
            yield sentence
        if self.ignored:
            yield (
                f"{key}: files in folders ignored by name or kind: {len(self.ignored)}, such as {self.ignored[0]}; "
                f"in a folder {', '.join((*_PLAIN, *_LINES))} (compressed or not) and {_PARQUET} are read, "
                f"others only if named by path or by a glob"
            )


class FileTexts:
    """The documents of the files that a key of the recipe names.

    A text file is one document. A single one may be cut (`cut`), because a split needs several documents. A line of JSON lines
    or a row of Parquet is one document, its text in `field`.
    """

    def __init__(self, wanted: str, field: str, key: str = "data.corpus", *, cut: bool = True) -> None:
        self.key = key
        self.name = wanted
        self._field = field
        found = find_sources(wanted, key)
        self.sources = found.sources
        self.notes: tuple[str, ...] = tuple(found.notes(key))
        """About the files. Not among a reading's skips: those are cached with the text, which may have other names later."""
        begins = [_beginning(source) for source in self.sources]
        filled = [s for s, begin in zip(self.sources, begins, strict=True) if _stat(s.path)[0] > 0 and begin != _BOM]
        self._cut = cut and len(filled) == 1 and filled[0].is_text
        self._before = self._stats()
        digest = hashlib.sha256(f"texts cut={self._cut} field={field}\n".encode("utf-8", "surrogateescape"))
        for source, begin in zip(self.sources, begins, strict=True):
            name = source.name.encode("utf-8", "surrogateescape")
            digest.update(len(name).to_bytes(8, "little") + name + _file_digest(source.path))
            if begin.startswith(_BOM):  # older tokens that include it may be cached
                digest.update(b"without its byte-order mark")
        self.fingerprint = digest.hexdigest()

    def read(self, skips: Skips | None = None, progress: Progress | None = None) -> Iterator[bytes]:
        skips = skips if skips is not None else Skips()
        done, total = 0, sum(size for size, _ in self._before)
        for source, (size, _) in zip(self.sources, self._before, strict=True):
            yield from self._documents(source, skips)
            done += size
            if progress is not None:
                progress("reading text", done, total)

    def check_unchanged(self) -> None:
        if self._stats() != self._before:
            changed = next(s.path for s, old in zip(self.sources, self._before, strict=True) if _stat(s.path) != old)
            raise DataError(f"{self.key}: {changed} changed while it was read: start again when it is complete")

    def _stats(self) -> list[tuple[int, int]]:
        return [_stat(source.path) for source in self.sources]

    def _documents(self, source: Source, skips: Skips) -> Iterator[bytes]:
        if source.is_parquet:
            yield from _rows(source.path, self._field, skips)
            return
        with open_unpacked(source.path) as stream:
            if source.is_lines:
                yield from _lines(stream, source.path, self._field, skips)
            else:
                yield from _texts(stream, source.path, self._cut, skips)


def find_sources(wanted: str, key: str) -> FoundFiles:
    """Files in the order of the parts between commas, sorted within a folder or a glob.

    A path that exists is taken literally, even with commas or wildcards in it.
    """
    parts = [wanted] if exists(wanted) else [part.strip() for part in wanted.split(",")]
    found: dict[Path, Source] = {}
    duplicates: list[Path] = []
    ignored: dict[Path, Path] = {}
    for part in parts:
        matching = _matching(part, key)
        for source in matching.sources:
            same = source.path.resolve()
            if same in found:
                duplicates.append(source.path)
            else:
                found[same] = source
        duplicates += matching.duplicates
        ignored |= {path.resolve(): path for path in matching.ignored}
    return FoundFiles(list(found.values()), duplicates, [path for same, path in ignored.items() if same not in found])


def exists(part: str) -> bool:
    """Whether it is read as one path, whatever characters it has."""
    try:
        return bool(part) and Path(part).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, with a NUL, or the home of an unknown user
        return False


def _matching(part: str, key: str) -> FoundFiles:
    if not part:
        raise DataError(f"{key}: a name is missing; give a path, a glob, or several separated by commas")
    if exists(part):
        path = Path(part).expanduser()
        if path.is_file():
            return FoundFiles([Source(path, path.name)], [], [])
        if not path.is_dir():
            raise DataError(f"{key}: {path} is neither a file nor a folder, and text is read more than once: name a file")
        inside = _in_folder(path, key)
        if not inside.sources:
            raise DataError(f"{key}: the folder {path} has no {_KINDS} file: put text there, or name another folder")
        return inside
    if glob.has_magic(part):
        return _by_glob(part, key)
    wanted = f"name a file of text, JSON lines or Parquet, a folder of them, or a glob{relative_path_note(Path(part))}"
    raise DataError(f"{key}: {part} does not exist: {wanted}")


def _by_glob(part: str, key: str) -> FoundFiles:
    """Matches count as if they were named, so a matched folder is read. But a folder that the glob itself descends into (`**`) is
    not: the glob selects its files."""
    expand_home(part, f"{key} = {part!r}")  # only checked: a Path would lose a trailing slash, which selects folders
    names = sorted(glob.glob(os.path.expanduser(part), recursive=True))
    if not names:
        raise DataError(f"{key}: no file matches {part}: check the glob, relative to {Path.cwd()}")
    paths = [Path(name) for name in names]
    descended = {folder for path in paths if not path.is_dir() for folder in path.parents}
    entered: set[Path] = set()
    found = FoundFiles([], [], [])
    for path in paths:
        if _is_special(path) and not path.is_dir():
            found.ignored.append(path)
        elif not path.is_dir():
            found.sources.append(Source(path, path.name))
        elif path not in descended and entered.isdisjoint(path.parents):
            entered.add(path)
            inside = _in_folder(path, key)
            found.sources += inside.sources
            found.duplicates += inside.duplicates
            found.ignored += inside.ignored
    if not found.sources:
        raise DataError(f"{key}: {part} matches no {_KINDS} file: put text there, or name another")
    return found


def _in_folder(root: Path, key: str) -> FoundFiles:
    """Sorted by name. Linked folders come after all real ones, so that a link does not rename a file. No folder is entered twice,
    so that a cycle of links ends."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{key}: the folder {error.filename} cannot be read: {error.strerror}") from error

    files: list[str] = []
    again: list[Path] = []
    entered: set[tuple[int, int]] = set()
    waiting = deque([root])
    while waiting:
        for name, folders, inside in os.walk(waiting.popleft(), onerror=refuse):
            folder, status = Path(name), os.stat(name)
            if (status.st_dev, status.st_ino) in entered:
                again.append(folder)
                folders.clear()
                continue
            entered.add((status.st_dev, status.st_ino))
            folders.sort()
            waiting.extend(folder / each for each in folders if (folder / each).is_symlink())
            files += [(folder / each).relative_to(root).as_posix() for each in inside]
    by_kind: dict[bool, list[str]] = {True: [], False: []}
    for each in sorted(files):
        by_kind[each.lower().endswith(IN_FOLDERS) and not _is_special(root / each)].append(each)
    return FoundFiles([Source(root / each, each) for each in by_kind[True]], again, [root / each for each in by_kind[False]])


def _is_special(path: Path) -> bool:
    """A pipe, a socket or a device: opening it may block for ever. A missing file is reported when it is read."""
    return path.exists() and not path.is_file()


def _beginning(source: Source) -> bytes:
    """The first bytes of a text file, to find a byte-order mark. A file that cannot be read is reported when it is read."""
    if source.is_text:
        with suppress(DataError), open_unpacked(source.path) as stream:
            return stream.read(len(_BOM) + 1)
    return b""


def _stat(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"the file {path} cannot be read: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns


def _file_digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise DataError(f"the file {path} cannot be read: {error.strerror}") from error


# ---------------------------------------------------------------- plain text


def _texts(stream: BinaryIO, path: Path, cut: bool, skips: Skips) -> Iterator[bytes]:
    lines, done, filled = 1, 0, False
    for piece in _pieces(stream, path) if cut else _whole(stream, path):
        try:
            piece.decode("utf-8")
        except UnicodeDecodeError as error:
            line, byte = lines + piece.count(b"\n", 0, error.start), done + error.start
            raise DataError(
                f"the file {path} is not utf-8 (line {line}, byte {byte} of the file is 0x{piece[error.start]:02x}): convert it"
            ) from error
        text = piece if done else piece.removeprefix(_BOM)
        lines, done = lines + piece.count(b"\n"), done + len(piece)
        if text:
            filled = True
            yield text
    if not filled:
        skips.add(str(path), "empty")


def _whole(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    content = stream.read(DOCUMENT_BYTES_MAX + 1)
    if len(content) > DOCUMENT_BYTES_MAX:
        raise DataError(f"the file {path} is one document of more than {DOCUMENT_BYTES_MAX} bytes: split it, or give JSON lines")
    if content:
        yield content


def _pieces(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """The file in pieces, cut after a blank line if one comes soon, otherwise after a line."""
    buffer, start, ended = b"", 0, False
    while True:
        while not ended and len(buffer) - start <= 2 * CUT_BYTES:
            block = stream.read(_BLOCK)
            buffer, start, ended = buffer[start:] + block, 0, not block
        if len(buffer) - start <= 2 * CUT_BYTES:
            break
        least = start + CUT_BYTES
        blank = buffer.find(b"\n\n", least, least + CUT_BYTES)
        end = blank + 2 if blank >= 0 else buffer.find(b"\n", least) + 1
        if end <= 0:
            if ended:
                break
            rest = b"".join(_until_newline(stream, path))
            ended = not rest.endswith(b"\n")
            buffer, start = buffer[start:] + rest, 0
            continue
        yield buffer[start:end]
        start = end
    if start < len(buffer):
        yield buffer[start:]


def _until_newline(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """At least to the next newline, or to the end of the file."""
    total = 0
    while True:
        part = stream.readline(_BLOCK)
        yield part
        total += len(part)
        if not part or part.endswith(b"\n"):
            return
        if total > DOCUMENT_BYTES_MAX:
            raise DataError(f"the file {path} has a line of more than {DOCUMENT_BYTES_MAX} bytes: break it up")


# ---------------------------------------------------------------- JSON lines and Parquet


def _lines(stream: BinaryIO, path: Path, field: str, skips: Skips) -> Iterator[bytes]:
    text_of = _field_reader(field)
    number = 0
    while line := stream.readline(DOCUMENT_BYTES_MAX + 1):
        number += 1
        if len(line) > DOCUMENT_BYTES_MAX:
            raise DataError(f"the file {path} has a line {number} of more than {DOCUMENT_BYTES_MAX} bytes: split the document")
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.isspace():
            skips.add(f"{path} line {number}", "blank line")
            continue
        try:
            document = text_of(line).encode()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"the file {path}, line {number}: {_problem(line, field, error)}") from error
        if document:
            yield document
        else:
            skips.add(f"{path} line {number}", "empty")
    if number == 0:
        skips.add(str(path), "empty")


class _Line(msgspec.Struct):
    text: str


def _field_reader(field: str) -> Callable[[bytes], str]:
    """Decodes only this field; msgspec skips the others without building objects."""
    plain = msgspec.json.Decoder(_Line)
    try:
        named = cast(type[_Line], msgspec.defstruct("Line", [("text", str)], rename={"text": field}))
    except ValueError:  # a name with a quotation mark or a backslash, which msgspec refuses
        parts = msgspec.json.Decoder(dict[str, msgspec.Raw])

        def unusual(line: bytes) -> str:
            value = parts.decode(line).get(field)
            return plain.decode(b"{}" if value is None else b'{"text":%b}' % bytes(value)).text

        return unusual
    decoder = msgspec.json.Decoder(named)
    return lambda line: decoder.decode(line).text


def _problem(line: bytes, field: str, error: Exception) -> str:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as wrong:
        return f"is not utf-8 (byte {wrong.start} of the line is 0x{line[wrong.start]:02x}): convert it"
    what = str(error)
    if half := lone_surrogate(line):
        return f"holds {half}: remove it"
    if not isinstance(error, msgspec.ValidationError):
        what = what if what[1:2].isupper() else what[:1].lower() + what[1:]
        return f"is not valid JSON ({what}); JSON lines hold one object per line"
    if "missing required field" in what:
        return f"has no field {field!r}: name the field with the text by data.field"
    if "$" in what:
        got = what.partition("got ")[2].partition(" ")[0].strip("`")
        return f"its field {field!r} holds {got}, not a string"
    return f"is not an object but {what.rpartition('got ')[2].strip('`')}; JSON lines hold one object per line"


def lone_surrogate(line: bytes) -> str:
    """The lone surrogate in a line that msgspec refuses, or "". msgspec takes it for truncated text; the json module reads it."""
    try:
        found = re.search("[\ud800-\udfff]", json.dumps(json.loads(line), ensure_ascii=False))
    except (ValueError, RecursionError):
        return ""
    return f"\\u{ord(found[0]):04x}, half of a surrogate pair and no character" if found else ""


def _rows(path: Path, field: str, skips: Skips) -> Iterator[bytes]:
    parquet = import_optional("pyarrow.parquet", f"to read {path}", "pyarrow", "parquet")
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if field not in columns:
                raise DataError(f"the file {path} has no column {field!r} but {', '.join(columns)}: name one by data.field")
            row = 0
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    if not isinstance(value, str):
                        got = "null" if value is None else type(value).__name__
                        raise DataError(f"the file {path}, row {row}: its column {field!r} holds {got}, not a string")
                    if value:
                        yield value.encode()
                    else:
                        skips.add(f"{path} row {row}", "empty")
            if row == 0:
                skips.add(str(path), "empty")
    except OSError as error:
        raise DataError(f"the file {path} cannot be read: {error}") from error
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise DataError(f"the file {path} is damaged or not Parquet ({str(error).splitlines()[0]})") from error
