"""A Hugging Face tokenizer from its JSON file. The package `tokenizers` is needed only to encode and decode.

What a run must know otherwise (entries, which token ends a document) is read from the JSON, so that a machine that finds
the tokens in its cache trains without the package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from atoll.errors import DataError
from atoll.workload.packing import counted_from, importing, opened

ENDS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
"""What tokenizers call the end of a document, tried in this order."""
FILE_BYTES_MAX: Final = 1 << 28


class JsonTokenizer:
    """Text never turns into special tokens: a document that holds the letters <|endoftext|> does not end there."""

    def __init__(self, path: Path, end: str = "") -> None:
        self._path = path
        content = _read(path)
        try:
            self._parts: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
            ids = _ids(self._parts)
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
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
        return [found.ids for found in self._engine.encode_batch_fast(words, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> bytes:
        """The end of a document decodes to nothing."""
        known = list(ids)
        for token in known:
            if not 0 <= token < self.vocab_size:
                raise DataError(f"token {token} is not in the vocabulary of {self.vocab_size}")
        text: str = self._engine.decode([token for token in known if token != self.end_of_document], skip_special_tokens=False)
        return text.encode()

    @cached_property
    def _engine(self) -> Any:
        package = importing("tokenizers", f"to use {self._path}", "tokenizers", "hf")
        # Truncation would drop text, padding invent it, and dropout give another text each time.
        model = {**self._parts["model"], "dropout": None} if "dropout" in self._parts["model"] else self._parts["model"]
        parts = {**self._parts, "truncation": None, "padding": None, "model": model}
        try:
            engine = package.Tokenizer.from_str(msgspec.json.encode(parts).decode())
        except Exception as error:  # the package raises bare Exceptions
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


def _ids(parts: dict[str, Any]) -> dict[str, int]:
    """Every entry and its number: BPE, WordPiece and WordLevel map them, Unigram lists them with a score."""
    vocab = parts["model"]["vocab"]
    ids = {str(each[0]): number for number, each in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    for added in parts.get("added_tokens") or ():
        ids[added["content"]] = added["id"]
    if not all(isinstance(number, int) and number >= 0 for number in ids.values()):
        raise ValueError("its entries are not numbered from 0")
    return ids


def _end(path: Path, ids: dict[str, int], wanted: str) -> str:
    if wanted and wanted not in ids:
        raise DataError(f"data.end_of_document = {wanted!r}: the tokenizer {path} has no such entry")
    found = wanted or next((name for name in ENDS if name in ids), "")
    if not found:
        raise DataError(
            f"data.tokenizer: {path} has none of {', '.join(ENDS)}: say with data.end_of_document which entry ends a document"
        )
    return found
