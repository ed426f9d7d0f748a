"""Rank 0's training thread: what `LiveLearner` is to a learner of one rank, for all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.errors import PlaceLost, RunFailed
from atoll.protocol.vocabulary import InnerStep, StepDone
from atoll.runtime.learner.live import LiveLearner
from atoll.runtime.ranks.executor import LeadExecutor
from atoll.runtime.ranks.lead import RankLead
from atoll.runtime.ranks.messages import Counted, Go
from atoll.runtime.syncer.places import Placement


class LeadingLearner:
    def __init__(self, live: LiveLearner, executor: LeadExecutor, lead: RankLead) -> None:
        self._live = live
        self._executor = executor
        self._lead = lead
        self._number = 0
        self._over = False
        lead.on_leave = live.leave
        lead.on_failure = self._rank_failed

    @property
    def placement(self) -> Placement:
        return self._live.placement

    @property
    def over(self) -> bool:
        """From a boundary on: all ranks must learn it at the same step."""
        return self._over

    @property
    def finished(self) -> bool:
        return self._live.finished

    def leave(self, reason: str, within_seconds: float | None = None, *, returns: bool = False) -> None:
        self._live.leave(reason, within_seconds, returns=returns)

    def step_done(self, done: StepDone | None) -> bool:
        """Waits for all ranks; the machine hears of one step, the sum of theirs. False: all of them skipped it."""
        self._number += 1
        boundaries = self._lead.boundaries(self._number)
        steps = [done, *(boundaries[rank].done for rank in sorted(boundaries))]
        if any(step is None for step in steps) and not all(step is None for step in steps):
            stepped = [str(rank) for rank, step in enumerate(steps) if step is not None]
            raise RunFailed(
                f"the optimiser stepped on ranks {', '.join(stepped)} of {len(steps)} and not on the others: a scaler must skip "
                f"on all ranks or on none; reduce found_inf over the ranks"
            )
        self._lead.tell(Counted(self._number, done is not None))
        self._executor.poisoned += [f"{b.poisoned} on rank {rank}" for rank, b in sorted(boundaries.items()) if b.poisoned]
        if done is not None:
            self._live.step_done(summed([step for step in steps if step is not None]))
        return done is not None

    def next_step(self) -> InnerStep | None:
        self._lead.raise_failure()
        try:
            step = self._live.next_step()
        except PlaceLost as lost:
            raise RunFailed(f"{lost}; a learner of several ranks comes back as a new process: start its ranks again") from None
        self._over = step is None
        self._lead.tell(Go(step))
        return step

    def _rank_failed(self, failure: RunFailed) -> None:
        """The syncer is told at once, so that nobody waits for this learner; twice, to leave without another step."""
        for _ in range(2):
            self._live.leave(str(failure))
        self._live.fail(failure)


def summed(steps: Sequence[StepDone]) -> StepDone:
    """Tokens and samples are added up; the loss is the mean over tokens, or over ranks where nobody counts tokens."""
    losses = [(step.loss, step.tokens) for step in steps if step.loss is not None]
    total = sum(tokens for _, tokens in losses)
    weights = [tokens / total if total else 1 / len(losses) for _, tokens in losses]
    loss = sum(loss * weight for (loss, _), weight in zip(losses, weights, strict=True)) if losses else None
    return StepDone(
        sum(step.tokens for step in steps), sum(step.samples for step in steps), max(step.nanos for step in steps), loss
    )
