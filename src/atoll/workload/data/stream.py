"""Packed tokens, and the streams of batches made of them.

A batch is a pure function of (seed, stream, position). A stream has no cursor that could be lost: a learner that restarts, or a
peer that takes over its data, gets the next batch by its position. And no batch is trained twice, because nothing rewinds.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from atoll.errors import DataError
from atoll.workload.data.corpus import HELDOUT_SHARE, Corpus, split_documents
from atoll.workload.data.seeds import generator
from atoll.workload.data.tokenizer import END_OF_DOCUMENT, ByteTokenizer, Tokenizer

EPOCHS_CACHED: Final = 4
"""Streams of one run pass through epochs nearly together; a slow one is an epoch or two behind."""
INT16_VOCAB_MAX: Final = 32_768


@dataclass(frozen=True, eq=False)
class TokenData:
    """The tokens of all documents, each followed by its end token; int16 if the vocabulary fits, otherwise int32."""

    train: Tensor
    heldout: Tensor
    vocab_size: int
    fingerprint: str


def token_data(corpus: Corpus, tokenizer: Tokenizer, heldout_share: float = HELDOUT_SHARE) -> TokenData:
    split = split_documents(corpus, heldout_share)
    identity = f"{corpus.fingerprint} {tokenizer.fingerprint} {heldout_share}"
    return TokenData(
        train=pack_documents(split.train, tokenizer),
        heldout=pack_documents(split.heldout, tokenizer),
        vocab_size=tokenizer.vocab_size,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
    )


def pack_documents(documents: Sequence[bytes], tokenizer: Tokenizer) -> Tensor:
    if type(tokenizer) is ByteTokenizer:
        return _bytes_packed(documents)
    compact = tokenizer.vocab_size <= INT16_VOCAB_MAX
    tokens = array("h" if compact else "i")
    for document in documents:
        tokens.extend(tokenizer.encode(document))
        tokens.append(tokenizer.end_of_document)
    if not tokens:  # torch refuses an empty buffer
        return torch.empty(0, dtype=torch.int16)
    return torch.frombuffer(tokens, dtype=torch.int16 if compact else torch.int32).clone()


def _bytes_packed(documents: Sequence[bytes]) -> Tensor:
    """The same without a number of Python's for every byte."""
    packed = torch.full((sum(map(len, documents)) + len(documents),), END_OF_DOCUMENT, dtype=torch.int16)
    begin = 0
    for document in documents:
        if document:
            packed[begin : begin + len(document)] = torch.frombuffer(bytearray(document), dtype=torch.uint8)
        begin += len(document) + 1
    return packed


class Stream:
    """`streams` many disjoint sequences of batches over the train tokens.

    The tokens are cut into windows of seq_len + 1 that overlap by one token (the last target of one is the first input
    of the next). Each epoch shuffles the windows again and deals them out in turn: stream s takes s, s + S, s + 2S and so on,
    so within an epoch no window is used twice. The few windows of an incomplete last turn are not used in that epoch.
    Learners beyond the declared number draw from the same text in an order of their own, so they repeat windows of others.
    """

    def __init__(self, data: TokenData, seed: int, streams: int, batch_size: int, seq_len: int) -> None:
        for name, value in (("streams", streams), ("batch_size", batch_size), ("seq_len", seq_len)):
            if value < 1:
                raise DataError(f"{name} = {value}: must be at least 1")
        self._windows = _windows(data.train, seq_len, "train")
        self.windows = self._windows.shape[0]
        if self.windows < streams:
            raise DataError(
                f"the train text gives {self.windows} windows of data.seq_len = {seq_len}, fewer than {streams} learners: "
                f"give more text, a shorter data.seq_len or fewer learners"
            )
        self.seed = seed
        self.streams = streams
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.share = self.windows // streams
        """Windows of one stream in one epoch."""

    @property
    def tokens_per_batch(self) -> int:
        """Predicted tokens, those with a loss."""
        return self.batch_size * self.seq_len

    @property
    def samples_per_batch(self) -> int:
        return self.batch_size

    def epoch_of(self, position: int) -> int:
        """The epoch of the batch's first sample; a batch may reach into the next one."""
        return position * self.batch_size // self.share

    def batch(self, stream: int, position: int) -> Tensor:
        """[batch_size, seq_len + 1], int64."""
        return self._windows[self.window_indices(stream, position)].long()

    def window_indices(self, stream: int, position: int) -> Tensor:
        """The windows of the batch."""
        if stream < 0:
            raise DataError(f"there is no stream {stream}: streams count from 0")
        deal, lane = divmod(stream, self.streams)
        if position < 0:
            raise DataError(f"position {position} of stream {stream}: positions count from 0")
        parts: list[Tensor] = []
        sample, end = position * self.batch_size, (position + 1) * self.batch_size
        while sample < end:
            epoch, offset = divmod(sample, self.share)
            count = min(end - sample, self.share - offset)
            first = lane + offset * self.streams
            parts.append(_shuffled(self.seed, epoch, self.windows, deal)[first : first + count * self.streams : self.streams])
            sample += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def heldout_batches(data: TokenData, batch_size: int, seq_len: int, limit: int) -> list[Tensor]:
    """At most `limit` fixed batches, spread evenly over the held-out text, so that a low limit still covers all of it.

    The last one may be smaller: no window is left out to make the batches even.
    """
    if batch_size < 1 or limit < 1:
        raise DataError(f"held-out batches of {batch_size} samples, at most {limit}: both must be at least 1")
    windows = _windows(data.heldout, seq_len, "held-out")
    total = windows.shape[0]
    count = min(total, limit * batch_size)
    chosen = torch.arange(count) * total // count
    return [windows[part].long() for part in torch.split(chosen, batch_size)]


def _windows(tokens: Tensor, seq_len: int, side: str) -> Tensor:
    """A view, [windows, seq_len + 1]; only a drawn batch is copied."""
    if tokens.numel() <= seq_len:
        raise DataError(
            f"data.seq_len = {seq_len} is longer than the {side} text of {tokens.numel()} tokens: "
            f"set it to at most {max(tokens.numel() - 1, 0)}, or give more text"
        )
    return tokens.unfold(0, seq_len + 1, seq_len)


@lru_cache(maxsize=EPOCHS_CACHED)
def _shuffled(seed: int, epoch: int, windows: int, deal: int) -> Tensor:
    """Callers share the result and only read it. A function of the module, so that a Stream can be pickled."""
    name = ("epoch", seed, epoch) if deal == 0 else ("epoch", seed, epoch, deal)
    return torch.randperm(windows, generator=generator(*name))
