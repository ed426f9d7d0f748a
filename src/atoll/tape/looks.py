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

LOOKS: Final = "heldout.jsonl"


class Look(msgspec.Struct, frozen=True):
    outer_step: OuterStep
    """The newest that is in these weights."""
    loss: float | None
    """None: no number."""


def add_look(directory: Path, look: Look) -> None:
    with (directory / LOOKS).open("ab", buffering=0) as file:  # in one write, so that whoever reads finds a line or none
        file.write(msgspec.json.encode(look) + b"\n")


def looks_in(directory: Path) -> list[Look]:
    """In order of outer steps, one each: whoever was killed while looking may have looked again. Half a line is of one who was
    killed while writing."""
    path, found = directory / LOOKS, {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.MsgspecError):
            look = msgspec.json.decode(line, type=Look)
            found[look.outer_step] = look
    return [found[step] for step in sorted(found)]
