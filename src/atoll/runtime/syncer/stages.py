"""How long the merging thread works on each round: taken to the tape with `Stored`, so that every reader can tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from atoll.ids import OuterStep
from atoll.protocol.vocabulary import AbortRound, Effect, Event, Merge, Store, Stored


class StageTimes:
    """In the merging thread only."""

    def __init__(self) -> None:
        self._merging: dict[OuterStep, int] = {}

    def timed(self, effect: Effect, work: Callable[[], Sequence[Event]]) -> Sequence[Event]:
        """Carries an effect out. A round may merge several fragments; it is stored once."""
        began = time.monotonic_ns()
        events = work()
        spent = time.monotonic_ns() - began
        match effect:
            case Merge(outer_step=t):
                self._merging[t] = self._merging.get(t, 0) + spent
            case AbortRound(outer_step=t):
                self._merging.pop(t, None)
            case Store(outer_step=t):
                spans = (self._merging.pop(t, 0), spent)
                return [msgspec.structs.replace(e, spans=spans) if isinstance(e, Stored) else e for e in events]
            case _:
                pass
        return events
