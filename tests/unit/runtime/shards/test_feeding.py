"""Stripes of an announcement and their places in its payload; connections handed from one process to another."""

from __future__ import annotations

import asyncio
import math
import socket
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.codecs import Packet, codec
from atoll.codecs.parts import joined, packet_part
from atoll.config import load
from atoll.errors import DataError
from atoll.executor.merging import FragmentMerger
from atoll.executor.sharded import ShardLost
from atoll.kernels import fused
from atoll.protocol.interface import Payload
from atoll.runtime import payload as wire
from atoll.runtime.ranks.channel import RankChannel
from atoll.runtime.shards.feeding import HandedOver, HeldParts, at_door, hand_over
from atoll.runtime.shards.feeds import ShardFeeds
from atoll.runtime.shards.messages import JudgePart, ToCoordinator
from atoll.tensors.layout import Fragment
from atoll.tensors.norms import tree_sum
from atoll.tensors.stripes import stripe_bounds
from atoll.transport import LinkLimits, Server

SIZES = st.integers(1, 9000)
CODECS = st.sampled_from(["fp32", "bf16", "int8", "int4", "e3m0", "int2", "int1"])


def same(a: Packet, b: Packet) -> bool:
    scales = (a.scales is None and b.scales is None) or (
        a.scales is not None and b.scales is not None and torch.equal(a.scales, b.scales)
    )
    return a.codec == b.codec and a.numel == b.numel and torch.equal(a.codes, b.codes) and scales


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


@given(numel=SIZES, buffers=st.integers(0, 5), shards=st.integers(1, 5), name=CODECS)
def test_parts_of_a_contribution_are_its_packet_cut_up(numel: int, buffers: int, shards: int, name: str) -> None:
    packet = codec(name).encode(torch.randn(numel, generator=torch.Generator().manual_seed(numel)))
    extra = torch.arange(float(buffers))
    parts = wire.to_stripes(Payload("packet", 0, (packet, extra)), shards)
    assert parts is not None and len(parts) == shards
    found = []
    for shard, (first, last) in enumerate(pairwise(stripe_bounds(numel, shards))):
        data, own = memoryview(bytearray(b"".join(map(bytes, parts[shard])))), buffers if shard == 0 else 0
        assert data.nbytes == wire.bytes_of_part(name, last - first, own)
        part, theirs = wire.part_from_buffer(name, last - first, own, data)
        assert torch.equal(theirs, extra[:own])
        found.append(part)
    assert same(joined(found), packet)


def test_what_cannot_be_cut_goes_as_a_whole() -> None:
    sparse, theta = codec("top_k:0.1").encode(torch.randn(5000)), torch.randn(5)
    nothing = torch.empty(0)
    for payload in (
        Payload("packet", 0, None), Payload("packet", 0, (sparse, nothing)), Payload("state", 0, object()),
        Payload("fragment", 0, (theta, nothing)),
    ):  # fmt: skip
        assert wire.to_stripes(payload, 2) is None


def test_part_of_another_size_is_none() -> None:
    with pytest.raises(DataError, match="a part of 9 bytes is none of 300 numbers by int4"):
        wire.part_from_buffer("int4", 300, 0, memoryview(bytearray(9)))


def stripe_fragments(shards: int) -> list[Fragment]:
    return [Fragment(0, (), (), last - first, 2 if not first else 0) for first, last in pairwise(stripe_bounds(NUMEL, shards))]


NUMEL = 70_001


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1e38])
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "e3m0", "int2", "int1"])
def test_squares_of_all_parts_are_those_of_the_norm(
    name: str, size: float, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, also where the codes do not tell a norm and the parts are asked for the values."""
    monkeypatch.setattr(fused, "WORTHWHILE", 1 if kernels else 1 << 60)
    config = load(preset_name="decoupled", overrides={"protocol": {"codec_up": name}})
    merger = FragmentMerger(config, [Fragment(0, (), (), NUMEL, 2)], warm_up=False)
    packet = codec(name).encode(torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).clamp(-3, 3) * size)
    parts = wire.to_stripes(Payload("packet", 0, (packet, torch.ones(2))), 3)
    assert parts is not None
    answers = []
    for shard, own in enumerate(stripe_fragments(3)):
        held = HeldParts(config, [own], merger)
        held.expect(b"s", shard)
        data = memoryview(bytearray(b"".join(map(bytes, parts[shard]))))
        flaw, leaves = held.look(JudgePart(b"s", shard, 0), data)
        answers.append((leaves, held.look_again(JudgePart(b"s", shard, 0, by_value=True))[1]))
        assert not flaw and held.of(b"s", shard)[0].numel == own.numel
    leaves = [by_code if all(one[0] is not None for one in answers) else by_value for by_code, by_value in answers]
    assert not any(each is None for each in leaves)
    norm = merger.norm(packet)
    assert math.sqrt(tree_sum(np.concatenate(leaves))) == norm and (math.isfinite(norm) or size > 1)


def held_parts() -> HeldParts:
    config = load(preset_name="decoupled", overrides={"protocol": {"codec_up": "fp32"}})
    fragment = Fragment(0, (), (), 3, 1)
    return HeldParts(config, [fragment], FragmentMerger(config, [fragment], warm_up=False))


def part_of(*numbers: float) -> memoryview:
    return memoryview(bytearray(torch.tensor(numbers).numpy().tobytes()))


def test_part_is_held_until_it_is_dropped_and_not_after_that() -> None:
    held, note = held_parts(), JudgePart(b"s", 7, 0)
    assert held.bytes_of(0) == 16
    held.expect(b"s", 7)
    assert held.look(note, part_of(9.0, 1.0, 2.0, 2.0))[0] == ""
    packet, buffers = held.of(b"s", 7)
    assert packet.codes.tolist() == [1.0, 2.0, 2.0] and buffers.tolist() == [9.0]
    assert held.of(b"s", 7)[0] is packet, "to accept it may fail, and is tried again"
    held.drop(b"s", 7)
    with pytest.raises(KeyError):
        held.of(b"s", 7)
    held.expect(b"s", 8)
    held.drop(b"s", 8)  # its link is over, and another thread looks at it
    held.look(JudgePart(b"s", 8, 0), part_of(9.0, 1.0, 2.0, 2.0))
    with pytest.raises(KeyError):
        held.of(b"s", 8)


def test_part_with_buffers_that_are_no_numbers_is_not_held() -> None:
    held, note = held_parts(), JudgePart(b"s", 7, 0)
    held.expect(b"s", 7)
    flaw, leaves = held.look(note, part_of(math.inf, 1.0, 2.0, 2.0))
    assert "NaN or Inf" in flaw and leaves is None
    with pytest.raises(KeyError):
        held.of(b"s", 7)


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
