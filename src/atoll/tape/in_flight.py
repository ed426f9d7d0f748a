"""Which rounds are in flight, by a syncer's events and decisions: their participants are fixed, and they are not stored yet."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.ids import LearnerId, OuterStep
from atoll.protocol.vocabulary import AbortRound, Effect, Event, FixParticipants, Started, Stored


class RoundsInFlight:
    def __init__(self) -> None:
        self._participants: dict[OuterStep, tuple[LearnerId, ...]] = {}

    def note(self, event: Event, effects: Iterable[Effect]) -> None:
        if isinstance(event, Started):
            self._participants.clear()
        elif isinstance(event, Stored):
            self._participants.pop(event.outer_step, None)
        for effect in effects:
            if isinstance(effect, FixParticipants) and effect.fragments:
                self._participants[effect.outer_step] = effect.participants
            elif isinstance(effect, AbortRound):
                self._participants.pop(effect.outer_step, None)

    def __len__(self) -> int:
        return len(self._participants)

    def takes_part(self, learner: LearnerId) -> bool:
        return any(learner in participants for participants in self._participants.values())
