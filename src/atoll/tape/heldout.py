"""Looks at Theta while a run trains: its held-out loss, one JSON line each, in `heldout.jsonl` beside the tapes.

No decision follows from them, so they are not on a tape; and they are kept as they come, so that a run that was cut short has
those that it got to.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from atoll.ids import OuterStep

HELDOUT_FILE: Final = "heldout.jsonl"


class HeldoutPoint(msgspec.Struct, frozen=True):
    outer_step: OuterStep
    """The newest that is in these weights."""
    loss: float | None
    """None: no number."""


def append_point(directory: Path, point: HeldoutPoint) -> None:
    with (directory / HELDOUT_FILE).open("ab", buffering=0) as file:  # in one write, so that whoever reads finds a line or none
        file.write(msgspec.json.encode(point) + b"\n")


def points_in(directory: Path) -> list[HeldoutPoint]:
    """In order of outer steps, one each: whoever was killed while looking may have looked again. Half a line is of one who was
    killed while writing."""
    path, found = directory / HELDOUT_FILE, {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.MsgspecError):
            point = msgspec.json.decode(line, type=HeldoutPoint)
            found[point.outer_step] = point
    return [found[step] for step in sorted(found)]
