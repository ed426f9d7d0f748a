"""The fate of every (token, fragment): merged, discarded with a reason, or in flight. They add up by construction.

For each learner and fragment there is one number, `settled`: tokens up to it have met their fate. A merge settles what
its contribution covers; an adoption overwrites the fragment and so settles the rest, as discarded. A token is trained
once per fragment, hence `trained = P x tokens`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from atoll.ids import FragmentId, LearnerId, OuterStep
from atoll.protocol.vocabulary import NO_VERSION


class Loss(StrEnum):
    """Why a trained token was not merged."""

    OVERLAP = "overlap"
    """Trained between the pull of its fragment and the adoption that overwrote it."""
    NOT_IN_ROUND = "not_in_round"
    """Its learner was not merged in the round whose result overwrote it."""
    LOST = "lost"
    """Its learner was lost."""
    LEFT = "left"
    """Its learner left before it could be merged."""
    ROLLED_BACK = "rolled_back"
    """A rollback undid its merge, or overwrote it."""


OVERLAP, NOT_IN_ROUND, LOST, LEFT, ROLLED_BACK = Loss


class Fates(msgspec.Struct, frozen=True):
    trained: int
    merged: int
    discarded: dict[Loss, int]
    in_flight: int

    def add_up(self) -> bool:
        return self.trained == self.merged + sum(self.discarded.values()) + self.in_flight


class _Row:
    __slots__ = ("merged_at", "settled", "tokens")

    def __init__(self, fragments: int) -> None:
        self.tokens = 0
        self.settled = [0] * fragments
        self.merged_at: list[OuterStep] = [NO_VERSION] * fragments


class Ledger:
    def __init__(self, fragments: int, *, adoption_discards: bool) -> None:
        """`adoption_discards` is false for anchor = round start: there what is trained during the overlap is part of
        the next round's difference and not lost."""
        self._fragments = fragments
        self._adoption_discards = adoption_discards
        self._rows: dict[LearnerId, _Row] = {}
        self._trained = 0
        self._merged = 0
        self._discarded: dict[Loss, int] = {}
        self._rolled_back_at: OuterStep = NO_VERSION

    def trained(self, learner: LearnerId, tokens: int) -> None:
        """`tokens` is cumulative for this incarnation, so that a lost report loses nothing."""
        row = self._rows.get(learner)
        if row is None:
            row = self._rows[learner] = _Row(self._fragments)
        if tokens > row.tokens:
            self._trained += (tokens - row.tokens) * self._fragments
            row.tokens = tokens

    def begins(self, learner: LearnerId, tokens: int) -> None:
        """A new incarnation. One that was resumed brings work of the run before: its fate is not accounted for here."""
        row = self._rows[learner] = _Row(self._fragments)
        row.tokens, row.settled = tokens, [tokens] * self._fragments

    def merged(
        self, learner: LearnerId, fragment: FragmentId, tokens: int, version: OuterStep, c_tokens: int | None = None
    ) -> None:
        """A contribution covers its own c_tokens. What lies before them was overwritten by an adoption whose report was
        lost on the way."""
        row = self._rows[learner]
        row.merged_at[fragment] = version
        if c_tokens is not None and tokens - c_tokens > row.settled[fragment]:
            self._discard(OVERLAP, tokens - c_tokens - row.settled[fragment])
            row.settled[fragment] = tokens - c_tokens
        if tokens > row.settled[fragment]:
            self._merged += tokens - row.settled[fragment]
            row.settled[fragment] = tokens

    def is_merged_in(self, learner: LearnerId, fragment: FragmentId, version: OuterStep) -> bool:
        row = self._rows.get(learner)
        return row is not None and row.merged_at[fragment] == version

    def adopted(self, learner: LearnerId, fragment: FragmentId, tokens: int, version: OuterStep) -> None:
        """`tokens`: those that the adoption overwrote or that were merged before. What a learner keeps is not among them."""
        row = self._rows[learner]
        undone = version == self._rolled_back_at
        if (self._adoption_discards or undone) and tokens > row.settled[fragment]:
            reason = ROLLED_BACK if undone else OVERLAP if row.merged_at[fragment] == version else NOT_IN_ROUND
            self._discard(reason, tokens - row.settled[fragment])
            row.settled[fragment] = tokens

    def rolled_back(self, merged: int, outer_step: OuterStep) -> None:
        """Theta is what it was when `merged` were merged; learners will adopt it as version `outer_step`. What they train until
        then is overwritten by that adoption."""
        self._discard(ROLLED_BACK, self._merged - merged)
        self._merged, self._rolled_back_at = merged, outer_step
        for row in self._rows.values():
            self._discard(ROLLED_BACK, sum(row.tokens - s for s in row.settled))
            row.settled = [row.tokens] * self._fragments

    def closed(self, learner: LearnerId, reason: Loss) -> None:
        """The incarnation is over: whatever it had in flight is discarded."""
        row = self._rows.pop(learner, None)
        if row is not None:
            self._discard(reason, sum(row.tokens - s for s in row.settled))

    def _discard(self, reason: Loss, tokens: int) -> None:
        if tokens:
            self._discarded[reason] = self._discarded.get(reason, 0) + tokens

    def fates(self) -> Fates:
        in_flight = sum(row.tokens * self._fragments - sum(row.settled) for row in self._rows.values())
        return Fates(self._trained, self._merged, dict(sorted(self._discarded.items())), in_flight)
