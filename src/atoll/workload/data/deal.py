"""A user's dataset dealt out to streams: the samples of a batch as a pure function of (seed, stream, position).

The order is that of `Stream`, for any dataset with a length. There is no cursor that could be lost: a learner that takes over
another's data gets the next batch by its position.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from atoll.errors import DataError
from atoll.workload.data.seeds import generator

EPOCHS_CACHED: Final = 4


class Deal:
    """Each epoch shuffles the samples again and deals them out in turn: stream s takes s, s + S, s + 2S and so on, so within
    an epoch no sample is used twice. Samples of an incomplete last turn are not used in that epoch. Streams beyond the
    declared number draw from the same samples in an order of their own."""

    def __init__(self, samples: int, seed: int, streams: int) -> None:
        if samples < streams:
            raise DataError(f"the dataset has {samples} samples, fewer than the run's {streams} learners: each needs one")
        self.samples = samples
        self.streams = streams
        self.share = samples // streams
        """Samples of one stream in one epoch."""
        self._seed = seed

    def batch(self, stream: int, position: int, batch_size: int) -> list[int]:
        """The samples of a batch, which may reach into the next epoch."""
        parts: list[int] = []
        at, end = position * batch_size, (position + 1) * batch_size
        while at < end:
            epoch, offset = divmod(at, self.share)
            count = min(end - at, self.share - offset)
            parts += self.epoch_order(stream, epoch)[offset : offset + count].tolist()
            at += count
        return parts

    def epoch_order(self, stream: int, epoch: int) -> Tensor:
        """A stream's samples of one epoch, in order."""
        deal, lane = divmod(stream, self.streams)
        return _shuffled(self._seed, epoch, self.samples, deal)[lane :: self.streams][: self.share]


@lru_cache(maxsize=EPOCHS_CACHED)
def _shuffled(seed: int, epoch: int, samples: int, deal: int) -> Tensor:
    """Callers share the result and only read it."""
    return torch.randperm(samples, generator=generator("deal", seed, epoch, deal))
