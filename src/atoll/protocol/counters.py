"""What a learner trained since it last adopted each fragment: c_steps, c_tokens, c_samples.

Kept as totals minus a base per fragment, so that an inner step costs three additions whatever P is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atoll.ids import FragmentId, LocalStep


class Count(NamedTuple):
    steps: int
    tokens: int
    samples: int


class Counters:
    __slots__ = ("base", "local_step", "samples", "tokens")

    def __init__(self, fragments: int) -> None:
        self.local_step: LocalStep = 0
        self.tokens = 0
        self.samples = 0
        self.base: list[Count] = [Count(0, 0, 0)] * fragments
        """What the totals were when each fragment was adopted."""

    def trained(self, tokens: int, samples: int) -> None:
        self.local_step += 1
        self.tokens += tokens
        self.samples += samples

    def since(self, fragment: FragmentId) -> Count:
        base = self.base[fragment]
        return Count(self.local_step - base.steps, self.tokens - base.tokens, self.samples - base.samples)

    def record(self) -> tuple[LocalStep, int, int, tuple[Count, ...]]:
        return self.local_step, self.tokens, self.samples, tuple(self.since(p) for p in range(len(self.base)))

    def restore(self, local_step: LocalStep, tokens: int, samples: int, since: Sequence[tuple[int, int, int]]) -> None:
        self.local_step, self.tokens, self.samples = local_step, tokens, samples
        self.base = [Count(local_step - s, tokens - t, samples - n) for s, t, n in since] or self.base

    def reset(self, fragment: FragmentId) -> None:
        self.base[fragment] = Count(self.local_step, self.tokens, self.samples)

    def count_from(self, fragment: FragmentId, taken: Count) -> None:
        """The first `taken` of what was counted since the last adoption are merged; the rest goes on counting."""
        base = self.base[fragment]
        self.base[fragment] = Count(base.steps + taken.steps, base.tokens + taken.tokens, base.samples + taken.samples)
