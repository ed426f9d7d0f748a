"""A machine that stands still breaks what real processes promise each other in seconds. This measures whether it did."""

from __future__ import annotations

import threading
import time

TICK_SECONDS = 0.05
STALL_SECONDS = 0.7
"""So late a thread that only sleeps is never by its own fault: the machine ran something else. Learners of these tests take steps
of 20 ms, and are called silent after a few."""


class Stalls:
    """Watches from a thread of its own; `longest` is the most that a sleep of a tick took too long, in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def stalled(self) -> bool:
        return self.longest > STALL_SECONDS

    def _watch(self) -> None:
        while not self._over.is_set():
            before = time.monotonic()
            self._over.wait(TICK_SECONDS)
            self.longest = max(self.longest, time.monotonic() - before - TICK_SECONDS)
