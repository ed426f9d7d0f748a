"""The median of all numbers but one, for every one of them, without sorting anew for each: rounds of hundreds of learners."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from statistics import median


class Medians:
    def __init__(self, values: Iterable[float]) -> None:
        self._ordered = sorted(values)

    def __len__(self) -> int:
        return len(self._ordered)

    def all(self) -> float:
        return median(self._ordered)

    def without(self, value: float) -> float:
        """Of the others, where `value` is one of the numbers, to the bit what `statistics.median` gives of them."""
        ordered, others = self._ordered, len(self._ordered) - 1
        left_out = bisect_left(ordered, value)

        def at(index: int) -> float:
            return ordered[index if index < left_out else index + 1]

        middle = others // 2
        return at(middle) if others % 2 else (at(middle - 1) + at(middle)) / 2
