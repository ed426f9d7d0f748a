"""Checks of a folder before a run writes into it."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.errors import UserError


def refuse_used(directory: Path) -> None:
    """A run writes into a new or empty folder, so that its files never mix with another run's. This check creates nothing: a
    command that is refused later for another reason leaves no folder behind."""
    refuse_unusable(directory)
    try:
        used = directory.exists() and any(directory.iterdir())
    except OSError as error:
        raise UserError(f"--out {directory}: cannot be used ({error.strerror})") from None
    if used:
        raise UserError(f"--out {directory}: is not empty; choose a new folder")


def refuse_unusable(directory: Path, option: str = "--out") -> None:
    """Refuse a path that is not a folder, cannot become one or is not writable, before any long work whose result would be
    lost."""
    try:
        there = next(path for path in (directory, *directory.parents) if path.exists())
        is_folder = there.is_dir()
    except OSError as error:
        raise UserError(f"{option} {directory}: cannot be used ({error.strerror})") from None
    if not is_folder:
        raise UserError(f"{option} {directory}: {there} is not a folder; choose a new one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{option} {directory}: {there} is not writable; choose a folder of your own")
