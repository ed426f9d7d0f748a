"""Rolling back: an outer step whose result is what Theta was at an earlier one, the outer optimiser's state included.

Every `protocol.rollback_interval` outer steps the versions current then become a *rollback point*; the newest
`limits.rollback_points` are kept beside the versions that learners need. A rollback takes the next outer step: open rounds
are aborted, the versions of the point are stored again under its number, and every connected learner loads them at its next
step boundary and enters again. Nothing that was trained before is merged after: no older version is a valid anchor any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from atoll.config import Config
from atoll.ids import FragmentId, OuterStep
from atoll.protocol.admission import Admission
from atoll.protocol.effects import Effects
from atoll.protocol.ledger import Ledger
from atoll.protocol.membership import IN_SYNC, SILENT, Roster
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.round import STORING, Rounds
from atoll.protocol.versions import Versions
from atoll.protocol.vocabulary import (
    AbortRound,
    AnswerRollback,
    CopyVersions,
    ForgetVersion,
    RollbackAsked,
    RollbackPoint,
    Store,
)


class Rollbacks:
    def __init__(
        self, config: Config, effects: Effects, roster: Roster, versions: Versions, ledger: Ledger, admission: Admission,
        rounds: Rounds,
    ) -> None:  # fmt: skip
        self._interval, self._keep = config.protocol.rollback_interval, config.limits.rollback_points
        self._total_steps = config.total_steps
        self._fragments = tuple(range(config.protocol.fragments))
        self._effects, self._roster, self._versions, self._ledger = effects, roster, versions, ledger
        self._admission, self._rounds = admission, rounds
        self._points: list[RollbackPoint] = []
        self.pending: list[RollbackAsked] = []
        """Not carried out yet; while the first is being stored, under `_storing`, it stays. Until they are, no round may be fixed
        or merged: its result would be rolled back."""
        self._storing: OuterStep = 0
        self.last_request = ""
        self.last_answer: AnswerRollback | None = None
        versions.is_pinned = self._is_pinned

    def points(self) -> tuple[RollbackPoint, ...]:
        return tuple(self._points)

    def steps(self) -> tuple[OuterStep, ...]:
        """Outer steps that the run can be rolled back to."""
        return tuple(point.outer_step for point in self._points)

    def restore(self, points: tuple[RollbackPoint, ...]) -> None:
        """From a snapshot. What was merged before this run began has its fate in the books of another."""
        self._points = [RollbackPoint(point.outer_step, point.versions, 0) for point in points]

    # ------------------------------------------------------------ points

    def committed(self, outer_step: OuterStep) -> None:
        if self._interval and outer_step % self._interval == 0:
            self._points.append(RollbackPoint(outer_step, self._versions.all_newest(), self._ledger.fates().merged))
            self._forget(self._points[: -self._keep])

    def _forget(self, dropped: list[RollbackPoint]) -> None:
        self._points = [point for point in self._points if point not in dropped]
        for point in dropped:
            for fragment, version in enumerate(point.versions):
                if not self._is_pinned(fragment, version) and not self._versions.has(fragment, version):
                    self._effects.emit(ForgetVersion(fragment, version))

    def _is_pinned(self, fragment: FragmentId, version: OuterStep) -> bool:
        return any(point.versions[fragment] == version for point in self._points)

    # ------------------------------------------------------------ carrying one out

    def ask(self, event: RollbackAsked) -> None:
        if event.request == self.last_request:
            return  # read twice: while the tape could not be written, events wait
        to = event.to
        if -len(self._points) <= to < 0:
            to = self._points[to].outer_step
        self.pending.append(structs.replace(event, to=to))
        self.last_request = event.request

    def restarted(self) -> None:
        """What was being stored when the syncer was killed is stored again, before anything else."""
        self._storing = 0

    def is_storing(self, outer_step: OuterStep) -> bool:
        return self._storing == outer_step

    def begin(self, committed: OuterStep) -> None:
        """Once no merge is being stored: its result counts, and is rolled back with the rest."""
        while self.pending and not self._storing and not any(r.phase == STORING for r in self._rounds.values()):
            event = self.pending[0]
            refusal = self._refusal(event.to, committed)
            if refusal is not None:
                self.pending.pop(0)
                self._answer(event.to, 0, refusal)
                continue
            point = self._point(event.to)
            self._abort_rounds(Reason(Why.ROLLED_BACK, f"to outer step {event.to}"))
            self._storing = committed + 1
            self._effects.emit(CopyVersions(self._storing, point.versions))
            self._effects.emit(Store(self._storing, self._fragments))

    def _point(self, outer_step: OuterStep) -> RollbackPoint:
        return next(point for point in self._points if point.outer_step == outer_step)

    def _refusal(self, to: OuterStep, committed: OuterStep) -> Reason | None:
        if committed >= self._total_steps:
            return Reason(Why.RUN_OVER)
        if to not in self.steps():
            return not_kept(to, self.steps())
        return None

    def stored(self) -> None:
        """It is durable: later points are of a past that is gone, and no older version is a valid anchor."""
        event, outer_step = self.pending.pop(0), self._storing
        self._storing = 0
        point = self._point(event.to)
        reason = Reason(Why.ROLLED_BACK, f"outer step {outer_step} has the weights of {event.to}: {event.reason}")
        self._forget([later for later in self._points if later.outer_step > event.to])
        self._ledger.rolled_back(point.merged, outer_step)
        self._versions.replace_all(outer_step)
        self.committed(outer_step)
        for member in self._roster.connected():
            if member.standing in (IN_SYNC, SILENT):
                self._admission.roll_back(member, outer_step, reason, reset_optimizer=event.reset_optimizer)
            else:
                self._admission.recover(member, reason)
        self._answer(event.to, outer_step, reason)

    def _answer(self, to: OuterStep, outer_step: OuterStep, reason: Reason) -> None:
        self.last_answer = AnswerRollback(to, outer_step, reason)
        self._effects.emit(self.last_answer)

    def _abort_rounds(self, reason: Reason) -> None:
        for outer_step in self._rounds:
            self._effects.emit(AbortRound(outer_step, reason))
        self._rounds.clear()


def stored_versions(versions: Versions, points: Sequence[RollbackPoint]) -> tuple[tuple[OuterStep, ...], ...]:
    """Of each fragment all versions that the disk must hold: those that learners may refer to, and those of the points."""
    pinned = [{point.versions[p] for point in points} for p in range(len(versions.all_newest()))]
    return tuple(tuple(sorted(set(kept) | extra)) for kept, extra in zip(versions.all_kept_versions(), pinned, strict=True))


def not_kept(to: OuterStep, steps: tuple[OuterStep, ...]) -> Reason:
    kept = f"kept are {', '.join(map(str, steps))}" if steps else "none is kept yet: see protocol.rollback_interval"
    return Reason(Why.NOT_KEPT, f"outer step {to} cannot be rolled back to; {kept}")
