"""Text encoded once: tokens on disk beside what they were made from, mapped into memory by whoever trains on them.

A folder of the cache is named by the hash of the text's files, the tokenizer and the settings. It appears whole, by a
rename, and is checked by size and hash whenever it is used: one that was damaged is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from atoll.config import Data
from atoll.errors import DataError
from atoll.workload.data.corpus import (
    HELDOUT_SHARE,
    STDLIB_BYTES,
    TEXT_BYTES_MAX,
    Corpus,
    HashSplit,
    Progress,
    Skips,
    Texts,
    document_key,
    stdlib_corpus,
)
from atoll.workload.data.documents import FileTexts
from atoll.workload.data.packing import expand_home
from atoll.workload.data.stream import INT16_VOCAB_MAX, TokenData, token_data
from atoll.workload.data.tokenizer import (
    SAMPLE_BYTES_MAX,
    BpeTokenizer,
    ByteTokenizer,
    JsonTokenizer,
    Sampler,
    Tokenizer,
    train_bpe,
)

FORMAT: Final = 2
"""Of the cache; raised whenever the same text and settings would give other tokens or other files."""
NO_CACHE: Final = "off"
BATCH_BYTES: Final = 4_000_000
"""Text encoded at once. A Hugging Face encoding takes about a hundred bytes a token while it lasts."""
PIECE_BYTES: Final = 8_000_000
"""A longer document is encoded in pieces, cut at a line's end where there is one."""
LOSSES_BYTES: Final = 1 << 16
"""Text by which it is told that a tokenizer loses some."""
_SIDES: Final = ("train", "heldout")


@dataclass(frozen=True, eq=False)
class TextData:
    tokens: TokenData
    tokenizer: Tokenizer
    notes: tuple[str, ...] = ()
    """What the user should know: documents left out, a cache that was damaged."""


class Check(msgspec.Struct, frozen=True):
    size: int
    sha256: str


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the folder of the cache holds; about.json."""

    format: int
    fingerprint: str
    vocab_size: int
    documents: int
    text_bytes: dict[str, int]
    """Of the corpus and of the held-out text, by key: `data.max_bytes` is the most of each."""
    tokens: dict[str, int]
    files: dict[str, Check]
    notes: tuple[str, ...] = ()
    merges: tuple[tuple[int, int], ...] = ()
    """Of the BPE that was trained on this text."""
    check: str = ""
    """The hash of all of the above."""

    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, check=""))).hexdigest()


def text_data(data: Data, progress: Progress | None = None) -> TextData:
    """Train and held-out tokens as the config asks for, from the cache where they are there."""
    texts = _texts(data)
    heldout = FileTexts(data.heldout, data.field, "data.heldout", cut=False) if data.heldout else None
    if isinstance(texts, FileTexts) and heldout is not None:
        _check_apart(texts, heldout)
    tokenizer = named_tokenizer(data)
    if isinstance(texts, Corpus) and heldout is None and isinstance(tokenizer, ByteTokenizer):
        return TextData(token_data(texts, tokenizer), tokenizer)  # faster than reading it back would be
    work = Work(texts, heldout, tokenizer, data.vocab, data.max_bytes or TEXT_BYTES_MAX, progress or _silent)
    if data.cache == NO_CACHE:
        with tempfile.TemporaryDirectory(prefix="atoll-tokens-") as folder:
            work.encode_into(Path(folder))
            return work.loaded(Path(folder))  # on Unix, what is mapped outlives its name
    return _from_cache(expand_home(data.cache, f"data.cache = {data.cache!r}") if data.cache else default_cache(), work)


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification: a relative path there is to be ignored
        return Path(base) / "atoll"
    return expand_home("~/.cache", "data.cache = ''", f"name a folder with data.cache, or say data.cache={NO_CACHE}") / "atoll"


def named_tokenizer(data: Data) -> Tokenizer | None:
    """None: a BPE that has yet to be trained on the text."""
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    if data.tokenizer == "bpe":
        return None
    return JsonTokenizer(expand_home(data.tokenizer, f"data.tokenizer = {data.tokenizer!r}"), data.end_of_document)


def _texts(data: Data) -> Texts:
    if data.corpus == "stdlib":
        return stdlib_corpus(data.max_bytes or STDLIB_BYTES)
    return FileTexts(data.corpus, data.field, cut=not data.heldout)


def _check_apart(texts: FileTexts, heldout: FileTexts) -> None:
    both = {source.path.resolve() for source in texts.sources} & {source.path.resolve() for source in heldout.sources}
    if both:
        raise DataError(f"data.heldout: {min(both)} is in data.corpus too: what is held out must not be trained on")


def _silent(what: str, done: int, total: int) -> None:
    pass


# ---------------------------------------------------------------- encoding


@dataclass(frozen=True)
class Survey:
    """What the first reading finds. It comes before any encoding, so that a broken last line is told in seconds."""

    is_heldout: Callable[[bytes], bool]
    documents: int
    text_bytes: dict[str, int]
    notes: tuple[str, ...]


class Work:
    """One text to be encoded by one tokenizer."""

    def __init__(
        self, texts: Texts, heldout: FileTexts | None, tokenizer: Tokenizer | None, vocab: int, max_bytes: int, progress: Progress
    ) -> None:  # fmt: skip
        self._texts, self._heldout, self._tokenizer = texts, heldout, tokenizer
        self._vocab, self._max_bytes, self._progress = vocab, max_bytes, progress
        self._kept_out = heldout.fingerprint if heldout is not None else str(HELDOUT_SHARE)
        made_by = tokenizer.fingerprint if tokenizer is not None else f"bpe {vocab}"
        key = f"{FORMAT} {texts.fingerprint} {self._kept_out} {made_by} {np.dtype(np.int16).str}"
        self.key: Final = hashlib.sha256(key.encode()).hexdigest()

    def encode_into(self, folder: Path) -> About:
        survey = self._survey()
        tokenizer = self._tokenizer or self._trained(survey)
        done = documents = 0
        with ExitStack() as stack:
            writers = [stack.enter_context(TokenFile(folder / f"{side}.npy", tokenizer)) for side in _SIDES]
            for batch in _batches(self._sided(survey)):
                for (side, piece, ends), ids in zip(batch, tokenizer.encode_batch([piece for _, piece, _ in batch]), strict=True):
                    writers[side].append(ids, ends)
                    done, documents = done + len(piece), documents + ends
                self._progress("encoding text", done, sum(survey.text_bytes.values()))
        self._check_unchanged()
        identity = f"{self._texts.fingerprint} {tokenizer.fingerprint} {self._kept_out}"
        about = About(
            format=FORMAT, vocab_size=tokenizer.vocab_size, documents=documents, text_bytes=survey.text_bytes, notes=survey.notes,
            fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
            tokens={side: writer.count for side, writer in zip(_SIDES, writers, strict=True)},
            files={f"{side}.npy": _checked(folder / f"{side}.npy") for side in _SIDES},
            merges=tokenizer.merges if self._tokenizer is None and isinstance(tokenizer, BpeTokenizer) else (),
        )  # fmt: skip
        about = msgspec.structs.replace(about, check=about.digest())
        (folder / "about.json").write_bytes(msgspec.json.format(msgspec.json.encode(about)))
        return about

    def loaded(self, folder: Path) -> TextData:
        """Raises ValueError or OSError for a folder that is not as it was made."""
        about = msgspec.json.decode((folder / "about.json").read_bytes(), type=About)
        if about.check != about.digest() or about.format != FORMAT:
            raise ValueError("about.json")
        for name, check in about.files.items():
            if (folder / name).stat().st_size != check.size or _checked(folder / name) != check:
                raise ValueError(name)
        self._check_size(max(about.text_bytes.values()))
        train, heldout = (_mapped(folder / f"{side}.npy") for side in _SIDES)
        tokenizer = self._tokenizer or BpeTokenizer(about.merges)
        notes = (*_notes(self._texts), *_notes(self._heldout), *about.notes)
        return TextData(TokenData(train, heldout, about.vocab_size, about.fingerprint), tokenizer, notes)

    def _survey(self) -> Survey:
        keys, kept_out, heldout_size = self._heldout_keys()
        split, skips, sampler = HashSplit(), Skips(), Sampler(LOSSES_BYTES)
        documents = size = contaminated = 0
        for document in self._texts.read(skips, self._progress):
            key = document_key(document)
            split.see(key)
            sampler.see(key, document)
            contaminated += key in keys
            documents, size = documents + 1, size + len(document)
            self._check_size(size)
        if not documents:
            raise DataError(f"data.corpus: {self._texts.name} is empty: it must hold some text")
        if self._heldout is None:
            split.check(self._texts.name)
        notes = [skips.sentence("data.corpus"), kept_out.sentence("data.heldout")]
        if contaminated:
            notes.append(f"data.heldout: {contaminated} of the training documents are held out too, which flatters the loss")
        if isinstance(self._tokenizer, JsonTokenizer):
            notes.append(self._tokenizer.losses(sampler.sample()))
        is_heldout = split.heldout if self._heldout is None else _never
        sizes = {"data.corpus": size, "data.heldout": heldout_size}
        return Survey(is_heldout, documents, sizes, tuple(note for note in notes if note is not None))

    def _heldout_keys(self) -> tuple[set[bytes], Skips, int]:
        keys: set[bytes] = set()
        skips, size = Skips(), 0
        if self._heldout is not None:
            for document in self._heldout.read(skips, self._progress):
                keys.add(document_key(document))
                size += len(document)
                self._check_size(size)
            if not keys:
                raise DataError(f"data.heldout: {self._heldout.name} is empty: it must hold some text")
        return keys, skips, size

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise DataError(f"the text holds more than {self._max_bytes} bytes: give less, or raise data.max_bytes")

    def _trained(self, survey: Survey) -> BpeTokenizer:
        sampler = Sampler(SAMPLE_BYTES_MAX)
        for document in self._texts.read():
            key = document_key(document)
            if not survey.is_heldout(key):
                sampler.see(key, document)
        return train_bpe(sampler.sample(), self._vocab, complete=sampler.complete)

    def _sided(self, survey: Survey) -> Iterator[tuple[int, bytes]]:
        for document in self._texts.read():
            yield int(survey.is_heldout(document_key(document))), document
        if self._heldout is not None:
            for document in self._heldout.read():
                yield 1, document

    def _check_unchanged(self) -> None:
        self._texts.check_unchanged()
        if self._heldout is not None:
            self._heldout.check_unchanged()


def _notes(texts: Texts | None) -> tuple[str, ...]:
    return texts.notes if isinstance(texts, FileTexts) else ()


def _never(key: bytes) -> bool:
    return False


def _batches(documents: Iterator[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes, bool]]]:
    """(side, text, whether a document ends with it), about BATCH_BYTES at a time."""
    batch: list[tuple[int, bytes, bool]] = []
    size = 0
    for side, document in documents:
        for piece, ends in _pieces(document):
            batch.append((side, piece, ends))
            size += len(piece)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(document: bytes) -> Iterator[tuple[bytes, bool]]:
    start = 0
    while len(document) - start > PIECE_BYTES:
        end = document.rfind(b"\n", start, start + PIECE_BYTES) + 1
        if end <= start:
            end = start + PIECE_BYTES
            while document[end] & 0xC0 == 0x80:  # inside a character
                end -= 1
        yield document[start:end], False
        start = end
    yield document[start:], True


class TokenFile:
    """A .npy file that grows. numpy leaves room in the header for a longer shape."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.count = 0
        self._end = tokenizer.end_of_document
        self._dtype = np.dtype(np.int16 if tokenizer.vocab_size <= INT16_VOCAB_MAX else np.int32)
        self._file: BinaryIO = path.open("wb")
        self._write_header()
        self._start = self._file.tell()

    def append(self, ids: Sequence[int], ends: bool) -> None:
        tokens = np.array([*ids, self._end] if ends else ids, self._dtype)
        self._file.write(tokens.tobytes())
        self.count += tokens.size

    def _write_header(self) -> None:
        shape = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._file, shape)

    def __enter__(self) -> TokenFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()
            assert self._file.tell() == self._start, "the header grew over the first tokens"


def _checked(path: Path) -> Check:
    with path.open("rb") as file:
        return Check(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _mapped(path: Path) -> Tensor:
    """Pages are shared by all processes; copied on a write, which nobody does, because torch knows no read-only tensors."""
    array = np.load(path, mmap_mode="c", allow_pickle=False) if path.stat().st_size else np.empty(0, np.int16)
    return torch.from_numpy(array) if array.size else torch.empty(0, dtype=torch.int16)


# ---------------------------------------------------------------- the cache


def _from_cache(base: Path, work: Work) -> TextData:
    folder = base / "tokens" / work.key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")) as alone:
            if alone:
                for left in folder.parent.glob(f"{work.key[:16]}-*.part"):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
            return _found_or_made(folder, work)
    except OSError as error:
        raise DataError(
            f"the cache of tokens at {folder.parent} cannot be used ({error.strerror or error}): "
            f"name another folder with data.cache, or say data.cache={NO_CACHE}"
        ) from error


def _found_or_made(folder: Path, work: Work) -> TextData:
    damaged = ""
    if folder.exists():
        try:
            return work.loaded(folder)
        except (ValueError, OSError) as error:
            damaged = f"the cached tokens in {folder} were damaged ({_first_line(error)}) and are made anew"
            shutil.rmtree(folder)
    part = folder.parent / f"{work.key[:16]}-{os.getpid()}-{secrets.token_hex(4)}.part"
    part.mkdir()
    try:
        work.encode_into(part)
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():
                raise  # else somebody without a lock was faster, and theirs is as good
    finally:
        shutil.rmtree(part, ignore_errors=True)
    made = work.loaded(folder)
    return TextData(made.tokens, made.tokenizer, (damaged, *made.notes)) if damaged else made


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """One process of a machine encodes, the others wait for it. Without a lock they would only do the work twice."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError:  # a file system without locks
            alone = False
        yield alone


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
