"""Who is told in these tests, and connections without a network whose order of arrival a seed decides."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from atoll.transport import Link, LinkLimits, Refused, Server, ServerCredentials
from atoll.transport.bulk import Traffic
from atoll.transport.chunks import CHUNK_HEADER_BYTES, unpack_chunk
from atoll.transport.frames import Violation
from atoll.transport.link import Notifier
from atoll.transport.wire import StreamBroken

PATIENCE_SECONDS = 60.0
"""Against hanging only: any thread may stall for seconds."""


class Recorder:
    def __init__(self, echo: bool = False) -> None:
        self.links: list[Link] = []
        self.heads: list[bytes] = []
        self.payloads: list[memoryview | None] = []
        self.reasons: list[str] = []
        self.told: list[tuple[str, str]] = []
        self.echo = echo
        self._notifier = Notifier()

    def opened(self, link: Link) -> None:
        self.links.append(link)
        self.told.append(("opened", link.peer))
        self._notifier.notify_all()

    def arrived(self, link: Link, head: bytes, payload: memoryview | None) -> None:
        self.heads.append(head)
        self.payloads.append(payload)
        if self.echo:
            link.send(head, None if payload is None else [payload])
        self._notifier.notify_all()

    def closed(self, link: Link, reason: str) -> None:
        self.reasons.append(reason)
        self.told.append(("closed", link.peer))
        self._notifier.notify_all()

    async def until(self, condition: Callable[[], bool], timeout: float = PATIENCE_SECONDS) -> None:
        async with asyncio.timeout(timeout):
            while not condition():
                await self._notifier.wait()


class Memory:
    """Where an upload goes."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.taken = bytearray()
        self.is_abandoned = False

    async def write(self, data: memoryview) -> None:
        self.taken += data

    async def finish(self) -> bytes:
        return b"%d" % len(self.taken)

    def abandon(self) -> None:
        self.is_abandoned = True


class Pipe:
    """One direction of a stream that lies in memory. `gate` holds everything back while it is clear."""

    def __init__(self, rng: random.Random | None = None, room: int = 4) -> None:
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(room)
        self._rng = rng
        self.gate = asyncio.Event()
        self.gate.set()

    async def put(self, frame: bytes) -> None:
        await self._dawdle()
        await self._room.acquire()
        self._frames.put_nowait(frame)

    def finish(self) -> None:
        self._frames.put_nowait(None)

    async def get(self) -> bytes | None:
        frame = await self._frames.get()
        self._room.release()
        await self.gate.wait()
        await self._dawdle()
        return frame

    async def _dawdle(self) -> None:
        if self._rng is not None:
            for _ in range(self._rng.choice((0, 0, 1, 3, 9))):
                await asyncio.sleep(0)


class End:
    def __init__(self, incoming: Pipe, outgoing: Pipe) -> None:
        self._incoming, self._outgoing = incoming, outgoing

    async def read(self) -> bytes | None:
        return await self._incoming.get()

    async def write(self, frame: bytes) -> None:
        await self._outgoing.put(frame)

    def finish(self) -> None:
        self._outgoing.finish()


def pipes(rng: random.Random | None = None) -> tuple[End, End, Pipe]:
    """Both ends, and the direction from the first to the second."""
    there, back = Pipe(rng), Pipe(rng)
    return End(back, there), End(there, back), there


class MemoryBulk:
    """A bulk connection over pipes, in the loop's own thread."""

    def __init__(self, incoming: Pipe, outgoing: Pipe) -> None:
        self.bytes_sent = self.bytes_received = 0
        self._incoming, self._outgoing = incoming, outgoing
        self._woken = Notifier()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, traffic: Traffic, reader: int) -> None:
        jobs = (self._write(traffic), self._read(traffic, reader))
        self._tasks = [asyncio.create_task(self._until_broken(job, traffic)) for job in jobs]

    def wake(self) -> None:
        self._woken.notify_all()

    def close(self) -> None:
        self._outgoing.finish()
        for task in self._tasks:
            task.cancel()

    async def _until_broken(self, job: Coroutine[Any, Any, None], traffic: Traffic) -> None:
        try:
            await job
        except (Violation, StreamBroken) as error:
            traffic.connection_failed(error)

    async def _write(self, traffic: Traffic) -> None:
        now = asyncio.get_running_loop().time
        while True:
            chunk = traffic.next_chunk(now())
            if chunk is None:
                await self._woken.wait()
                continue
            await self._outgoing.put(chunk.header + b"".join(chunk.parts))
            self.bytes_sent += CHUNK_HEADER_BYTES + chunk.size
            traffic.chunk_sent(chunk, now())

    async def _read(self, traffic: Traffic, reader: int) -> None:
        now = asyncio.get_running_loop().time
        while (data := await self._incoming.get()) is not None:
            self.bytes_received += len(data)
            header = unpack_chunk(data[:CHUNK_HEADER_BYTES])
            while (place := traffic.claim(header, now(), reader)) is None:
                await self._woken.wait()
            place[:] = data[CHUNK_HEADER_BYTES:]
            traffic.chunk_received(header, now())
        raise StreamBroken("the peer went away")


@asynccontextmanager
async def paired(
    a: Recorder, b: Recorder, limits: LinkLimits, rng: random.Random | None = None
) -> AsyncIterator[tuple[Link, Link, list[Pipe]]]:
    """Two links without a network; the pipes lead from the first to the second, the talk stream's is the first of them."""
    talk = pipes(rng)
    ways = [(Pipe(rng), Pipe(rng)) for _ in range(limits.connections)]
    left, right = Link("right", a, limits), Link("left", b, limits)
    left.begin(talk[0], [MemoryBulk(back, there) for there, back in ways])
    right.begin(talk[1], [MemoryBulk(there, back) for there, back in ways])

    async def hold(link: Link, side: int) -> None:
        await link.run_until_closed()
        talk[side].finish()

    running = [asyncio.create_task(hold(left, 0)), asyncio.create_task(hold(right, 1))]
    from_left = [talk[2], *(there for there, _ in ways)]
    try:
        yield left, right, from_left
    finally:
        for pipe in from_left:
            pipe.gate.set()
        left.close("the test is over")
        await asyncio.gather(*running)


def admit(metadata: Mapping[str, str]) -> str:
    if metadata.get("token") != "secret":
        raise Refused("the token is wrong")
    if metadata["name"] == "busy":
        raise Refused("come back later", retry=True)
    return metadata["name"]


def credentials_of(name: str) -> dict[str, str]:
    return {"name": name, "token": "secret"}


@asynccontextmanager
async def serving(
    handler: Recorder, limits: LinkLimits | None = None, credentials: ServerCredentials | None = None
) -> AsyncIterator[tuple[Server, str]]:
    server = Server(handler, admit, limits or LinkLimits(), credentials)
    async with started(server) as address:
        yield server, address


@asynccontextmanager
async def started(server: Server) -> AsyncIterator[str]:
    """Stopped also by a test that fails: gRPC would complain of a server left over in one of the next tests."""
    address = await server.start("127.0.0.1:0")
    try:
        yield address
    finally:
        await server.stop(0.5)


class Hasty(selectors.DefaultSelector):
    """Does not wait: the seconds that it was asked to wait for have passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0.0 if timeout is not None else None)


class VirtualLoop(asyncio.SelectorEventLoop):
    """For stories without a network: its time passes only while nothing can go on, so a stall of the machine takes none."""

    def __init__(self) -> None:
        self._hasty = Hasty()
        super().__init__(self._hasty)

    def time(self) -> float:
        return self._hasty.now


def run(test: Coroutine[Any, Any, None], *, virtual: bool = False) -> None:
    """A leftover task or an unhandled error in the loop fails the test. `virtual`: on a clock of its own."""
    errors: list[Any] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with asyncio.timeout(2 * PATIENCE_SECONDS):
            await test
        left = asyncio.all_tasks() - {asyncio.current_task()}
        own = {task for task in left if "atoll" in repr(task.get_coro())}
        if own:
            await asyncio.wait(own, timeout=3)
        assert not [task for task in own if not task.done()]

    with asyncio.Runner(loop_factory=VirtualLoop if virtual else None) as runner:
        runner.run(watched())
    # gRPC may complete an operation of an earlier test, whose loop is closed: that says nothing about this one.
    errors = [error for error in errors if "PollerCompletionQueue" not in error["message"]]
    assert not errors, errors
