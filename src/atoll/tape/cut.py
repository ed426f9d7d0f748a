"""The condition of a tape, record by record, and on request its cut at the last good one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import TapeError
from atoll.tape.format import Header, Missing, Record, Tape


@dataclass(frozen=True)
class TapeCondition:
    path: Path
    """The tape's current segment."""
    header: Header | None
    """None: the header itself is damaged."""
    records: int
    """Number of the last good record."""
    good_bytes: int
    rest_bytes: int
    """What follows the last good line and is no footer: an unfinished line, or everything from the damage on."""
    ended: bool
    """With a footer: the run ended in order."""
    missing: tuple[Missing, ...]
    damage: str | None
    past: Path | None = None
    """The older segment that is damaged, if it is one: it cannot be cut."""


def examine_tape(path: Path, observe: Callable[[Header, Record], None] = lambda header, record: None) -> TapeCondition:
    """Reads the tape up to its end or its first damage."""
    try:
        tape = Tape(path)
    except TapeError as error:
        size = path.stat().st_size if path.is_file() else 0
        return TapeCondition(path, None, 0, 0, size, False, (), str(error))
    damage = None
    try:
        for record in tape.records():
            observe(tape.header, record)
    except TapeError as error:
        damage = str(error)
    ended = damage is None and not tape.cut
    past = tape.reading if damage is not None and tape.reading != path else None
    rest = 0 if ended or past is not None else path.stat().st_size - tape.good_bytes
    missing = tuple(tape.missing())
    return TapeCondition(path, tape.header, tape.whole_records, tape.good_bytes, rest, ended, missing, damage, past)


def cut_tape(condition: TapeCondition) -> Path:
    """Cuts a damaged tape after its last good record and returns the file that has the rest. The rest is on the disk before the
    tape is cut, so no byte is ever lost."""
    path = condition.path
    if condition.header is None:
        raise TapeError(f"tape {path}: its header is damaged, so no record of it can be read; there is nothing to keep")
    if condition.past is not None:
        raise TapeError(f"tape {condition.past}: is an older segment; only the newest can be cut, and the run goes on without it")
    saved = next(name for n in range(1, 10_000) if not (name := path.with_name(f"{path.name}.cut{n}")).exists())
    with path.open("rb") as tape, saved.open("xb") as rest:
        tape.seek(condition.good_bytes)
        shutil.copyfileobj(tape, rest, 1 << 20)
        rest.flush()
        os.fsync(rest.fileno())
    with path.open("r+b") as tape:
        tape.truncate(condition.good_bytes)
        os.fsync(tape.fileno())
    return saved
