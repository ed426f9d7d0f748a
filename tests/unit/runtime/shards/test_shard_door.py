"""Who gets through a shard's door: a coordinator with the key, or with the syncer's certificate, and nobody else."""

from __future__ import annotations

import queue
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from atoll.runtime.ranks.channel import ChannelClosed, RankChannel
from atoll.runtime.shards import door as door_module
from atoll.runtime.shards.door import HELLO_SECONDS, STRANGERS_MAX, ShardDoor, knock
from atoll.runtime.shards.messages import EffectDone, LinkInto, ShardHello
from atoll.transport import client_credentials, server_credentials
from atoll.transport.chunks import PREFACE, TALK_PREFACE, preface_of
from atoll.transport.keys import SHARD_NAME, Credentials, load_learner, load_server, load_shard, make_keys

Address = tuple[str, int]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", learners=1, shards=1)
    return tmp_path / "keys"


class Street:
    """One shard's door, and those who come to it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()
        self._ends = ExitStack()

    def door(
        self, key: str = "key", tls: ssl.SSLContext | None = None,
        take_learner: Callable[[socket.socket], None] = socket.socket.close,
    ) -> ShardDoor:  # fmt: skip
        door = ShardDoor(self._listener, key, tls, take_learner)
        self._ends.callback(door.close)
        return door

    def knock(self, session: str, key: str = "key", tls: ssl.SSLContext | None = None, *, reads: bool = False) -> RankChannel:
        channel = knock(self.address, ShardHello(session, reads, key), tls)
        self._ends.callback(channel.close)
        return channel

    def pair(self, session: str, key: str = "key", tls: ssl.SSLContext | None = None) -> list[RankChannel]:
        return [self.knock(session, key, tls, reads=reads) for reads in (False, True)]

    def stranger(self) -> socket.socket:
        return self._ends.enter_context(socket.create_connection(self.address))

    def close(self) -> None:
        self._ends.close()


@pytest.fixture
def street() -> Iterator[Street]:
    with closing(Street()) as found:
        yield found


def dialled_by(credentials: Credentials) -> ssl.SSLContext:
    return client_credentials(credentials.ca, credentials.certificate, credentials.key, SHARD_NAME).bulk


def own_of(credentials: Credentials) -> ssl.SSLContext:
    return server_credentials(credentials.certificate, credentials.key, credentials.ca).bulk


def exchange(door: ShardDoor, work: RankChannel) -> RankChannel:
    """The shard hears what the coordinator sends, and answers."""
    inside, _ = door.next()
    work.send(LinkInto("somewhere"))
    asked, _ = inside.receive()
    assert asked == LinkInto("somewhere")
    inside.send(EffectDone())
    assert work.receive()[0] == EffectDone()
    return inside


def is_closed(channel: RankChannel) -> bool:
    with suppress(ChannelClosed):
        channel.receive()
        return False
    return True


def test_coordinator_with_the_key_gets_in_and_another_key_does_not(street: Street) -> None:
    door = street.door()
    assert all(is_closed(channel) for channel in street.pair("a", "another"))
    work, _ = street.pair("b")
    exchange(door, work)


def test_only_the_syncers_certificate_gets_in(street: Street, keys: Path) -> None:
    door = street.door(tls=own_of(load_shard(keys)))
    for other in (load_learner(keys), load_shard(keys)):
        assert all(is_closed(channel) for channel in street.pair("a", tls=dialled_by(other)))
    work, _ = street.pair("b", tls=dialled_by(load_server(keys)))
    exchange(door, work)


def test_syncer_sends_nothing_to_who_is_no_shard(street: Street, keys: Path) -> None:
    street.door(tls=own_of(load_learner(keys)))
    with pytest.raises(ssl.SSLCertVerificationError, match="atoll-shard"):
        street.pair("a", tls=dialled_by(load_server(keys)))


def _nothing(stranger: socket.socket) -> None:
    pass


def _huge(stranger: socket.socket) -> None:
    stranger.sendall(struct.pack("<IQ", 1 << 29, 1 << 60))


def _garbage(stranger: socket.socket) -> None:
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 8)


def _half_a_handshake(stranger: socket.socket) -> None:
    stranger.sendall(b"\x16\x03\x01\x02\x00\x01\x00")


def _half_a_preface(stranger: socket.socket) -> None:
    stranger.sendall(preface_of(0)[:5])


@pytest.mark.parametrize("does", [_nothing, _huge, _garbage])
def test_strangers_keep_no_coordinator_out(does: Callable[[socket.socket], None], street: Street) -> None:
    door = street.door()
    for _ in range(3 * STRANGERS_MAX):
        does(street.stranger())
    work, _ = street.pair("b")
    exchange(door, work)


@pytest.mark.parametrize("does", [_nothing, _garbage, _half_a_handshake, _half_a_preface])
def test_strangers_keep_nobody_out_of_a_shard_on_its_own_machine(
    does: Callable[[socket.socket], None], street: Street, keys: Path
) -> None:
    taken: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    before = threading.active_count()
    door = street.door(tls=own_of(load_shard(keys)), take_learner=taken.put)
    strangers = [street.stranger() for _ in range(2 * STRANGERS_MAX)]
    for stranger in strangers:
        does(stranger)
    work, _ = street.pair("b", tls=dialled_by(load_server(keys)))
    exchange(door, work)
    learner = street.stranger()
    learner.sendall(preface_of(1) + b"hello")
    with taken.get(timeout=HELLO_SECONDS) as connection:
        assert connection.recv(5) == b"hello", "what follows the preface is not read here"
    assert threading.active_count() - before <= STRANGERS_MAX + 8


def test_strangers_do_not_decide_how_much_is_logged(street: Street, caplog: pytest.LogCaptureFixture) -> None:
    door = street.door()
    for _ in range(50):
        _garbage(street.stranger())
    work, _ = street.pair("b")
    exchange(door, work)
    until = time.monotonic() + HELLO_SECONDS
    while door._unsaid + len(caplog.records) < 50 and time.monotonic() < until:
        time.sleep(0.01)
    (line,) = [record for record in caplog.records if record.name == "atoll.shard"]
    assert "ended before it showed who it is" in line.message and door._unsaid == 49


@pytest.mark.parametrize("words", [PREFACE, TALK_PREFACE, b"ATOLFzz\n", b"ATTACKER"])
def test_shard_takes_nobody_with_another_preface(words: bytes, street: Street, keys: Path) -> None:
    taken: list[socket.socket] = []
    street.door(tls=own_of(load_shard(keys)), take_learner=taken.append)
    stranger = street.stranger()
    stranger.sendall(words)
    stranger.settimeout(HELLO_SECONDS)
    assert stranger.recv(1) == b"" and not taken


def test_newer_coordinator_takes_the_place_of_one_whose_machine_is_gone(street: Street) -> None:
    door = street.door()
    first, _ = street.pair("a")
    inside = exchange(door, first)
    second, _ = street.pair("b")
    exchange(door, second)
    assert is_closed(inside) and is_closed(first)


def test_halves_of_two_coordinators_are_no_pair(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    door = street.door()
    with monkeypatch.context() as hurried:
        hurried.setattr(door_module, "HELLO_SECONDS", 0.5)
        abandoned = [street.knock("a"), street.knock("b", reads=True), street.knock("c"), street.knock("c")]
        assert all(is_closed(channel) for channel in abandoned)
    work, _ = street.pair("d")
    exchange(door, work)
