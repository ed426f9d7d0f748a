"""The wall clock of a run: nanoseconds since its syncer first started, monotonic."""

from __future__ import annotations

import time

from atoll.ids import Nanos


class Clock:
    """All workers count from the same instant (`epoch`, wall-clock nanoseconds), so that the times on their tapes compare.
    Within a process time is monotonic; `floor` is the last time on a tape that is continued."""

    def __init__(self, epoch: int, floor: Nanos = 0) -> None:
        began = max(time.time_ns() - epoch, floor)
        self._offset = began - time.monotonic_ns()

    def now(self) -> Nanos:
        return time.monotonic_ns() + self._offset


def wall() -> int:
    return time.time_ns()
