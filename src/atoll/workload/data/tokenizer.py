"""Tokenizers: bytes as they are, a byte-pair encoding trained on the text, and Hugging Face tokenizer files.

The package `tokenizers` trains and encodes. The first two are lossless on any bytes: ids 0 to 255 are the bytes, 256 ends a
document, and a trained tokenizer's merges follow in the order they were learnt.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import msgspec
from tokenizers import Regex
from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split
from tokenizers.trainers import BpeTrainer

from atoll.config.models import BYTE_VOCAB
from atoll.errors import DataError
from atoll.workload.data.packing import open_unpacked, relative_path_note

END_OF_DOCUMENT: Final = 256
END_TEXT: Final = "<|endoftext|>"
VOCAB_MAX: Final = 65_536

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
        return bytes(token for token in _known(ids, BYTE_VOCAB) if token != END_OF_DOCUMENT)


def _known(ids: Iterable[int], vocab_size: int) -> list[int]:
    found = list(ids)
    for token in found:
        if not 0 <= token < vocab_size:
            raise DataError(f"token {token} is not in the vocabulary of {vocab_size}")
    return found


# ---------------------------------------------------------------- trained on the text

SAMPLE_BYTES: Final = 1_000_000
"""Of text to learn merges from: enough for about 12,000 entries of Python."""
SAMPLE_BYTES_MAX: Final = 32_000_000
"""Where more entries are asked for than that."""
SAMPLE_GROWTH: Final = 4
PAIR_COUNT_MIN: Final = 2
"""A merge of a pair seen once would only memorise the sample."""

BLANK: Final = r"\t-\r "
LETTER: Final = r"A-Za-z_\x{80}-\x{ff}"
WORD: Final = (
    rf" ?[{LETTER}]{{1,64}}| ?[0-9]{{1,64}}| ?[^{BLANK}{LETTER}0-9]{{1,64}}|[{BLANK}]{{1,64}}(?![^{BLANK}])|[{BLANK}]{{1,64}}"
)
"""Merges stay inside a word. Every byte falls into one alternative, so words join up to the text."""
PART: Final = re.compile(rb"(?s).{65536,}?\S(?=\s)|.+")
"""Of a sample, cut before a blank that follows something else. No word goes across, so parts have the words of the whole."""


class BpeTokenizer:
    """The package takes text, not bytes: Latin-1 writes each byte as one character and keeps the bytes' order, by which the
    package breaks ties between pairs."""

    end_of_document: int = END_OF_DOCUMENT

    def __init__(self, merges: Sequence[Pair]) -> None:
        self.merges = tuple(merges)
        pieces = [chr(byte) for byte in range(256)] + [END_TEXT]
        for left, right in self.merges:
            if not all(0 <= token < len(pieces) and token != END_OF_DOCUMENT for token in (left, right)):
                raise DataError(f"a BPE cannot merge {left} and {right} into token {len(pieces)}: its merges are damaged")
            pieces.append(pieces[left] + pieces[right])
        vocab = {piece: token for token, piece in enumerate(pieces)}
        if len(vocab) < len(pieces):  # learnt from text, a piece has one pair: its letters meet the same merges everywhere
            raise DataError("a BPE cannot merge two pairs into one piece: its merges are damaged")
        self._engine = Engine(BPE(vocab, [(pieces[left], pieces[right]) for left, right in self.merges]))
        self._engine.pre_tokenizer = Split(Regex(WORD), "isolated")
        self._pieces = [b"" if piece == END_TEXT else piece.encode("latin-1") for piece in pieces]
        text = "atoll bpe " + " ".join(f"{left},{right}" for left, right in self.merges)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def encode(self, text: bytes) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[list[int]]:
        """On all cores (RAYON_NUM_THREADS says otherwise)."""
        return [found.ids for found in self._engine.encode_batch_fast([text.decode("latin-1") for text in texts])]

    def decode(self, ids: Iterable[int]) -> bytes:
        """The end of a document is no byte: it decodes to nothing."""
        return b"".join(self._pieces[token] for token in _known(ids, len(self._pieces)))


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
    """Learn vocab_size - 257 merges from the first SAMPLE_BYTES, or from as many more as it takes: a sample that grows at its
    end leaves the merges as they were. `complete`: the sample is all the text there is."""
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

    The package numbers the alphabet in the order of its characters and merges in the order it learns them, so the rule leaves
    nothing to threads or to the order of a hash map.
    """
    engine = Engine(BPE())
    engine.pre_tokenizer = Split(Regex(WORD), "isolated")
    trainer = BpeTrainer(
        vocab_size=256 + wanted, min_frequency=PAIR_COUNT_MIN, show_progress=False,
        initial_alphabet=[chr(byte) for byte in range(256)],
    )  # fmt: skip
    engine.train_from_iterator((part.decode("latin-1") for part in PART.findall(sample)), trainer)
    learnt: list[tuple[str, str]] = msgspec.json.decode(engine.to_str())["model"]["merges"]
    ids = {chr(byte): byte for byte in range(256)}
    for left, right in learnt:
        ids[left + right] = len(ids) + 1  # after END_OF_DOCUMENT, which is no piece
    return [(ids[left], ids[right]) for left, right in learnt]


# ---------------------------------------------------------------- a Hugging Face file

ENDS: Final = (END_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
"""What tokenizers call the end of a document, tried in this order."""
FILE_BYTES_MAX: Final = 1 << 28
LOST_MAX: Final = 0.01
"""A smaller share of each letter may go by how words are joined ("do not" to "don't"), so it is no loss by itself."""
SHOWN: Final = 5
_FROM_BYTES: Final = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
"""The decoder that goes with a byte-level pre-tokenizer, as the package writes its own."""


class JsonTokenizer:
    """Text never turns into special tokens: a document that holds the letters <|endoftext|> does not end there."""

    def __init__(self, path: Path, end: str = "", content: bytes | None = None) -> None:
        """`content`: the JSON, where it is not to be read from `path`."""
        self._path = path
        self.content = content = _read(path) if content is None else content
        try:
            self._parts: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
            self._used = _used(self._parts)
            self._engine = Engine.from_str(msgspec.json.encode(self._used).decode())
        except Exception as error:  # the package raises bare Exceptions
            raise DataError(
                f"data.tokenizer: {path} is no Hugging Face tokenizer ({error}): name a file as Tokenizer.save() writes it"
            ) from error
        self._engine.encode_special_tokens = True
        ids = self._engine.get_vocab()
        if not ids:
            raise DataError(f"data.tokenizer: {path} has no entry")
        self.vocab_size: int = max(ids.values()) + 1
        self.end_text: str = _end(path, ids, end)
        self.end_of_document: int = ids[self.end_text]
        self.fingerprint: str = hashlib.sha256(content + f"\nend {self.end_of_document}".encode()).hexdigest()

    def encode(self, text: bytes) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[list[int]]:
        """On all cores (RAYON_NUM_THREADS says otherwise). Bytes that are no utf-8 are refused."""
        try:
            words = [text.decode("utf-8") for text in texts]
        except UnicodeDecodeError as error:
            raise DataError(f"a Hugging Face tokenizer takes utf-8 text only: {error}") from error
        try:
            return [found.ids for found in self._engine.encode_batch_fast(words, add_special_tokens=False)]
        except Exception as error:  # the package raises bare Exceptions
            raise DataError(
                f"data.tokenizer: {self._path} cannot encode the text ({error}): "
                f"give one that knows all of it, or has an unknown token"
            ) from error

    def decode(self, ids: Iterable[int]) -> bytes:
        """The end of a document decodes to nothing."""
        known = [token for token in _known(ids, self.vocab_size) if token != self.end_of_document]
        return self._engine.decode(known, skip_special_tokens=False).encode()

    def losses(self, sample: bytes) -> str | None:
        """A sentence for a tokenizer that has no entry for some of the text, and so drops it or writes its unknown token.

        What its normaliser changes is meant to be changed, and blanks come and go as words are joined: neither is lost.
        """
        text = sample.decode("utf-8", "ignore")  # a sample may end inside a character
        normaliser = self._engine.normalizer
        wanted = _printed(normaliser.normalize_str(text) if normaliser is not None else text)
        unknown = self._unknown
        found = _printed(self.decode(token for token in self.encode(text.encode()) if token != unknown).decode())
        lost = wanted - found
        kinds = {letter: count for letter, count in lost.items() if 2 * count > wanted[letter]}
        if not kinds and lost.total() <= LOST_MAX * wanted.total():
            return None
        shown = ", ".join(repr(letter) for letter, _ in Counter(kinds or lost).most_common(SHOWN))
        return (
            f"data.tokenizer: {self._path} has no entry for some of the text: in a sample {lost.total():,} of {wanted.total():,} "
            f"characters are lost to the model, such as {shown}; a byte-level tokenizer, or one with byte fallback, loses none"
        )

    @property
    def _unknown(self) -> int | None:
        """Unigram's is a number, others' a name."""
        model = self._parts["model"]
        name = model.get("unk_token")
        token: int | None = self._engine.token_to_id(name) if isinstance(name, str) else model.get("unk_id")
        return token

    @property
    def exported(self) -> bytes:
        """The JSON of what encodes here: with another one a reader would give the model other ids than training did."""
        same = all(value == self._parts.get(key) for key, value in self._used.items())
        return self.content if same else msgspec.json.encode(self._used)


def _used(parts: dict[str, Any]) -> dict[str, Any]:
    """Truncation would drop text, padding and a post-processor's special tokens would add to it, and dropout give other
    tokens each time: of the file, all but these."""
    used = parts | {"truncation": None, "padding": None, "post_processor": None}
    if "dropout" in used["model"]:
        used["model"] = used["model"] | {"dropout": None}
    before = used.get("pre_tokenizer")
    if used.get("decoder") is None and isinstance(before, dict) and before.get("type") == "ByteLevel":
        used["decoder"] = _FROM_BYTES  # or each byte of the text would come back as a letter
    return used


def _read(path: Path) -> bytes:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise DataError(
            f"data.tokenizer = {str(path)!r}: must be 'bytes', 'bpe' or a Hugging Face tokenizer's JSON file, "
            f"and there is no file {file}{relative_path_note(file)}"
        )
    with open_unpacked(file) as stream:
        content = stream.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise DataError(f"data.tokenizer: {file} holds more than {FILE_BYTES_MAX} bytes: this is no tokenizer")
    return content


def _printed(text: str) -> Counter[str]:
    """All but blanks, of which \u2581 is sentencepiece's."""
    return Counter(letter for letter in text if not letter.isspace() and letter != "\u2581")


def _end(path: Path, ids: dict[str, int], wanted: str) -> str:
    if wanted and wanted not in ids:
        raise DataError(f"data.end_of_document = {wanted!r}: the tokenizer {path} has no such entry")
    found = wanted or next((name for name in ENDS if name in ids), "")
    if not found:
        raise DataError(
            f"data.tokenizer: {path} has none of {', '.join(ENDS)}: say with data.end_of_document which entry ends a document"
        )
    return found
