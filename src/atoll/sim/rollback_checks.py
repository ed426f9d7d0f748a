"""What must hold of rollbacks, from the checkers' own accounts of which versions were stored, forgotten and merged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from atoll.ids import FragmentId, LearnerId, OuterStep
from atoll.protocol.ledger import Fates
from atoll.protocol.vocabulary import AnswerRollback, CopyVersions, SyncerState

Demand = Callable[[bool, int, str], None]


class RollbackChecks:
    def __init__(self, fragments: int, demand: Demand) -> None:
        self._demand = demand
        self._stored: list[list[OuterStep]] = [[0] for _ in range(fragments)]
        """All versions there ever were."""
        self._forgotten: set[tuple[FragmentId, OuterStep]] = set()
        self._merged_at: dict[OuterStep, int] = {0: 0}
        self._begins_at: OuterStep = 0
        self._told: dict[LearnerId, OuterStep] = defaultdict(lambda: -1)
        self._copied: CopyVersions | None = None
        self.at: OuterStep = 0
        """The outer step of the last rollback."""

    def restored(self, syncer_state: SyncerState) -> None:
        self._begins_at = syncer_state.outer_step
        for p, kept in enumerate(syncer_state.kept):
            self._stored[p] = sorted({*kept, *(point.versions[p] for point in syncer_state.points)})

    def stored(self, outer_step: OuterStep, fragments: tuple[FragmentId, ...]) -> None:
        for p in fragments:
            self._stored[p].append(outer_step)

    def forgotten(self, fragment: FragmentId, version: OuterStep) -> None:
        self._demand((fragment, version) not in self._forgotten, 9, f"version {version} of {fragment} is forgotten twice")
        self._forgotten.add((fragment, version))

    def copies(self, effect: CopyVersions, in_flight: list[OuterStep]) -> None:
        self._demand(not in_flight, 2, f"rounds {in_flight} are in flight while the run is rolled back")
        for p, version in enumerate(effect.versions):
            self._demand((p, version) not in self._forgotten, 9, f"version {version} of fragment {p} is copied and was forgotten")
        self._copied = effect

    def answered(self, effect: AnswerRollback, fates: Fates, committed: OuterStep) -> None:
        if not effect.outer_step:
            return
        self._demand(effect.outer_step == committed, 2, f"rollback {effect.outer_step} is answered at outer step {committed}")
        assert self._copied is not None
        for p, version in enumerate(self._copied.versions):
            current = max(v for v in self._stored[p] if v <= effect.to)
            self._demand(version == current, 2, f"fragment {p} is rolled back to {version}, at {effect.to} it was {current}")
        at = max((t for t in self._merged_at if t <= effect.to), default=0)
        merged = self._merged_at[at] if effect.to >= self._begins_at else 0
        self._demand(fates.merged == merged, 8, f"{fates.merged} count as merged after a rollback to {effect.to}, not {merged}")
        self._demand(fates.in_flight == 0, 8, f"{fates.in_flight} are in flight after a rollback")
        self._merged_at = {t: count for t, count in self._merged_at.items() if t <= effect.to}
        self.at = effect.outer_step

    def committed(self, outer_step: OuterStep, fates: Fates) -> None:
        """After each event, which may have committed several outer steps, of which the first had something due."""
        for step in range(max(self._merged_at) + 1, outer_step + 1):
            self._merged_at[step] = fates.merged

    def accepted(self, learner: LearnerId, anchor: OuterStep) -> None:
        old = f"learner {learner}'s difference to {anchor} is merged after the rollback at {self.at}"
        self._demand(anchor >= self.at, 2, old)

    # ------------------------------------------------------------ the learners

    def told(self, learner: LearnerId, outer_step: OuterStep) -> None:
        self._told[learner] = outer_step

    def cut_off(self, learner: LearnerId) -> None:
        """It trains on what it has, and the syncer tells it anew when it is back."""
        self._told.pop(learner, None)

    def steps(self, learner: LearnerId, held: dict[FragmentId, OuterStep]) -> None:
        old = {p: v for p, v in held.items() if v < self._told[learner]}
        self._demand(not old, 6, f"learner {learner} trains on {old}, and was told of the rollback at {self._told[learner]}")
