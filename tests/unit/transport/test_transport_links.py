"""Links over gRPC on the loopback: what arrives, in which order, and how a link ends."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
from transport_peers import PATIENCE_SECONDS, Memory, Recorder, credentials_of, paired, run, serving

from atoll.errors import UserError
from atoll.transport import Backoff, Link, LinkFailed, LinkLimits, Refused, Server, call, dial, upload
from atoll.transport.chunks import PREFACE
from atoll.transport.frames import ANSWER, HEADER_BYTES, WELCOME, pack
from atoll.transport.keys import split_address


async def dialled(address: str, handler: Recorder, name: str = "learner0", limits: LinkLimits | None = None) -> Link:
    return await dial(address, handler, peer="syncer", metadata=credentials_of(name), limits=limits, timeout=PATIENCE_SECONDS)


def test_link_carries_messages_both_ways_and_both_ends_are_told() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder(echo=True)
        async with serving(there) as (_, address):
            link = await dialled(address, here)
            assert here.told == [("opened", "syncer")]
            link.send(b"hello")
            link.send(b"parts", [b"ab", bytearray(b"cd"), memoryview(b"xefx")[1:3], b""])
            link.send(b"nothing", [])
            await here.until(lambda: len(here.heads) == 3)
            assert here.heads == [b"hello", b"parts", b"nothing"]
            assert here.payloads == [None, b"abcdef", b""]
            assert (link.messages_sent, link.messages_received) == (3, 3)
            link.close("that was all")
            await there.until(lambda: bool(there.reasons))
            await link.wait_closed()
        assert here.reasons == ["that was all"] and there.reasons == ["the peer closed: that was all"]
        assert there.told == [("opened", "learner0"), ("closed", "learner0")]

    run(story())


def test_64_megabytes_over_two_connections_come_back_the_same() -> None:
    async def story() -> None:
        data = random.Random(0).randbytes(1 << 20) * 64 + b"tail"
        limits = LinkLimits(connections=2)
        here, there = Recorder(), Recorder(echo=True)
        async with serving(there, limits) as (_, address):
            link = await dialled(address, here, limits=limits)
            link.send(b"big", [data[:5], memoryview(data)[5:]])
            await here.until(lambda: bool(here.heads))
            assert here.payloads[0] == data
            assert link.bulk_bytes_per_second_up and link.bulk_bytes_per_second_down
            assert link.bytes_sent > len(data) and link.bytes_received > len(data)

    run(story())


@pytest.mark.parametrize("connections", [1, 3])
def test_payloads_that_nobody_uses_are_left_on_the_wire(connections: int) -> None:
    """To one who joins a whole model is sent at once. The payload whose turn it is comes also beyond the bound: it may be larger,
    or others have filled the room on other connections."""
    limits = LinkLimits(connections=connections, chunk_bytes=1 << 14, unused_bytes_max=100_000, assembling_max=50)
    sizes = [250_000, *([30_000] * 40)]

    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with serving(there, limits) as (_, address):
            link = await dialled(address, here, limits=limits)
            await there.until(lambda: bool(there.links))
            for index, size in enumerate(sizes):
                there.links[0].send(b"%d" % index, [bytes([index]) * size])
            used = 0
            for index, size in enumerate(sizes):
                await here.until(lambda index=index: len(here.heads) > index)
                await asyncio.sleep(0.002)
                read = link.bytes_received - 100 * (link.bytes_received // 10_000) - 10_000  # heads of chunks, and pulses
                assert read - used <= 100_000 + size, f"{read} bytes were read, and {used} used"
                used += size
                link.used(size)
            assert not here.reasons and not there.reasons
        assert [payload and bytes(payload) for payload in here.payloads] == [bytes([i]) * size for i, size in enumerate(sizes)]

    run(story())


def test_bulk_in_both_directions_at_once() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder()
        limits = LinkLimits(connections=2, chunk_bytes=1 << 16, assembling_max=2)
        async with serving(there, limits) as (_, address):
            link = await dialled(address, here, limits=limits)
            await there.until(lambda: bool(there.links))
            for index in range(30):
                for end in (link, there.links[0]):
                    end.send(b"%d" % index, [bytes([index]) * (index * 20_011)])
                    end.send(b"then %d" % index)
            await here.until(lambda: len(here.heads) == 60)
            await there.until(lambda: len(there.heads) == 60)
            for side in (here, there):
                assert side.heads == [head for index in range(30) for head in (b"%d" % index, b"then %d" % index)]
                assert all(side.payloads[2 * index] == bytes([index]) * (index * 20_011) for index in range(30))

    run(story())


def test_control_that_may_overtake_passes_a_bulk_that_is_stuck_and_the_others_wait() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with paired(here, there, LinkLimits(chunk_bytes=100)) as (left, _, (_, bulk)):
            bulk.gate.clear()
            left.send(b"before")
            left.send(b"bulk", [bytes(5000)])
            left.send(b"overtakes", may_overtake=True)
            left.send(b"waits")
            left.send(b"overtakes no control", may_overtake=True)
            await there.until(lambda: len(there.heads) == 2)
            assert there.heads == [b"before", b"overtakes"]
            bulk.gate.set()
            await there.until(lambda: len(there.heads) == 5)
            assert there.heads == [b"before", b"overtakes", b"bulk", b"waits", b"overtakes no control"]

    run(story(), virtual=True)


@asynccontextmanager
async def slow_bulk(address: str, flowing: asyncio.Event) -> AsyncIterator[str]:
    """The address of a proxy that forwards no more than a megabyte of a bulk connection until `flowing` is set."""
    tasks: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, room: float) -> None:
        while data := await reader.read(1 << 16):
            room -= len(data)
            if room < 0:
                await flowing.wait()
            writer.write(data)
            await writer.drain()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other = await asyncio.open_connection(*split_address(address))
        writers.extend([writer, other])
        first = await reader.readexactly(len(PREFACE))
        other.write(first)
        up = pump(reader, other, 1 << 20 if first == PREFACE else math.inf)
        tasks.extend([asyncio.create_task(up), asyncio.create_task(pump(other_reader, writer, math.inf))])

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    finally:
        proxy.close()
        for task in tasks:
            task.cancel()
        for each in writers:
            each.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_control_overtakes_a_real_bulk_over_grpc() -> None:
    """Which is held up on its way: whoever has the processor could else carry it there before a word of gRPC's."""

    async def story() -> None:
        here, there, flowing = Recorder(), Recorder(), asyncio.Event()
        async with serving(there) as (_, address), slow_bulk(address, flowing) as between:
            link = await dialled(between, here)
            link.send(b"bulk", [bytes(48 << 20)])
            link.send(b"overtakes", may_overtake=True)
            link.send(b"waits")
            await there.until(lambda: bool(there.heads))
            flowing.set()
            await there.until(lambda: len(there.heads) == 3)
            assert there.heads == [b"overtakes", b"bulk", b"waits"]
            link.close("that was all")
            await link.wait_closed()

    run(story())


def test_send_and_close_from_other_threads() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with serving(there) as (_, address):
            link = await dialled(address, here)

            def work(index: int) -> None:
                for count in range(50):
                    link.send(b"%d %d" % (index, count), [b"x"] if count % 2 else None)

            threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
            for thread in threads:
                thread.start()
            await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
            await link.drain()
            await there.until(lambda: len(there.heads) == 150)
            for index in range(3):
                own = [head for head in there.heads if head.startswith(b"%d " % index)]
                assert own == [b"%d %d" % (index, count) for count in range(50)]
            await asyncio.to_thread(link.close, "from a thread")
            await there.until(lambda: bool(there.reasons))
            assert there.reasons == ["the peer closed: from a thread"]

    run(story())


def test_drain_then_close_loses_nothing() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with serving(there) as (_, address):
            link = await dialled(address, here)
            for index in range(100):
                link.send(b"%d" % index, [bytes(30_000)])
            link.send(b"leave")
            await link.drain()
            link.close("left")
            link.send(b"too late")
            await there.until(lambda: bool(there.reasons))
            assert len(there.heads) == 101 and there.heads[-1] == b"leave"

    run(story())


def test_what_was_sent_before_the_last_word_is_heard_before_it_is_over() -> None:
    """The last word and the bytes before it travel on different connections, and the word is quicker."""

    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with paired(here, there, LinkLimits(chunk_bytes=100)) as (left, right, (_, bulk)):
            bulk.gate.clear()
            left.send(b"bulk", [bytes(300)])
            left.send(b"leave")
            await left.drain()
            left.close("left", timeout=5.0)
            await asyncio.sleep(1.5)  # longer than those who close in anger wait
            assert not there.heads and not there.reasons
            bulk.gate.set()
            await there.until(lambda: bool(there.reasons))
            assert there.heads == [b"bulk", b"leave"] and there.reasons == ["the peer closed: left"]
            assert left.closed_here and not right.closed_here

    run(story(), virtual=True)


def test_peer_that_goes_with_bytes_outstanding_is_waited_for_while_its_streams_last() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with paired(here, there, LinkLimits(chunk_bytes=100, pulse_seconds=0.05)) as (left, _, (_, bulk)):
            bulk.gate.clear()
            left.send(b"bulk", [bytes(300)])
            await left.drain()
            left.close("left", timeout=0.1)
            await there.until(lambda: bool(there.reasons))
            assert there.reasons == ["the peer closed: left"] and not there.heads

    run(story(), virtual=True)


def test_full_queue_closes_the_link_with_a_reason_and_does_not_raise() -> None:
    """Without a network: a bulk connection's thread may empty the queue while it is being filled."""

    async def story() -> None:
        for limits, count, words in (
            (LinkLimits(queue_messages_max=10), 11, "the send queue is full: 10 messages"),
            (LinkLimits(queue_bytes_max=250), 3, "the send queue is full: it holds 200 bytes and 100 more do not fit"),
            (LinkLimits(head_bytes_max=3), 1, "a head of 4 bytes is longer than 3"),
        ):
            here, there = Recorder(), Recorder()
            async with paired(here, there, limits) as (link, _, _):
                for _ in range(count):
                    link.send(b"head", [bytes(100)])
                await here.until(lambda here=here: bool(here.reasons))
                await there.until(lambda there=there: bool(there.reasons))
            assert here.reasons == [words]
            assert there.reasons == [f"the peer closed: {words}"]

    run(story(), virtual=True)


def test_admit_refuses_and_says_whether_to_try_again() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with serving(there) as (server, address):
            with pytest.raises(Refused) as wrong:
                await dial(address, here, peer="s", metadata={"name": "x", "token": "no"}, timeout=PATIENCE_SECONDS)
            assert (wrong.value.reason, wrong.value.retry) == ("the token is wrong", False)
            with pytest.raises(Refused) as busy:
                await dialled(address, here, "busy")
            assert (busy.value.reason, busy.value.retry) == ("come back later", True)
            assert server.refused["admit"] == 2
        assert not here.told and not there.told

    run(story())


def test_nobody_there_is_a_failed_link_and_a_deaf_one_too() -> None:
    async def story() -> None:
        with pytest.raises(LinkFailed, match="cannot be reached"):
            await dialled("127.0.0.1:1", Recorder())
        deaf = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = deaf.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionError):
            await dial(f"127.0.0.1:{port}", Recorder(), peer="s", metadata={}, timeout=0.5)
        deaf.close()
        await deaf.wait_closed()

    run(story())


def test_busy_port_is_one_clear_sentence() -> None:
    async def story() -> None:
        async with serving(Recorder()) as (_, address):
            with pytest.raises(UserError, match=f"cannot listen on {address}: the port is taken"):
                await Server(Recorder(), lambda _: "x", LinkLimits(), None).start(address)

    run(story())


def test_server_that_stops_tells_everybody_and_the_link_comes_back_with_backoff() -> None:
    async def story() -> None:
        here, backoff, waits = Recorder(), Backoff(random.Random(3)), []
        async with serving(Recorder()) as (_, address):
            await dialled(address, here)
        await here.until(lambda: bool(here.reasons))
        assert here.reasons == ["the peer closed: the server is stopping"]
        server = Server(Recorder(echo=True), lambda _: "x", LinkLimits(), None)
        while len(waits) < 8:
            try:
                link = await dialled(address, here)
                break
            except LinkFailed:
                waits.append(backoff.next())
                if len(waits) == 2:
                    await server.start(address)
                await asyncio.sleep(waits[-1])
        backoff.reset()
        link.send(b"again")
        await here.until(lambda: here.heads == [b"again"])
        await server.stop(1)
        await link.wait_closed()
        assert 2 <= len(waits) < 8

    run(story())


def test_fifty_links_at_once() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder(echo=True)
        async with serving(there) as (_, address):
            links = await asyncio.gather(*(dialled(address, here, f"learner{index}") for index in range(50)))
            for index, link in enumerate(links):
                link.send(b"%d" % index, [bytes([index]) * 1000])
            await here.until(lambda: len(here.heads) == 50)
            assert sorted(here.heads, key=int) == [b"%d" % index for index in range(50)]
            assert {link.peer for link in there.links} == {f"learner{index}" for index in range(50)}
        await here.until(lambda: len(here.reasons) == 50)
        await asyncio.gather(*(link.wait_closed() for link in links))

    run(story())


def test_calls_and_uploads() -> None:
    async def story() -> None:
        server = Server(Recorder(), lambda _: "x", LinkLimits(), None)

        async def later(metadata: Mapping[str, str], request: bytes) -> bytes:
            await asyncio.sleep(0)
            return metadata["name"].encode() + request

        def refuse(metadata: Mapping[str, str], request: bytes) -> bytes:
            raise Refused("not today", retry=True)

        sinks: list[Memory] = []

        def begin(metadata: Mapping[str, str]) -> Memory | bytes:
            if "known" in metadata:
                return b"known already"
            sinks.append(Memory(3 << 20))
            return sinks[-1]

        server.on_call("later", later, lambda _: None)
        server.on_call("no", refuse, lambda _: None)
        server.on_upload("take", begin)
        address = await server.start("127.0.0.1:0")
        assert await call(address, "later", {"name": "n"}, b"!", None, PATIENCE_SECONDS) == b"n!"
        with pytest.raises(Refused, match="not today"):
            await call(address, "no", {}, b"", None, PATIENCE_SECONDS)
        with pytest.raises(LinkFailed, match="unimplemented"):
            await call(address, "unheard", {}, b"", None, PATIENCE_SECONDS)
        data = os.urandom(1 << 20) * 2 + b"abc"
        assert await upload(address, "take", {}, [data[:7], data[7:]], None, PATIENCE_SECONDS) == b"%d" % len(data)
        assert sinks[0].taken == data and not sinks[0].is_abandoned
        assert await upload(address, "take", {"known": "yes"}, [data], None, PATIENCE_SECONDS) == b"known already"
        assert len(sinks) == 1
        with pytest.raises(Refused, match="larger than"):
            await upload(address, "take", {}, [data, data], None, PATIENCE_SECONDS)
        assert server.refused == {"payload_too_big": 1} and sinks[1].is_abandoned
        await server.stop(0)
        with pytest.raises(LinkFailed):
            await call(address, "later", {"name": "n"}, b"", None, PATIENCE_SECONDS)

    run(story())


def test_upload_may_take_its_time_while_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __init__(self, *_: object) -> None:
            self._left, self._said, self._welcomed = 8, asyncio.Event(), False

        def open(self, *_: object) -> Slow:
            return self

        async def write(self, frame: bytes) -> None:
            await asyncio.sleep(0.1 if self._left else 60)
            self._left -= 1

        async def read(self) -> bytes:
            if not self._welcomed:
                self._welcomed = True
                return pack(WELCOME)
            await self._said.wait()
            return pack(ANSWER, body=(b"thanks",))

        async def finish(self) -> None:
            self._said.set()

        async def close(self) -> None:
            pass

    async def story() -> None:
        monkeypatch.setattr(sys.modules["atoll.transport.dial"], "Channel", Slow)  # the package's `dial` is the function
        chunk = bytes(LinkLimits.chunk_bytes)
        assert await upload("far.away:1", "take", {}, [chunk] * 8, None, 0.4) == b"thanks"
        with pytest.raises(LinkFailed, match=re.escape("far.away:1 accepted no data for 0.4 s")):
            await upload("far.away:1", "take", {}, [chunk] * 9, None, 0.4)

    run(story(), virtual=True)


PULSING = LinkLimits(pulse_seconds=0.1, assembling_max=100)


def test_link_without_messages_lives_by_its_pulses_which_are_no_messages() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with paired(here, there, PULSING) as (left, right, _):
            while min(left.bytes_received, right.bytes_received) < 8 * HEADER_BYTES:
                assert not here.reasons and not there.reasons
                await asyncio.sleep(0.01)
            assert left.messages_sent == right.messages_received == 0
            left.send(b"still here")
            await there.until(lambda: there.heads == [b"still here"])

    run(story(), virtual=True)


def test_peer_of_which_nothing_comes_for_three_pulses_is_taken_for_dead() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with paired(here, there, PULSING) as (_, _, pipes):
            for pipe in pipes:
                pipe.gate.clear()
            await there.until(lambda: bool(there.reasons))
            assert there.reasons == ["the connection broke (nothing came for 0.3 s)"]

    run(story(), virtual=True)


def test_chunks_that_come_are_a_sign_of_life_whatever_became_of_the_pulses() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with paired(here, there, PULSING) as (left, right, (talk, _)):
            talk.gate.clear()
            loop = asyncio.get_running_loop()
            until = loop.time() + 1.0
            while loop.time() < until:
                left.send(b"bulk", [bytes(10)])
                await asyncio.sleep(0.08)
            assert not there.reasons and right.bytes_received
            talk.gate.set()
            await there.until(lambda: len(there.heads) >= 8)

    run(story(), virtual=True)


def test_end_that_reads_no_further_does_not_blame_the_peer_for_its_silence() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with paired(here, there, LinkLimits(pulse_seconds=0.1, queue_messages_max=3)) as (left, right, (_, bulk)):
            bulk.gate.clear()
            left.send(b"bulk", [bytes(10)])
            for _ in range(4):
                left.send(b"waits")
                await left.drain()
            read = right.bytes_received
            await asyncio.sleep(0.8)
            assert right.bytes_received == read, "the inbox is full"
            assert not here.reasons and not there.reasons
            bulk.gate.set()
            await there.until(lambda: len(there.heads) == 5)

    run(story(), virtual=True)


def test_frozen_connection_is_noticed_on_both_ends() -> None:
    """A proxy that stops forwarding stands for a pulled cable: nothing is closed, nothing arrives."""

    async def story() -> None:
        here, there = Recorder(), Recorder()
        flowing = asyncio.Event()
        flowing.set()
        pumps: list[asyncio.Task[None]] = []
        writers: list[asyncio.StreamWriter] = []

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                await flowing.wait()
                writer.write(data)

        async with serving(there) as (_, address):
            host, port = address.split(":")

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                other_reader, other_writer = await asyncio.open_connection(host, int(port))
                writers.extend([writer, other_writer])
                pumps.extend([asyncio.create_task(pump(reader, other_writer)), asyncio.create_task(pump(other_reader, writer))])

            proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
            link = await dialled(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}", here)
            flowing.clear()
            for end in (here, there):
                await end.until(lambda end=end: bool(end.reasons))
                assert "the connection broke (nothing came for " in end.reasons[0]
            assert 4 * LinkLimits().pulse_seconds <= 10.0, "two to four pulses: ten seconds, where nothing stalls"
            await link.wait_closed()
            proxy.close()
            for pumping in pumps:
                pumping.cancel()
            for writer in writers:
                writer.close()
            await asyncio.gather(*pumps, *(writer.wait_closed() for writer in writers), return_exceptions=True)

    run(story())
