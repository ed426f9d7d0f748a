"""The table of connections, without a socket; then the same with real ones, some thousand of them."""

from __future__ import annotations

import asyncio
import random
import resource
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_peers import PATIENCE_SECONDS, Memory, Recorder, admit, credentials_of, run, started

from atoll.transport import Caps, LinkFailed, LinkLimits, Refused, Server, call, dial, raise_open_files_limit, upload, uploads
from atoll.transport.door import EARLY_BYTES_MAX, Door, Endpoint, address_group, endpoint_of
from atoll.transport.frames import CHUNK, REFUSAL, WELCOME, pack, unpack
from atoll.transport.server import COUNT_KEY, SESSION_KEY
from atoll.transport.wire import CALL_SERVICE, Channel, StreamBroken, failure

CAPS = Caps(connections=100, unadmitted=20, unadmitted_per_address=10)


def closed_by(door: Door, now: float, *spoken: Endpoint) -> list[Endpoint]:
    """`spoken` are those whose clients have sent something."""
    return door.to_close(now, {endpoint: 100 * (endpoint in spoken) for endpoint in door.unadmitted})


def test_late_connection_is_closed_and_one_with_an_admitted_stream_stays() -> None:
    door = Door(CAPS)
    late, held = ("10.0.0.1", 1), ("10.0.0.1", 2)
    with door.admitted(held, lambda: 30.0):
        door.update([late, held], 0.0)
        assert closed_by(door, 9.9) == []
        assert closed_by(door, 10.0) == [late]
        door.update([held], 20.0)
        assert closed_by(door, 20.0) == []
    assert closed_by(door, 39.9) == []  # its time begins anew when its last stream ends
    assert closed_by(door, 40.0) == [held]
    assert +door.closed == {"late": 2}


def test_address_with_too_many_loses_its_oldest_and_others_lose_none() -> None:
    door = Door(CAPS)
    crowd, one = [("10.0.0.1", port) for port in range(15)], ("10.0.0.2", 7)
    for now in range(15):
        door.update([*crowd[: now + 1], one], float(now) / 10)
    assert closed_by(door, 2.0) == crowd[:5]
    assert door.closed["address"] == 5 and len(door.unadmitted) == 11


def test_full_table_takes_from_the_busiest_address_first() -> None:
    door = Door(CAPS)
    found = [(f"10.0.0.{host}", port) for host, count in ((1, 10), (2, 10), (3, 2), (4, 1)) for port in range(count)]
    door.update(found, 0.0)
    closed = closed_by(door, 1.0)
    assert {host for host, _ in closed} == {"10.0.0.1", "10.0.0.2"} and len(closed) == 3
    assert len(door.unadmitted) == CAPS.unadmitted and door.closed["full"] == 3


def test_those_that_have_spoken_stay_while_others_of_their_address_are_silent() -> None:
    door = Door(CAPS)
    early = ("10.0.0.1", 999)
    door.update([early], 0.0)
    door.update([early, *(("10.0.0.1", port) for port in range(30))], 1.0)
    closed = closed_by(door, 2.0, early)
    assert len(closed) == 21 and early not in closed


def test_among_those_that_have_spoken_any_may_stay() -> None:
    """Oldest first would close every client that needs longer than the table needs to turn over."""
    kept = 0
    for seed in range(40):
        door = Door(CAPS, random.Random(seed))
        door.update([("10.0.0.1", 0)], 0.0)
        crowd = [("10.0.0.1", port) for port in range(20)]
        door.update(crowd, 1.0)
        kept += ("10.0.0.1", 0) not in closed_by(door, 2.0, *crowd)
    assert 10 <= kept <= 30


def test_admitted_connections_of_one_address_are_not_counted() -> None:
    door = Door(CAPS)
    site = [("10.0.0.1", port) for port in range(60)]
    with ExitStack() as stack:
        for endpoint in site:
            stack.enter_context(door.admitted(endpoint, lambda: 0.0))
        door.update(site, 0.0)
        assert closed_by(door, 99.0) == [] == door.unadmitted


def test_one_that_sends_too_much_before_it_is_admitted_is_closed() -> None:
    door = Door(CAPS)
    greedy, held = ("10.0.0.1", 1), ("10.0.0.1", 2)
    with door.admitted(held, lambda: 1.0):
        door.update([greedy, held], 0.0)
        assert door.to_close(0.1, {greedy: 65_536}) == []
        assert door.to_close(0.2, {greedy: 65_537}) == [greedy]
        assert door.to_close(0.3, {held: 1 << 30}) == []
    assert door.to_close(1.1, {held: 1 << 31}) == []  # what it sent while it was admitted does not count
    assert door.to_close(1.2, {held: (1 << 31) + 65_537}) == [held]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 60)), max_size=150), st.integers(0, 2**31))
def test_bounds_hold_whatever_comes(found: list[tuple[int, int]], seed: int) -> None:
    door = Door(CAPS, random.Random(seed))
    endpoints = {(f"10.0.0.{host}", port) for host, port in found}
    door.update(endpoints, 0.0)
    closed = closed_by(door, 1.0, *(e for e in endpoints if e[1] % 2 == 0))
    left = endpoints - set(closed)
    sizes = [sum(host == f"10.0.0.{n}" for host, _ in left) for n in range(13)]
    assert len(left) == len(door.unadmitted) <= CAPS.unadmitted and max(sizes) <= CAPS.unadmitted_per_address
    wanted = min(CAPS.unadmitted, sum(min(10, len([1 for host, _ in endpoints if host == f"10.0.0.{n}"])) for n in range(13)))
    assert len(left) == wanted, "no more are closed than necessary"


def test_caps_follow_from_the_limit_of_open_files_and_leave_some_for_files() -> None:
    assert Caps.from_open_files(1024) == Caps(448, 112, 56)
    assert Caps.from_open_files(1 << 20) == Caps(1 << 16, 1024, 512)
    assert Caps.from_open_files(64).connections == 16
    assert Caps.from_open_files(1024, most=128) == Caps(128, 32, 16)


def test_addresses_as_the_system_writes_them() -> None:
    assert endpoint_of("::ffff:10.0.0.5", 4711) == ("10.0.0.5", 4711) == endpoint_of("10.0.0.5", 4711)
    assert endpoint_of("2001:db8:0::1", 9) == ("2001:db8::1", 9)
    assert address_group("10.0.0.5") == "10.0.0.5"
    assert address_group("2001:db8::1") == address_group("2001:db8::ffff") != address_group("2001:db8:0:1::1")


def test_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert raise_open_files_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(hard, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---------------------------------------------------------------- with sockets


@contextmanager
def silent(address: str, source: str, count: int, words: bytes = b"") -> Iterator[list[socket.socket]]:
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            made_one = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS, source_address=(source, 0))
            one = stack.enter_context(made_one)
            one.sendall(words)
            one.setblocking(False)
            made.append(one)
        yield made


def is_open(one: socket.socket) -> bool:
    """Reads away what a server says first."""
    try:
        while one.recv(4096):
            pass
        return False
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


async def until(condition: object, seconds: float = PATIENCE_SECONDS) -> None:
    assert callable(condition)
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("words", [b"", PREFACE], ids=["silent", "http2"])
def test_server_closes_what_is_not_admitted_and_an_honest_link_stays(words: bytes) -> None:
    caps = Caps(connections=200, unadmitted=30, unadmitted_per_address=20, admission_seconds=5.0)

    async def story() -> None:
        here, there = Recorder(), Recorder(echo=True)
        server = Server(there, admit, LinkLimits(), caps=caps)
        async with started(server) as address:
            link = await dial(address, here, peer="server", metadata=credentials_of("early"))
            with silent(address, "127.0.0.2", 60, words) as crowd, silent(address, "127.0.0.3", 5, words) as few:
                await until(lambda: sum(map(is_open, crowd)) <= 20)
                assert sum(map(is_open, few)) == 5, "another address keeps its own"
                late = await dial(address, here, peer="server", metadata=credentials_of("late"))  # from 127.0.0.1
                await until(lambda: not any(map(is_open, crowd + few)))
            for each in (link, late):
                each.send(b"still here")
            await here.until(lambda: len(here.heads) == 2)

    run(story())


def test_server_that_holds_all_it_may_admits_one_more_after_it_made_room() -> None:
    """Beyond `connections` what is accepted is closed at once; the door makes room, and the next attempt succeeds."""
    caps = Caps(connections=40, unadmitted=10, unadmitted_per_address=5)

    async def story() -> None:
        server = Server(Recorder(), admit, LinkLimits(), caps=caps)
        async with started(server) as address:
            with silent(address, "127.0.0.1", 300):
                for _ in range(20):
                    try:
                        link = await dial(address, Recorder(), peer="server", metadata=credentials_of("new"), timeout=3)
                        break
                    except LinkFailed:
                        await asyncio.sleep(0.1)
                link.close("enough")
                await link.wait_closed()

    run(story())


def test_call_is_refused_before_its_message_is_read() -> None:
    async def story() -> None:
        server = Server(Recorder(), admit, LinkLimits())
        read: list[bytes] = []

        def take(_: object, request: bytes) -> bytes:
            read.append(request)
            return b"thanks"

        server.on_call("take", take, admit)
        async with started(server) as address:
            with pytest.raises(Refused, match="token"):
                await call(address, "take", {"token": "wrong"}, bytes(EARLY_BYTES_MAX // 2))
            with pytest.raises((Refused, LinkFailed)):  # the door may close what sends so much before the refusal is on its way
                await call(address, "take", {"token": "wrong"}, bytes(1 << 20))
            assert read == []
            assert await call(address, "take", credentials_of("honest"), b"x") == b"thanks" and read == [b"x"]

    run(story())


def test_peer_has_one_attempt_at_a_time_and_the_newest_counts() -> None:
    """Each attempt may bring sixteen connections that count as admitted."""

    async def story() -> None:
        server = Server(Recorder(), admit, LinkLimits())
        async with started(server) as address:
            channels = [Channel(address, LinkLimits(), None) for _ in range(3)]
            talks = []
            for channel in channels:
                session = {**credentials_of("many"), SESSION_KEY: secrets.token_hex(16), COUNT_KEY: "16"}
                talks.append(channel.open("Talk", session))
                assert unpack(await talks[-1].read() or b"").kind == WELCOME
            for talk in talks[:2]:
                with pytest.raises(StreamBroken) as broken:
                    await talk.read()
                assert isinstance(failure(broken.value, address), Refused)
            for channel in channels:
                await channel.close()

    run(story())


def test_upload_is_refused_before_its_bytes_are_read() -> None:
    async def story() -> None:
        server = Server(Recorder(), admit, LinkLimits())

        def begin(metadata: Mapping[str, str]) -> Memory:
            admit(metadata)
            return Memory(8 << 20)

        server.on_upload("take", begin)
        async with started(server) as address:
            for size in (0, 100, 8 << 20):
                with pytest.raises(Refused, match="token"):
                    await upload(address, "take", {"token": "wrong"}, [bytes(size)])
            assert await upload(address, "take", credentials_of("honest"), [bytes(3 << 20)]) == b"%d" % (3 << 20)

    run(story())


def test_upload_that_comes_too_slowly_is_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "UPLOAD_SECONDS", 3.0)

    async def story() -> None:
        sink = Memory(8 << 20)
        server = Server(Recorder(), admit, LinkLimits())
        server.on_upload("take", lambda _: sink)
        async with started(server) as address:
            channel = Channel(address, LinkLimits(), None)
            stream = channel.open("take", {}, CALL_SERVICE)
            assert unpack(await stream.read() or b"").kind == WELCOME
            await stream.write(pack(CHUNK, 0, 0, 2000, [bytes(1000)]))
            answer = unpack(await stream.read() or b"")
            assert (answer.kind, answer.number) == (REFUSAL, 1)
            assert len(sink.taken) == 1000 and sink.is_abandoned and server.refused == {"slow": 1}
            await channel.close()

    run(story())
