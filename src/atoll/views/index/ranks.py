"""Torch's data-parallel training as rows: a step of all ranks is a round in which everybody takes part.

No machine decided any of it, so there is none to ask: the records say everything (`runtime/ddp/tape.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll.ids import SYNCER, LearnerId, Nanos, OuterStep, WorkerId, worker_name
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Effect, Event, Finished, FixParticipants, Resume, StepDone, Stored
from atoll.views.index.fold import RowSink
from atoll.views.index.rows import EventKind, EventRow, LaneState, LearnerBin, RoundRow, TokenFates


class RankFold:
    """An observer of such a run."""

    def __init__(self, sink: RowSink) -> None:
        self._sink = sink
        self.outer_step: OuterStep = 0
        self.finished = False
        self._closed_at: Nanos = 0
        self._fixed_at: Nanos = 0
        self._fix: FixParticipants | None = None
        self._steps: dict[LearnerId, tuple[StepDone, Nanos]] = {}
        self._tokens = 0
        self._known: set[LearnerId] = set()

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, StepDone) and worker != SYNCER:
            waited = sum(effect.waited_nanos for effect in effects if isinstance(effect, Resume))
            self._steps[worker] = (event, waited)
        for effect in effects:
            if isinstance(effect, FixParticipants):
                self._fix, self._fixed_at = effect, now
                self._greet(effect.participants)
        if isinstance(event, Stored):
            self._commit(event.outer_step, now)
        if any(isinstance(effect, Finished) for effect in effects):
            self.finished = True
            self._say(now, EventKind.FINISHED, f"the run is finished at step {self.outer_step}")

    def _greet(self, ranks: Sequence[LearnerId]) -> None:
        for rank in sorted(set(ranks) - self._known):
            self._known.add(rank)
            said = f"{worker_name(rank)} is in sync: it is a rank"
            self._say(self._closed_at, EventKind.STANDING, said, rank, LaneState.TRAINING)

    def _say(
        self, at: Nanos, kind: EventKind, text: str, learner: LearnerId | None = None, state: LaneState | None = None
    ) -> None:
        self._sink.put_event(EventRow(at, kind, learner, self.outer_step, text, state))

    def _commit(self, step: OuterStep, now: Nanos) -> None:
        fix = self._fix
        ranks, reason = (fix.participants, fix.reason) if fix is not None else ((), Reason(Why.ALL_REPORTED))
        losses = [done.loss for done, _ in self._steps.values() if done.loss is not None and math.isfinite(done.loss)]
        self._tokens += sum(done.tokens for done, _ in self._steps.values())
        self._sink.put_round(RoundRow(
            outer_step=step, begins_at=self._closed_at, opened_at=self._closed_at, quorum_at=self._fixed_at,
            fixed_at=self._fixed_at, closed_at=now, fragments=(0,), participants=ranks, merged=ranks, left_out=(),
            why=reason.why.value, text=str(reason),
            loss=sum(losses) / len(losses) if losses else None, fates=TokenFates(self._tokens, self._tokens, 0, {}),
            learners=tuple(self._lane(rank, now - self._closed_at) for rank in sorted(self._steps)),
        ))  # fmt: skip
        self.outer_step, self._closed_at, self._fix = step, now, None
        self._steps.clear()

    def _lane(self, rank: LearnerId, span: Nanos) -> LearnerBin:
        done, waited = self._steps[rank]
        nanos = [0] * len(LaneState)
        nanos[LaneState.WAITING] = min(waited, span)
        nanos[LaneState.TRAINING] = span - nanos[LaneState.WAITING]
        loss = done.loss if done.loss is not None and math.isfinite(done.loss) else None
        return LearnerBin(
            rank, LaneState.TRAINING, tuple(nanos), steps=1, tokens=done.tokens, step_nanos=done.nanos, merged=1, loss=loss
        )
