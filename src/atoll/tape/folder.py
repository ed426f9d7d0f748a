"""A run's folder, before there is a run in it."""

from __future__ import annotations

from pathlib import Path

from atoll.errors import UserError


def refuse_used(directory: Path) -> None:
    """A run writes into a folder that is new or empty, so that it never mixes with what another left. Nothing is made here:
    whoever asks before the work begins, and is refused something else later, leaves no folder behind."""
    try:
        there = next(path for path in (directory, *directory.parents) if path.exists())
        if not there.is_dir():
            raise UserError(f"--out {directory}: {there} is no folder; choose a new one")
        used = there == directory and any(there.iterdir())
    except OSError as error:
        raise UserError(f"--out {directory}: cannot be used ({error.strerror})") from None
    if used:
        raise UserError(f"--out {directory}: is not empty; choose a new folder")
