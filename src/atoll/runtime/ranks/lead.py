"""Rank 0's side of its learner's other ranks: tells them what to do, gathers what they have, and finds out who is missing."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from atoll.errors import RunFailed
from atoll.runtime.learner.leaving import Leave
from atoll.runtime.ranks.channel import REASON_SECONDS, ChannelClosed, read_in_thread
from atoll.runtime.ranks.messages import (
    ArrivalTaken,
    Ended,
    GradientsReady,
    GroupFormed,
    LeaveWanted,
    Note,
    Part,
    PartOfState,
    PartWritten,
    Profile,
    RankLeaves,
    Reform,
    StepFailed,
    StepReached,
    TakeStep,
)
from atoll.runtime.ranks.rendezvous import RankLink

log = logging.getLogger("atoll.learner")

GOODBYE_SECONDS: Final = 5.0
LOSS_SECONDS: Final = 10.0
"""Between a collective that fails and the end of the rank it failed for: without one, the failure is the learner's."""


class RankLost(RunFailed):
    """A rank that is needed is gone, and its learner may go on without it."""


class RankLead:
    def __init__(self, connected: Mapping[int, RankLink], timeout_seconds: float) -> None:
        self._connected = dict(connected)
        """In the order of torch's group."""
        self._timeout = timeout_seconds
        self._condition = threading.Condition()
        self._boundaries: dict[int, StepReached] = {}
        self._profiles: dict[int, Profile] = {}
        self._answers: dict[tuple[int, int], tuple[Part | PartOfState | PartWritten, Tensor]] = {}
        self._taken: set[tuple[int, int]] = set()
        """Rank and arrival. A state and the versions announced meanwhile arrive in any order."""
        self._left: dict[int, str] = {}
        self._ready: dict[int, GradientsReady] = {}
        self._formed: dict[int, GroupFormed] = {}
        self._lost: dict[int, str] = {}
        self._released: list[RankLink] = []
        self._attempt = 0
        self._written_until = float("inf")
        self.may_lose: Callable[[Collection[int]], bool] = lambda lost: False
        """Whether the learner could go on without these ranks."""
        self.on_lost: Callable[[int], None] = lambda rank: None
        self.unblock: Callable[[], None] = lambda: None
        """Ends the collectives that wait for a rank that is gone."""
        self._numbers = 0
        self._ended = False
        self.failure: RunFailed | None = None
        self.on_failure: Callable[[RunFailed], None] = lambda failure: None
        self.on_leave: Leave = lambda reason, within_seconds=None, *, returns=False: None
        self._threads = [
            read_in_thread(channel, self._taker(rank), closed(rank), f"rank-{rank}")
            for rank, both in connected.items()
            for channel, closed in ((both.control, self._closer), (both.bulk, self._bulk_closer))
        ]

    @property
    def members(self) -> tuple[int, ...]:
        """All ranks but 0 that are there, in the order of torch's group."""
        with self._condition:
            return tuple(self._connected)

    # ------------------------------------------------------------ telling

    def tell(self, note: Note, data: Sequence[Tensor] = ()) -> None:
        """All other ranks, in order with everything told before."""
        for rank in self.members:
            self.tell_rank(rank, note, data)

    def tell_rank(self, rank: int, note: Note, data: Sequence[Tensor] = (), *, bulk: bool = False) -> None:
        both = self._connected.get(rank)
        if both is None:
            return  # lost meanwhile
        try:
            (both.bulk if bulk else both.control).send(note, data)
        except ChannelClosed as closed:
            self._gone(rank, str(closed))

    def number(self) -> int:
        with self._condition:
            self._numbers += 1
            return self._numbers

    # ------------------------------------------------------------ gathering

    def profiles(self) -> dict[int, Profile]:
        self._wait(lambda: [r for r in self._connected if r not in self._profiles], "did not say what it trains")
        return dict(self._profiles)

    def boundaries(self, number: int) -> dict[int, StepReached]:
        """Waits until every rank has called `learner.step`."""
        self._wait(
            lambda: [r for r in self._connected if r not in self._boundaries], "has not called learner.step()", must_train=True
        )
        with self._condition:
            found, self._boundaries = self._boundaries, {}
            ready, self._ready = self._ready, {}
        for rank, note in ready.items():  # of a rank that was lost since: its gradients are in this step
            found.setdefault(rank, StepReached(note.number, note.done))
        for rank, boundary in found.items():
            if boundary.number != number:
                self.fail(rank, f"is at its step {boundary.number}, and rank 0 at its step {number}")
        self.raise_failure()
        return found

    def answers(self, request: int, asked: Sequence[int]) -> dict[int, tuple[Part, Tensor]]:
        """Raises RankLost if one that was asked is gone."""
        self._wait(lambda: self._unanswered(request, asked), "did not send its part", needs=asked)
        with self._condition:
            found = {rank: self._answers.pop((rank, request)) for rank in asked}
        return {rank: (note, data) for rank, (note, data) in found.items() if isinstance(note, Part)}

    def state_parts(self, request: int, asked: Sequence[int]) -> list[Tensor]:
        """Their bytes, in that order."""
        self._wait(lambda: self._unanswered(request, asked), "did not send its part of the state", needs=asked)
        with self._condition:
            return [self._answers.pop((rank, request))[1] for rank in asked]

    def spool_into(self, folder: Path) -> None:
        for both in self._connected.values():
            both.bulk.spool = folder

    def written(self, request: int, asked: Sequence[int]) -> dict[int, PartWritten]:
        """Waits for as long as the disks take. RunFailed if the learner ends before, or loses a rank."""

        def is_over() -> bool:
            late = time.monotonic() >= self._written_until
            return late or self._ended or self.failure is not None or not set(asked) <= self._connected.keys()

        with self._condition:
            while (missing := self._unanswered(request, asked)) and not is_over():
                self._condition.wait(min(3600.0, self._written_until - time.monotonic()))
            if missing:
                raise self.failure or RunFailed(f"rank {missing[0]} had not written its part when the learner ended or lost it")
            found = {rank: self._answers.pop((rank, request))[0] for rank in asked}
        return {rank: note for rank, note in found.items() if isinstance(note, PartWritten)}

    def write_within(self, seconds: float) -> None:
        """The learner ends: a rank that stands still must not hold it up."""
        with self._condition:
            self._written_until = time.monotonic() + seconds
            self._condition.notify_all()

    def _unanswered(self, request: int, asked: Sequence[int]) -> list[int]:
        return [rank for rank in asked if (rank, request) not in self._answers]

    def await_taken(self, arrival: int) -> None:
        self._wait(lambda: [r for r in self._connected if (r, arrival) not in self._taken], "did not take what it was sent")
        with self._condition:
            self._taken -= {(rank, arrival) for rank in self._connected}

    def _wait(
        self, missing: Callable[[], list[int]], what: str, *, must_train: bool = False, needs: Sequence[int] = ()
    ) -> None:
        """`must_train`: a rank whose loop has ended does not do it any more. It answers until the learner has left. `needs`:
        these ranks, and not only those that are left."""
        until = time.monotonic() + self._timeout
        with self._condition:
            while self.failure is None and (late := missing()):
                if self._ended:
                    raise RunFailed("the learner has ended")
                if needs and (lost := set(needs) - self._connected.keys()):
                    raise RankLost(f"rank {min(lost)} of this learner is gone")
                if must_train and (gone := [rank for rank in late if rank in self._left]):
                    self.fail(gone[0], f"its loop ended ({self._left[gone[0]]}), and those of the others have not")
                elif not self._condition.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    self.fail(late[0], f"{what} for {self._timeout:.0f} s, and the others wait (rank_timeout_seconds)")
        self.raise_failure()

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    # ------------------------------------------------------------ the loss of ranks

    @property
    def has_lost(self) -> bool:
        """Ranks that torch's group still counts on."""
        with self._condition:
            return bool(self._lost)

    def ready(self, number: int) -> bool:
        """Waits until every rank has the gradients of this step, and tells all to take it. False: a rank was lost before, and no
        rank takes it."""

        def waiting() -> list[int]:
            if self._lost:
                return []
            return [r for r in self._connected if r not in self._ready or self._ready[r].number != number]

        self._wait(waiting, "has not computed its gradients", must_train=True)
        with self._condition:
            if self._lost:
                self._ready.clear()
                return False
        self.tell(TakeStep(number))
        return True

    def await_loss(self, seconds: float = LOSS_SECONDS) -> bool:
        """After a collective failed: whether it did because a rank is gone."""
        with self._condition:
            self._condition.wait_for(lambda: self._lost or self.failure is not None or self._ended, seconds)
        self.raise_failure()
        return self.has_lost

    def take_lost(self) -> tuple[int, dict[int, str]]:
        """Number of the attempt to go on without them, and why each is lost."""
        with self._condition:
            lost, self._lost = self._lost, {}
            self._attempt += 1
            self._formed.clear()
            return self._attempt, lost

    def tell_reform(self, note: Reform) -> None:
        """Those that are not in the smaller group end, and are no loss."""
        self.tell(note)
        with self._condition:
            self._released += [both for rank, both in self._connected.items() if rank not in note.order]
            self._connected = {rank: self._connected[rank] for rank in note.order if rank in self._connected}
            self._condition.notify_all()

    def formed(self) -> dict[int, str]:
        """By rank the digest of its weights. RankLost: another one is gone."""
        self._wait(lambda: [] if self._lost else [r for r in self._connected if r not in self._formed], "did not form the group")
        with self._condition:
            if self._lost:
                raise RankLost("another rank is gone")
            return {rank: note.digest for rank, note in self._formed.items()}

    def await_change(self, changed: Callable[[], bool]) -> bool:
        """Whether what a lost rank left undone is asked for anew, as the smaller group divides it."""
        with self._condition:
            self._condition.wait_for(lambda: changed() or self._ended or self.failure is not None, self._timeout)
            return changed()

    def _step_failed(self, rank: int, note: StepFailed) -> None:
        """Most often because another rank is gone, which is heard of at the same time."""

        def look() -> None:
            with self._condition:
                explained = self._lost or self._attempt != note.attempt
            if not explained:
                self.fail(rank, note.reason)

        timer = threading.Timer(LOSS_SECONDS, look)
        timer.daemon = True
        timer.start()

    def _gone(self, rank: int, reason: str) -> None:
        """Its process ended without a word."""
        with self._condition:
            if self._ended or self.failure is not None or rank not in self._connected:
                return
            lose = rank not in self._left and self.may_lose({rank, *self._lost})
            if lose:
                self.unblock()  # first: who hears of the loss may begin to form a group, which this would end
                self._lost[rank] = reason
                self._released.append(self._connected.pop(rank))
                self._condition.notify_all()
        if not lose:
            return self.fail(rank, reason)
        log.error("rank %d of this learner: %s", rank, reason)
        return self.on_lost(rank)

    # ------------------------------------------------------------ hearing

    def _taker(self, rank: int) -> Callable[[Any, Tensor], None]:
        def take(note: Any, data: Tensor) -> None:
            if isinstance(note, LeaveWanted):
                self.on_leave(note.reason, note.within_seconds, returns=note.returns)
                return
            if isinstance(note, RankLeaves) and note.failed:
                self.fail(rank, note.reason)
                return
            if isinstance(note, StepFailed):
                self._step_failed(rank, note)
                return
            with self._condition:
                match note:
                    case Profile():
                        self._profiles[rank] = note
                    case StepReached():
                        self._boundaries[rank] = note
                    case Part(request=request) | PartOfState(request=request) | PartWritten(request=request):
                        self._answers[rank, request] = (note, data)
                    case ArrivalTaken(arrival=arrival):
                        self._taken.add((rank, arrival))
                    case RankLeaves(reason=reason):
                        self._left[rank] = reason
                    case GradientsReady():
                        self._ready[rank] = note
                    case GroupFormed(attempt=attempt) if attempt == self._attempt:
                        self._formed[rank] = note
                    case GroupFormed():
                        pass  # of an attempt that another loss ended
                    case _:
                        raise AssertionError(f"no rank says {note}")
                self._condition.notify_all()

        return take

    def _closer(self, rank: int) -> Callable[[BaseException], None]:
        return lambda error: self._gone(rank, str(error)) if isinstance(error, ChannelClosed) else self.fail(rank, str(error))

    def _bulk_closer(self, rank: int) -> Callable[[BaseException], None]:
        """A rank that ends closes both channels, and on the other one it may have said why: that is heard first."""

        def closed(error: BaseException) -> None:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._ended or self.failure is not None or rank not in self._connected, REASON_SECONDS
                )
            self._closer(rank)(error)

        return closed

    def fail(self, rank: int, reason: str) -> None:
        with self._condition:
            if self._ended or self.failure is not None:
                return
            sentence = f"rank {rank} of this learner: {reason}. A learner's ranks go down together: start them again"
            self.failure = RunFailed(sentence)
            self._condition.notify_all()
        log.error("%s", sentence)
        self._say_ended(Ended(sentence, True))
        self.on_failure(self.failure)
        self.unblock()

    def _say_ended(self, ended: Ended) -> None:
        for both in list(self._connected.values()):
            with contextlib.suppress(ChannelClosed):
                both.control.send(ended)

    # ------------------------------------------------------------ the end

    def close(self, reason: str, *, failed: bool) -> None:
        with self._condition:
            ended, self._ended = self._ended, True
            self._condition.notify_all()
        if ended:
            return
        if self.failure is None:
            self._say_ended(Ended(reason, failed))
        for both in (*self._connected.values(), *self._released):
            both.close()
        for thread in self._threads:
            thread.join(GOODBYE_SECONDS)
