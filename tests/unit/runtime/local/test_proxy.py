"""The proxy on real sockets: it forwards faithfully, fails as told, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import functools
import gc
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from atoll.chaos import Clog, Corrupt, Partition
from atoll.errors import PlanError, UserError
from atoll.ids import SYNCER
from atoll.runtime.local.proxy import CONNECTIONS_MAX, Faults, Proxy

SOON, LIMIT = 0.04, 60.0
"""Long enough for loopback to show what is not held; a test that hangs ends after LIMIT."""
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Target:
    """A server that hands out its ends of connections."""

    def __init__(self) -> None:
        self.accepted: asyncio.Queue[Ends] = asyncio.Queue()
        self.ends: list[Ends] = []
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ends.append((reader, writer))
        self.accepted.put_nowait((reader, writer))

    async def stop(self) -> None:
        self._server.close()
        for _, writer in self.ends:
            writer.transport.abort()
        await self._server.wait_closed()


class Wires:
    def __init__(self) -> None:
        self.target = Target()
        self.proxies: list[Proxy] = []
        self.clients: list[Ends] = []

    async def proxy(self, target: str | Callable[[], str] | None = None) -> Proxy:
        proxy = Proxy()
        self.address = await proxy.start(target if target is not None else self.target.address)
        self.proxies.append(proxy)
        return proxy

    async def dial(self, address: str | None = None) -> Ends:
        host, port = (address or self.address).split(":")
        self.clients.append(await asyncio.open_connection(host, int(port)))
        return self.clients[-1]

    async def pair(self) -> tuple[Ends, Ends]:
        client = await self.dial()
        return client, await self.target.accepted.get()


def live(test: Callable[[Wires], Awaitable[None]]) -> Callable[[], None]:
    """Run in a loop of its own, with everything the loop complains about turned into a failure."""

    async def run() -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        wires = Wires()
        await wires.target.start()
        try:
            await asyncio.wait_for(test(wires), LIMIT)
        finally:
            for proxy in wires.proxies:
                await proxy.stop()
                assert proxy.open_connections == 0
            for _, writer in wires.clients:
                writer.transport.abort()
            await wires.target.stop()
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left behind"
        gc.collect(1)  # tasks and futures dropped with an error complain when they are collected
        assert complaints == []

    @functools.wraps(test)
    def wrapper() -> None:
        asyncio.run(run())

    del wrapper.__wrapped__  # pytest would take `wires` for a fixture
    return wrapper


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def nothing_comes(coroutine: Coroutine[Any, Any, object]) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(coroutine, SOON)


async def sees_reset(reader: asyncio.StreamReader) -> None:
    with pytest.raises(ConnectionResetError):
        await reader.read(1)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


# ---------------------------------------------------------------- forwarding


@live
async def test_bytes_go_both_ways_whole_and_are_counted(wires: Wires) -> None:
    proxy = await wires.proxy()
    (reader, writer), (far_reader, far_writer) = await wires.pair()
    up, down = bytes(range(256)) * 8192, bytes(reversed(range(256))) * 4096
    results = await asyncio.gather(
        far_reader.readexactly(len(up)), reader.readexactly(len(down)), send(writer, up), send(far_writer, down)
    )
    assert results[:2] == [up, down]
    assert (proxy.bytes_up, proxy.bytes_down, proxy.connections, proxy.open_connections) == (len(up), len(down), 1, 1)


@live
async def test_a_reader_that_does_not_read_is_felt_by_the_writer(wires: Wires) -> None:
    proxy = await wires.proxy()
    (_, writer), _ = await wires.pair()
    await nothing_comes(send(writer, bytes(64 << 20)))
    await until(lambda: proxy.bytes_up > 0)
    assert proxy.bytes_up < 32 << 20, "the proxy does not hoard what nobody takes"


@live
async def test_half_close_passes_and_the_answer_still_comes(wires: Wires) -> None:
    proxy = await wires.proxy()
    (reader, writer), (far_reader, far_writer) = await wires.pair()
    writer.write(b"question")
    writer.write_eof()
    assert await far_reader.read() == b"question"
    await send(far_writer, b"answer" * 100_000)
    far_writer.close()
    assert await reader.read() == b"answer" * 100_000
    await until(lambda: proxy.open_connections == 0)


@live
async def test_who_closes_first_closes_the_other_after_its_bytes(wires: Wires) -> None:
    proxy = await wires.proxy()
    (_, writer), (far_reader, far_writer) = await wires.pair()
    writer.write(b"last words" * 50_000)
    writer.close()
    assert await far_reader.read() == b"last words" * 50_000
    far_writer.close()
    await until(lambda: proxy.open_connections == 0)


@live
async def test_a_reset_passes_as_a_reset(wires: Wires) -> None:
    proxy = await wires.proxy()
    for near_dies in (True, False):
        near, far = await wires.pair()
        victim, witness = (near, far) if near_dies else (far, near)
        victim[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        victim[1].transport.abort()
        await sees_reset(witness[0])
    await until(lambda: proxy.open_connections == 0)


@live
async def test_the_target_is_looked_up_at_each_connection(wires: Wires) -> None:
    where = [wires.target.address]
    await wires.proxy(lambda: where[0])
    await wires.pair()
    where[0] = ""  # it died and has no address yet
    await sees_reset((await wires.dial())[0])
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        where[0] = f"127.0.0.1:{nobody.getsockname()[1]}"
        await sees_reset((await wires.dial())[0])
    moved = Target()
    await moved.start()
    where[0] = moved.address
    _, writer = await wires.dial()
    await send(writer, b"hello")
    far_reader, _ = await moved.accepted.get()
    assert await far_reader.readexactly(5) == b"hello"
    await moved.stop()


@live
async def test_nonsense_is_refused_at_the_start(wires: Wires) -> None:
    with pytest.raises(UserError, match="host:port"):
        await wires.proxy("nowhere")
    proxy = await wires.proxy()
    with pytest.raises(RuntimeError, match="listens already"):
        await proxy.start(wires.target.address)
    with pytest.raises(ValueError, match="above 0"):
        proxy.limit(0)


@live
async def test_connections_have_a_limit(wires: Wires) -> None:
    proxy = await wires.proxy()
    proxy._links = {object() for _ in range(CONNECTIONS_MAX)}  # type: ignore[misc]
    await sees_reset((await wires.dial())[0])
    proxy._links = set()


# ---------------------------------------------------------------- holding


@live
async def test_held_bytes_come_late_and_in_order_and_the_other_way_is_free(wires: Wires) -> None:
    proxy = await wires.proxy()
    (reader, writer), (far_reader, far_writer) = await wires.pair()
    proxy.hold("up")
    words = [b"%06d" % i for i in range(5000)]
    for word in words:
        writer.write(word)
    writer.write_eof()
    await nothing_comes(far_reader.read(1))
    await send(far_writer, b"free")
    assert await reader.readexactly(4) == b"free"
    assert proxy.bytes_up == 0
    proxy.release("up")
    assert await far_reader.read() == b"".join(words)


@live
async def test_holds_nest(wires: Wires) -> None:
    proxy = await wires.proxy()
    (reader, _), (_, far_writer) = await wires.pair()
    proxy.hold()
    proxy.hold("down")
    await send(far_writer, b"late")
    proxy.release()
    await nothing_comes(reader.read(1))
    proxy.release("down")
    assert await reader.readexactly(4) == b"late"
    for too_often in (proxy.release, proxy.heal):
        with pytest.raises(ValueError, match="more often"):
            too_often()


@live
async def test_new_connections_are_accepted_and_held(wires: Wires) -> None:
    proxy = await wires.proxy()
    proxy.hold()
    _, writer = await wires.dial()
    await send(writer, b"early")
    await nothing_comes(wires.target.accepted.get())
    proxy.release()
    far_reader, _ = await wires.target.accepted.get()
    assert await far_reader.readexactly(5) == b"early"


@live
async def test_a_reset_is_held_too(wires: Wires) -> None:
    proxy = await wires.proxy()
    (_, writer), (far_reader, _) = await wires.pair()
    proxy.hold("up")
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    await nothing_comes(far_reader.read(1))
    proxy.release("up")
    await sees_reset(far_reader)


@live
async def test_a_cut_ends_what_is_held_and_what_waits(wires: Wires) -> None:
    proxy = await wires.proxy()
    (reader, writer), (far_reader, _) = await wires.pair()
    await send(writer, b"x")
    await far_reader.readexactly(1)
    proxy.hold()
    waiting, _ = await wires.dial()
    await send(writer, b"never")
    await until(lambda: proxy.open_connections == 2)
    proxy.cut()
    for end in (reader, far_reader, waiting):
        await sees_reset(end)
    await until(lambda: proxy.open_connections == 0)
    proxy.release()
    _, (far_reader, _) = await wires.pair()
    await nothing_comes(far_reader.read(1))  # and not the bytes of the dead


# ---------------------------------------------------------------- partitions


@live
async def test_a_partition_holds_then_breaks_then_refuses_then_heals(wires: Wires) -> None:
    proxy = await wires.proxy()
    (reader, writer), (far_reader, far_writer) = await wires.pair()
    split = proxy.partition("both", LIMIT)
    await send(writer, b"lost")
    await send(far_writer, b"lost")
    await nothing_comes(far_reader.read(1))
    proxy._notice(split)  # rather than wait for the timer, which the next but one does
    await asyncio.gather(sees_reset(reader), sees_reset(far_reader))
    await sees_reset((await wires.dial())[0])
    proxy.heal()
    (_, writer), (far_reader, _) = await wires.pair()
    await send(writer, b"again")
    assert await far_reader.readexactly(5) == b"again"


@live
async def test_a_partition_healed_before_it_is_noticed_was_a_clog(wires: Wires) -> None:
    proxy = await wires.proxy()
    (_, writer), (far_reader, _) = await wires.pair()
    split = proxy.partition("both", LIMIT)
    await send(writer, b"late")
    proxy.heal()
    assert await far_reader.readexactly(4) == b"late"
    assert split.timer is not None and split.timer.cancelled()


@live
async def test_a_one_way_partition_leaves_the_other_way_until_noticed(wires: Wires) -> None:
    proxy = await wires.proxy()
    (reader, writer), (far_reader, far_writer) = await wires.pair()
    split = proxy.partition("up", LIMIT)
    await send(writer, b"lost")
    await send(far_writer, b"free")
    assert await reader.readexactly(4) == b"free"
    await nothing_comes(far_reader.read(1))
    proxy._notice(split)
    await asyncio.gather(sees_reset(reader), sees_reset(far_reader))


@live
async def test_overlapping_partitions_end_in_any_order(wires: Wires) -> None:
    proxy = await wires.proxy()
    first = proxy.partition("both", 0.0)
    second = proxy.partition("up", LIMIT)
    await until(lambda: first.noticed)
    await sees_reset((await wires.dial())[0])
    proxy.heal(first)
    reader, writer = await wires.dial()  # `second` is not noticed: it still only holds, and only up
    await send(writer, b"late")
    await nothing_comes(wires.target.accepted.get())
    proxy.heal(second)
    far_reader, far_writer = await wires.target.accepted.get()
    assert await far_reader.readexactly(4) == b"late"
    await send(far_writer, b"free")
    assert await reader.readexactly(4) == b"free"


# ---------------------------------------------------------------- damage and slowness


@live
async def test_one_byte_of_the_next_long_chunk_is_damaged(wires: Wires) -> None:
    proxy = await wires.proxy()
    (reader, writer), (far_reader, far_writer) = await wires.pair()
    proxy.corrupt_next("up")
    proxy.corrupt_next("up")
    await send(writer, bytes(63))
    assert await far_reader.readexactly(63) == bytes(63), "short chunks pass"
    await send(far_writer, bytes(100))
    assert await reader.readexactly(100) == bytes(100), "the other way passes"
    await send(writer, bytes(100))
    assert await far_reader.readexactly(100) == bytes(50) + b"\xff" + bytes(49)
    await send(writer, bytes(100))
    assert await far_reader.readexactly(100) == bytes(100), "once"


@live
async def test_a_cut_takes_the_damage_along(wires: Wires) -> None:
    proxy = await wires.proxy()
    proxy.corrupt_next("up")
    proxy.cut()
    (_, writer), (far_reader, _) = await wires.pair()
    await send(writer, bytes(100))
    assert await far_reader.readexactly(100) == bytes(100)


@live
async def test_a_limit_is_kept_by_all_connections_together_and_lifted(wires: Wires) -> None:
    proxy = await wires.proxy()
    pairs = [await wires.pair() for _ in range(2)]
    loop, rate, each = asyncio.get_running_loop(), 1_000_000, 100_000

    async def through() -> float:
        start = loop.time()
        for near, _ in pairs:
            near[1].write(bytes(each))
        await asyncio.gather(*(far[0].readexactly(each) for _, far in pairs))
        return loop.time() - start

    proxy.limit(rate)
    slow = await through()
    assert slow >= 0.9 * 2 * each / rate
    proxy.limit(None)
    assert min([await through() for _ in range(5)]) < slow, "one of them may be stalled"


@live
async def test_stop_breaks_what_is_open_held_or_slow(wires: Wires) -> None:
    proxy = await wires.proxy()
    (reader, writer), (far_reader, _) = await wires.pair()
    proxy.partition("down", LIMIT)
    proxy.limit(10_000)
    await send(writer, bytes(10_000))
    await far_reader.read(1)
    await proxy.stop()
    await sees_reset(reader)
    with pytest.raises(ConnectionResetError):
        await far_reader.read()
    with pytest.raises(ConnectionRefusedError):
        await wires.dial()
    proxy.heal()
    await proxy.stop()  # twice does no harm


# ---------------------------------------------------------------- a plan's faults


async def passes(wires: Wires, address: str, direction: str, patience: float = LIMIT) -> bool:
    """Do bytes pass in this direction on a new connection? With the way up held, not even the connection does."""
    near = await wires.dial(address)
    if direction == "up":
        await send(near[1], b"x")
    try:
        far = await asyncio.wait_for(wires.target.accepted.get(), patience)
        if direction == "down":
            await send(far[1], b"x")
        return await asyncio.wait_for((far if direction == "up" else near)[0].readexactly(1), patience) == b"x"
    except TimeoutError:
        return False


async def cluster(wires: Wires, detect_seconds: float = LIMIT) -> tuple[Faults, dict[str, tuple[Proxy, str]]]:
    named = {}
    for name in ("m0", "m1", "peer0", "peer1", "peer2"):
        named[name] = (await wires.proxy(), wires.address)
    proxies = {m: named[f"m{m}"][0] for m in (0, 1)}
    peers = {m: named[f"peer{m}"][0] for m in (0, 1, 2)}
    return Faults(proxies, peers, detect_seconds=detect_seconds), named


@pytest.mark.parametrize(
    ("fault", "held"),
    [
        (Clog(0.0, 0, SYNCER, LIMIT), {"m0": "up down"}),
        (Clog(0.0, SYNCER, 1, LIMIT), {"m1": "up down"}),
        (Clog(0.0, 0, 2, LIMIT), {"peer0": "up down", "peer2": "up down"}),
        (Partition(0.0, 1, SYNCER, LIMIT), {"m1": "up down"}),
        (Partition(0.0, 0, SYNCER, LIMIT, one_way=True), {"m0": "up"}),
        (Partition(0.0, SYNCER, 0, LIMIT, one_way=True), {"m0": "down"}),
        (Partition(0.0, 2, 1, LIMIT, one_way=True), {"peer1": "up", "peer2": "down"}),
    ],
    ids=str,
)
def test_a_fault_strikes_its_link_in_its_direction(fault: Clog | Partition, held: dict[str, str]) -> None:
    @live
    async def scenario(wires: Wires) -> None:
        faults, named = await cluster(wires)
        await faults.inject(fault)
        holds = {
            name: " ".join(d for d in ("up", "down") if proxy._ways[d]._holds)  # type: ignore[index]
            for name, (proxy, _) in named.items()
        }
        assert {name: ways for name, ways in holds.items() if ways} == held
        name, ways = next(iter(held.items()))
        proxy, address = named[name]
        assert not await passes(wires, address, ways.split()[0], SOON)
        proxy.cut()  # that try, lest it be taken for the next
        assert faults.active == 1
        await faults.stop()
        assert faults.active == 0
        assert await passes(wires, address, ways.split()[0])

    scenario()


@live
async def test_a_fault_ends_by_itself(wires: Wires) -> None:
    faults, named = await cluster(wires)
    await faults.inject(Partition(0.0, 0, SYNCER, 2.0))
    await faults.inject(Clog(0.0, 0, SYNCER, 1.0))
    assert faults.active == 2
    await until(lambda: faults.active == 0)
    assert await passes(wires, named["m0"][1], "up") and await passes(wires, named["m0"][1], "down")


@live
async def test_a_partition_of_a_plan_is_noticed_after_detect_seconds(wires: Wires) -> None:
    faults, named = await cluster(wires, detect_seconds=0.0)
    proxy, address = named["m0"]
    await faults.inject(Partition(0.0, 0, SYNCER, LIMIT))
    await until(lambda: proxy._splits[0].noticed)
    await sees_reset((await wires.dial(address))[0])
    await faults.stop()
    assert await passes(wires, address, "up")


@live
async def test_corruption_between_learners_strikes_one_chunk_in_either_place(wires: Wires) -> None:
    faults, named = await cluster(wires)
    await faults.inject(Corrupt(0.0, 1, 0))
    got = []
    for name, upwards in (("peer1", False), ("peer0", True)):  # what learner 1 serves to others, what it sends to learner 0
        near = await wires.dial(named[name][1])
        far = await wires.target.accepted.get()
        source, sink = (near, far) if upwards else (far, near)
        await send(source[1], bytes(64))
        got.append(await sink[0].readexactly(64))
    assert got == [bytes(32) + b"\xff" + bytes(31), bytes(64)]
    assert faults.active == 0


@live
async def test_a_link_without_a_proxy_is_the_plans_fault(wires: Wires) -> None:
    faults = Faults({0: await wires.proxy()})
    with pytest.raises(PlanError, match=r"no proxy of learner 3 .* learner3 to syncer"):
        await faults.inject(Clog(0.0, 3))
    with pytest.raises(PlanError, match=r"learner0 to learner1"):
        await faults.inject(Partition(0.0, 0, 1))
    assert faults.active == 0
