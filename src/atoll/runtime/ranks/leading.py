"""Rank 0's training thread: what `LiveLearner` is to a learner of one rank, for all ranks at once."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.errors import PlaceLost, RunFailed
from atoll.protocol.vocabulary import InnerStep, Resized, StepDone
from atoll.runtime.learner.live import LiveLearner
from atoll.runtime.ranks.executor import LeadExecutor
from atoll.runtime.ranks.group import TorchGroup, new_store, smaller
from atoll.runtime.ranks.launch import tell_launcher
from atoll.runtime.ranks.lead import RankLead, RankLost
from atoll.runtime.ranks.messages import Counted, Go, Reform
from atoll.runtime.syncer.places import Placement

log = logging.getLogger("atoll.learner")


class LeadingLearner:
    def __init__(self, live: LiveLearner, executor: LeadExecutor, lead: RankLead) -> None:
        self._live = live
        self._executor = executor
        self._lead = lead
        self._number = 0
        self._over = False
        self._order: tuple[int, ...] = (0, *lead.members)
        self._ranks = len(self._order)
        self._shards = self._ranks
        self._lost: dict[int, str] = {}
        self._seconds = 0.0
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

    def go_on_without(self, shards: int, seconds: float) -> None:
        """From now on the loss of a rank is not the learner's, where the others hold a replica of `shards` ranks."""
        self._shards, self._seconds = shards, seconds
        self._lead.on_lost = tell_launcher
        self._lead.may_lose = lambda lost: bool(smaller(self._order, shards, {*self._lost, *lost}))

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

    # ------------------------------------------------------------ the loss of ranks

    @property
    def has_lost(self) -> bool:
        return self._lead.has_lost

    def ready(self, done: StepDone) -> bool:
        """See `RankMember.ready`."""
        return self._lead.ready(self._number + 1)

    def await_loss(self, error: BaseException) -> bool:
        return self._lead.await_loss()

    def regroup(self, group: TorchGroup, form: Callable[[Reform, Any], str]) -> bool:
        """Forms a smaller group of the ranks that are left; where another one is lost meanwhile, a smaller one yet. The machine
        hears of what became of it. RunFailed: it cannot be formed, and the learner ends."""
        while True:
            attempt, lost = self._lead.take_lost()
            self._lost.update(lost)
            order = smaller(self._order, self._shards, self._lost)
            if not order:
                raise RunFailed(f"ranks {sorted(self._lost)} of this learner are lost, and the others hold no whole replica")
            why = f"no smaller group was formed within {self._seconds:.0f} s"
            late = threading.Timer(self._seconds, self._lead.fail, (0, why))
            late.daemon = True
            late.start()
            try:
                with group.forming():
                    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
                    store = new_store(host, self._seconds)
                    note = Reform(attempt, self._number + 1, order, host, store.port)
                    self._executor.shrink(note)
                    digest = form(note, store)
                digests = {0: digest, **self._lead.formed()}
            except (RuntimeError, RankLost) as error:
                if not self._lead.await_loss():
                    raise RunFailed(f"rank 0 of this learner: the smaller group could not be formed: {error}") from None
                continue
            finally:
                late.cancel()
            self._order = order
            return self._resized(digests)

    def _resized(self, digests: Mapping[int, str]) -> bool:
        """Ranks in one column of the mesh hold the same. They are compared: a step that one of them took and another did not
        would never be found later."""
        for at, rank in enumerate(self._order):
            first = self._order[at % self._shards]
            if digests[rank] != digests[first]:
                raise RunFailed(f"ranks {first} and {rank} of this learner have other weights after the loss of a rank")
        self._executor.went_on_without(self._lost)
        self._live.dispatch(Resized(len(self._order) / self._ranks))
        told = ", ".join(f"{rank} ({why})" for rank, why in sorted(self._lost.items()))
        log.warning(
            "this learner goes on with %d of its %d ranks; lost: %s", len(self._order), self._ranks, told
        )  # fmt: skip
        return True

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
