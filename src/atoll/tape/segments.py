"""The files of a long tape.

    run.tape                 the segment that is being written
    run.tape.000001.zst      those before it, compressed (without .zst: not yet)
    run.tape.000002.state    the machine with which segment 2 begins
    run.tape.next            a segment that is being begun

A segment that has grown to its limit ends with a line that names the next. The next has a header of its own, which says how many
records came before, continues the chain of checksums, and names the machine's state by its digest. So a restart reads one
segment, a reader may begin at any, and the oldest can be dropped.

The line is what ends a segment: everything that the next one needs is on the disk before it. A writer that is killed behind the
line leaves only names to be changed (`finish_roll`).
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
from pathlib import Path
from typing import IO

import msgspec

from atoll.errors import TapeError
from atoll.ids import Incarnation, OuterStep, WorkerId

try:
    import zstandard
except ImportError:  # pragma: no cover - a dependency; without it segments stay as they are
    zstandard = None  # type: ignore[assignment]

UNREADABLE: tuple[type[Exception], ...] = (OSError,) if zstandard is None else (OSError, zstandard.ZstdError)
LEVEL = 3
"""Of zstd: a fourteenth of the size at 270 MB/s; level 9 gains a fifth of that and takes five times as long."""
STATE_MAX = 1 << 30
"""Bytes of a machine's state."""


class Segment(msgspec.Struct, frozen=True):
    """Where a segment begins. In the header of every one but a tape's first."""

    number: int
    records: int
    """On the segments before this one."""
    chain: int
    """The checksum of the line before this segment's header."""
    outer_step: OuterStep
    incarnation: Incarnation
    state_sha256: str
    sent: tuple[tuple[WorkerId, int, int], ...]
    """By receiver: the messages that this incarnation had sent by then, in either lane."""


def can_compress() -> bool:
    return zstandard is not None


def past(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number:06d}")


def compressed(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number:06d}.zst")


def state_file(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number:06d}.state")


def begun(path: Path) -> Path:
    return path.with_name(f"{path.name}.next")


def past_numbers(path: Path) -> list[int]:
    """Of the segments before the one that is being written, as far as they are kept."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d{6})(\.zst)?")
    try:
        return sorted({int(match[1]) for found in path.parent.iterdir() if (match := pattern.fullmatch(found.name))})
    except OSError:
        return []


def open_past(path: Path, number: int) -> tuple[IO[bytes], Path] | None:
    """None: it is the current one, or is not kept."""
    plain, packed = past(path, number), compressed(path, number)
    try:
        return plain.open("rb"), plain
    except FileNotFoundError:
        pass
    try:
        file = packed.open("rb")
    except FileNotFoundError:
        return None
    if zstandard is None:
        file.close()
        raise TapeError(f"tape {packed}: is compressed, and the package zstandard is not installed")
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, closefd=True), 1 << 16), packed


def machine_state(path: Path, segment: Segment) -> bytes:
    """The machine's state at the beginning of a segment."""
    file = state_file(path, segment.number)
    try:
        if file.stat().st_size > STATE_MAX:
            raise TapeError(f"tape {file}: is larger than {STATE_MAX >> 20} MiB; it is no machine's state")
        state = file.read_bytes()
    except OSError as error:
        raise TapeError(f"tape {file}: cannot be read ({error.strerror})") from None
    if hashlib.sha256(state).hexdigest() != segment.state_sha256:
        raise TapeError(f"tape {file}: is damaged: its digest is not the one in the header of segment {segment.number}")
    return state


# ---------------------------------------------------------------- the writer's side


def write_durably(path: Path, content: bytes) -> None:
    """Under its name when it is whole."""
    making = path.with_name(f".{path.name}")
    try:
        with making.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        making.rename(path)
    except OSError:
        making.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def finish_roll(path: Path, number: int) -> None:
    """The segment at `path` ended, as segment `number`: it takes its place among those before, and the next is current. `path`
    is there at every moment, for those who look for it."""
    if begun(path).exists():  # else another attempt came as far as the names, and the folder could not be synced
        if not past(path, number).exists():
            _link(path, past(path, number))
        begun(path).rename(path)
    sync_folder(path.parent)


def _link(path: Path, name: Path) -> None:
    try:
        os.link(path, name)
    except OSError:  # a file system without hard links
        copy = name.with_suffix(".copy")
        shutil.copyfile(path, copy)
        copy.rename(name)


_ENDS = re.compile(rb'\{"c":"[0-9a-f]{8}","next":(\d+)\}\n')


def settle(path: Path) -> None:
    """Before a tape is written on: a writer that was killed behind the line that ends a segment left the names."""
    if not begun(path).exists():
        return
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 64))
        ends = file.read().rpartition(b'{"c"')
    found = _ENDS.fullmatch(b"".join(ends[1:]))
    if found is not None:
        finish_roll(path, int(found[1]) - 1)


def tidy(path: Path, keep_bytes: int) -> None:
    """Compresses segments that ended, and drops the oldest beyond `keep_bytes`. Any thread may do it meanwhile."""
    numbers = past_numbers(path)
    for number in numbers:
        if past(path, number).exists() and zstandard is not None:
            _compress(path, number)
    sizes = [(number, _size(path, number)) for number in numbers]
    total = sum(size for _, size in sizes)
    for number, size in sizes:
        if total <= keep_bytes:
            return
        for file in (past(path, number), compressed(path, number), state_file(path, number)):
            file.unlink(missing_ok=True)
        total -= size


def _compress(path: Path, number: int) -> None:
    source, making = past(path, number), compressed(path, number).with_suffix(".making")
    try:
        with source.open("rb") as plain, making.open("wb") as file:
            zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).copy_stream(plain, file)
            file.flush()
            os.fsync(file.fileno())
        making.rename(compressed(path, number))
    except OSError:
        making.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    source.unlink()


def _size(path: Path, number: int) -> int:
    return sum(file.stat().st_size for file in (past(path, number), compressed(path, number)) if file.exists())
