"""Bulk connections: whose they are, what strangers get, what a cut costs, and what a peer that does not read holds."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from raw_link import RawBulk, RawLink, chunk
from transport_peers import PATIENCE_SECONDS, Recorder, admit, credentials_of, run, serving, started

from atoll.transport import (
    Caps,
    ClientCredentials,
    LinkFailed,
    LinkLimits,
    Server,
    SharedBuffers,
    client_credentials,
    dial,
    server_credentials,
)
from atoll.transport.chunks import PREFACE, TALK_PREFACE, BulkHello
from atoll.transport.frames import BULK, pack
from atoll.transport.keys import SYNCER_NAME, load_learner, load_server, make_keys, split_address


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bulk") / "keys"
    make_keys(folder, learners=2)
    return folder


def client(keys: Path, learner: int) -> ClientCredentials:
    found = load_learner(keys, learner)
    return client_credentials(found.ca, found.certificate, found.key, SYNCER_NAME)


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


# ---------------------------------------------------------------- whose it is


def test_bulk_connection_without_the_key_of_a_session_is_closed_without_a_word() -> None:
    async def story() -> None:
        there = Recorder()
        async with serving(there) as (server, address):
            link, other = RawLink(address, credentials_of("a")), RawLink(address, credentials_of("b"))
            await link.open_talk(count=2)
            await other.open_talk(count=2)
            for wrong in ({"key": b"?" * 32}, {"key": other.key}, {"session": b"?" * 16}, {"place": 2}, {"place": 255}):
                assert await (await link.open_bulk(**{"place": 0, **wrong})).is_closed(), wrong
            assert server.refused == {"session": 5} and not there.told
            twice = [asyncio.create_task((await link.open_bulk(place=0)).is_closed()) for _ in range(2)]
            closed, kept = await asyncio.wait(twice, return_when=asyncio.FIRST_COMPLETED)
            assert [one.result() for one in closed] == [True] and len(kept) == 1, "each place once"
            await link.open_bulk(place=1)
            await link.ready()
            await there.until(lambda: there.told == [("opened", "a")])
            assert await (await link.open_bulk(place=1)).is_closed(), "the link stands: its key opens nothing more"
            assert server.refused == {"session": 7} and not any(one.done() for one in kept)
            await link.close()
            await other.close()
            await asyncio.wait(kept)

    run(story())


def test_key_of_a_session_opens_nothing_for_another_certificate(keys: Path) -> None:
    async def story() -> None:
        found, there = load_server(keys), Recorder()
        async with serving(there, credentials=server_credentials(found.certificate, found.key, found.ca)) as (server, address):
            link = RawLink(address, credentials_of("a"), client(keys, 0))
            await link.open_talk()
            stolen = await RawBulk.connect(address, BulkHello(link.number, link.key, 0), client(keys, 1))
            assert await stolen.is_closed() and server.refused == {"session": 1}
            await link.open_bulk()
            await link.ready()
            await stolen.close()
            await link.close()

    run(story())


def test_bulk_connection_without_a_certificate_of_the_run_gets_no_further_than_tls(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "others", learners=1)

    async def story() -> None:
        found, there = load_server(keys), Recorder()
        async with serving(there, credentials=server_credentials(found.certificate, found.key, found.ca)) as (server, address):
            plain = await RawBulk.connect(address, BulkHello(b"s" * 16, b"k" * 32, 0))  # in the clear, where TLS is expected
            assert await closed_without_an_answer(plain)
            outsider = load_learner(tmp_path / "others", 0)
            own = client_credentials(found.ca, outsider.certificate, outsider.key, SYNCER_NAME)
            stranger = await RawBulk.connect(address, BulkHello(b"s" * 16, b"k" * 32, 0), own)
            assert await stranger.is_closed()
            assert not server.refused and not there.told
            await plain.close()
            await stranger.close()

    run(story())


async def closed_without_an_answer(bulk: RawBulk) -> bool:
    """But for the few bytes of TLS that say so."""
    try:
        return len(await bulk.reader.read()) < 20
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "words",
    [b"", PREFACE[:5], PREFACE, PREFACE + b"hello", TALK_PREFACE, TALK_PREFACE + b"hello"],
    ids=["silent", "half", "whole", "half-hello", "talk", "half-hello-of-talk"],
)
def test_half_open_bulk_connections_are_bounded_and_closed(words: bytes) -> None:
    """The honest client is from another address: of its own address's connections that have spoken the door closes any."""
    caps = Caps(connections=100, unadmitted=20, unadmitted_per_address=10, admission_seconds=1.5)

    def half_open(address: str) -> socket.socket:
        return socket.create_connection(split_address(address), source_address=("127.0.0.2", 0))

    async def story() -> None:
        there = Recorder(echo=True)
        server = Server(there, admit, LinkLimits(), caps=caps)
        async with started(server) as address:
            with ExitStack() as stack:
                crowd = [stack.enter_context(half_open(address)) for _ in range(40)]
                for one in crowd:
                    one.sendall(words)
                    one.setblocking(False)
                await until(lambda: sum(map(is_open, crowd)) <= 10)
                here = Recorder()
                link = await dial(address, here, peer="server", metadata=credentials_of("honest"), timeout=PATIENCE_SECONDS)
                await until(lambda: not any(map(is_open, crowd)))
                link.send(b"still here", [b"x"])
                await here.until(lambda: here.heads == [b"still here"])

    run(story())


def is_open(one: socket.socket) -> bool:
    try:
        return one.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_bulk_connection_that_trickles_its_hello_is_closed_in_time() -> None:
    caps = Caps(connections=100, unadmitted=20, unadmitted_per_address=10, admission_seconds=0.5)

    async def story() -> None:
        server = Server(Recorder(), admit, LinkLimits(), caps=caps)
        async with started(server) as address:
            reader, writer = await asyncio.open_connection(*split_address(address))
            bulk = RawBulk(reader, writer)
            closed = asyncio.create_task(bulk.is_closed())  # by a reset, where a byte of it was not read yet
            for byte in PREFACE + bytes(40):
                if closed.done():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(0.05)
            assert await closed
            await bulk.close()

    run(story())


# ---------------------------------------------------------------- what it carries


def test_lanes_keep_their_order_over_tls_and_three_connections(keys: Path) -> None:
    limits, rng = LinkLimits(connections=3, chunk_bytes=1 << 14, assembling_max=3), random.Random(5)

    async def story() -> None:
        found, here, there = load_server(keys), Recorder(), Recorder()
        async with serving(there, limits, server_credentials(found.certificate, found.key, found.ca)) as (_, address):
            link = await dial(address, here, peer="s", metadata=credentials_of("a"), limits=limits, credentials=client(keys, 0))
            sent = []
            for index in range(120):
                payload = rng.randbytes(rng.randrange(100_000)) if rng.random() < 0.5 else None
                sent.append((b"%d" % index, payload))
                link.send(b"%d" % index, None if payload is None else [payload])
            await there.until(lambda: len(there.heads) == len(sent))
            assert list(zip(there.heads, there.payloads, strict=True)) == sent

    run(story())


def test_cut_within_a_payload_ends_the_link_and_the_next_one_carries_it() -> None:
    async def story() -> None:
        here, there, payload = Recorder(), Recorder(), os.urandom(8 << 20)
        async with serving(there) as (_, address):
            host, port = split_address(address)
            links: list[asyncio.StreamWriter] = []

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                links.append(writer)
                other_reader, other = await asyncio.open_connection(host, port)
                links.append(other)

                async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, room: int) -> None:
                    while room > 0 and (data := await source.read(1 << 16)):
                        sink.write(data)
                        room -= len(data)
                    sink.transport.abort()

                await asyncio.gather(pump(reader, other, 3 << 20), pump(other_reader, writer, 3 << 20), return_exceptions=True)

            proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
            link = await dial(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}", here, peer="s", metadata=credentials_of("a"))
            link.send(b"theta", [payload])
            link.send(b"after")
            for end in (here, there):
                await end.until(lambda end=end: bool(end.reasons))
                assert "the connection broke" in end.reasons[0]
            assert not there.heads, "neither half a payload nor what was sent after it"
            await link.wait_closed()
            again = await dial(address, here, peer="s", metadata=credentials_of("a"))
            again.send(b"theta", [payload])
            await there.until(lambda: there.heads == [b"theta"])
            assert there.payloads[0] == payload
            proxy.close()
            for writer in links:
                writer.transport.abort()
            await proxy.wait_closed()

    run(story())


def test_one_payload_for_many_peers_that_do_not_read_stays_one_payload_in_memory() -> None:
    """It is neither copied for each of them nor read into memory; and who reads gets it."""
    peers, nbytes = 8, 48 << 20

    async def story() -> None:
        there, here = Recorder(), Recorder()
        payload = SharedBuffers([os.urandom(1 << 20) * (nbytes >> 20)])
        async with serving(there, LinkLimits(unread_seconds=60.0)) as (_, address):
            deaf = [RawLink(address, credentials_of(f"deaf-{number}")) for number in range(peers)]
            for link in deaf:
                await link.open_talk()
                await link.open_bulk()
                await link.ready()
            await dial(address, here, peer="s", metadata=credentials_of("honest"))
            await there.until(lambda: len(there.links) == peers + 1)
            before = megabytes()
            for link in there.links:
                link.send(b"theta", payload)
            await here.until(lambda: here.heads == [b"theta"])
            assert here.payloads[0] == payload[0]
            assert megabytes() - before < 1.5 * nbytes / 1e6, "the copy that the honest peer received, and little else"
            assert not there.reasons
            for one in deaf:
                await one.close()

    run(story())


def test_payload_that_is_announced_and_never_sent_takes_no_memory() -> None:
    async def story() -> None:
        there = Recorder()
        async with serving(there) as (_, address):
            link, before = RawLink(address, credentials_of("a")), megabytes()
            await link.open_talk()
            bulk = await link.open_bulk()
            await link.ready()
            for number in range(8):
                await bulk.write(chunk(number, 0, 1 << 33, b"x"))
            await link.talk.write(pack(BULK, 0, 0, 1 << 33, [b"theta"]))
            await bulk.write(chunk(0, 1, 1 << 33, bytes(1 << 20))[:60])  # of a chunk that is never finished
            await asyncio.sleep(0.3)
            assert megabytes() - before < 20 and not there.reasons
            await link.close()

    run(story())


# ---------------------------------------------------------------- a port of its own


def test_bulk_port_of_its_own_carries_payloads_and_nothing_else() -> None:
    async def story() -> None:
        there, here = Recorder(echo=True), Recorder()
        server = Server(there, admit, LinkLimits(), bulk_port=0)
        async with started(server) as address:
            link = await dial(address, here, peer="s", metadata=credentials_of("a"), limits=LinkLimits(connections=2))
            link.send(b"theta", [bytes(3 << 20)])
            await here.until(lambda: here.heads == [b"theta"])
            on_talk = await RawBulk.connect(address)
            assert await on_talk.is_closed(), "the other port takes no payloads"
            await on_talk.close()
            bulk = f"127.0.0.1:{server.bulk_port}"
            assert bulk != address
            with pytest.raises(LinkFailed):
                await dial(bulk, here, peer="s", metadata=credentials_of("a"), timeout=2)

    run(story())
