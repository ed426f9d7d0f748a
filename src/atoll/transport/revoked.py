"""Certificates and tokens that no longer admit anyone: the file `revoked` beside the keys, which a running syncer reads again.

    certificate learner-3              by its common name; a new certificate of that name is revoked too
    token 1f0c5a9e2b7d4c68             by its id, which is not the token
    # a comment

`atoll keys DIR --revoke NAME` writes it; an editor may, too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from atoll.errors import UserError
from atoll.transport.keys import NAME, TOKEN_PREFIX, read_token

REVOKED_FILE: Final = "revoked"
KINDS: Final = ("certificate", "token")
_ID_CHARACTERS: Final = 16


def token_id(token: str) -> str:
    """Names a token without showing it."""
    return hashlib.sha256(b"atoll token id " + token.encode("utf8", "replace")).hexdigest()[:_ID_CHARACTERS]


def revoke(directory: Path, name: str) -> str:
    """Adds a line to the list in `directory`, and returns it. `name`: a certificate's, a file with a token, or a token itself."""
    line = _line(directory, name)
    path = directory / REVOKED_FILE
    try:
        known = path.read_text(encoding="utf8") if path.exists() else ""
        if line not in known.splitlines():
            before = known if known.endswith("\n") or not known else known + "\n"
            partial = path.with_name(path.name + ".partial")
            partial.write_text(f"{before}{line}\n", encoding="utf8")
            os.replace(partial, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}; give this user access to it") from None
    return line


def _line(directory: Path, name: str) -> str:
    if name.startswith(TOKEN_PREFIX):
        return f"token {token_id(name)}"
    for path in (directory / name, Path(name)):
        if path.is_file() and (token := read_token(path).reveal()).startswith(TOKEN_PREFIX):
            return f"token {token_id(token)}"
    if not NAME.fullmatch(name):
        raise UserError(f"--revoke {name}: is neither a file with a token nor a certificate's name, such as learner-0")
    return f"certificate {name}"


class Revoked:
    """The list, read again when its file has changed. It never raises: an outsider's call may be what reads it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / REVOKED_FILE
        self._stamp: tuple[int, int, int] | None = None
        self._lines: frozenset[tuple[str, str]] = frozenset()
        self.changes = 0
        """How often the file was found changed."""
        self.flaws: list[str] = []
        """Lines that are not understood; all others are in force. If the file cannot be read, the list before stays in force."""
        self.refresh()

    def refresh(self) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self.changes += 1
        try:
            lines = self._path.read_text(encoding="utf8", errors="replace").splitlines()
        except FileNotFoundError:
            lines = []
        except OSError as error:
            self.flaws = [f"{self._path} cannot be read: {error.strerror or error}; give this user access to it"]
            return
        self._take(lines)

    def certificate(self, name: str) -> bool:
        return bool(name) and ("certificate", name) in self._lines

    def token(self, identity: str) -> bool:
        return bool(identity) and ("token", identity) in self._lines

    def _stamp_now(self) -> tuple[int, int, int] | None:
        """Inode and size too: two writes within one tick of the clock have the same time."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        except OSError:
            return self._stamp
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _take(self, lines: Sequence[str]) -> None:
        found, self.flaws = set(), []
        for number, line in enumerate(lines, 1):
            kind, _, name = line.partition("#")[0].strip().partition(" ")
            if kind in KINDS and name.strip():
                found.add((kind, name.strip()))
            elif kind:
                right = "must be such as 'certificate learner-3' or 'token ID'"
                self.flaws.append(f"{self._path}, line {number}: {line[:80]!r} {right}")
        self._lines = frozenset(found)
