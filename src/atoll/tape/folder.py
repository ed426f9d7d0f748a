"""A run's folder, before there is a run in it."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.errors import UserError


def refuse_used(directory: Path) -> None:
    """A run writes into a folder that is new or empty, so that it never mixes with what another left. Nothing is made here:
    whoever asks before the work begins, and is refused something else later, leaves no folder behind."""
    refuse_unusable(directory)
    try:
        used = directory.exists() and any(directory.iterdir())
    except OSError as error:
        raise UserError(f"--out {directory}: cannot be used ({error.strerror})") from None
    if used:
        raise UserError(f"--out {directory}: is not empty; choose a new folder")


def refuse_unusable(directory: Path, option: str = "--out") -> None:
    """What is no folder, cannot become one or may not be written to, before anything is loaded that would then go nowhere."""
    try:
        there = next(path for path in (directory, *directory.parents) if path.exists())
        is_folder = there.is_dir()
    except OSError as error:
        raise UserError(f"{option} {directory}: cannot be used ({error.strerror})") from None
    if not is_folder:
        raise UserError(f"{option} {directory}: {there} is no folder; choose a new one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{option} {directory}: {there} may not be written to; choose a folder of your own")
