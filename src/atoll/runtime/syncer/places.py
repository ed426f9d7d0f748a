"""Admission to a run: which processes may join, under which id and incarnation, and what an admitted learner receives.

A token admits a process once. The process then gets a place (learner, incarnation) and a key for it, which it presents with
every connection. The key is a function of the run's secret, so a restarted syncer recognises it. A place is on disk before it
is given out: no two processes ever have the same incarnation.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from atoll.errors import DataError
from atoll.ids import Incarnation, LearnerId, worker_name
from atoll.runtime.log import rate_limited
from atoll.transport import Refused
from atoll.transport.keys import JoinTokens, random_token_secret, session_key, session_ok

peer_log = rate_limited("atoll.syncer.peers")
"""For lines that peers cause: rate limited."""

PROTOCOL = 3
"""The version of the messages; both ends must have the same."""
RESERVED_SECONDS = 15.0
"""A place stays reserved this long after it was given out, or after its process disconnected."""
SECRET_BYTES = 32


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    protocol: int = PROTOCOL
    wants: int = -1
    """The learner id that this process asks for, or -1 for any."""
    codecs: dict[str, str] = {}
    """The codecs that this process has, with a digest of each row."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    learner: LearnerId
    incarnation: Incarnation
    key: str
    run: str
    epoch: int
    config: dict[str, Any]
    data_fingerprint: str
    layout: str
    """Digest of the fragments, which the learner's own must equal; empty before a model is uploaded."""
    needs_model: bool = False
    tokenizer: str = ""
    """Its fingerprint, which the learner's own must equal; empty if the run has no tokenizer."""


class Placed(msgspec.Struct, frozen=True):
    learner: LearnerId
    incarnation: Incarnation


class Places:
    def __init__(
        self, directory: Path, run: str, tokens: JoinTokens, members_max: int, is_connected: Callable[[LearnerId], bool],
        now: float = 0.0,
    ) -> None:  # fmt: skip
        self._run = run
        self._tokens = tokens
        self._members_max = members_max
        self._is_connected = is_connected
        self._file = directory / "places.jsonl"
        self._secret = _secret(directory / "run.secret")
        self._last: dict[LearnerId, Incarnation] = {}
        self._given_at: dict[LearnerId, float] = {}
        self.refused: Counter[str] = Counter()
        if self._file.exists():
            whole, end, _ = self._file.read_bytes().rpartition(b"\n")  # a killed writer may leave half a line
            for number, line in enumerate(whole.split(b"\n") if end else (), 1):
                placed = _placed(line, self._file, number)
                self._last[placed.learner] = placed.incarnation
            os.truncate(self._file, len(whole) + len(end))
        self._given_at = dict.fromkeys(self._last, now)

    # ------------------------------------------------------------ tokens and keys

    def check_token(self, metadata: Mapping[str, str]) -> None:
        wrong = self._tokens.check(metadata.get("token", ""), self._run)
        if wrong is not None:
            self._refuse("token", wrong)
        if metadata.get("run", self._run) != self._run:
            self._refuse("run", f"this is run {self._run}, not {metadata['run'][:80]}")

    def admit(self, metadata: Mapping[str, str]) -> Placed:
        """Checks a connection against the places given out."""
        try:
            placed = Placed(int(metadata.get("learner", "")), int(metadata.get("incarnation", "")))
        except ValueError:
            self._refuse("place", "a connection must name its learner and incarnation")
        if not 0 <= placed.learner < self._members_max:  # negative ids are for the keys of tickets, which are not places
            self._refuse("place", f"a connection must name a learner from 0 to {self._members_max - 1}")
        if metadata.get("run", "") != self._run:
            self._refuse("run", f"this is run {self._run}, not {metadata.get('run', '')[:80]!r}")
        if not session_ok(self._secret, placed.learner, placed.incarnation, metadata.get("key", "")):
            self._refuse("key", f"wrong key for {worker_name(placed.learner)}, incarnation {placed.incarnation}")
        if placed.incarnation < self._last.get(placed.learner, -1):
            last = self._last[placed.learner]
            self._refuse("older", f"incarnation {placed.incarnation} of {worker_name(placed.learner)} was replaced by {last}")
        return placed

    def _refuse(self, kind: str, reason: str, *, retry: bool = False) -> NoReturn:
        self.refused[kind] += 1
        peer_log.warning("refused: %s", reason)
        raise Refused(reason, retry=retry)

    def ticket_key(self, ticket: int, newcomer: LearnerId) -> str:
        """The key with which a newcomer gets a peer's state."""
        return session_key(self._secret, -2 - ticket, newcomer)

    # ------------------------------------------------------------ places

    def place(self, wants: int, now: float) -> tuple[Placed, str]:
        learner = self._choose(wants, now)
        placed = Placed(learner, self._last.get(learner, -1) + 1)
        self._append(placed)
        self._last[learner] = placed.incarnation
        self._given_at[learner] = now
        return placed, session_key(self._secret, placed.learner, placed.incarnation)

    def _append(self, placed: Placed) -> None:
        before = self._file.stat().st_size if self._file.exists() else 0
        try:
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode(placed) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            os.truncate(self._file, before)
            self._refuse("disk", "the syncer's disk is full", retry=True)

    def touch(self, learner: LearnerId, now: float) -> None:
        """Its connection opened or closed: a learner that is briefly disconnected keeps its place."""
        self._given_at[learner] = now

    def release(self, learner: LearnerId) -> None:
        self._given_at.pop(learner, None)

    def _choose(self, wants: int, now: float) -> LearnerId:
        if wants >= 0:
            if wants >= self._members_max:
                self._refuse("id", f"learner {wants}: ids go from 0 to {self._members_max - 1} (limits.members_max)")
            if self._is_connected(wants):
                self._refuse("id", f"learner {wants} is already connected", retry=True)
            return wants
        for learner in range(self._members_max):
            taken = now - self._given_at.get(learner, -RESERVED_SECONDS) < RESERVED_SECONDS
            if not taken and not self._is_connected(learner):
                return learner
        self._refuse("id", f"all {self._members_max} places are taken (limits.members_max)", retry=True)


def _placed(line: bytes, file: Path, number: int) -> Placed:
    """An unreadable line is an error: to skip it could give its incarnation out twice."""
    try:
        return msgspec.json.decode(line, type=Placed)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        right = 'must be such as {"learner":0,"incarnation":0}'
        raise DataError(f"{file}, line {number}: is not a place ({error}); {right}") from None


def _secret(path: Path) -> bytes:
    if not path.exists() or path.stat().st_size < SECRET_BYTES:
        write_private(path, random_token_secret())
    return path.read_bytes()


def write_private(path: Path, content: bytes) -> None:
    """Atomically, and never readable by others."""
    partial = path.with_name(path.name + ".partial")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(file, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


def new_run_id() -> str:
    return secrets.token_hex(6)
