"""Payloads that other processes send on connections of their own: here other ends of the same process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from raw_link import RawBulk, RawLink, chunk
from transport_peers import PATIENCE_SECONDS, Recorder, admit, credentials_of, run, started

from atoll.transport import (
    Elsewhere,
    FeedEnd,
    Link,
    LinkFailed,
    LinkLimits,
    PlacedBytes,
    Server,
    ServerCredentials,
    SharedBuffers,
    client_credentials,
    dial,
    server_credentials,
)
from atoll.transport import feed as feeds_of_transport
from atoll.transport.chunks import BulkHello, feed_of, may_be_preface, pack_key, preface_of, unpack_key
from atoll.transport.frames import BULK, CONTROL, SPREAD, pack
from atoll.transport.keys import SYNCER_NAME, load_learner, load_server, load_shard, make_keys

PART_SIZES = (4, 3 << 20)


class Ends:
    """The feeds of a server, without their processes: what a `ShardFeeds` does."""

    def __init__(self, count: int, credentials: ServerCredentials | None = None) -> None:
        self.count = count
        self.addresses: list[str] = []
        self._loop = asyncio.get_running_loop()
        self.server: Server
        self.late = False
        """The word of a new session comes after its connections."""
        context = credentials.bulk if credentials is not None else None
        self.ends = [
            FeedEnd(
                context, LinkLimits(), lambda session, n=n: self._tell("feed_is_here", session, n),
                lambda session, nbytes, n=n: self._tell("feed_sent", session, n, nbytes),
                lambda session, why: self._tell("feed_is_gone", session, why), part_sizes=PART_SIZES,
                came=lambda session, number, nbytes: self._tell("feed_has", session, number, nbytes),
            )
            for n in range(count)
        ]  # fmt: skip

    def _tell(self, what: str, *about: object) -> None:
        self._loop.call_soon_threadsafe(lambda: getattr(self.server, what)(*about))

    def expect(self, session: bytes, key: bytes, certificate: str | None) -> None:
        for end in self.ends:
            if self.late:
                self._loop.call_later(0.3, end.expect, session, key, certificate)
            else:
                end.expect(session, key, certificate)

    def forget(self, session: bytes) -> None:
        for end in self.ends:
            end.forget(session)

    def hand(self, feed: int, connection: socket.socket) -> None:
        self.ends[feed].take(connection.dup())

    def part(self, feed: int, link: Link, number: int) -> bytes | None:
        """Of a spread message that was delivered, from the feed that has it."""
        data = self.ends[feed].take_part(link.session, number)
        return None if data is None else bytes(data)

    def send(self, link: Link, head: bytes, stripes: list[list[PlacedBytes]]) -> None:
        """`stripes`: of each feed."""
        total = sum(len(part) for each in stripes for stripe in each for part in stripe.data)
        number = link.send_elsewhere(head, total)
        assert number is not None
        for end, own in zip(self.ends, stripes, strict=True):
            end.put(link.session, number, total, own)


@asynccontextmanager
async def fed(
    there: Recorder, count: int = 2, credentials: ServerCredentials | None = None, of_feeds: ServerCredentials | None = None
) -> AsyncIterator[tuple[Ends, str]]:
    server = Server(there, admit, LinkLimits(), credentials)
    ends = Ends(count, of_feeds or credentials)
    ends.server, server.feeds = server, ends
    async with started(server) as address:
        try:
            yield ends, address
        finally:
            for end in ends.ends:
                end.close()


def stripe(at: int, data: bytes) -> PlacedBytes:
    return PlacedBytes(at, SharedBuffers([data]))


async def dialled(address: str, here: Recorder, name: str = "a") -> Link:
    return await dial(address, here, peer="syncer", metadata=credentials_of(name))


@asynccontextmanager
async def ports(ends: Ends) -> AsyncIterator[None]:
    """The feeds take connections at ports of their own, as processes of other machines."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in ends.ends]

    def accept(listener: socket.socket, end: FeedEnd) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                connection, _ = listener.accept()
                assert feed_of(connection.recv(8, socket.MSG_WAITALL)) is not None
                end.take(connection)

    for pair in zip(listeners, ends.ends, strict=True):
        threading.Thread(target=accept, args=pair, daemon=True).start()
    ends.addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    try:
        yield
    finally:
        for listener in listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def shards_credentials(keys: Path) -> ServerCredentials:
    found = load_shard(keys)
    return server_credentials(found.certificate, found.key, found.ca)


def test_feeds_at_addresses_of_their_own_are_dialled_there_and_show_who_they_are(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", learners=1, shards=1)
    ours, theirs = load_server(tmp_path / "keys"), load_learner(tmp_path / "keys", 0)
    shown = client_credentials(theirs.ca, theirs.certificate, theirs.key, SYNCER_NAME)
    own = server_credentials(ours.certificate, ours.key, ours.ca)

    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with fed(there, credentials=own, of_feeds=shards_credentials(tmp_path / "keys")) as (ends, address), ports(ends):
            peer = await dial(address, here, peer="syncer", metadata=credentials_of("a"), credentials=shown)
            (link,) = there.links
            ends.send(link, b"striped", [[stripe(0, b"ab")], [stripe(2, b"cd")]])
            await here.until(lambda: bool(here.heads))
            assert here.payloads == [b"abcd"] and peer.feeds == 2

    run(story())


def test_no_learner_talks_to_a_feed_that_is_no_shard_or_is_not_there(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", learners=1, shards=1)
    ours, theirs = load_server(tmp_path / "keys"), load_learner(tmp_path / "keys", 0)
    shown = client_credentials(theirs.ca, theirs.certificate, theirs.key, SYNCER_NAME)
    own = server_credentials(ours.certificate, ours.key, ours.ca)

    async def refused(of_feeds: ServerCredentials, there: Recorder, *, away: bool, match: str) -> None:
        async with fed(there, credentials=own, of_feeds=of_feeds) as (ends, address), ports(ends):
            if away:
                with socket.create_server(("127.0.0.1", 0)) as unused:
                    ends.addresses[1] = f"127.0.0.1:{unused.getsockname()[1]}"
            with pytest.raises(LinkFailed, match=match):
                await dial(address, Recorder(), peer="syncer", metadata=credentials_of("a"), credentials=shown)

    async def story() -> None:
        there = Recorder()
        await refused(own, there, away=False, match="certificate verify failed")
        await refused(shards_credentials(tmp_path / "keys"), there, away=True, match="shard 1 cannot be reached at 127")
        assert not there.told

    run(story())


@pytest.mark.parametrize("late", [False, True])
def test_payload_comes_together_from_all_connections_in_the_order_of_the_messages(late: bool) -> None:
    async def story() -> None:
        data = random.Random(0).randbytes(5 << 20)
        here, there = Recorder(), Recorder(echo=False)
        async with fed(there) as (ends, address):
            ends.late = late
            await dialled(address, here)
            (link,) = there.links
            link.send(b"before")
            third = len(data) // 3
            ends.send(link, b"striped", [
                [stripe(0, data[:third]), stripe(2 * third, data[2 * third :])], [stripe(third, data[third : 2 * third])],
            ])  # fmt: skip
            link.send(b"between")
            link.send(b"own", [b"of the server"])
            ends.send(link, b"again", [[stripe(0, b"x")], []])
            await here.until(lambda: len(here.heads) == 5)
            assert here.heads == [b"before", b"striped", b"between", b"own", b"again"]
            assert here.payloads == [None, data, None, b"of the server", b"x"]
            await until(lambda: link.bytes_sent > len(data))

    run(story())


def test_control_that_may_overtake_does_not_wait_for_what_a_feed_has_not_sent() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with fed(there) as (ends, address):
            await dialled(address, here)
            (link,) = there.links
            number = link.send_elsewhere(b"striped", 4)
            link.send(b"overtakes", may_overtake=True)
            link.send(b"after it")
            await here.until(lambda: bool(here.heads))
            assert here.heads == [b"overtakes"] and number == 0
            ends.ends[1].put(link.session, 0, 4, [stripe(0, b"four")])
            await here.until(lambda: len(here.heads) == 3)
            assert here.heads == [b"overtakes", b"striped", b"after it"]

    run(story())


def test_feeds_of_a_server_with_certificates_show_its_own_and_ask_for_the_learners(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", learners=2)
    ours, theirs, others = load_server(tmp_path / "keys"), load_learner(tmp_path / "keys", 0), load_learner(tmp_path / "keys", 1)

    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with fed(there, credentials=server_credentials(ours.certificate, ours.key, ours.ca)) as (ends, address):
            shown = client_credentials(theirs.ca, theirs.certificate, theirs.key, SYNCER_NAME)
            await dial(address, here, peer="syncer", metadata=credentials_of("a"), credentials=shown)
            (link,) = there.links
            ends.send(link, b"striped", [[stripe(0, b"ab")], [stripe(2, b"cd")]])
            await here.until(lambda: bool(here.heads))
            assert here.payloads == [b"abcd"]
            # Another learner's certificate with the key of this one's session.
            raw = RawLink(address, credentials_of("b"), shown)
            await raw.open_talk()
            other = client_credentials(others.ca, others.certificate, others.key, SYNCER_NAME)
            raw._credentials = other
            assert await (await raw.open_bulk(feed=0)).is_closed()
            await raw.close()

    run(story())


def test_strangers_are_closed_without_a_word_and_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds_of_transport, "STRANGERS_MAX", 4)
    # Any of them is closed, so among five it may be the one that was about to say its key. Here it is the oldest.
    monkeypatch.setattr(feeds_of_transport, "random", SimpleNamespace(randrange=lambda count: 0))

    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with fed(there) as (ends, address):
            link = RawLink(address, credentials_of("a"))
            await link.open_talk()
            assert await (await link.open_bulk(feed=0, key=b"?" * 32)).is_closed()
            assert await (await link.open_bulk(feed=2)).is_closed(), "there are two"
            silent = [await RawBulk.connect(address, preface=preface_of(1)) for _ in range(6)]
            ends_of = [asyncio.create_task(one.is_closed()) for one in silent]
            await until(lambda: sum(one.done() for one in ends_of) == 2)
            assert all(one.result() for one in ends_of if one.done()), "two of them make room"
            await link.close()
            await dialled(address, here)
            ends.send(there.links[0], b"striped", [[stripe(0, b"ab")], [stripe(2, b"cd")]])
            await here.until(lambda: bool(here.payloads))
            assert here.payloads == [b"abcd"]
            for one in silent:
                await one.close()
            await asyncio.gather(*ends_of)

    run(story())


def test_stranger_that_shows_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds_of_transport, "STRANGER_SECONDS", 0.2)

    async def story() -> None:
        async with fed(Recorder()) as (_, address):
            link = RawLink(address, credentials_of("a"))
            await link.ask()
            silent = await RawBulk.connect(address, preface=preface_of(0))
            assert await silent.is_closed()
            unknown = await RawBulk.connect(address, BulkHello(b"s" * 16, b"k" * 32, 0), preface=preface_of(0))
            assert await unknown.is_closed()
            for one in (silent, unknown, link):
                await one.close()

    run(story())


class Spread(Recorder):
    """A server whose feeds receive."""

    def __init__(self) -> None:
        super().__init__(echo=False)
        self.spread: list[Elsewhere] = []

    def opened(self, link: Link) -> None:
        super().opened(link)
        link.on_spread = self.arrived_elsewhere

    def arrived_elsewhere(self, link: Link, head: bytes, part: Elsewhere) -> None:
        self.heads.append(head)
        self.spread.append(part)
        self._notifier.notify_all()


def test_spread_message_goes_to_the_feeds_and_keeps_its_turn() -> None:
    async def story() -> None:
        here, there = Recorder(), Spread()
        async with fed(there) as (ends, address):
            link = await dialled(address, here)
            large = random.Random(1).randbytes(3 << 20)
            link.send(b"before")
            link.send(b"whole", [b"of the link"])
            link.send_spread(b"spread", [[large[:5], b"", large[5:]], [b"four"]])
            link.send(b"between")
            link.send_spread(b"one of them", [[], [b"more"]])
            link.send(b"after", [b""])
            await there.until(lambda: len(there.heads) == 6)
            assert there.heads == [b"before", b"whole", b"spread", b"between", b"one of them", b"after"]
            assert there.spread == [Elsewhere(1, len(large) + 4), Elsewhere(2, 4)]
            theirs = there.links[0]
            assert ends.part(0, theirs, 1) == large
            assert ends.part(1, theirs, 1) == b"four" and ends.part(1, theirs, 2) == b"more"
            assert theirs.bytes_received > len(large) and link.bytes_sent > len(large)
            assert ends.part(0, theirs, 4) is None

    run(story())


def test_messages_that_may_overtake_do_not_wait_for_parts_and_others_do() -> None:
    async def story() -> None:
        there = Spread()
        async with fed(there, count=2) as (_, address):
            link = RawLink(address, credentials_of("a"))
            await link.open_talk()
            await link.open_bulk()
            first, second = await link.open_bulk(feed=0), await link.open_bulk(feed=1)
            await link.ready()
            await first.write(chunk(0, 0, 4, b"four"))
            await link.talk.write(pack(SPREAD, 0, 0, 8, (b"spread",)))
            await link.talk.write(pack(CONTROL, 0, 0, 0, (b"overtakes",)))
            await link.talk.write(pack(CONTROL, 1, 1, 0, (b"after",)))
            await there.until(lambda: bool(there.heads))
            await asyncio.sleep(0.2)
            assert there.heads == [b"overtakes"], "the other part is missing"
            await second.write(chunk(0, 0, 4, b"more"))
            await there.until(lambda: len(there.heads) == 3)
            assert there.heads == [b"overtakes", b"spread", b"after"]
            await link.close()

    run(story())


def test_last_spread_message_counts_though_its_sender_has_said_goodbye() -> None:
    async def story() -> None:
        here, there = Recorder(), Spread()
        async with fed(there) as (_, address):
            link = await dialled(address, here)
            link.send_spread(b"spread", [[random.Random(1).randbytes(3 << 20)], [b"four"]])
            await link.drain()
            link.close("over", timeout=5.0)
            await there.until(lambda: bool(there.reasons))
            assert there.heads == [b"spread"] and "over" in there.reasons[0]

    run(story())


def test_peer_whose_parts_have_more_bytes_than_it_said_loses_its_link() -> None:
    async def story() -> None:
        there = Spread()
        async with fed(there, count=2) as (_, address):
            link = RawLink(address, credentials_of("a"))
            await link.open_talk()
            await link.open_bulk()
            feeds = [await link.open_bulk(feed=0), await link.open_bulk(feed=1)]
            await link.ready()
            await link.talk.write(pack(SPREAD, 0, 0, 7, (b"spread",)))
            for feed in feeds:
                await feed.write(chunk(0, 0, 4, b"four"))
            await there.until(lambda: bool(there.reasons))
            assert "have more than 7 bytes" in there.reasons[0]
            await link.close()

    run(story())


def test_peer_that_spreads_what_nobody_there_takes_loses_its_link() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder(echo=False)
        async with fed(there) as (_, address):
            link = await dialled(address, here)
            link.send_spread(b"spread", [[b"four"], []])
            await there.until(lambda: bool(there.reasons))
            assert "does not belong here" in there.reasons[0]

    run(story())


@pytest.mark.parametrize("head_first", [True, False])
def test_chunk_of_a_spread_message_on_another_connection_ends_the_link(head_first: bool) -> None:
    async def story() -> None:
        there = Spread()
        async with fed(there, count=1) as (_, address):
            link = RawLink(address, credentials_of("a"))
            await link.open_talk()
            own = await link.open_bulk()
            await link.open_bulk(feed=0)
            await link.ready()
            if head_first:  # and a message before it has not come
                await link.talk.write(pack(BULK, 0, 0, 4, (b"first",)))
                await link.talk.write(pack(SPREAD, 1, 0, 4, (b"head",)))
                await asyncio.sleep(0.2)
                await own.write(chunk(1, 0, 4, b"four"))
            else:
                await own.write(chunk(0, 0, 4, b"four"))
                await asyncio.sleep(0.2)
                await link.talk.write(pack(SPREAD, 0, 0, 4, (b"head",)))
            await there.until(lambda: bool(there.reasons))
            assert "which is spread, came here" in there.reasons[0]
            await link.close()

    run(story())


def test_spread_message_without_bytes_is_none() -> None:
    async def story() -> None:
        there = Spread()
        async with fed(there, count=1) as (_, address):
            link = RawLink(address, credentials_of("a"))
            await link.open_talk()
            await link.open_bulk()
            await link.open_bulk(feed=0)
            await link.ready()
            await link.talk.write(pack(SPREAD, 0, 0, 0, (b"head",)))
            await there.until(lambda: bool(there.reasons))
            assert "does not belong here" in there.reasons[0]
            await link.close()

    run(story())


def test_peer_that_sends_a_feed_a_part_of_no_size_there_is_loses_its_link() -> None:
    async def story() -> None:
        there = Recorder()
        async with fed(there, count=1) as (_, address):
            link = RawLink(address, credentials_of("a"))
            await link.open_talk()
            await link.open_bulk()
            feed = await link.open_bulk(feed=0)
            await link.ready()
            await feed.write(chunk(0, 0, 5, b"hello"))
            await there.until(lambda: bool(there.reasons))
            assert "no part has 5 bytes" in there.reasons[0]
            await link.close()

    run(story())


def test_lost_feed_ends_the_link_on_both_ends() -> None:
    async def story() -> None:
        here, there = Recorder(), Recorder()
        async with fed(there) as (ends, address):
            await dialled(address, here)
            ends.ends[1].close()
            await here.until(lambda: bool(here.reasons))
            await there.until(lambda: bool(there.reasons))

    run(story())


def test_peer_without_a_connection_to_every_feed_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.transport.server.OPENING_SECONDS", 0.3)

    async def story() -> None:
        there = Recorder()
        async with fed(there) as (_, address):
            link = RawLink(address, credentials_of("a"))
            await link.open_talk()
            await link.open_bulk()
            await link.open_bulk(feed=0)
            with pytest.raises(Exception, match="only 3 of 4 connections arrived"):
                await link.ready()
            assert not there.told
            await link.close()

    run(story())


def test_server_without_feeds_closes_a_connection_for_one() -> None:
    async def story() -> None:
        async with started(Server(Recorder(), admit)) as address:
            stranger = await RawBulk.connect(address, preface=preface_of(0))
            assert await stranger.is_closed()
            await stranger.close()

    run(story())


def test_peer_that_does_not_read_from_a_feed_loses_its_link() -> None:
    async def story() -> None:
        there = Recorder()
        async with fed(there) as (ends, address):
            ends.ends[1]._limits = LinkLimits(queue_bytes_max=40 << 20)
            link = RawLink(address, credentials_of("a"))
            await link.open_talk()
            await link.open_bulk()
            for feed in range(2):
                await link.open_bulk(feed=feed, place=feed)
            await link.ready()
            await there.until(lambda: bool(there.links))
            for _ in range(4):
                ends.send(there.links[0], b"theta", [[stripe(0, b"x")], [stripe(1, bytes(16 << 20))]])
            await there.until(lambda: bool(there.reasons))
            assert "the send queue is full: 41943040 bytes wait" in there.reasons[0]
            await link.close()

    run(story())


def test_strangers_that_are_gone_take_nobodys_place() -> None:
    async def story() -> None:
        async with fed(Recorder()) as (ends, _), ports(ends):
            host, port = ends.addresses[0].split(":")
            for _ in range(20):
                with socket.create_connection((host, int(port))) as stranger:
                    stranger.sendall(preface_of(0))
            await until(lambda: not ends.ends[0]._strangers)
            stays = await RawBulk.connect(ends.addresses[0], preface=preface_of(0))
            await until(lambda: len(ends.ends[0]._strangers) == 1)
            await stays.close()

    run(story())


def test_who_does_not_answer_is_named(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", learners=1, shards=1)
    ours, theirs = load_server(tmp_path / "keys"), load_learner(tmp_path / "keys", 0)
    shown = client_credentials(theirs.ca, theirs.certificate, theirs.key, SYNCER_NAME)
    own = server_credentials(ours.certificate, ours.key, ours.ca)

    async def story() -> None:
        async with fed(Recorder(), credentials=own) as (ends, address):
            with socket.create_server(("127.0.0.1", 0)) as hangs:
                ends.addresses = [f"127.0.0.1:{hangs.getsockname()[1]}"] * 2
                here = {"peer": "syncer", "metadata": credentials_of("a"), "credentials": shown}
                with pytest.raises(LinkFailed, match=f"^{address}, or one of its shards, did not answer within 1.5 s"):
                    await dial(address, Recorder(), timeout=1.5, **here)  # type: ignore[arg-type]

    run(story())


def test_nobody_is_handed_to_a_feed_while_nobody_opens_a_link() -> None:
    async def story() -> None:
        there = Recorder()
        async with fed(there) as (ends, address):
            stranger = await RawBulk.connect(address, preface=preface_of(0))
            assert await stranger.is_closed() and not ends.ends[0]._strangers
            link = RawLink(address, credentials_of("a"))
            await link.ask()
            other = await RawBulk.connect(address, preface=preface_of(0))
            await until(lambda: len(ends.ends[0]._strangers) == 1)
            for one in (stranger, other, link):
                await one.close()

    run(story())


def test_key_tells_where_the_feeds_are() -> None:
    key = bytes(range(32))
    assert unpack_key(pack_key(key, []), 3) == (key, [])
    assert unpack_key(pack_key(key, ["a:1", "[::1]:2"]), 2) == (key, ["a:1", "[::1]:2"])
    for data, count in ((key[:31], 0), (pack_key(key, ["a:1"]), 2), (key + b"\xff", 1)):
        with pytest.raises(ValueError):
            unpack_key(data, count)


def test_prefaces() -> None:
    assert [feed_of(preface_of(n)) for n in (None, 0, 7, 255)] == [None, 0, 7, 255]
    for whole in (preface_of(None), preface_of(31)):
        assert all(may_be_preface(whole[:n]) for n in range(9))
    for wrong in (b"ATOLF-1\n", b"ATOLF-f\n", b"ATOLF+1\n", b"ATOLF 1\n", b"ATOLFAA\n", b"ATOLF001"):
        with pytest.raises(ValueError):
            feed_of(wrong)
    assert not may_be_preface(b"PRI") and not may_be_preface(b"\x16\x03") and not may_be_preface(b"ATOLX")
    for nobodys in (b"ATOLFzz\n", b"ATOLF001", b"ATOLF0\n"):
        with pytest.raises(ValueError):
            feed_of(nobodys)


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)
