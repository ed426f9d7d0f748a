"""Names of things, shared by every room.

Plain integers with a name each: they travel in every message and sit on every tape line, so they stay as cheap
as integers are. `SYNCER` is a worker like any other; learners count from zero.
"""

from __future__ import annotations

from typing import Final, TypeAlias

WorkerId: TypeAlias = int
LearnerId: TypeAlias = int
FragmentId: TypeAlias = int
OuterStep: TypeAlias = int
"""The syncer's count of rounds. A version of a fragment is named by the outer step that announced it; 0 is the initial one."""
LocalStep: TypeAlias = int
"""A learner's count of completed inner optimiser steps. Never a bare "step"."""
Incarnation: TypeAlias = int
Nanos: TypeAlias = int
"""Integer nanoseconds, so that equal means equal."""

SYNCER: Final[WorkerId] = -1
SECOND: Final[Nanos] = 1_000_000_000


def worker_name(worker: WorkerId) -> str:
    return "syncer" if worker == SYNCER else f"learner{worker}"


def nanos(seconds: float) -> Nanos:
    return round(seconds * SECOND)


def seconds(nanoseconds: Nanos) -> float:
    return nanoseconds / SECOND
