"""Real link faults: a TCP proxy in user space, and the map from a plan's faults to proxies.

A proxy sits on a link of a local cluster and forwards bytes; *up* is from the dialling side to the target, *down* is back. It
knows nothing of gRPC or TLS. Faults mean what they mean in `sim/network.py`: a plan does the same in real and in virtual time.

    clog        bytes are held back and delivered late, in order; connections stay open, and new ones wait too
    partition   the same until it is detected; then connections break, and new ones are refused until it heals
    corrupt     one byte of the next chunk is damaged; the checksum above (TLS, the frame's) ends the connection

Held bytes do not pile up here: a pump holds one chunk, the kernel's buffers fill, and the sender is held up, as by a real clog.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

from atoll.chaos import Clog, Corrupt, Partition
from atoll.errors import PlanError, UserError
from atoll.ids import SYNCER, WorkerId, worker_name
from atoll.transport.keys import split_address

LinkDirection: TypeAlias = Literal["up", "down"]
LinkDirections: TypeAlias = Literal["up", "down", "both"]
LinkFault: TypeAlias = Partition | Clog | Corrupt
_EACH: Final[dict[LinkDirections, tuple[LinkDirection, ...]]] = {"up": ("up",), "down": ("down",), "both": ("up", "down")}

CHUNK_BYTES: Final = 64 * 1024
DAMAGE_FROM_BYTES: Final = 64  # shorter chunks are pings and window updates: damage there says nothing about data
CONNECTIONS_MAX: Final = 512
SLICE_SECONDS: Final = 0.02  # a limited way forwards in slices of this much time: a slow link trickles, it does not burst


@dataclass(eq=False)
class Damage:
    """One corruption, armed in one or more places and used up by the first chunk that is long enough."""

    spent: bool = False


class _Way:
    """One direction of the proxy, for all its connections."""

    def __init__(self) -> None:
        self.forwarded = 0
        self.damage: Damage | None = None
        self._holds = 0
        self._open = asyncio.Event()
        self._open.set()
        self._rate: float | None = None
        self._free_at = 0.0

    def hold(self) -> None:
        self._holds += 1
        self._open.clear()

    def release(self) -> None:
        if self._holds == 0:
            raise ValueError("released more often than held")
        self._holds -= 1
        if self._holds == 0:
            self._open.set()

    async def clear(self) -> None:
        while self._holds:  # it may be held again between the event and this task's turn
            await self._open.wait()

    def limit(self, bytes_per_second: float | None) -> None:
        self._rate, self._free_at = bytes_per_second, 0.0

    async def admit(self, count: int) -> int:
        """Waits until some of `count` bytes may pass, and returns how many. Idle time is not saved up beyond one slice."""
        if self._rate is not None:
            count = min(count, max(DAMAGE_FROM_BYTES, int(self._rate * SLICE_SECONDS)))
            now = asyncio.get_running_loop().time()
            self._free_at = max(now, self._free_at) + count / self._rate
            await asyncio.sleep(self._free_at - now)
        await self.clear()
        return count

    def damaged(self, data: bytes) -> bytes:
        if self.damage is None or len(data) < DAMAGE_FROM_BYTES:
            return data
        damage, self.damage = self.damage, None
        if damage.spent:
            return data
        damage.spent = True
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


@dataclass(eq=False)
class _Link:
    """One accepted connection and the one to the target: the client's writer, then the target's."""

    reader: asyncio.StreamReader
    writers: list[asyncio.StreamWriter]
    task: asyncio.Task[None] | None = None

    def abort(self) -> None:
        """Both ends see a reset at once, and bytes in transit are lost. A target being dialled sees an empty connection."""
        for writer in self.writers:
            _reset(writer)
        if self.task is not None:
            self.task.cancel()

    async def run(self, up: _Way, down: _Way, target: Callable[[], str]) -> None:
        try:
            await up.clear()  # a held connection attempt does not reach the target
            try:
                host, port = split_address(target())
                reader, writer = await asyncio.open_connection(host, port, limit=CHUNK_BYTES)
            except (OSError, UserError):  # nothing listens there, or the target has no address yet
                _reset(self.writers[0])
                return
            self.writers.append(writer)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(self.reader, writer, up))
                pumps.create_task(self._pump(reader, self.writers[0], down))
        finally:
            for end in self.writers:
                end.close()  # flushes first; a no-op after a reset
        await self.closed()

    async def closed(self) -> None:
        for writer in self.writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: _Way) -> None:
        while True:
            try:
                data = await source.read(CHUNK_BYTES)
            except OSError:
                await way.clear()  # a reset is delayed like bytes
                self.abort()
                return
            try:
                while data:
                    count = await way.admit(len(data))
                    sink.write(way.damaged(data[:count]))
                    way.forwarded += count
                    data = data[count:]
                    await sink.drain()
                if source.at_eof():
                    await way.clear()
                    sink.write_eof()  # after what is buffered; the other direction may go on
                    return
            except (OSError, RuntimeError):
                # The sink is closed (RuntimeError: write_eof on a closed one). The pump that reads from it passes that on when
                # its way is clear; a sender that keeps writing is held by back-pressure until then.
                return


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with RST rather than FIN: the other end must see a failure, not an orderly close."""
    with contextlib.suppress(OSError):  # it is closed already
        sock: socket.socket | None = writer.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@dataclass(eq=False)
class ActivePartition:
    """A partition under way."""

    directions: LinkDirections
    noticed: bool = False
    timer: asyncio.TimerHandle | None = None


class Proxy:
    """Created and used within one event loop."""

    def __init__(self) -> None:
        self.connections = 0  # accepted so far, refused ones included
        self._ways: dict[LinkDirection, _Way] = {"up": _Way(), "down": _Way()}
        self._links: set[_Link] = set()
        self._splits: list[ActivePartition] = []
        self._server: asyncio.Server | None = None
        self._target: Callable[[], str]

    @property
    def bytes_up(self) -> int:
        return self._ways["up"].forwarded

    @property
    def bytes_down(self) -> int:
        return self._ways["down"].forwarded

    @property
    def open_connections(self) -> int:
        return len(self._links)

    async def start(self, target: str | Callable[[], str]) -> str:
        """Listens on a free port of 127.0.0.1 and returns the address. A callable target is called for each connection, because a
        restarted target may have moved; "" while it has none: the connection is refused."""
        if self._server is not None:
            raise RuntimeError("the proxy listens already")
        if isinstance(target, str):
            split_address(target)
        self._target = partial(str, target) if isinstance(target, str) else target
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK_BYTES)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Breaks open connections and stops listening. Holds and partitions stay counted, so that they can still be ended."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        links = list(self._links)
        self.cut()
        await asyncio.gather(*(link.task for link in links if link.task is not None), return_exceptions=True)
        for link in links:
            await link.closed()
        await server.wait_closed()
        await asyncio.sleep(0)  # sockets just reset are closed by the loop's next turn

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self._server is None or any(split.noticed for split in self._splits) or len(self._links) >= CONNECTIONS_MAX:
            _reset(writer)
            return
        link = _Link(reader, [writer])
        self._links.add(link)
        link.task = asyncio.create_task(link.run(self._ways["up"], self._ways["down"], self._target))
        link.task.add_done_callback(lambda _: self._links.discard(link))

    def hold(self, directions: LinkDirections = "both") -> None:
        for direction in _EACH[directions]:
            self._ways[direction].hold()

    def release(self, directions: LinkDirections = "both") -> None:
        for direction in _EACH[directions]:
            self._ways[direction].release()

    def partition(self, directions: LinkDirections = "both", detect_seconds: float = 3.0) -> ActivePartition:
        """Holds bytes, and breaks and refuses connections after `detect_seconds`. `heal` takes what it returns: overlapping
        partitions need not end in the order in which they began."""
        split = ActivePartition(directions)
        self._splits.append(split)
        self.hold(directions)
        split.timer = asyncio.get_running_loop().call_later(detect_seconds, self._notice, split)
        return split

    def heal(self, split: ActivePartition | None = None) -> None:
        """Ends this partition; without an argument, the newest. One that heals before it is detected was a clog."""
        if not self._splits:
            raise ValueError("healed more often than partitioned")
        split = split or self._splits[-1]
        self._splits.remove(split)
        if split.timer is not None:
            split.timer.cancel()
        self.release(split.directions)

    def corrupt_next(self, direction: LinkDirection, damage: Damage | None = None) -> None:
        """Flips a byte in the middle of the next chunk of at least 64 bytes, on any connection. As in the simulator, a second
        call before that has no effect, and `cut` cancels it."""
        self._ways[direction].damage = damage or Damage()

    def cut(self) -> None:
        for way in self._ways.values():
            way.damage = None
        for link in list(self._links):
            link.abort()

    def limit(self, bytes_per_second: float | None) -> None:
        """A token bucket for each direction, shared by its connections."""
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ValueError("a limit must be above 0; use hold to stop the bytes")
        for way in self._ways.values():
            way.limit(bytes_per_second)

    def _notice(self, split: ActivePartition) -> None:
        split.noticed = True
        self.cut()


_Proxies: TypeAlias = Mapping[WorkerId, Proxy]


class Faults:
    """Carries a plan's link faults out on proxies.

    `proxies[m]` stands between learner m, who dials, and the syncer; `peer_proxies[m]` in front of learner m's own server,
    for all other learners. A proxy cannot tell who dials, so a fault between learners a and b is applied to both of their
    peer proxies and strikes *all* peers of a and of b: more harm than the plan asks for, never less.
    """

    def __init__(self, proxies: _Proxies, peer_proxies: _Proxies | None = None, *, detect_seconds: float = 3.0) -> None:
        self._proxies = proxies
        self._peer_proxies = peer_proxies if peer_proxies is not None else {}  # an empty one may be filled later
        self._detect_seconds = detect_seconds
        self._ongoing: list[Callable[[], None]] = []  # how to end each

    @property
    def active(self) -> int:
        """Number of faults that have begun and not ended."""
        return len(self._ongoing)

    async def inject(self, fault: LinkFault) -> None:
        """Begins it now (the caller sees to `fault.at`) and ends it after `fault.lasts`."""
        ways = self._ways(fault.a, fault.b)
        match fault:
            case Partition(one_way=one_way, lasts=lasts):
                splits = [(p, p.partition(way if one_way else "both", self._detect_seconds)) for p, way in ways]
                self._end_after(lasts, [partial(proxy.heal, split) for proxy, split in splits])
            case Clog(lasts=lasts):
                for proxy, _ in ways:
                    proxy.hold()
                self._end_after(lasts, [proxy.release for proxy, _ in ways])
            case Corrupt():
                damage = Damage()  # one, at the proxy where bytes pass first
                for proxy, way in ways:
                    proxy.corrupt_next(way, damage)

    async def stop(self) -> None:
        """Ends every fault now, before the cluster is checked or stopped."""
        for end in list(self._ongoing):
            end()

    def _ways(self, a: WorkerId, b: WorkerId) -> list[tuple[Proxy, LinkDirection]]:
        """The proxies on the link, each with the direction from a to b."""
        try:
            if SYNCER in (a, b):
                return [(self._proxies[a], "up") if b == SYNCER else (self._proxies[b], "down")]
            return [(self._peer_proxies[b], "up"), (self._peer_proxies[a], "down")]
        except KeyError as missing:
            link = f"{worker_name(a)} to {worker_name(b)}"
            raise PlanError(f"no proxy of learner {missing} stands on the link {link}; start the cluster with proxies") from None

    def _end_after(self, lasts: float, undo: list[Callable[[], None]]) -> None:
        def end() -> None:
            timer.cancel()
            self._ongoing.remove(end)
            for step in undo:
                step()

        timer = asyncio.get_running_loop().call_later(lasts, end)
        self._ongoing.append(end)
