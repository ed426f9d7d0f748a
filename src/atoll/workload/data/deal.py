"""A user's dataset dealt out to streams: which samples a batch is made of, as a pure function of (seed, stream, position).

The same cards as `Stream` deals, for anything with a length. There is no cursor to lose: whoever takes over a learner's
data asks for the next position and gets the next batch.
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
    """Each epoch shuffles the samples anew and deals them like cards: stream s takes s, s + S, s + 2S and so on, so within
    an epoch no sample is seen twice, by anyone. What does not deal out evenly sits that epoch out. Streams beyond the
    declared number take from the same samples in an order of their own."""

    def __init__(self, samples: int, seed: int, streams: int) -> None:
        if samples < streams:
            raise DataError(f"the dataset has {samples} samples, fewer than the run's {streams} learners: each needs one")
        self.samples = samples
        self.streams = streams
        self.share = samples // streams
        """Samples that one stream takes in one epoch."""
        self._seed = seed

    def batch(self, stream: int, position: int, batch_size: int) -> list[int]:
        """Which samples; a batch may reach into the next epoch."""
        parts: list[int] = []
        at, end = position * batch_size, (position + 1) * batch_size
        while at < end:
            epoch, offset = divmod(at, self.share)
            count = min(end - at, self.share - offset)
            parts += self.hand(stream, epoch)[offset : offset + count].tolist()
            at += count
        return parts

    def hand(self, stream: int, epoch: int) -> Tensor:
        """All of a stream's samples of one epoch, in their order."""
        deal, lane = divmod(stream, self.streams)
        return _shuffled(self._seed, epoch, self.samples, deal)[lane :: self.streams][: self.share]


@lru_cache(maxsize=EPOCHS_CACHED)
def _shuffled(seed: int, epoch: int, samples: int, deal: int) -> Tensor:
    """Shared between callers, who only read it."""
    return torch.randperm(samples, generator=generator("deal", seed, epoch, deal))
