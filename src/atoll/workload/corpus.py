"""Text to train on. The default is the running interpreter's own standard library: real text on every machine.

A corpus is a tuple of whole documents in a fixed order with a fingerprint over their names and contents. What was left
out is named, with its reason: a corpus that quietly shrank would make two runs differ for no visible cause.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.errors import DataError

STDLIB_BYTES_MAX: Final = 8_000_000
TEXT_BYTES_MAX: Final = 256_000_000
"""Tokens are packed in memory, by Python: beyond this a corpus needs another tool than this one."""
HELDOUT_SHARE: Final = 0.05
CUT_BYTES: Final = 4096
"""A lone text file is cut into documents of at least this size, so that some of them can be held out."""

_OUTSIDE: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "__pycache__"})
_BUILD_DIR: Final = "config-"
_BUILD_FILE: Final = "_sysconfigdata"
"""Written when the interpreter was built: paths of that machine, which would give each machine its own fingerprint."""


@dataclass(frozen=True)
class Skipped:
    path: str
    reason: str


@dataclass(frozen=True)
class Corpus:
    name: str
    documents: tuple[bytes, ...]
    fingerprint: str
    skipped_files: tuple[Skipped, ...] = ()

    @property
    def skipped(self) -> int:
        return len(self.skipped_files)

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.documents))


@dataclass(frozen=True)
class Split:
    train: tuple[bytes, ...]
    heldout: tuple[bytes, ...]


def stdlib_corpus(max_bytes: int = STDLIB_BYTES_MAX) -> Corpus:
    """The standard library's sources, by relative path, up to the first document that would exceed max_bytes.

    Up to the first, not whatever still fits: so a larger budget only ever adds documents at the end.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    kept: list[tuple[str, bytes]] = []
    skipped: list[Skipped] = []
    total, full = 0, False
    for relative in _files_under(root, (".py",), _OUTSIDE):
        name = relative.split("/")[-1]
        if name.startswith(_BUILD_FILE) or relative.startswith(_BUILD_DIR):
            continue
        try:
            content = (root / relative).read_bytes()
            content.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = "not utf-8" if isinstance(error, UnicodeDecodeError) else "unreadable"
            skipped.append(Skipped(relative, reason))
            continue
        full = full or total + len(content) > max_bytes
        if full:
            skipped.append(Skipped(relative, f"over the budget of {max_bytes} bytes"))
        elif not content:
            skipped.append(Skipped(relative, "empty"))
        else:
            kept.append((relative, content))
            total += len(content)
    if not kept:
        why = f"{skipped[0].path} is {skipped[0].reason}" if skipped else "there are no .py files"
        raise DataError(f"no corpus from the standard library at {root}: {why}; name a text file or folder instead")
    return _corpus("stdlib", kept, skipped)


def text_corpus(path: str | Path, max_bytes: int = TEXT_BYTES_MAX) -> Corpus:
    """A plain text file, or every .txt and .py file under a folder. The user's own data, so nothing is forgiven."""
    root = Path(path)
    if root.is_file():
        sources = [(root.name, root)]
    elif root.is_dir():
        sources = [(relative, root / relative) for relative in _files_under(root, (".txt", ".py"), frozenset())]
        if not sources:
            raise DataError(f"the corpus folder {root} has no .txt or .py file: put text there, or name another folder")
    else:
        raise DataError(f"the corpus {root} does not exist: name a text file, or a folder of .txt or .py files")
    kept: list[tuple[str, bytes]] = []
    skipped: list[Skipped] = []
    total = 0
    for name, file in sources:
        content = _read_text(file)
        total += len(content)
        if total > max_bytes:
            raise DataError(f"the corpus {root} holds more than {max_bytes} bytes: give less text")
        if content:
            kept.append((name, content))
        else:
            skipped.append(Skipped(name, "empty"))
    if not kept:
        raise DataError(f"the corpus {root} is empty: it must hold some text")
    if len(kept) == 1:
        name, content = kept[0]
        kept = [(f"{name}#{index}", piece) for index, piece in enumerate(_cut(content))]
    return _corpus(root.name, kept, skipped)


def split_documents(corpus: Corpus, heldout_share: float = HELDOUT_SHARE) -> Split:
    """Train and held-out documents, chosen by the hash of each document's content.

    By content, so that a document that is in the corpus twice falls on one side both times, and so that adding or
    removing documents never moves another one across.
    """
    keys = [hashlib.sha256(document).digest() for document in corpus.documents]
    limit = int(heldout_share * 2**64)
    out = {key for key in keys if int.from_bytes(key[:8], "big") < limit} or {min(keys)}
    if len(out) == len(set(keys)):
        if len(out) == 1:
            raise DataError(
                f"the corpus {corpus.name} has only one distinct document, but training and held-out text need one "
                f"each: give more text (a lone file is cut into documents of about {CUT_BYTES} bytes)"
            )
        out.remove(max(out))
    pairs = list(zip(keys, corpus.documents, strict=True))
    return Split(
        train=tuple(document for key, document in pairs if key not in out),
        heldout=tuple(document for key, document in pairs if key in out),
    )


def _files_under(root: Path, suffixes: tuple[str, ...], outside: frozenset[str]) -> Iterator[str]:
    """Relative paths with forward slashes, sorted as text: the same order on every file system."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in outside]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(suffixes)]
    return iter(sorted(found))


def _read_text(file: Path) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"the corpus file {file} cannot be read: {error.strerror}") from error
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the corpus file {file} is not utf-8 (byte {error.start} is 0x{content[error.start]:02x}): convert it"
        ) from error
    return content


def _cut(content: bytes) -> list[bytes]:
    """Pieces that join up to the content, cut after a blank line where one comes soon, else after a line."""
    pieces, start = [], 0
    while len(content) - start > 2 * CUT_BYTES:
        least = start + CUT_BYTES
        blank = content.find(b"\n\n", least, least + CUT_BYTES)
        end = blank + 2 if blank >= 0 else content.find(b"\n", least) + 1
        if end <= 0:
            break
        pieces.append(content[start:end])
        start = end
    if start < len(content):
        pieces.append(content[start:])
    return pieces


def _corpus(name: str, named: Sequence[tuple[str, bytes]], skipped: Sequence[Skipped]) -> Corpus:
    digest = hashlib.sha256()
    for path, content in named:
        # Lengths first: without them ("ab", "c") and ("a", "bc") would be the same corpus.
        encoded = path.encode("utf-8", "surrogateescape")
        digest.update(len(encoded).to_bytes(8, "little") + len(content).to_bytes(8, "little") + encoded + content)
    return Corpus(name, tuple(content for _, content in named), digest.hexdigest(), tuple(skipped))
