"""The talk connection: whose it is, and frames on a socket whose bytes arrive as they like."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from raw_link import RawBulk, RawLink
from transport_peers import Recorder, admit, credentials_of, run, serving, started

from atoll.transport import ClientCredentials, LinkLimits, Server, client_credentials, dial, server_credentials
from atoll.transport.acceptor import kind_of
from atoll.transport.chunks import PREFACE, TALK_PREFACE, BulkHello, preface_of
from atoll.transport.frames import CONTROL, HEADER_BYTES, PULSE, Violation, frame_checksum, pack
from atoll.transport.keys import SYNCER_NAME, load_learner, load_server, make_keys
from atoll.transport.talk import AHEAD_BYTES, TalkStream
from atoll.transport.wire import StreamBroken

LIMITS = LinkLimits(head_bytes_max=1 << 16, chunk_bytes=1 << 16)
LAST = b"the last frame, of some forty bytes or so"
HELLO = BulkHello(b"s" * 16, b"k" * 32, 0)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    make_keys(directory, learners=2)
    return directory


def client(keys: Path, learner: int) -> ClientCredentials:
    found = load_learner(keys, learner)
    return client_credentials(found.ca, found.certificate, found.key, SYNCER_NAME)


async def connected() -> tuple[socket.socket, socket.socket]:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = await loop.run_in_executor(None, listener.accept)
    there.setblocking(False)
    return here, there


@asynccontextmanager
async def talking(keys: Path | None = None) -> AsyncIterator[tuple[TalkStream, TalkStream]]:
    """Both ends of one, with TLS where there are keys."""
    ours, theirs = await connected()
    if keys is not None:
        found = load_server(keys)
        context = server_credentials(found.certificate, found.key, found.ca).bulk
        ours = context.wrap_socket(ours, server_side=True, do_handshake_on_connect=False)
        theirs = client(keys, 1).bulk.wrap_socket(theirs, server_hostname=SYNCER_NAME, do_handshake_on_connect=False)
    here, there = TalkStream(ours, LIMITS), TalkStream(theirs, LIMITS)
    shown, _ = await asyncio.gather(here.greeted(), there.greet(HELLO))
    assert shown == (HELLO, "learner-1" if keys is not None else None)
    try:
        yield here, there
    finally:
        here.close()
        there.close()


def framed(frame: bytes) -> bytes:
    length = len(frame).to_bytes(4, "little")
    return length + frame_checksum(length).to_bytes(4, "little") + frame


# ---------------------------------------------------------------- frames


@pytest.mark.parametrize("secret", [False, True], ids=["plain", "tls"])
def test_frames_of_any_size_arrive_whole_and_in_order(secret: bool, keys: Path) -> None:
    rng = random.Random(7)
    frames = [rng.randbytes(rng.choice((HEADER_BYTES, 33, 500, 16_000, 60_000))) for _ in range(300)]

    async def story() -> None:
        async with talking(keys if secret else None) as (here, there):

            async def send() -> None:
                for frame in frames:
                    await there.write(frame)

            sending = asyncio.create_task(send())
            assert [await here.read() for _ in frames] == frames
            await sending
            await here.write(LAST)
            assert await there.read() == LAST
            there.close()
            assert await here.read() is None

    run(story())


def test_frames_are_cut_wherever_the_bytes_break() -> None:
    frames = [bytes(HEADER_BYTES), b"x" * 33, bytes(range(256)) * 9]
    data = b"".join(map(framed, frames))

    async def story() -> None:
        ours, theirs = await connected()
        here = TalkStream(ours, LIMITS)
        loop = asyncio.get_running_loop()

        async def trickle() -> None:
            for at in range(0, len(data), 7):
                await loop.sock_sendall(theirs, data[at : at + 7])
                await asyncio.sleep(0)

        sending = asyncio.create_task(trickle())
        assert [await here.read() for _ in frames] == frames
        await sending
        await loop.sock_sendall(theirs, framed(LAST) + framed(LAST)[:-1])
        theirs.close()
        assert await here.read() == LAST
        assert await here.read() is None, "half a frame is none"
        here.close()

    run(story())


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (framed(b"x" * 40)[:3] + b"\x01" + framed(b"x" * 40)[4:], "checksum"),
        (framed(bytes(LIMITS.frame_bytes_max + 1))[:8], "malformed"),
        (framed(bytes(HEADER_BYTES - 1))[:8], "malformed"),
        (framed(b""), "malformed"),
    ],
    ids=["damaged length", "too long", "too short", "nothing"],
)  # fmt: skip
def test_length_is_checked_before_a_byte_of_the_frame_is_awaited(data: bytes, kind: str) -> None:
    async def story() -> None:
        ours, theirs = await connected()
        here = TalkStream(ours, LIMITS)
        await asyncio.get_running_loop().sock_sendall(theirs, framed(LAST) + data)
        assert await here.read() == LAST
        for _ in range(2):
            with pytest.raises(Violation) as violation:
                await here.read()
            assert violation.value.kind == kind
        theirs.close()
        here.close()

    run(story())


def test_what_nobody_reads_stays_with_its_sender() -> None:
    async def story() -> None:
        async with talking() as (here, there):
            await there.write(LAST)
            assert await here.read() == LAST  # it listens from now on

            async def flood() -> None:
                for _ in range(1000):
                    await there.write(bytes(60_000))

            flooding = asyncio.create_task(flood())
            await asyncio.wait({flooding}, timeout=0.5)
            assert not flooding.done()
            assert here._ahead + len(here._data) < AHEAD_BYTES + 2 * LIMITS.frame_bytes_max
            for _ in range(1000):
                assert len(await here.read() or b"") == 60_000
            await flooding

    run(story())


def test_end_closed_here_wakes_whoever_reads_or_writes() -> None:
    async def story() -> None:
        closed: list[str] = []
        ours, theirs = await connected()
        here = TalkStream(ours, LIMITS, lambda: closed.append("closed"))
        reading = asyncio.create_task(here.read())

        async def flood() -> None:
            while True:
                await here.write(bytes(60_000))

        writing = asyncio.create_task(flood())
        await asyncio.sleep(0.2)
        here.close()
        here.close()
        assert await reading is None and closed == ["closed"]
        with pytest.raises(StreamBroken):
            await writing
        theirs.close()

    run(story())


# ---------------------------------------------------------------- whose it is


def test_connection_without_the_key_of_a_session_is_closed_without_a_word() -> None:
    async def story() -> None:
        there = Recorder()
        async with serving(there) as (server, address):
            link, other = RawLink(address, credentials_of("a")), RawLink(address, credentials_of("b"))
            await link.ask()
            await other.ask()
            for wrong in ({"key": b"?" * 32}, {"key": other.key}, {"session": b"?" * 16}, {"place": 1}):
                await link.connect_talk(**wrong)
                assert await link.talk.read() is None, wrong
            assert server.refused == {"session": 4} and not there.told
            await link.connect_talk()
            kept = link.talk
            await link.connect_talk()
            assert await link.talk.read() is None, "one talk connection each"
            await link.open_bulk()
            await link.ready()
            await link.connect_talk()
            assert await link.talk.read() is None, "the link stands: its key opens nothing more"
            await kept.write(pack(CONTROL, 0, 0, 0, [b"hello"]))
            await there.until(lambda: there.heads == [b"hello"])
            assert server.refused == {"session": 6}
            await link.close()
            await other.close()

    run(story())


def test_key_of_a_session_opens_nothing_for_another_certificate(keys: Path) -> None:
    async def story() -> None:
        found, there = load_server(keys), Recorder()
        async with serving(there, credentials=server_credentials(found.certificate, found.key, found.ca)) as (server, address):
            link, thief = RawLink(address, credentials_of("a"), client(keys, 0)), RawLink(address, {}, client(keys, 1))
            await link.ask()
            thief.number, thief.key = link.number, link.key
            await thief.connect_talk()
            assert await thief.talk.read() is None and server.refused == {"session": 1}
            plain = RawLink(address, {})
            plain.number, plain.key = link.number, link.key
            await plain.connect_talk()
            with pytest.raises((StreamBroken, Violation)):  # the server's word of TLS that it wants TLS
                assert await plain.talk.read() is None
                raise StreamBroken("closed")
            await link.connect_talk()
            await link.open_bulk()
            await link.ready()
            for one in (thief, plain, link):
                await one.close()

    run(story())


def test_link_that_stands_needs_no_stream_of_grpc_any_more() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder(echo=True)
        async with serving(there) as (server, address):
            link = await dial(address, here, peer="s", metadata=credentials_of("a"), timeout=60)
            for _ in range(200):
                assert server._acceptor is not None
                if len(server._acceptor.endpoints) == 2:  # to talk, and for payloads
                    break
                await asyncio.sleep(0.02)
            assert len(server._acceptor.endpoints) == 2
            link.send(b"over", [b"there"])
            await here.until(lambda: here.heads == [b"over"])
            assert link.bytes_sent and link.bytes_received

    run(story())


def test_silent_peer_behind_a_whole_talk_connection_loses_its_link() -> None:
    limits = LinkLimits(pulse_seconds=0.2)

    async def story() -> None:
        there = Recorder()
        async with serving(there, limits) as (_, address):
            link = RawLink(address, credentials_of("a"))
            await link.open_talk()
            await link.open_bulk()
            await link.ready()
            for _ in range(5):
                await link.talk.write(pack(PULSE))
                await asyncio.sleep(0.2)
            assert not there.reasons
            await there.until(lambda: len(there.reasons) == 1)
            assert "nothing came for 0.6 s" in there.reasons[0]
            await link.close()

    run(story())


def test_prefaces_tell_what_a_connection_is_for() -> None:
    assert [kind_of(TALK_PREFACE[:n]) for n in range(1, 9)] == [None] * 7 + ["talk"]
    assert kind_of(PREFACE) == kind_of(preface_of(3)) == "bulk"
    assert kind_of(b"PRI ") == kind_of(b"\x16\x03\x01") == kind_of(b"ATOLT/2\n") == kind_of(b"GET / HT") == "grpc"


def test_talk_connection_does_not_use_the_port_of_payloads() -> None:
    async def story() -> None:
        there = Recorder()
        server = Server(there, admit, bulk_port=0)
        async with started(server) as address:
            payloads = f"127.0.0.1:{server.bulk_port}"
            stranger = await RawBulk.connect(payloads, preface=TALK_PREFACE)
            assert await stranger.is_closed(), "that port takes no talk"
            await stranger.close()
            here = Recorder()
            link = await dial(address, here, peer="s", metadata=credentials_of("a"), timeout=60)
            link.send(b"payload", [bytes(10)])
            await there.until(lambda: there.heads == [b"payload"])

    run(story())


def test_end_without_a_last_word_of_tls_is_an_end_like_any_other(keys: Path) -> None:
    async def story() -> None:
        async with talking(keys) as (here, there):
            await there.write(LAST)
            assert isinstance(there.sock, ssl.SSLSocket)
            there.sock.shutdown(socket.SHUT_RDWR)
            assert await here.read() == LAST
            assert await here.read() is None

    run(story())
