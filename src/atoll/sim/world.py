"""Virtual time: a heap of scheduled calls. Two calls at the same nanosecond run in the order in which they were scheduled."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from atoll.ids import Nanos


class World:
    __slots__ = ("_count", "_heap", "now")

    def __init__(self) -> None:
        self.now: Nanos = 0
        self._heap: list[tuple[Nanos, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: Nanos, call: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heappush(self._heap, (when if when > self.now else self.now, self._count, call, args))

    def after(self, delay: Nanos, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay, call, *args)

    def step(self) -> bool:
        """Make the next call. False: none is left."""
        if not self._heap:
            return False
        self.now, _, call, args = heappop(self._heap)
        call(*args)
        return True
