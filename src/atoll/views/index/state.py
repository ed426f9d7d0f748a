"""Where an index stood when a segment of its tape began. A syncer that goes on from that segment goes on with its index there,
and folds what has come since."""

from __future__ import annotations

from pathlib import Path

import msgspec

from atoll.errors import UNDECODABLE, TapeError
from atoll.tape.segments import Segment
from atoll.views.index.files import STATE, WriterState
from atoll.views.index.sums import FoldState


class IndexState(msgspec.Struct, frozen=True):
    records: int
    """On the segments before."""
    written: WriterState
    fold: FoldState


def write_index_state(directory: Path, segment: int, state: IndexState) -> None:
    """The one before stays: the segment may fail to begin."""
    path = _path(directory, segment)
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.msgpack.encode(state))
    new.replace(path)
    for other in directory.glob(f"*{STATE}"):
        if other.stem.isdecimal() and int(other.stem) < segment - 1:
            other.unlink(missing_ok=True)


def read_index_state(directory: Path, segment: Segment) -> IndexState:
    path = _path(directory, segment.number)
    try:
        state = msgspec.msgpack.decode(path.read_bytes(), type=IndexState)
    except OSError as error:
        raise TapeError(f"index {path}: cannot be read ({error.strerror})") from None
    except UNDECODABLE as error:
        raise TapeError(f"index {path}: is damaged ({error})") from None
    if state.records != segment.records:
        raise TapeError(f"index {path}: is of another tape")
    return state


def _path(directory: Path, segment: int) -> Path:
    return directory / f"{segment:06d}{STATE}"
