"""A real syncer among strangers: each is refused with a reason that its log tells, and honest learners are served all the same.

Tests do not depend on each other.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
import re
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from command import atoll
from harness import SharedForkServer

from atoll.errors import UserError
from atoll.runtime.learner.address import Address, request_place
from atoll.runtime.syncer.places import Placement
from atoll.transport import ClientCredentials, Refused, client_credentials, dial
from atoll.transport.keys import SYNCER_NAME, Credentials, JoinTokens, load_learner, make_keys, session_key

PATIENCE_SECONDS = 180.0
NUMBERS = ("total_steps=1000000", "data.max_bytes=200000", "data.seq_len=16", "limits.leave_seconds=2")
TINY = ["--learners", "2", *(word for number in NUMBERS for word in ("--set", number))]


class Process:
    """`atoll ...`, and what it says on stderr, line by line."""

    def __init__(self, *words: str | Path, **environment: str) -> None:
        # gRPC's silence is this process's own choice (atoll.transport) and not the command's.
        inherited = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "atoll", *map(str, words)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, env=inherited | environment,
        )  # fmt: skip
        assert self._popen.stderr is not None
        self.pid, self._stderr = self._popen.pid, self._popen.stderr
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        for line in self._stderr:
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()
        self._stderr.close()
        with self._said:
            self._said.notify_all()

    def until(self, words: str, seen: int = 0) -> str:
        """The first line after `seen` lines that holds these words."""

        def found() -> str | None:
            return next((line for line in self.lines[seen:] if words in line), None)

        with self._said:
            self._said.wait_for(lambda: found() or self._stderr.closed, PATIENCE_SECONDS)
            line = found()
        assert line is not None, f"{words!r} was not said; what was: {self.text}"
        return line

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def code(self) -> int:
        code = self._popen.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        return code

    def stop(self) -> int:
        self._popen.send_signal(signal.SIGTERM)
        return self.code()

    def kill(self) -> None:
        self._popen.kill()
        self.code()


@dataclass(frozen=True)
class Island:
    """A syncer that listens with mutual TLS, and all that a test may know of it."""

    syncer: Process
    folder: Path
    keys: Path
    strangers: Path
    address: str
    run: str

    @property
    def directory(self) -> Path:
        return self.folder / "syncer"

    @property
    def token(self) -> str:
        return (self.keys / "token").read_text().strip()

    def ask_for_place(
        self, token: str | None = None, *, run: str = "", wants: int = -1, credentials: Any = "learner-0", seconds: float = 0.0
    ) -> Placement:
        """As `atoll learner` does at first: once, or for so many seconds."""
        if isinstance(credentials, str):
            credentials = shown_as(load_learner(self.keys, credentials))
        address = Address(self.address, self.token if token is None else token, run, credentials, join_timeout_seconds=seconds)
        return asyncio.run(request_place(address, wants, random.Random(0)))

    def connect(self, placement: Placement, **changes: str) -> None:
        """As `atoll learner` does when it has a place."""
        metadata = {
            "run": placement.run, "learner": str(placement.learner), "incarnation": str(placement.incarnation),
            "key": placement.key, "advertise": "",
        }  # fmt: skip
        shown = shown_as(load_learner(self.keys, "learner-0"))
        asyncio.run(_dial(self.address, metadata | changes, shown))


async def _dial(address: str, metadata: dict[str, str], credentials: ClientCredentials) -> None:
    link = await dial(address, _Nobody(), peer="syncer", metadata=metadata, credentials=credentials)
    link.close("enough")
    await link.wait_closed()


class _Nobody:
    def opened(self, link: object) -> None: ...
    def arrived(self, link: object, head: bytes, payload: memoryview | None) -> None: ...
    def closed(self, link: object, reason: str) -> None: ...


def shown_as(found: Credentials, *, trusting: bytes | None = None) -> ClientCredentials:
    return client_credentials(trusting or found.ca, found.certificate, found.key, SYNCER_NAME)


@pytest.fixture(scope="module")
def island(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Island]:
    folder = tmp_path_factory.mktemp("island")
    make_keys(folder / "keys", learners=2)
    make_keys(folder / "strangers")
    syncer = Process(
        "syncer", *TINY, "--listen", "127.0.0.1:0", "--keys", folder / "keys", "--dir", folder / "syncer",
        "--tls-log", "--set", "limits.learners_per_certificate=8",
    )  # fmt: skip
    try:
        said = re.search(r"run (\w+) listens on (\S+),", syncer.until(" listens on "))
        assert said is not None
        yield Island(syncer, folder, folder / "keys", folder / "strangers", said[2], said[1])
        assert syncer.is_alive, f"the syncer died: {syncer.text}"
        assert syncer.stop() == 0, syncer.text
    finally:
        syncer.kill()


# ---------------------------------------------------------------- what is not even started


def test_address_that_others_can_reach_is_refused_without_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "atoll1.x")
    syncer = atoll("syncer", *TINY, "--listen", "0.0.0.0:0", "--dir", tmp_path / "syncer", cwd=tmp_path)
    learner = atoll("learner", "--syncer", "10.255.255.1:7077", cwd=tmp_path)
    assert (syncer.returncode, learner.returncode) == (2, 2)
    assert syncer.stderr.startswith("atoll: --listen 0.0.0.0:0: ") and "--insecure" in syncer.stderr
    assert learner.stderr.startswith("atoll: --syncer 10.255.255.1:7077: ") and "--insecure" in learner.stderr
    assert not (tmp_path / "syncer").exists()


def test_second_syncer_in_the_same_directory_is_refused(island: Island, tmp_path: Path) -> None:
    words = ("--listen", "127.0.0.1:0", "--keys", island.keys, "--dir", island.directory)
    second = atoll("syncer", *TINY, *words, cwd=tmp_path)
    assert second.returncode == 2
    assert f"directory {island.directory}: another syncer (pid {island.syncer.pid})" in second.stderr.splitlines()[-1]
    assert island.syncer.is_alive
    assert (island.directory / "address").read_text() == island.address


# ---------------------------------------------------------------- who does not get in


def refused_tokens(island: Island) -> list[tuple[str, str, str]]:
    """(token, run asked for, what the syncer says)."""
    secret = JoinTokens.load(island.keys)
    now = datetime.now(UTC)
    expired = secret.make(expires=now - timedelta(hours=1), now=now - timedelta(hours=2))
    flipped = island.token[:-2] + ("A" if island.token[-2] != "A" else "B") + island.token[-1]
    return [
        ("", "", "wrong token"),
        ("atoll1.", "", "wrong token"),
        (flipped, "", "wrong token"),
        (JoinTokens.load(island.strangers).make(), "", "wrong token"),
        (expired, "", f"token expired at {now - timedelta(hours=1):%Y-%m-%d %H:%M:%S} UTC"),
        (secret.make(run="another"), "", "token is for run another"),
        (island.token, "another", f"this is run {island.run}, not another"),
    ]


def test_each_wrong_token_is_refused_for_good_logged_once_and_not_repeated(island: Island) -> None:
    seen = len(island.syncer.lines)
    tries = refused_tokens(island)
    for token, run, reason in tries:
        with pytest.raises(UserError, match=rf"^syncer {island.address}: refuses this learner: {re.escape(reason)}$"):
            island.ask_for_place(token, run=run)
        island.syncer.until(f"refused: {reason}", seen)
    refusals = [line.partition("refused: ")[2] for line in island.syncer.lines[seen:] if "refused: " in line]
    assert refusals == [reason for _, _, reason in tries]
    for token, _, _ in tries:
        assert len(token) < 10 or token not in island.syncer.text
    assert not any(line.startswith("Traceback") for line in island.syncer.lines)
    assert island.ask_for_place(run=island.run, wants=5).run == island.run


def test_client_without_a_certificate_of_this_authority_is_refused_and_logged(island: Island) -> None:
    """No handler sees them, so gRPC tells of them, in its words."""
    ours = load_learner(island.keys, "learner-0")
    stranger = shown_as(load_learner(island.strangers, "learner-0"), trusting=ours.ca)
    nobody = ClientCredentials(grpc.ssl_channel_credentials(ours.ca), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), SYNCER_NAME)
    for credentials, told in (
        (stranger, "CERTIFICATE_VERIFY_FAILED"),
        (nobody, "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        (None, "WRONG_VERSION_NUMBER"),
    ):
        seen = len(island.syncer.lines)
        with pytest.raises(UserError, match=rf"^syncer {island.address}: cannot be joined: {island.address} cannot be reached"):
            island.ask_for_place(credentials=credentials)
        assert "Handshake failed" in island.syncer.until(told, seen)
    assert island.syncer.is_alive
    assert island.ask_for_place(wants=6).learner == 6, "and who has one gets in"


def test_learner_does_not_talk_to_a_syncer_of_another_authority(island: Island) -> None:
    seen = len(island.syncer.lines)
    with pytest.raises(UserError, match="cannot be joined"):
        island.ask_for_place(credentials=shown_as(load_learner(island.strangers, "learner-0")))
    assert not any("refused: " in line for line in island.syncer.lines[seen:]), "the token was not shown to it"


def test_older_incarnation_wrong_key_and_no_place_are_refused(island: Island) -> None:
    first, second = island.ask_for_place(wants=7), island.ask_for_place(wants=7, seconds=10.0)
    assert (first.incarnation, second.incarnation) == (0, 1)
    for placement, changes, reason in (
        (first, {}, "incarnation 0 of learner7 was replaced by 1"),
        (second, {"key": first.key}, "wrong key for learner7, incarnation 1"),
        (second, {"learner": "8"}, "wrong key for learner8, incarnation 1"),
        (second, {"run": "another"}, f"this is run {island.run}, not 'another'"),
        (second, {"learner": "seven"}, "a connection must name its learner and incarnation"),
    ):
        seen = len(island.syncer.lines)
        with pytest.raises(Refused, match=rf"^{re.escape(reason)}$"):
            island.connect(placement, **changes)
        island.syncer.until(f"refused: {reason}", seen)
    island.connect(second)


# ---------------------------------------------------------------- who does


def secrets_of(island: Island) -> dict[str, list[bytes]]:
    """What must be nowhere, in every form that it might be written in."""
    run_secret = (island.directory / "run.secret").read_bytes()
    private = [path for path in island.keys.glob("*.key") if path.name != "token.key"]
    found = {path.name: path.read_bytes().splitlines()[1:-1] for path in private}
    for name, raw in (("token.key", (island.keys / "token.key").read_bytes()), ("run.secret", run_secret)):
        found[name] = [raw, raw.hex().encode(), base64.b64encode(raw), base64.urlsafe_b64encode(raw).rstrip(b"=")]
    found["token"] = [island.token.encode(), island.token.removeprefix("atoll1.").encode()]
    found["session keys"] = [session_key(run_secret, m, i).encode() for m in range(10) for i in range(3)]
    return found


def test_honest_learner_is_served_among_strangers_and_no_secret_is_written_anywhere(
    island: Island, tmp_path: Path
) -> None:
    out = island.folder / "learners" / "0"
    seen = len(island.syncer.lines)
    words = ["learner", "--syncer", island.address, "--keys", island.keys, "--name", "learner-1", "--id", "0", "--out", out]
    fork_server, log = SharedForkServer(), tmp_path / "learner.log"
    try:
        learner = fork_server.spawn(list(map(str, words)), log)
        with pytest.raises(UserError, match="wrong token"):
            island.ask_for_place("atoll1.AAAA")
        island.syncer.until("learner0 has joined", seen)
        with pytest.raises(UserError, match="wrong token"):
            island.ask_for_place("atoll1.AAAA")
        learner.signal(signal.SIGTERM)
        learner.wait(PATIENCE_SECONDS)
        assert learner.poll() == 0, log.read_text()
        island.syncer.until("learner0 has left", seen)
    finally:
        fork_server.close()
    assert island.syncer.is_alive
    logs = {"the syncer's log": island.syncer.text.encode(), "the learner's log": log.read_bytes()}
    files = [path for path in island.folder.rglob("*") if path.is_file() and not path.is_relative_to(island.keys)]
    written = [path for path in files if path.name != "run.secret" and not path.is_relative_to(island.strangers)]
    assert {path.name for path in written} >= {"run.tape", "0.tape", "places.jsonl", "config.toml"}
    for where, text in logs.items() | {(str(path), path.read_bytes()) for path in written}:
        for name, forms in secrets_of(island).items():
            assert not any(form in text for form in forms), f"{name} is in {where}"
    assert (island.directory / "run.secret").stat().st_mode & 0o077 == 0
