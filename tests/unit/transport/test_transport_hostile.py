"""Peers that are admitted and do not speak our language: each loses its own link, for a reason that is counted, and no other."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AbstractAsyncContextManager

import pytest
from raw_link import RawBulk, chunk, of_kind, raw_link
from transport_peers import PATIENCE_SECONDS, Recorder, credentials_of, run, serving

from atoll.transport import LinkLimits, Refused, Server, dial
from atoll.transport.chunks import CHUNK_HEADER_BYTES
from atoll.transport.frames import BULK, BYE, CHUNK, CONTROL, PULSE, pack, unpack
from atoll.transport.server import COUNT_KEY, SESSION_KEY
from atoll.transport.talk import TalkStream
from atoll.transport.wire import Channel, StreamBroken, failure

LIMITS = LinkLimits(head_bytes_max=1000, payload_bytes_max=1 << 20, chunk_bytes=1 << 16, queue_messages_max=50)
T, B = "talk", "bulk"


def corrupt(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


FRAMES: dict[str, tuple[str, list[tuple[str, bytes]]]] = {
    "garbage": ("checksum", [(T, secrets.token_bytes(500))]),
    "short": ("malformed", [(T, b"x")]),
    "garbage in bulk": ("checksum", [(B, bytes(500))]),
    "unknown kind": ("malformed", [(T, pack(b"what"))]),
    "chunk on the talk stream": ("malformed", [(T, pack(CHUNK, 0, 0, 1, [b"x"]))]),
    "message on a bulk connection": ("malformed", [(B, of_kind(CONTROL, chunk(0, 0, 1, b"x")))]),
    "pulse that says something": ("malformed", [(T, pack(PULSE, 0, 0, 0, [b"x"]))]),
    "control with a size": ("malformed", [(T, pack(CONTROL, 0, 0, 5))]),
    "bad checksum": ("checksum", [(T, corrupt(pack(CONTROL, 0, 0, 0, [b"head"])))]),
    "bad checksum of a chunk": ("checksum", [(B, corrupt(chunk(0, 0, 4, b"data")))]),
    "bad checksum of a header": ("checksum", [(B, corrupt(chunk(0, 0, 4, b"data")[:CHUNK_HEADER_BYTES]))]),
    "head too long": ("head_too_long", [(T, pack(CONTROL, 0, 0, 0, [bytes(1001)]))]),
    "number skipped": ("order", [(T, pack(CONTROL, 1))]),
    "number again, other words": ("order", [(T, pack(CONTROL, 0, 0, 0, [b"a"])), (T, pack(CONTROL, 0, 0, 0, [b"b"]))]),
    "behind bulk never sent": ("order", [(T, pack(CONTROL, 0, 1))]),
    "behind control never sent": ("order", [(B, chunk(0, 0, 1, b"x")), (T, pack(BULK, 0, 1, 1))]),
    "payload too big": ("payload_too_big", [(B, chunk(0, 0, 1 << 33, b"x"))]),
    "payload too big, head": ("payload_too_big", [(T, pack(BULK, 0, 0, 1 << 62))]),
    "totals of chunks disagree": ("total_disagrees", [(B, chunk(0, 0, 9, b"x")), (B, chunk(0, 1, 8, b"x"))]),
    "totals of head and chunk disagree": ("total_disagrees", [(T, pack(BULK, 0, 0, 8)), (B, chunk(0, 0, 9, b"x"))]),
    "chunk beyond its payload": ("malformed", [(B, chunk(0, 3, 4, b"xx"))]),
    "chunk beyond all numbers": ("malformed", [(B, chunk(0, 2**64 - 1, 4, b"xx"))]),
    "empty chunk": ("malformed", [(B, chunk(0, 0, 4))]),
    "chunk larger than a chunk may be": ("malformed", [(B, chunk(0, 0, 1 << 20, bytes(LIMITS.chunk_bytes + 1)))]),
    "overlap": ("overlap", [(B, chunk(0, 0, 9, b"abc")), (B, chunk(0, 2, 9, b"xyz"))]),
    "the same chunk again": ("overlap", [(B, chunk(0, 0, 9, b"abc")), (B, chunk(0, 0, 9, b"abc"))]),
    "an empty payload again": ("overlap", [(B, chunk(0, 0, 0)), (B, chunk(0, 0, 0))]),
    "chunk of a message far ahead": ("order", [(B, chunk(1 << 50, 0, 4, b"x"))]),
    "chunk of a delivered message": (
        "unknown_transfer",
        [(B, chunk(0, 0, 1, b"x")), (T, pack(BULK, 0, 0, 1)), ("wait", b""), (B, chunk(0, 0, 1, b"y"))],
    ),
    "goes on after its word": ("", [(T, pack(BYE, body=[b"\xff\xfe"])), (T, b"x")]),
}


def hostile(address: str, connections: int = 1) -> AbstractAsyncContextManager[tuple[TalkStream, list[RawBulk]]]:
    return raw_link(address, credentials_of("hostile"), connections)


async def last_words(talk: TalkStream) -> str:
    try:
        while (data := await talk.read()) is not None:
            frame = unpack(data)
            if frame.kind == BYE:
                return bytes(frame.body).decode()
    except StreamBroken:
        pass
    return ""


async def assail(address: str, server: Server, there: Recorder, name: str) -> None:
    kind, frames = FRAMES[name]
    before = server.refused[kind]
    async with hostile(address) as (talk, (bulk,)):
        ended = len(there.reasons)
        try:
            for where, frame in frames:
                if where == "wait":
                    await there.until(lambda: there.heads[-1:] == [b""])
                else:
                    await {T: talk, B: bulk}[where].write(frame)
        except (StreamBroken, ConnectionError):
            pass  # it was cut off before it was done
        words = await last_words(talk)
        await there.until(lambda: len(there.reasons) == ended + 1)
    if kind:
        assert server.refused[kind] == before + 1, name
        assert words and there.reasons[-1] == f"the peer broke the rules: {words}", name


def test_hostile_frames_of_every_kind_leave_an_honest_link_untouched() -> None:
    async def story() -> None:
        there, here = Recorder(), Recorder()
        async with serving(there, LIMITS) as (server, address):
            honest = await dial(address, here, peer="s", metadata=credentials_of("honest"), limits=LIMITS, timeout=60)
            for name in FRAMES:
                await assail(address, server, there, name)
                honest.send(name.encode(), [name.encode() * 10_000])
                await there.until(lambda name=name: there.heads[-1:] == [name.encode()])
                assert there.payloads[-1] == name.encode() * 10_000
            assert not here.reasons
            assert len(there.reasons) == len(FRAMES)
            assert "duplicate" not in server.refused

    run(story())


def test_identical_message_twice_is_dropped_and_counted() -> None:
    async def story() -> None:
        there = Recorder()
        async with serving(there, LIMITS) as (server, address), hostile(address, 2) as (talk, bulks):
            for _ in range(2):
                await talk.write(pack(CONTROL, 0, 0, 0, [b"once"]))
            await bulks[0].write(chunk(0, 0, 6, b"abc"))
            await bulks[1].write(chunk(0, 3, 6, b"def"))
            await talk.write(pack(BULK, 0, 1, 6, [b"bulk"]))
            await there.until(lambda: len(there.heads) == 2)
            assert there.heads == [b"once", b"bulk"] and there.payloads[1] == b"abcdef"
            assert server.refused == {"duplicate": 1}

    run(story())


def test_messages_held_back_are_bounded_by_reading_no_further() -> None:
    async def story() -> None:
        there = Recorder()
        async with serving(there, LIMITS) as (server, address), hostile(address) as (talk, (bulk,)):
            await talk.write(pack(BULK, 0, 0, 1, [b"first"]))
            flood = asyncio.create_task(talk_flood(talk))
            await there.until(lambda: bool(there.links))
            link = there.links[0]
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not link._inbox.is_full:
                    await asyncio.sleep(0.01)
            await asyncio.wait({flood}, timeout=0.3)
            assert link._inbox.is_full and not there.heads
            assert len(link._inbox._controls) < LIMITS.queue_messages_max
            await bulk.write(chunk(0, 0, 1, b"x"))
            await flood
            await there.until(lambda: len(there.heads) == 201)
            assert not server.refused

    run(story())


async def talk_flood(talk: TalkStream) -> None:
    for number in range(200):
        await talk.write(pack(CONTROL, number, 1, 0, [bytes(900)]))


def test_session_that_is_not_its_own_is_refused() -> None:
    async def story() -> None:
        there = Recorder()
        async with serving(there) as (server, address):
            good = {**credentials_of("x"), SESSION_KEY: secrets.token_hex(16), COUNT_KEY: "2"}
            channel = Channel(address, LinkLimits(), None)
            talk = channel.open("Talk", good)
            assert await talk.read()
            for metadata, words in (
                (good, "malformed or already in use"),
                ({**good, SESSION_KEY: "short"}, "malformed or already in use"),
                ({**good, SESSION_KEY: "g" * 32}, "malformed or already in use"),
                ({**good, SESSION_KEY: "f" * 32, COUNT_KEY: "999"}, "1 to 16 bulk connections"),
            ):
                with pytest.raises(StreamBroken) as broken:
                    await channel.open("Talk", metadata).read()
                refusal = failure(broken.value, address)
                assert isinstance(refusal, Refused) and words in refusal.reason and not refusal.retry
            assert server.refused == {"admit": 4}
            await channel.close()
        assert not there.told

    run(story())


def test_limit_of_payloads_may_be_lowered_later() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with serving(there) as (server, address):
            link = await dial(address, here, peer="s", metadata=credentials_of("x"), timeout=60)
            link.send(b"fits", [bytes(2000)])
            await there.until(lambda: there.heads == [b"fits"])
            server.payload_bytes_max = 1000
            link.send(b"does not", [bytes(2000)])
            await here.until(lambda: bool(here.reasons))
            assert here.reasons == ["refused: a payload of 2000 bytes is larger than 1000"]
            assert server.refused == {"payload_too_big": 1}

    run(story())


def test_peer_that_lives_and_never_reads_its_bulk_stream_loses_its_link() -> None:
    """It sends pulses, so it is not silent; but what is queued for it would stay in memory as long as it likes."""
    limits = LinkLimits(unread_seconds=0.8, pulse_seconds=0.3)

    async def story() -> None:
        there = Recorder()
        async with serving(there, limits) as (_, address), hostile(address) as (talk, _):
            await there.until(lambda: len(there.links) == 1)
            there.links[0].send(b"theta", [bytes(64 << 20)])

            async def pulse() -> None:
                while not there.reasons:
                    await talk.write(pack(PULSE))
                    await asyncio.sleep(0.1)

            pulses = asyncio.create_task(pulse())
            await there.until(lambda: len(there.reasons) == 1)
            await asyncio.gather(pulses, return_exceptions=True)
            assert "read nothing for 0.8 s" in there.reasons[0]

    run(story())


def test_queue_of_a_peer_that_reads_too_slowly_is_bounded_and_may_be_later_on() -> None:
    async def story() -> None:
        there = Recorder()
        async with serving(there) as (server, address), hostile(address):
            await there.until(lambda: len(there.links) == 1)
            server.queue_bytes_max = 40 << 20
            assert there.links[0].queue_bytes_max == 40 << 20
            payload = bytes(16 << 20)
            for _ in range(4):
                there.links[0].send(b"theta", [payload])
            await there.until(lambda: len(there.reasons) == 1)
            assert "queue is full" in there.reasons[0]

    run(story())
