"""Stripes of an announcement and their places in its payload; connections handed from one process to another."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.codecs import codec
from atoll.codecs.parts import packet_part
from atoll.executor.sharded import ShardLost
from atoll.protocol.interface import Payload
from atoll.runtime import payload as wire
from atoll.runtime.ranks.channel import RankChannel
from atoll.runtime.shards.feeding import HandedOver, at_door, hand_over
from atoll.runtime.shards.feeds import ShardFeeds
from atoll.runtime.shards.messages import ToCoordinator
from atoll.tensors.stripes import stripe_bounds
from atoll.transport import LinkLimits, Server

SIZES = st.integers(1, 9000)


@given(
    numel=SIZES, buffers=st.integers(0, 5), shards=st.integers(1, 5), name=st.sampled_from(["", "bf16", "int8", "int4", "e3m0"])
)
def test_stripes_are_the_payload_in_pieces(numel: int, buffers: int, shards: int, name: str) -> None:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    content, extra = codec(name).encode(vector) if name else vector, torch.arange(float(buffers))
    whole = b"".join(map(bytes, wire.to_buffers(Payload("fragment", 0, (content, extra))) or ()))
    assert wire.bytes_of_fragment(name, numel, buffers) == len(whole)
    found, written = bytearray(len(whole)), 0
    for shard, (first, last) in enumerate(pairwise(stripe_bounds(numel, shards))):
        part = vector[first:last] if isinstance(content, torch.Tensor) else packet_part(content, first, last)
        for at, view in wire.places_of_stripe(part, extra if shard == 0 else extra[:0], first, numel, begins=shard == 0):
            found[at : at + len(view)] = view
            written += len(view)
    assert found == whole and written == len(whole), "every byte once"


class Taker:
    def __init__(self) -> None:
        self.end = self
        self.taken: list[socket.socket] = []

    def take(self, sock: socket.socket) -> None:
        self.taken.append(sock)
        sock.sendall(b"mine now")

    def close(self) -> None:
        for sock in self.taken:
            sock.close()


def given(door: socket.socket) -> socket.socket:
    """The peer of a connection that was handed over, and whose giver has closed its own descriptor."""
    peer, given_away = socket.socketpair()
    hand_over(door, given_away)
    given_away.close()
    peer.settimeout(10.0)
    return peer


def test_connections_are_handed_over_and_their_giver_may_close_its_own_ends() -> None:
    there = HandedOver()
    there.feeding = Taker()  # type: ignore[assignment]
    with at_door(there.path) as door:
        for _ in range(3):
            with given(door) as peer:
                assert peer.recv(100) == b"mine now"
        assert not Path(there.path).parent.exists(), "a process that is killed leaves nothing behind"
    there.close()


def test_connection_for_a_shard_that_feeds_nobody_yet_is_closed() -> None:
    there = HandedOver()
    with at_door(there.path) as door, given(door) as peer:
        assert peer.recv(1) == b""
    there.close()


def test_door_that_was_closed_leaves_nothing_and_lets_nobody_in() -> None:
    there = HandedOver()
    there.close()
    assert not Path(there.path).parent.exists()
    with pytest.raises(OSError):
        at_door(there.path)


class Shard:
    """The coordinator's ends of a shard that says nothing."""

    def __init__(self) -> None:
        self.handed = HandedOver()
        self.door = self.handed.path
        self.end: socket.socket

    def feeds(self) -> RankChannel:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            self.end = listener.accept()[0]
        return RankChannel(ours, ToCoordinator)

    def close(self) -> None:
        self.end.close()
        self.handed.close()


@pytest.mark.parametrize("begun", [True, False])
def test_shard_that_takes_no_more_words_is_lost_and_one_that_is_let_go_is_not(begun: bool) -> None:
    async def story() -> None:
        shards, heard = [Shard(), Shard()], asyncio.Queue[Exception]()
        feeds = ShardFeeds(shards, ())
        server = Server(None, lambda metadata: "", LinkLimits())  # type: ignore[arg-type]  # it never starts
        if begun:
            feeds.begin(server, heard.put_nowait)
        shards[1].end.close()
        if not begun:
            while not feeds._gone:
                await asyncio.sleep(0.01)
            feeds.begin(server, heard.put_nowait)
        lost = await asyncio.wait_for(heard.get(), 30.0)
        assert isinstance(lost, ShardLost) and "shard 1 sends learners nothing any more" in str(lost)
        feeds.close()
        shards[0].close()
        shards[1].close()
        await asyncio.sleep(0.1)
        assert heard.empty(), "closing the other one is no loss"

    asyncio.run(story())
