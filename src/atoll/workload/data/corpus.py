"""Text to train on. The default is the standard library of the running interpreter: real text on every machine.

Texts are whole documents in a fixed order with a fingerprint over their names and contents: in memory (`Corpus`) or in files
(`documents.py`). Skipped documents are counted and named with the reason: otherwise a corpus that shrank unnoticed would make
two runs differ without a visible cause.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from atoll.errors import DataError

STDLIB_BYTES_MAX: Final = 8_000_000
STDLIB_BYTES: Final = 4_000_000
"""Default amount of standard library text in a run."""
TEXT_BYTES_MAX: Final = 20_000_000_000
"""Limit for files, which are read as streams; their tokens are on disk and mapped into memory."""
HELDOUT_SHARE: Final = 0.05
CUT_BYTES: Final = 4096
"""A single text file is cut into documents of at least this size, so that some of them can be held out."""

NAMED_MAX: Final = 20
"""Skipped documents that are named; the others are only counted."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""(the activity, bytes done, total bytes)"""

_EXCLUDED: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "__pycache__"})
_BUILD_DIR: Final = "config-"
_BUILD_FILE: Final = "_sysconfigdata"
"""Build files of the interpreter: they contain paths of the build machine and would change the fingerprint."""


@dataclass(frozen=True)
class Skipped:
    path: str
    reason: str


class Skips:
    """Skipped documents: all are counted, the first few named."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.named: list[Skipped] = []

    def add(self, path: str, reason: str) -> None:
        self.counts[reason] += 1
        if len(self.named) < NAMED_MAX:
            self.named.append(Skipped(path, reason))

    def sentence(self, key: str) -> str | None:
        if not self.counts:
            return None
        total = self.counts.total()
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.counts.items()))
        more = f" and {total - len(self.named)} more" if total > len(self.named) else ""
        return f"{key}: left out {total} ({reasons}): " + ", ".join(skip.path for skip in self.named) + more


class Texts(Protocol):
    """Documents that can be read repeatedly, always the same in the same order."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    def read(self, skips: Skips | None = None, progress: Progress | None = None) -> Iterator[bytes]: ...
    def check_unchanged(self) -> None: ...


@dataclass(frozen=True)
class Corpus:
    """Texts in memory."""

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

    def read(self, skips: Skips | None = None, progress: Progress | None = None) -> Iterator[bytes]:
        return iter(self.documents)

    def check_unchanged(self) -> None:
        """Texts in memory do not change."""


@dataclass(frozen=True)
class Split:
    train: tuple[bytes, ...]
    heldout: tuple[bytes, ...]


def stdlib_corpus(max_bytes: int = STDLIB_BYTES_MAX) -> Corpus:
    """The standard library's sources, by relative path, up to the first document that would exceed max_bytes.

    It stops at the first such document even if smaller ones would still fit, so that a larger budget only appends documents.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    kept: list[tuple[str, bytes]] = []
    skipped: list[Skipped] = []
    total, full, over = 0, False, f"over the budget of {max_bytes} bytes"
    for relative in files_under(root, (".py",), _EXCLUDED):
        name = relative.split("/")[-1]
        if name.startswith(_BUILD_FILE) or relative.startswith(_BUILD_DIR):
            continue
        if full:
            skipped.append(Skipped(relative, over))
            continue
        try:
            content = (root / relative).read_bytes()
            content.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = "not utf-8" if isinstance(error, UnicodeDecodeError) else "unreadable"
            skipped.append(Skipped(relative, reason))
            continue
        full = total + len(content) > max_bytes
        if full:
            skipped.append(Skipped(relative, over))
        elif not content:
            skipped.append(Skipped(relative, "empty"))
        else:
            kept.append((relative, content))
            total += len(content)
    if not kept:
        why = f"{skipped[0].path} is {skipped[0].reason}" if skipped else "there are no .py files"
        raise DataError(f"no corpus from the standard library at {root}: {why}; name a text file or folder instead")
    return _corpus("stdlib", kept, skipped)


class HashSplit:
    """Selects held-out documents by the hash of their content; `see` must have all documents before `heldout` is called.

    By content, so that equal documents are on the same side, and so that adding or removing documents never moves another one
    to the other side. Each side gets at least one.
    """

    def __init__(self, share: float = HELDOUT_SHARE) -> None:
        self._limit = int(share * 2**64)
        self._least = self._greatest = b""
        self._out = self._in = False

    def see(self, key: bytes) -> None:
        out = self._by_share(key)
        self._out, self._in = self._out or out, self._in or not out
        self._least = min(self._least or key, key)
        self._greatest = max(self._greatest, key)

    def check(self, name: str) -> None:
        if self._least == self._greatest:
            raise DataError(
                f"the corpus {name} has only one distinct document, but training and held-out text need one "
                f"each: give more text (a single file is cut into documents of about {CUT_BYTES} bytes), or data.heldout"
            )

    def heldout(self, key: bytes) -> bool:
        if not self._out:
            return key == self._least
        if not self._in:
            return key != self._greatest
        return self._by_share(key)

    def _by_share(self, key: bytes) -> bool:
        return int.from_bytes(key[:8], "big") < self._limit


def document_key(document: bytes) -> bytes:
    return hashlib.sha256(document).digest()


def split_documents(corpus: Corpus, heldout_share: float = HELDOUT_SHARE) -> Split:
    split = HashSplit(heldout_share)
    keys = [document_key(document) for document in corpus.documents]
    for key in keys:
        split.see(key)
    split.check(corpus.name)
    pairs = list(zip(keys, corpus.documents, strict=True))
    return Split(
        train=tuple(document for key, document in pairs if not split.heldout(key)),
        heldout=tuple(document for key, document in pairs if split.heldout(key)),
    )


def files_under(root: Path, suffixes: tuple[str, ...], outside: frozenset[str] = frozenset()) -> Iterator[str]:
    """Relative paths with forward slashes, sorted as text, so that the order is the same on every file system."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in outside]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(suffixes)]
    return iter(sorted(found))


def _corpus(name: str, named: Sequence[tuple[str, bytes]], skipped: Sequence[Skipped]) -> Corpus:
    digest = hashlib.sha256()
    for path, content in named:
        # Lengths first: without them ("ab", "c") and ("a", "bc") would have the same digest.
        encoded = path.encode("utf-8", "surrogateescape")
        digest.update(len(encoded).to_bytes(8, "little") + len(content).to_bytes(8, "little") + encoded + content)
    return Corpus(name, tuple(content for _, content in named), digest.hexdigest(), tuple(skipped))
