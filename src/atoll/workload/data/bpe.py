"""Tokenizers: bytes as they are, and a small byte-pair encoding trained here. Both are lossless on any bytes.

Ids 0 to 255 are the bytes, 256 ends a document, and a trained tokenizer's merges follow in the order they were learnt.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, Protocol, TypeAlias

from atoll.errors import DataError

END_OF_DOCUMENT: Final = 256
BYTE_VOCAB: Final = 257
VOCAB_MAX: Final = 65_536
CACHED_WORDS_MAX: Final = 200_000
SAMPLE_BYTES: Final = 1_000_000
"""Of text to learn merges from: enough for about 12,000 entries of Python, and learnt in two seconds."""
SAMPLE_BYTES_MAX: Final = 32_000_000
"""Where more entries are asked for than that. A megabyte takes one and a half seconds and 20 MB of memory."""
SAMPLE_GROWTH: Final = 4

_WORD: Final = re.compile(
    rb" ?[A-Za-z_\x80-\xff]{1,64}| ?[0-9]{1,64}| ?[^\sA-Za-z_0-9\x80-\xff]{1,64}|\s{1,64}(?!\S)|\s{1,64}"
)
"""Merges stay inside a word. Every byte falls into one alternative, so words join up to the text; at most 64 long (plus
a leading space), because merging inside a word is quadratic in its length and text without spaces exists."""

Pair: TypeAlias = tuple[int, int]


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def end_of_document(self) -> int: ...
    def encode(self, text: bytes) -> list[int]: ...
    def encode_batch(self, texts: Sequence[bytes]) -> list[list[int]]: ...
    def decode(self, ids: Iterable[int]) -> bytes: ...


class ByteTokenizer:
    vocab_size: int = BYTE_VOCAB
    fingerprint: str = hashlib.sha256(b"atoll byte tokenizer, 256 ends a document").hexdigest()
    end_of_document: int = END_OF_DOCUMENT

    def encode(self, text: bytes) -> list[int]:
        return list(text)

    def encode_batch(self, texts: Sequence[bytes]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> bytes:
        """The end of a document is no byte: it decodes to nothing."""
        known = list(ids)
        for token in known:
            if not 0 <= token < BYTE_VOCAB:
                raise DataError(f"token {token} is not in the vocabulary of {BYTE_VOCAB}")
        return bytes(token for token in known if token != END_OF_DOCUMENT)


class BpeTokenizer:
    end_of_document: int = END_OF_DOCUMENT

    def __init__(self, merges: Sequence[Pair]) -> None:
        self.merges = tuple(merges)
        self._ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        self._pieces = [bytes([byte]) for byte in range(256)] + [b""]
        for left, right in self.merges:
            self._pieces.append(self._pieces[left] + self._pieces[right])
        self._cache: dict[bytes, list[int]] = {}
        text = "atoll bpe " + " ".join(f"{left},{right}" for left, right in self.merges)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def encode(self, text: bytes) -> list[int]:
        ids: list[int] = []
        cache = self._cache
        for word in _WORD.findall(text):
            known = cache.get(word)
            if known is None:
                known = self._encode_word(word)
                if len(cache) < CACHED_WORDS_MAX:
                    cache[word] = known
            ids += known
        return ids

    def encode_batch(self, texts: Sequence[bytes]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> bytes:
        """The end of a document is no byte: it decodes to nothing."""
        pieces = []
        for token in ids:
            if not 0 <= token < len(self._pieces):
                raise DataError(f"token {token} is not in the vocabulary of {len(self._pieces)}")
            pieces.append(self._pieces[token])
        return b"".join(pieces)

    def _encode_word(self, word: bytes) -> list[int]:
        ids = list(word)
        never = len(self.merges)
        while len(ids) > 1:
            # The earliest learnt merge first, as in training: only then do encoding and training agree on the pieces.
            rank = min(self._ranks.get(pair, never) for pair in pairwise(ids))
            if rank == never:
                break
            ids = _merged(ids, self.merges[rank], BYTE_VOCAB + rank)
        return ids


class Sampler:
    """Documents in the order of their hashes until max_bytes are full: the first ones by name would all be alike.

    Of what was seen only as much is kept as the sample may need.
    """

    def __init__(self, max_bytes: int = SAMPLE_BYTES_MAX) -> None:
        self._max = max_bytes
        self._kept: list[tuple[int, bytes]] = []  # a heap, the greatest hash first
        self._bytes = 0
        self._seen = 0

    @property
    def complete(self) -> bool:
        """Whether the sample is all there was."""
        return self._seen <= self._max

    def see(self, key: bytes, document: bytes) -> None:
        self._seen += len(document)
        heapq.heappush(self._kept, (-int.from_bytes(key, "big"), document[: self._max]))
        self._bytes += min(len(document), self._max)
        while self._bytes - len(self._kept[0][1]) >= self._max:
            self._bytes -= len(heapq.heappop(self._kept)[1])

    def sample(self) -> bytes:
        """Begins with what a smaller one would be."""
        return b"".join(document for _, document in sorted(self._kept, reverse=True))[: self._max]


def training_sample(documents: Sequence[bytes], max_bytes: int = SAMPLE_BYTES_MAX) -> bytes:
    sampler = Sampler(max_bytes)
    for document in documents:
        sampler.see(hashlib.sha256(document).digest(), document)
    return sampler.sample()


def train_bpe(sample: bytes, vocab_size: int, *, complete: bool = True) -> BpeTokenizer:
    """Learn vocab_size - 257 merges from the first SAMPLE_BYTES, or from as many more as it takes: so whatever they were once
    enough for stays as it was. `complete`: the sample is all the text there is."""
    if not BYTE_VOCAB <= vocab_size <= VOCAB_MAX:
        raise DataError(f"data.vocab = {vocab_size}: is not possible for a BPE: ask for {BYTE_VOCAB} to {VOCAB_MAX} entries")
    size = SAMPLE_BYTES
    while True:
        merges = _merges(sample[:size], vocab_size - BYTE_VOCAB)
        if len(merges) == vocab_size - BYTE_VOCAB:
            return BpeTokenizer(merges)
        if size >= len(sample):
            break
        size *= SAMPLE_GROWTH
    otherwise = "give more text" if complete else "name a Hugging Face tokenizer with data.tokenizer"
    raise DataError(
        f"data.vocab = {vocab_size}: a sample of {len(sample)} bytes repeats too little for so many entries of a BPE: "
        f"ask for at most {BYTE_VOCAB + len(merges)}, or {otherwise}"
    )


def _merges(sample: bytes, wanted: int) -> list[Pair]:
    """Again and again the most frequent pair, on a tie the one with the smallest ids; fewer where none is there twice.

    Counts are kept per distinct word and corrected only in the words a merge touches; the heap may hold outdated
    counts, and an entry counts only while it equals the present one.
    """
    tally = Counter(_WORD.findall(sample))
    words = [list(word) for word in tally]
    weights = list(tally.values())
    counts: dict[Pair, int] = defaultdict(int)
    places: dict[Pair, set[int]] = defaultdict(set)
    for index, ids in enumerate(words):
        for pair in pairwise(ids):
            counts[pair] += weights[index]
            places[pair].add(index)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    while len(merges) < wanted:
        best = _most_frequent(heap, counts)
        if best is None:
            break
        merges.append(best)
        _apply(best, BYTE_VOCAB + len(merges) - 1, words, weights, counts, places, heap)
    return merges


def _most_frequent(heap: list[tuple[int, Pair]], counts: dict[Pair, int]) -> Pair | None:
    """None when no pair occurs twice: a merge of a pair seen once would only memorise the sample."""
    while heap:
        negative, pair = heapq.heappop(heap)
        if -negative == counts.get(pair, 0):
            return pair if -negative >= 2 else None
    return None


def _apply(
    pair: Pair,
    token: int,
    words: list[list[int]],
    weights: list[int],
    counts: dict[Pair, int],
    places: dict[Pair, set[int]],
    heap: list[tuple[int, Pair]],
) -> None:
    changed: set[Pair] = set()
    for index in places.pop(pair):
        before = words[index]
        after = _merged(before, pair, token)
        if len(after) == len(before):
            continue  # an earlier merge took this word's last such pair; places are not pruned
        for old in pairwise(before):
            counts[old] -= weights[index]
            changed.add(old)
        for new in pairwise(after):
            counts[new] += weights[index]
            places[new].add(index)
            changed.add(new)
        words[index] = after
    for other in changed:
        if counts[other] > 0:
            heapq.heappush(heap, (-counts[other], other))
        else:
            del counts[other]
            places.pop(other, None)


def _merged(ids: list[int], pair: Pair, token: int) -> list[int]:
    """Every occurrence of the pair replaced, from the left."""
    left, right = pair
    out: list[int] = []
    index, last = 0, len(ids) - 1
    while index <= last:
        if index < last and ids[index] == left and ids[index + 1] == right:
            out.append(token)
            index += 2
        else:
            out.append(ids[index])
            index += 1
    return out
