"""Held-out losses of Theta while a run trains: one JSON line each, in `heldout.jsonl` beside the tapes.

No decision depends on them, so they are not on a tape. Each is written at once, so that a run that is cut short keeps them.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from atoll.errors import UNDECODABLE
from atoll.ids import OuterStep

HELDOUT_FILE: Final = "heldout.jsonl"


class HeldoutPoint(msgspec.Struct, frozen=True):
    outer_step: OuterStep
    """The newest outer step in these weights."""
    loss: float | None
    """None: not a finite number."""


def append_point(directory: Path, point: HeldoutPoint) -> None:
    with (directory / HELDOUT_FILE).open("ab", buffering=0) as file:  # one write: a reader sees all or nothing
        file.write(msgspec.json.encode(point) + b"\n")


def points_in(directory: Path) -> list[HeldoutPoint]:
    """In order of outer steps, one point each: an evaluator that was killed may evaluate a step again. An incomplete line of one
    that was killed while writing is skipped."""
    path, found = directory / HELDOUT_FILE, {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(*UNDECODABLE):
            point = msgspec.json.decode(line, type=HeldoutPoint)
            found[point.outer_step] = point
    return [found[step] for step in sorted(found)]
