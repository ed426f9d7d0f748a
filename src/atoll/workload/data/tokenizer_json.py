"""A Hugging Face tokenizer from its JSON file. The package `tokenizers` is needed only to encode and decode.

What a run must know otherwise (entries, which token ends a document) is read from the JSON, so that a machine that finds
the tokens in its cache trains without the package.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from atoll.errors import DataError
from atoll.workload.data.packing import counted_from, importing, opened

ENDS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
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
            ids = _ids(self._parts)
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"data.tokenizer: {path} is no Hugging Face tokenizer ({error}): name a file as Tokenizer.save() writes it"
            ) from error
        if not ids:
            raise DataError(f"data.tokenizer: {path} has no entry")
        self.vocab_size: int = max(ids.values()) + 1
        self.end_of_document: int = ids[_end(path, ids, end)]
        self.fingerprint: str = hashlib.sha256(content + f"\nend {self.end_of_document}".encode()).hexdigest()

    def encode(self, text: bytes) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[list[int]]:
        """On all cores (RAYON_NUM_THREADS says otherwise). Bytes that are no utf-8 are refused."""
        try:
            words = [text.decode("utf-8") for text in texts]
        except UnicodeDecodeError as error:
            raise DataError(f"a Hugging Face tokenizer takes utf-8 text only: {error}") from error
        engine = self._engine
        try:
            return [found.ids for found in engine.encode_batch_fast(words, add_special_tokens=False)]
        except Exception as error:  # the package raises bare Exceptions
            raise DataError(
                f"data.tokenizer: {self._path} cannot encode the text ({error}): "
                f"give one that knows all of it, or has an unknown token"
            ) from error

    def decode(self, ids: Iterable[int]) -> bytes:
        """The end of a document decodes to nothing."""
        known = list(ids)
        for token in known:
            if not 0 <= token < self.vocab_size:
                raise DataError(f"token {token} is not in the vocabulary of {self.vocab_size}")
        text: str = self._engine.decode([token for token in known if token != self.end_of_document], skip_special_tokens=False)
        return text.encode()

    def losses(self, sample: bytes) -> str | None:
        """What to tell of a tokenizer that has no entry for some of the text, and so drops it or writes its unknown token.

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
        """The JSON of what encodes here, so that whoever loads it asks the model in the ids it was trained on."""
        used = self._used
        same = all(value == self._parts.get(key) for key, value in used.items())
        return self.content if same else msgspec.json.encode(used)

    @cached_property
    def _used(self) -> dict[str, Any]:
        """Truncation would drop text, padding and a post-processor's special tokens would add to it, and dropout give other
        tokens each time: of the file, all but these."""
        parts = self._parts | {"truncation": None, "padding": None, "post_processor": None}
        if "dropout" in parts["model"]:
            parts["model"] = parts["model"] | {"dropout": None}
        before = parts.get("pre_tokenizer")
        if parts.get("decoder") is None and isinstance(before, dict) and before.get("type") == "ByteLevel":
            parts["decoder"] = _FROM_BYTES  # or each byte of the text would come back as a letter
        return parts

    @cached_property
    def _engine(self) -> Any:
        package = importing("tokenizers", f"to use {self._path}", "tokenizers", "hf")
        try:
            engine = package.Tokenizer.from_str(msgspec.json.encode(self._used).decode())
        except Exception as error:
            raise DataError(f"data.tokenizer: {self._path} is refused by the package tokenizers: {error}") from error
        engine.encode_special_tokens = True
        return engine


def _read(path: Path) -> bytes:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise DataError(
            f"data.tokenizer = {str(path)!r}: must be 'bytes', 'bpe' or a Hugging Face tokenizer's JSON file, "
            f"and there is no file {file}{counted_from(file)}"
        )
    with opened(file) as stream:
        content = stream.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise DataError(f"data.tokenizer: {file} holds more than {FILE_BYTES_MAX} bytes: this is no tokenizer")
    return content


def _printed(text: str) -> Counter[str]:
    """All but blanks, of which \u2581 is sentencepiece's."""
    return Counter(letter for letter in text if not letter.isspace() and letter != "\u2581")


def _ids(parts: dict[str, Any]) -> dict[str, int]:
    """Every entry and its number: BPE, WordPiece and WordLevel map them, Unigram lists them with a score."""
    vocab = parts["model"]["vocab"]
    ids = {_listed(each, number): number for number, each in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    for added in parts.get("added_tokens") or ():
        ids[added["content"]] = added["id"]
    if not all(isinstance(number, int) and number >= 0 for number in ids.values()):
        raise ValueError("its entries are not numbered from 0")
    return ids


def _listed(entry: Any, number: int) -> str:
    if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
        raise ValueError(f"entry {number} of its vocabulary is no list of a text and a score")
    return entry[0]


def _end(path: Path, ids: dict[str, int], wanted: str) -> str:
    if wanted and wanted not in ids:
        raise DataError(f"data.end_of_document = {wanted!r}: the tokenizer {path} has no such entry")
    found = wanted or next((name for name in ENDS if name in ids), "")
    if not found:
        raise DataError(
            f"data.tokenizer: {path} has none of {', '.join(ENDS)}: say with data.end_of_document which entry ends a document"
        )
    return found
