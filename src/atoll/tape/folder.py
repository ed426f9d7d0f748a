"""A run's folder: checks before a run writes into it, and where to find a run that a user names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.errors import UserError

TAPE_FILE: Final = "run.tape"
_OF_A_RUN: Final = (TAPE_FILE, "versions", "theta.safetensors")
"""What lies in the folder that holds a run's tape and weights."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run's files lie."""

    folder: Path
    """The run's own folder: config.toml, summary.json, and of a live run syncer/ and learners/."""
    home: Path
    """The folder with tape, versions and weights: a live run's syncer/, otherwise the run's own."""

    @property
    def tape(self) -> Path:
        return self.home / TAPE_FILE


def find_run(path: Path, named: str = "run") -> RunFolder:
    """A run by its folder, its syncer's folder or one of its tapes. `named`: how the caller calls it in a refusal."""
    start = path
    if path.is_file():
        tape = path if len(path.parts) > 3 else path.resolve()  # a short relative name does not say where it is
        of_learner = tape.suffix == ".tape" and tape.parents[1].name == "learners"
        start = tape.parents[2] if of_learner else path.parent
    start = start if start.name not in ("", "..") else start.resolve()
    if _holds_run(start / "syncer"):
        return RunFolder(start, start / "syncer")
    above = start.parent
    if start.name == "syncer" and _holds_run(start) and ((above / "config.toml").is_file() or (above / "learners").is_dir()):
        return RunFolder(above, start)
    if path.exists() and (_holds_run(start) or (start / "config.toml").is_file()):
        return RunFolder(start, start)
    raise UserError(f"{named} {path}: no run is there; give a run's folder, its syncer's folder or its tape (run.tape)")


def _holds_run(folder: Path) -> bool:
    snapshots = (folder / "snapshots").is_dir() and folder.absolute().parent.name != "learners"  # a learner's parts are no run
    return snapshots or any((folder / name).exists() for name in _OF_A_RUN)


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
