"""Rank 0's side of its learner's other ranks: tells them what to do, gathers what they have, and finds out who is missing."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from atoll.errors import RunFailed
from atoll.runtime.learner.leaving import Leave
from atoll.runtime.ranks.channel import REASON_SECONDS, ChannelClosed, read_in_thread
from atoll.runtime.ranks.messages import (
    ArrivalTaken,
    Ended,
    LeaveWanted,
    Note,
    Part,
    PartWritten,
    Profile,
    RankLeaves,
    StepReached,
)
from atoll.runtime.ranks.rendezvous import RankLink

log = logging.getLogger("atoll.learner")

GOODBYE_SECONDS: Final = 5.0


class RankLead:
    def __init__(self, connected: Mapping[int, RankLink], timeout_seconds: float) -> None:
        self._connected = connected
        self._timeout = timeout_seconds
        self._condition = threading.Condition()
        self._boundaries: dict[int, StepReached] = {}
        self._profiles: dict[int, Profile] = {}
        self._answers: dict[tuple[int, int], tuple[Part | PartWritten, Tensor]] = {}
        self._taken: set[tuple[int, int]] = set()
        """Rank and arrival. A state and the versions announced meanwhile arrive in any order."""
        self._left: dict[int, str] = {}
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
    def ranks(self) -> int:
        return 1 + len(self._connected)

    # ------------------------------------------------------------ telling

    def tell(self, note: Note, data: Sequence[Tensor] = ()) -> None:
        """All other ranks, in order with everything told before."""
        for rank in self._connected:
            self.tell_rank(rank, note, data)

    def tell_rank(self, rank: int, note: Note, data: Sequence[Tensor] = (), *, bulk: bool = False) -> None:
        both = self._connected[rank]
        try:
            (both.bulk if bulk else both.control).send(note, data)
        except ChannelClosed as closed:
            self._fail(rank, str(closed))

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
        for rank, boundary in found.items():
            if boundary.number != number:
                self._fail(rank, f"is at its step {boundary.number}, and rank 0 at its step {number}")
        self.raise_failure()
        return found

    def answers(self, request: int) -> dict[int, tuple[Part, Tensor]]:
        self._wait(lambda: self._unanswered(request), "did not send its part")
        with self._condition:
            found = {rank: self._answers.pop((rank, request)) for rank in self._connected}
        return {rank: (note, data) for rank, (note, data) in found.items() if isinstance(note, Part)}

    def written(self, request: int) -> dict[int, PartWritten]:
        """Waits for as long as the disks take. RunFailed if the learner ends before."""
        with self._condition:
            self._condition.wait_for(lambda: self._ended or self.failure is not None or not self._unanswered(request))
            if self._unanswered(request):
                raise self.failure or RunFailed("the learner ended before all of its ranks had written their parts")
            found = {rank: self._answers.pop((rank, request))[0] for rank in self._connected}
        return {rank: note for rank, note in found.items() if isinstance(note, PartWritten)}

    def _unanswered(self, request: int) -> list[int]:
        return [rank for rank in self._connected if (rank, request) not in self._answers]

    def await_taken(self, arrival: int) -> None:
        self._wait(lambda: [r for r in self._connected if (r, arrival) not in self._taken], "did not take what it was sent")
        with self._condition:
            self._taken -= {(rank, arrival) for rank in self._connected}

    def _wait(self, missing: Callable[[], list[int]], what: str, *, must_train: bool = False) -> None:
        """`must_train`: a rank whose loop has ended does not do it any more. It answers until the learner has left."""
        until = time.monotonic() + self._timeout
        with self._condition:
            while self.failure is None and (late := missing()):
                if self._ended:
                    raise RunFailed("the learner has ended")
                if must_train and (gone := [rank for rank in late if rank in self._left]):
                    self._fail(gone[0], f"its loop ended ({self._left[gone[0]]}), and those of the others have not")
                elif not self._condition.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    self._fail(late[0], f"{what} for {self._timeout:.0f} s, and the others wait (rank_timeout_seconds)")
        self.raise_failure()

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    # ------------------------------------------------------------ hearing

    def _taker(self, rank: int) -> Callable[[Any, Tensor], None]:
        def take(note: Any, data: Tensor) -> None:
            if isinstance(note, LeaveWanted):
                self.on_leave(note.reason, note.within_seconds, returns=note.returns)
                return
            if isinstance(note, RankLeaves) and note.failed:
                self._fail(rank, note.reason)
                return
            with self._condition:
                match note:
                    case Profile():
                        self._profiles[rank] = note
                    case StepReached():
                        self._boundaries[rank] = note
                    case Part(request=request) | PartWritten(request=request):
                        self._answers[rank, request] = (note, data)
                    case ArrivalTaken(arrival=arrival):
                        self._taken.add((rank, arrival))
                    case RankLeaves(reason=reason):
                        self._left[rank] = reason
                    case _:
                        raise AssertionError(f"no rank says {note}")
                self._condition.notify_all()

        return take

    def _closer(self, rank: int) -> Callable[[BaseException], None]:
        return lambda error: self._fail(rank, str(error))

    def _bulk_closer(self, rank: int) -> Callable[[BaseException], None]:
        """A rank that ends closes both channels, and on the other one it may have said why: that is heard first."""

        def closed(error: BaseException) -> None:
            with self._condition:
                self._condition.wait_for(lambda: self._ended or self.failure is not None, REASON_SECONDS)
            self._fail(rank, str(error))

        return closed

    def _fail(self, rank: int, reason: str) -> None:
        with self._condition:
            if self._ended or self.failure is not None:
                return
            sentence = f"rank {rank} of this learner: {reason}. A learner's ranks go down together: start them again"
            self.failure = RunFailed(sentence)
            self._condition.notify_all()
        log.error("%s", sentence)
        self._say_ended(Ended(sentence, True))
        self.on_failure(self.failure)

    def _say_ended(self, ended: Ended) -> None:
        for both in self._connected.values():
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
        for both in self._connected.values():
            both.close()
        for thread in self._threads:
            thread.join(GOODBYE_SECONDS)
