"""Where a round's time went, from the syncer's tape: gathering, waiting for the merging thread, merging, storing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from atoll.ids import SYNCER, FragmentId, Nanos, OuterStep, WorkerId, seconds
from atoll.protocol.vocabulary import AbortRound, Effect, Event, FixParticipants, Merge, Stored
from atoll.tape.format import Record

STAGES = ("gather", "queue", "merge", "store")


class RoundStages(NamedTuple):
    outer_step: OuterStep
    fragments: tuple[FragmentId, ...]
    learners: int
    """Whose contributions were merged."""
    gather: Nanos
    """From the choice of the participants to the merge: pulls, transfers and inspections."""
    queue: Nanos
    """Until the merging thread took it, and from the stored file to the machine's word of it."""
    merge: Nanos
    store: Nanos
    """Checksum, file and fsync."""
    between: Nanos | None
    """Since the commit before."""


class RoundClock:
    """An observer of the syncer's events."""

    def __init__(self) -> None:
        self._fixed: dict[OuterStep, tuple[Nanos, FixParticipants]] = {}
        self._merges: dict[OuterStep, tuple[Nanos, int]] = {}
        self._committed: Nanos | None = None
        self.rounds: list[RoundStages] = []

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if worker != SYNCER:
            return
        if isinstance(event, Stored):
            self._stored(now, event)
        for effect in effects:
            match effect:
                case FixParticipants(outer_step=t):
                    self._fixed[t] = (now, effect)
                case Merge(outer_step=t):
                    self._merges.setdefault(t, (now, len(effect.shares)))
                case AbortRound(outer_step=t):
                    self._fixed.pop(t, None)
                    self._merges.pop(t, None)

    def _stored(self, now: Nanos, stored: Stored) -> None:
        fixed, merging = self._fixed.pop(stored.outer_step, None), self._merges.pop(stored.outer_step, None)
        if fixed is None or merging is None:
            return  # nothing was due, or the tape begins later
        between = now - self._committed if self._committed is not None else None
        self._committed = now
        merge, store = stored.spans or (0, 0)
        queue = max(0, now - merging[0] - merge - store)
        self.rounds.append(RoundStages(
            stored.outer_step, fixed[1].fragments, merging[1], merging[0] - fixed[0], queue, merge, store, between
        ))  # fmt: skip

    def medians(self) -> dict[str, float]:
        """In seconds, by stage; empty if no round was merged. `between_commits` is the time from one commit to the next."""
        if not self.rounds:
            return {}
        found = {name: _median(getattr(r, name) for r in self.rounds) for name in STAGES}
        return found | {"between_commits": _median(r.between for r in self.rounds if r.between is not None)}


def timing_lines(records: Iterable[Record]) -> Iterator[str]:
    """A table, one line for each merged round, then the medians."""
    clock = RoundClock()
    yield f"{'step':>8}  {'learners':>8}" + "".join(f"  {name:>9}" for name in (*STAGES, "between")) + "  fragments"
    for r in records:
        known = len(clock.rounds)
        clock(r.now, r.worker, r.event, r.effects)
        for done in clock.rounds[known:]:
            spans = "".join(f"  {_shown(getattr(done, name)):>9}" for name in (*STAGES, "between"))
            yield f"{done.outer_step:>8}  {done.learners:>8}{spans}  {','.join(map(str, done.fragments))}"
    found = clock.medians()
    if found:
        yield f"{'median':>8}  {'':>8}" + "".join(f"  {1e3 * value:>7.1f}ms" for value in found.values())


def _shown(span: Nanos | None) -> str:
    return "" if span is None else f"{1e3 * seconds(span):.1f}ms"


def _median(values: Iterable[Nanos]) -> float:
    found = list(values)
    return round(seconds(round(statistics.median(found))), 6) if found else 0.0
