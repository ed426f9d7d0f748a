"""Admission to a run: which processes may join, under which id and incarnation, and what an admitted learner receives.

A token admits a process once. The process then gets a place (learner, incarnation) and a key for it, which it presents with
every connection. The key is a function of the run's secret, so a restarted syncer recognises it. A place is on disk before it
is given out: no two processes ever have the same incarnation.

A place belongs to the certificate that first took it. Without certificates it belongs to the process that got its place key,
which that process keeps and shows when it comes back; once it is away for longer than a reservation lasts, another may take the
place.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from atoll.config import Config
from atoll.errors import UNDECODABLE, DataError
from atoll.ids import Incarnation, LearnerId, worker_name
from atoll.runtime.log import rate_limited
from atoll.transport import CERTIFICATE_KEY, Refused
from atoll.transport.keys import JoinTokens, place_key, place_ok, random_token_secret, session_key, session_ok
from atoll.transport.revoked import Revoked, token_id

peer_log = rate_limited("atoll.syncer.peers")
"""For lines that peers cause: rate limited."""

PROTOCOL = 7
"""The version of the messages; both ends must have the same."""
RESERVED_SECONDS = 15.0
"""A place stays reserved this long after it was given out, or after its process disconnected."""
RETAKE_SECONDS = 1.0
"""The least time between two incarnations of a place. Each is written and synced, so one client must not ask for many."""
SECRET_BYTES = 32


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    protocol: int = PROTOCOL
    wants: int = -1
    """The learner id that this process asks for, or -1 for any."""
    codecs: dict[str, str] = {}
    """The codecs that this process has, with a digest of each row."""
    place: int = -1
    """The place that it had before, with the place key that it got for it."""
    place_key: str = ""


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
    place_key: str = ""
    """To show when this process comes back; empty where certificates say who it is."""


class Placed(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of places.jsonl. Lines of earlier versions have the first two fields only."""

    learner: LearnerId
    incarnation: Incarnation
    certificate: str = ""
    """The name of the certificate that the place belongs to."""
    token: str = ""
    """The id of the token that admitted the process."""
    since: Incarnation = 0
    """The incarnation with which its place key was given out."""


class Caller(NamedTuple):
    """Who asks for a place."""

    certificate: str = ""
    token: str = ""
    place: LearnerId = -1
    key: str = ""


class PlaceLimits(NamedTuple):
    members: int
    per_certificate: int = 1
    per_token: int = 1 << 30
    return_seconds: float = 0.0

    @classmethod
    def of(cls, config: Config) -> PlaceLimits:
        limits = config.limits
        per_token = limits.places_per_token or max(16, 4 * config.learners)
        return cls(limits.members_max, limits.learners_per_certificate, per_token, limits.return_seconds)


class Places:
    def __init__(
        self, directory: Path, run: str, tokens: JoinTokens, limits: PlaceLimits, is_connected: Callable[[LearnerId], bool],
        is_expelled: Callable[[LearnerId], bool], revoked: Revoked, now: float = 0.0,
    ) -> None:  # fmt: skip
        self._run = run
        self._tokens = tokens
        self._limits = limits
        self._is_connected = is_connected
        self._is_expelled = is_expelled
        self._revoked = revoked
        self._file = directory / "places.jsonl"
        self._secret = _secret(directory / "run.secret")
        self._last: dict[LearnerId, Placed] = {}
        self._placed_at: dict[LearnerId, float] = {}
        self._returns_by: dict[LearnerId, float] = {}
        self.refused: Counter[str] = Counter()
        self.certified = False
        """The syncer listens with TLS, so every client shows a certificate."""
        if self._file.exists():
            whole, end, _ = self._file.read_bytes().rpartition(b"\n")  # a killed writer may leave half a line
            for number, line in enumerate(whole.split(b"\n") if end else (), 1):
                placed = _placed(line, self._file, number)
                self._last[placed.learner] = placed
            os.truncate(self._file, len(whole) + len(end))
        self._reserved_at = dict.fromkeys(self._last, now)

    # ------------------------------------------------------------ tokens and keys

    def check_token(self, metadata: Mapping[str, str]) -> str:
        """Returns the token's id."""
        wrong = self._tokens.check(metadata.get("token", ""), self._run)
        if wrong is not None:
            self._refuse("token", wrong)
        if metadata.get("run", self._run) != self._run:
            self._refuse("run", f"this is run {self._run}, not {metadata['run'][:80]}")
        identity = token_id(metadata["token"])
        self._check_revoked(self._certificate(metadata), identity)
        return identity

    def admit(self, metadata: Mapping[str, str]) -> Placed:
        """Checks a connection against the places given out."""
        try:
            learner, incarnation = int(metadata.get("learner", "")), int(metadata.get("incarnation", ""))
        except ValueError:
            self._refuse("place", "a connection must name its learner and incarnation")
        if not 0 <= learner < self._limits.members:  # negative ids are for the keys of tickets, which are not places
            self._refuse("place", f"a connection must name a learner from 0 to {self._limits.members - 1}")
        if metadata.get("run", "") != self._run:
            self._refuse("run", f"this is run {self._run}, not {metadata.get('run', '')[:80]!r}")
        if not session_ok(self._secret, learner, incarnation, metadata.get("key", "")):
            self._refuse("key", f"wrong key for {worker_name(learner)}, incarnation {incarnation}")
        last, certificate = self._last.get(learner, Placed(learner, incarnation)), self._certificate(metadata)
        if certificate and last.certificate not in ("", certificate):
            words = f"{worker_name(learner)} belongs to certificate {last.certificate}, not to {certificate[:80]}"
            self._refuse("certificate", words)
        self._check_revoked(certificate, last.token)
        if incarnation < last.incarnation:
            self._refuse(
                "older", f"incarnation {incarnation} of {worker_name(learner)} was replaced by {last.incarnation}", rejoin=True
            )
        return Placed(learner, incarnation)

    def _certificate(self, metadata: Mapping[str, str]) -> str:
        found = metadata.get(CERTIFICATE_KEY, "")
        if self.certified and not found:
            self._refuse("certificate", "a certificate must have a common name; make it with `atoll keys`")
        return found

    def _check_revoked(self, certificate: str, token: str) -> None:
        self._revoked.refresh()
        if self._revoked.certificate(certificate):
            self._refuse("revoked", f"certificate {certificate[:80]} is revoked")
        if self._revoked.token(token):
            self._refuse("revoked", f"the token with which it joined ({token}) is revoked")

    def _refuse(self, kind: str, reason: str, *, retry: bool = False, rejoin: bool = False) -> NoReturn:
        self.refused[kind] += 1
        peer_log.warning("refused: %s", reason)
        raise Refused(reason, retry=retry, rejoin=rejoin)

    def ticket_key(self, ticket: int, newcomer: LearnerId) -> str:
        """The key with which a newcomer gets a peer's state."""
        return session_key(self._secret, -2 - ticket, newcomer)

    # ------------------------------------------------------------ places

    def place(self, wants: int, now: float, caller: Caller) -> tuple[Placed, str, str]:
        """The place, its session key, and its place key: empty for a caller with a certificate."""
        learner = self._choose(wants, now, caller)
        if now - self._placed_at.get(learner, -RETAKE_SECONDS) < RETAKE_SECONDS:
            self._refuse("id", f"learner {learner} was given out less than {RETAKE_SECONDS:.0f} s ago", retry=True)
        self._check_token_limit(learner, caller.token)
        before = self._last.get(learner)
        incarnation = before.incarnation + 1 if before is not None else 0
        since = before.since if before is not None and self._owns(caller, before) else incarnation
        certificate = caller.certificate or (before.certificate if before is not None else "")
        placed = Placed(learner, incarnation, certificate, caller.token, since)
        self._append(placed)
        self._last[learner] = placed
        self._reserved_at[learner] = self._placed_at[learner] = now
        self._returns_by.pop(learner, None)
        again = "" if caller.certificate else place_key(self._secret, learner, since)
        return placed, session_key(self._secret, learner, incarnation), again

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
        self._reserved_at[learner] = now

    def left(self, learner: LearnerId, now: float, *, returns: bool) -> None:
        """It said Goodbye. The place of one that means to return goes to nobody by chance."""
        self._reserved_at.pop(learner, None)
        self._returns_by.pop(learner, None)
        if returns:
            self._returns_by[learner] = now + self._limits.return_seconds

    def _owns(self, caller: Caller, placed: Placed) -> bool:
        if caller.certificate:
            return placed.certificate == caller.certificate
        return caller.place == placed.learner and place_ok(self._secret, placed.learner, placed.since, caller.key)

    def _is_reserved(self, learner: LearnerId, now: float) -> bool:
        return now - self._reserved_at.get(learner, -RESERVED_SECONDS) < RESERVED_SECONDS

    # ------------------------------------------------------------ which place

    def _choose(self, wants: int, now: float, caller: Caller) -> LearnerId:
        if wants >= 0:
            self._check_wanted(wants, now, caller)
            return wants
        for learner in self._own_places(caller, now):
            if self._is_expelled(learner) and (not caller.certificate or self._limits.per_certificate == 1):
                self._refuse("expelled", f"learner {learner} was expelled")
            if not self._is_connected(learner) and not self._is_expelled(learner):
                return learner
            if not caller.certificate:  # the end of its old connection will be noticed in seconds
                self._refuse("id", f"learner {learner} is already connected", retry=True)
        self._check_certificate_limit(caller, retry=True)
        kept: list[LearnerId] = []
        for learner in range(self._limits.members):
            theirs = caller.certificate and learner in self._last and self._last[learner].certificate
            taken = self._is_reserved(learner, now) or self._is_connected(learner) or self._is_expelled(learner)
            if not theirs and not taken:
                if self._returns_by.get(learner, now) <= now:
                    return learner
                kept.append(learner)
        if kept:  # a learner that is here is worth more than one that may come back: that one gets another place
            return min(kept, key=lambda learner: self._returns_by[learner])
        self._refuse("id", f"all {self._limits.members} places are taken (limits.members_max)", retry=True)

    def _own_places(self, caller: Caller, now: float) -> Iterator[LearnerId]:
        """The places to which this caller comes back. Several learners on one certificate may come at once, so those that were
        given out a moment ago are left out."""
        alone = self._limits.per_certificate == 1
        for learner, placed in sorted(self._last.items()):
            if self._owns(caller, placed) and (alone or not caller.certificate or not self._is_reserved(learner, now)):
                yield learner

    def _check_wanted(self, wants: int, now: float, caller: Caller) -> None:
        if wants >= self._limits.members:
            self._refuse("id", f"learner {wants}: ids go from 0 to {self._limits.members - 1} (limits.members_max)")
        if self._is_expelled(wants):
            self._refuse("expelled", f"learner {wants} was expelled")
        placed = self._last.get(wants)
        if placed is not None and caller.certificate and placed.certificate not in ("", caller.certificate):
            words = f"learner {wants} belongs to certificate {placed.certificate}; ask for another id, or for none"
            self._refuse("certificate", words)
        if self._is_connected(wants):
            self._refuse("id", f"learner {wants} is already connected", retry=True)
        if placed is None or not self._owns(caller, placed):
            self._check_certificate_limit(caller, retry=False)
            if self._is_reserved(wants, now):
                self._refuse("id", f"learner {wants} is reserved for the process that had it, which may come back", retry=True)

    def _check_certificate_limit(self, caller: Caller, *, retry: bool) -> None:
        name, most = caller.certificate, self._limits.per_certificate
        places = [learner for learner, placed in sorted(self._last.items()) if name and placed.certificate == name]
        if len(places) >= most:
            have = f"certificate {name[:80]} has learner {', '.join(map(str, places))} already"
            remedy = "give each learner its own certificate (`atoll keys DIR --add`), or raise the limit"
            self._refuse("certificate", f"{have} (limits.learners_per_certificate = {most}): {remedy}", retry=retry)

    def _check_token_limit(self, learner: LearnerId, token: str) -> None:
        places = {other for other, placed in self._last.items() if token and placed.token == token} - {learner}
        if len(places) >= self._limits.per_token:
            have = f"token {token} has admitted {len(places)} learners already"
            self._refuse("token", f"{have} (limits.places_per_token = {self._limits.per_token}): use another, or raise the limit")


def _placed(line: bytes, file: Path, number: int) -> Placed:
    """An unreadable line is an error: to skip it could give its incarnation out twice."""
    try:
        return msgspec.json.decode(line, type=Placed)
    except UNDECODABLE as error:
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
