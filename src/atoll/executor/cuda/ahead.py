"""The next batch, prepared while the device runs this one's step: drawn from the token cache and copied into pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from torch import Tensor

from atoll.executor.cuda.transfer import each_tensor, first_samples
from atoll.ids import LearnerId
from atoll.tasks.task import Task


class BatchPosition(NamedTuple):
    """Which micro-batches a step takes: a pure function of this gives them."""

    stream: LearnerId
    batch: int
    share: float

    def following(self) -> BatchPosition:
        """The usual next step. Another one, after a grant or a recovery, costs one wait for its batch."""
        return self._replace(batch=self.batch + 1)


def micro_batches(task: Task, learner: LearnerId, place: BatchPosition) -> list[Any]:
    """The batches of one optimiser step, whole."""
    count, found = task.config.inner.accumulate, []
    for position in range(place.batch * count, (place.batch + 1) * count):
        batch = task.batch(learner, place.stream, position)
        found.append(first_samples(batch, place.share, position) if place.share < 1.0 else batch)
    return found


class BatchesAhead:
    def __init__(self, draw: Callable[[BatchPosition], list[Any]]) -> None:
        self._draw = draw
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[BatchPosition, Future[list[Any]]] | None = None

    def take(self, place: BatchPosition) -> list[Any]:
        expected, self._next = self._next, None
        return expected[1].result() if expected is not None and expected[0] == place else self._pinned(place)

    def prepare(self, place: BatchPosition) -> None:
        self._next = (place, self._thread.submit(self._pinned, place))

    def close(self) -> None:
        self._thread.shutdown()

    def _pinned(self, place: BatchPosition) -> list[Any]:
        return [each_tensor(batch, Tensor.pin_memory) for batch in self._draw(place)]
