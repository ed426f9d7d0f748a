"""What is wrong in a run's folder, as values."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec


class Remedy(StrEnum):
    """What `atoll doctor` can do about it."""

    NONE = ""
    REPAIR = "repair"
    """Loses nothing."""
    CUT_TAPE = "cut_tape"
    """Loses what comes after the damage, which is kept in a file beside the tape."""


class HealthProblem(msgspec.Struct, frozen=True):
    part: str
    """tape, versions, snapshots, places, permissions, config or weights."""
    path: str
    what: str
    """A sentence that names the file."""
    advice: str
    remedy: Remedy = Remedy.NONE

    def __str__(self) -> str:
        return f"{self.what}; {self.advice}"


class HealthReport(msgspec.Struct):
    run: str
    healthy: bool = True
    problems: list[HealthProblem] = []
    notes: list[str] = []
    """What is unusual and no harm."""
    repaired: list[str] = []
    checked: dict[str, int] = {}
    """How many tapes, versions, snapshots and secrets were read."""

    def problem(self, part: str, path: Path, what: str, advice: str, remedy: Remedy = Remedy.NONE) -> None:
        self.damaged(part, path, f"{path}: {what}", advice, remedy)

    def damaged(self, part: str, path: Path, error: object, advice: str, remedy: Remedy = Remedy.NONE) -> None:
        """What reading the file said, which names it already."""
        self.problems.append(HealthProblem(part, str(path), str(error), advice, remedy))
        self.healthy = False

    def note(self, path: Path, what: str) -> None:
        self.notes.append(f"{path}: {what}")

    def count(self, what: str, number: int = 1) -> None:
        self.checked[what] = self.checked.get(what, 0) + number
