"""Where a learner stands among the outer steps: what it must wait for there, and where it goes on after it entered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.config import Config
from atoll.ids import FragmentId, LearnerId, OuterStep
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.staging import Copy, Key, Pending
from atoll.rules import Schedule, learner_overlap


class Position:
    def __init__(self, config: Config, schedule: Schedule, learner: LearnerId) -> None:
        self._config, self._schedule, self._learner = config, schedule, learner

    def due(self, position: OuterStep, pending: Mapping[FragmentId, Pending]) -> list[FragmentId]:
        """Which of the announced versions are adopted here, in order."""
        return sorted([p for p, announced in pending.items() if position >= self.due_at(announced)])

    def due_at(self, pending: Pending) -> OuterStep:
        policy = self._schedule.policy(pending.version)
        return pending.version + learner_overlap(self._config, policy, self._learner) if policy.exact else 0

    def must_wait(
        self, position: OuterStep, held: Sequence[OuterStep], pending: Mapping[FragmentId, Pending]
    ) -> Reason | None:
        """At most `lead` local steps past the last due adoption; checked at every boundary, so one outer step suffices."""
        policy = self._schedule.policy(position)
        if policy.lead < 0:
            return None
        if policy.exact and position >= self._config.total_steps:
            return Reason(Why.LAST_STEP_DONE)  # exactly H steps an interval: none beyond the last outer step
        lead = learner_overlap(self._config, policy, self._learner) if policy.exact else policy.lead
        outer_step = position - lead
        missing = [p for p in self._schedule.due(outer_step) if _lacks(held[p], pending.get(p), outer_step)]
        return Reason(Why.VERSION_AWAITED, f"outer step {outer_step} of fragment {missing[0]} is not back") if missing else None

    def after_entering(
        self, at: OuterStep, position: OuterStep, staged: Mapping[Key, Copy], *, waiting: bool
    ) -> OuterStep:
        """A learner that already stands where a member may stand keeps its place: it has trained that step."""
        policy = self._schedule.policy(at + 1)
        lead = learner_overlap(self._config, policy, self._learner) if policy.exact else max(0, policy.lead)
        due = self._schedule.next_due(at + 1)  # nobody waits before something is due
        if not at <= position <= due + lead:
            position = at
        return self._where_staged(at, position, staged, waiting) if policy.exact else position

    def _where_staged(self, at: OuterStep, position: OuterStep, staged: Mapping[Key, Copy], waiting: bool) -> OuterStep:
        """A place is worth keeping only with the copies that go with it: else a pull of it is declined for ever. What
        is due at this very boundary is staged right after."""
        last = position if waiting else position - 1
        gaps = (t for t in range(at + 1, last + 1) if any((p, t) not in staged for p in self._schedule.due(t)))
        return next(gaps, position + 1) - 1


def _lacks(held: OuterStep, pending: Pending | None, outer_step: OuterStep) -> bool:
    """Not adopted, and no newer version has made it pointless: a laggard is sent the newest only."""
    return held < outer_step and (pending is None or pending.version <= outer_step)
