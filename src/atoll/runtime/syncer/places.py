"""The syncer's door: who may join, under which id and incarnation, and what a learner is told when it is let in.

A token lets a process in once. It is then given a place (learner, incarnation) and a key for it, which it shows with
every connection; the key is a function of the run's secret, so a syncer that comes back knows it again. Places are
written down before they are given away: no two processes ever hold the same incarnation.
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
"""What peers make us say."""

PROTOCOL = 2
"""Two ends that disagree on the words must not talk."""
FRESH_SECONDS = 15.0
"""A place given away, or whose process was here, is kept for it so long."""
SECRET_BYTES = 32


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    protocol: int = PROTOCOL
    wants: int = -1
    """The id this process would like, or -1."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    learner: LearnerId
    incarnation: Incarnation
    key: str
    run: str
    epoch: int
    config: dict[str, Any]
    data_fingerprint: str
    layout: str
    """Digest of the fragments, to be met by the learner's own; empty while nobody has brought a model."""
    needs_model: bool = False
    tokenizer: str = ""
    """Its fingerprint, to be met by the learner's own; empty where there is none."""


class Placed(msgspec.Struct, frozen=True):
    learner: LearnerId
    incarnation: Incarnation


class Places:
    def __init__(
        self, directory: Path, run: str, tokens: JoinTokens, members_max: int, is_here: Callable[[LearnerId], bool],
        now: float = 0.0,
    ) -> None:  # fmt: skip
        self._run = run
        self._tokens = tokens
        self._members_max = members_max
        self._is_here = is_here
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
        """A connection under a place that was given."""
        try:
            placed = Placed(int(metadata.get("learner", "")), int(metadata.get("incarnation", "")))
        except ValueError:
            self._refuse("place", "a connection must name its learner and incarnation")
        if not 0 <= placed.learner < self._members_max:  # below zero are the keys of tickets, which are no places
            self._refuse("place", "a connection must name a learner that can be")
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
        """A peer's state is given to whoever shows this."""
        return session_key(self._secret, -2 - ticket, newcomer)

    # ------------------------------------------------------------ places

    def place(self, wants: int, now: float) -> tuple[Placed, str]:
        learner = self._choose(wants, now)
        placed = Placed(learner, self._last.get(learner, -1) + 1)
        self._write_down(placed)
        self._last[learner] = placed.incarnation
        self._given_at[learner] = now
        return placed, session_key(self._secret, placed.learner, placed.incarnation)

    def _write_down(self, placed: Placed) -> None:
        before = self._file.stat().st_size if self._file.exists() else 0
        try:
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode(placed) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            os.truncate(self._file, before)
            self._refuse("disk", "the syncer's disk is full", retry=True)

    def touched(self, learner: LearnerId, now: float) -> None:
        """Its connection opened or closed: who is away for a moment keeps its place."""
        self._given_at[learner] = now

    def left(self, learner: LearnerId) -> None:
        self._given_at.pop(learner, None)

    def _choose(self, wants: int, now: float) -> LearnerId:
        if wants >= 0:
            if wants >= self._members_max:
                self._refuse("id", f"learner {wants}: ids go from 0 to {self._members_max - 1} (limits.members_max)")
            if self._is_here(wants):
                self._refuse("id", f"learner {wants} is here already", retry=True)
            return wants
        for learner in range(self._members_max):
            taken = now - self._given_at.get(learner, -FRESH_SECONDS) < FRESH_SECONDS
            if not taken and not self._is_here(learner):
                return learner
        self._refuse("id", f"all {self._members_max} places are taken (limits.members_max)", retry=True)


def _placed(line: bytes, file: Path, number: int) -> Placed:
    """To pass over a line that says nothing would give its incarnation away twice."""
    try:
        return msgspec.json.decode(line, type=Placed)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        right = 'must be such as {"learner":0,"incarnation":0}'
        raise DataError(f"{file}, line {number}: is no place that was given away ({error}); {right}") from None


def _secret(path: Path) -> bytes:
    if not path.exists() or path.stat().st_size < SECRET_BYTES:
        write_private(path, random_token_secret())
    return path.read_bytes()


def write_private(path: Path, content: bytes) -> None:
    """Only the owner may read it, from the first moment on; whole, or not at all."""
    partial = path.with_name(path.name + ".partial")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(file, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


def new_run_id() -> str:
    return secrets.token_hex(6)
