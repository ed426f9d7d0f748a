"""Copies of fragments taken at step boundaries, waiting to be pulled: a pull in mid-step never reads live weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import msgspec

from atoll.config import Config
from atoll.ids import FragmentId, LocalStep, OuterStep
from atoll.protocol.counters import Count, Counters
from atoll.protocol.effects import Effects
from atoll.protocol.vocabulary import NO_VERSION, Contribution, Stage, Unstage
from atoll.rules import Schedule

Key: TypeAlias = tuple[FragmentId, OuterStep]


class Pending(msgspec.Struct, frozen=True, gc=False):
    """An announced version that is kept and yet to be adopted."""

    version: OuterStep
    previous: OuterStep
    merged: bool


class Copy(msgspec.Struct, frozen=True, gc=False):
    local_step: LocalStep
    anchor: OuterStep
    c_steps: int
    c_tokens: int
    c_samples: int
    tokens: int


class Staging:
    """Keyed by (fragment, slot): exact adoption has a slot per outer step, adoption on arrival one (NO_VERSION) whose
    newest copy replaces the older. The counters at the time of the copy are those that are weighed."""

    def __init__(self, config: Config, schedule: Schedule, effects: Effects, counters: Counters) -> None:
        self._schedule, self._effects, self._counters = schedule, effects, counters
        self._restart = config.protocol.anchor == "round_start"
        self._keeps = config.protocol.keep_overlap
        self.lookahead = Lookahead(config.protocol.overlap)
        self.copies: dict[Key, Copy] = {}
        self._sent: dict[FragmentId, tuple[OuterStep, Copy]] = {}
        """With `keep_overlap`, of each fragment the copy that was sent last, and for which outer step."""

    def put_exact(self, position: OuterStep, held: Sequence[OuterStep]) -> None:
        for fragment in self._schedule.due(position):
            if (fragment, position) not in self.copies:
                self.put(fragment, position, held[fragment])

    def put_ahead(self, known: OuterStep, held: Sequence[OuterStep]) -> None:
        """The fragments that may be pulled before the next boundary, anew at every boundary."""
        steps = self._counters.local_step - self._counters.base[0].steps
        ahead = min(self.lookahead.at(known, steps), self._schedule.policy(known + 1).interval)
        wanted = self._schedule.due_between(known + 1, known + ahead)
        self.keep_only(wanted)
        for fragment in wanted:
            self.put(fragment, NO_VERSION, held[fragment])

    def put(self, fragment: FragmentId, slot: OuterStep, anchor: OuterStep) -> None:
        counters = self._counters
        base, local_step, tokens = counters.base[fragment], counters.local_step, counters.tokens
        self.copies[fragment, slot] = Copy(
            local_step, anchor, local_step - base.steps, tokens - base.tokens, counters.samples - base.samples, tokens
        )
        self._effects.emit(Stage(fragment, local_step, slot, self._restart))
        if self._restart:
            counters.reset(fragment)

    def contribution(self, outer_step: OuterStep, fragment: FragmentId, slot: OuterStep) -> Contribution:
        c = self.copies[fragment, slot]
        if self._keeps:
            self._sent[fragment] = outer_step, c
        return Contribution(outer_step, fragment, c.local_step, c.anchor, c.c_steps, c.c_tokens, c.c_samples, c.tokens)

    def covered_by(self, fragment: FragmentId, version: OuterStep, held: OuterStep) -> Count | None:
        """Of this learner's work, what this version holds: that of the copy sent for it. None if none was, or a newer one since,
        or if the weights are not those any more that it was a copy of, on top of version `held`: then it is not known what was
        trained after the copy. Asked once, at the adoption."""
        outer_step, copy = self._sent.pop(fragment, (NO_VERSION, None))
        if copy is None or outer_step != version or copy.anchor != held:
            return None
        return Count(copy.c_steps, copy.c_tokens, copy.c_samples)

    def forget(self) -> None:
        """The weights that the copies were taken of are gone."""
        self.keep_only(())
        self._sent.clear()

    def keep_only(self, fragments: Collection[FragmentId]) -> None:
        if unwanted := [key for key in self.copies if key[0] not in fragments]:
            self._drop(unwanted)

    def drop_up_to(self, fragment: FragmentId, slot: OuterStep) -> None:
        """What it was for is decided: this version of the fragment was adopted."""
        self._drop([key for key in self.copies if key[0] == fragment and key[1] <= slot])

    def drop_slots_up_to(self, outer_step: OuterStep) -> None:
        self._drop([key for key in self.copies if NO_VERSION < key[1] <= outer_step])

    def _drop(self, unwanted: Sequence[Key]) -> None:
        for key in unwanted:
            del self.copies[key]
            self._effects.emit(Unstage(*key))


LONG_STEPS_FADE, LONG_STEPS_MOST = 0.97, 8.0
"""At each boundary the number of outer steps that went by during a long step is lowered to this share: to half of it in 23 steps.
More than so many are not remembered: a learner that was stopped, or has just joined, does not stage its whole model for long."""


class Lookahead:
    """How many outer steps ahead copies are staged: of the tau rounds that may be in flight, and of the one beyond them, which is
    pulled next. Where outer steps go by faster than a learner's own, as many more as went by during its last step, or during a
    longer one not long ago."""

    def __init__(self, overlap: int) -> None:
        self._overlap = overlap
        self._known: OuterStep = 0
        self._longest = 1.0
        self.least_steps = 0
        """Dynamic local updates: before so many steps on a version nothing is pulled."""

    def at(self, known: OuterStep, steps: int) -> int:
        """At a boundary, with the outer step that is known there, and the steps trained since the first fragment was adopted."""
        if steps < self.least_steps:
            self._known = known
            return 0
        went_by, self._known = known - self._known, known
        self._longest = min(LONG_STEPS_MOST, max(1.0, went_by, LONG_STEPS_FADE * self._longest))
        return self._overlap + max(went_by, round(self._longest))
