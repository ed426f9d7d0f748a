"""Identifiers and units, shared by every room.

They are aliases of int, because every message and every line of a tape has some. `SYNCER` is a worker like any other;
learners count from zero.
"""

from __future__ import annotations

from typing import Final, TypeAlias

WorkerId: TypeAlias = int
LearnerId: TypeAlias = int
FragmentId: TypeAlias = int
OuterStep: TypeAlias = int
"""The syncer's count of rounds. The outer step that announced a version of a fragment names it; 0 is the initial version."""
LocalStep: TypeAlias = int
"""A learner's count of completed inner optimiser steps. Never write a bare "step"."""
Incarnation: TypeAlias = int
Nanos: TypeAlias = int
"""Integer nanoseconds, so that equal times compare equal."""

SYNCER: Final[WorkerId] = -1
SECOND: Final[Nanos] = 1_000_000_000


def worker_name(worker: WorkerId) -> str:
    return "syncer" if worker == SYNCER else f"learner{worker}"


def nanos(seconds: float) -> Nanos:
    return round(seconds * SECOND)


def seconds(nanoseconds: Nanos) -> float:
    return nanoseconds / SECOND
