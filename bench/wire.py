"""How fast payloads travel: Atoll's links against bare TLS sockets, between the same two processes over loopback.

    python bench/wire.py [--peers 1 8] [--repeats 5] [--rounds 4] [--out bench/results/wire.jsonl]

One process stands for the syncer, the other for its learners. A contribution is 26 MB up, an announcement 47 MB down, as of a
fragment of 46.7 million parameters (int4 up, int8 down). A bare socket is Python's own: one thread a connection, `recv_into` a
buffer that lies ready, `sendall` of the whole payload. The two take turns, so that a loaded machine slows both. One object for
each direction and number of peers:

    atoll_mb_s, bare_mb_s         payload bytes over the time until the last is there; medians of the repeats
    ratio                         the median of the ratios of neighbours in time
    atoll_cpu_ms, bare_cpu_ms     of the syncer's process, for one payload of one peer
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import socket
import ssl
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from provenance import commit

from atoll.transport import Link, LinkLimits, Server, client_credentials, dial, server_credentials
from atoll.transport.keys import SYNCER_NAME, load_learner, load_server, make_keys

UP_BYTES, DOWN_BYTES = 26_000_000, 47_000_000
UP, DOWN = b"u", b"d"

# ---------------------------------------------------------------- the syncer's process


class Receiver:
    """Answers each contribution, and each request with an announcement that all peers share."""

    def __init__(self, announcement: list[bytes]) -> None:
        self._announcement = announcement

    def opened(self, link: Link) -> None: ...

    def arrived(self, link: Link, head: bytes, payload: memoryview | None) -> None:
        if head == DOWN:
            link.send(DOWN, self._announcement)
        else:
            link.send(UP)

    def closed(self, link: Link, reason: str) -> None: ...


def shared(payload: bytes) -> list[bytes]:
    """As the syncer sends announcements; an Atoll before the bulk sockets has no such class."""
    import atoll.transport as transport

    return getattr(transport, "SharedBuffers", list)([payload])


def serve_bare(listener: socket.socket, context: ssl.SSLContext, payload: bytes) -> None:
    def one(plain: socket.socket) -> None:
        with context.wrap_socket(plain, server_side=True) as tls:
            view = memoryview(bytearray(UP_BYTES))
            while asked := tls.recv(1):
                if asked == DOWN:
                    tls.sendall(payload)
                else:
                    receive(tls, view)
                    tls.sendall(b"!")

    while True:
        plain, _ = listener.accept()
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=one, args=(plain,), daemon=True).start()


def receive(tls: ssl.SSLSocket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        at += tls.recv_into(view[at:])


def serve(pipe: Connection, keys: Path) -> None:
    announcement = random.Random(1).randbytes(1 << 20) * 45
    announcement = announcement[:DOWN_BYTES].ljust(DOWN_BYTES, b"x")
    found = load_server(keys)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "syncer.pem", keys / "syncer.key")
    context.load_verify_locations(keys / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_bare, args=(listener, context, announcement), daemon=True).start()

    async def main() -> None:
        credentials = server_credentials(found.certificate, found.key, found.ca)
        server = Server(Receiver(shared(announcement)), lambda metadata: metadata["name"], LinkLimits(), credentials)
        pipe.send((await server.start("127.0.0.1:0"), listener.getsockname()[1]))
        while await asyncio.to_thread(pipe.recv):
            pipe.send(time.process_time())
        await server.stop(1.0)

    asyncio.run(main())


# ---------------------------------------------------------------- the learners' process


class Peer:
    def __init__(self) -> None:
        self.heard = asyncio.Event()
        self.link: Link

    def opened(self, link: Link) -> None: ...

    def arrived(self, link: Link, head: bytes, payload: memoryview | None) -> None:
        assert payload is None or payload.nbytes == DOWN_BYTES
        self.heard.set()

    def closed(self, link: Link, reason: str) -> None:
        assert "measured" in reason, reason

    async def once(self, direction: bytes, payload: bytes) -> None:
        self.heard.clear()
        self.link.send(direction, [payload] if direction == UP else None)
        await self.heard.wait()


class Bare:
    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        plain = socket.create_connection(("127.0.0.1", port))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tls = context.wrap_socket(plain, server_hostname=SYNCER_NAME)
        self._view = memoryview(bytearray(DOWN_BYTES))

    def once(self, direction: bytes, payload: bytes) -> None:
        self._tls.sendall(direction)
        if direction == UP:
            self._tls.sendall(payload)
            receive(self._tls, self._view[:1])
        else:
            receive(self._tls, self._view)


class Load:
    def __init__(self, pipe: Connection, rounds: int) -> None:
        self._pipe, self._rounds = pipe, rounds
        self._payload = random.Random(2).randbytes(1 << 20) * 25

    def _cpu(self) -> float:
        self._pipe.send(True)
        return float(self._pipe.recv())

    async def timed(self, count: int, nbytes: int, once: Callable[[], Any]) -> tuple[float, float]:
        """MB a second, and CPU ms of the other process for one payload."""
        cpu, began = self._cpu(), time.perf_counter()
        for _ in range(self._rounds):
            await once()
        seconds, payloads = time.perf_counter() - began, self._rounds * count
        return payloads * nbytes / seconds / 1e6, (self._cpu() - cpu) * 1e3 / payloads

    async def compare(self, peers: list[Peer], bare: list[Bare], direction: bytes, repeats: int) -> dict[str, float]:
        payload = self._payload.ljust(UP_BYTES, b"x")[:UP_BYTES]
        nbytes = UP_BYTES if direction == UP else DOWN_BYTES
        pool, loop = ThreadPoolExecutor(len(bare)), asyncio.get_running_loop()

        async def by_links() -> None:
            await asyncio.gather(*(peer.once(direction, payload) for peer in peers))

        async def by_sockets() -> None:
            await asyncio.gather(*(loop.run_in_executor(pool, one.once, direction, payload) for one in bare))

        await by_links()
        await by_sockets()
        atoll, plain = [], []
        for _ in range(repeats):
            plain.append(await self.timed(len(bare), nbytes, by_sockets))
            atoll.append(await self.timed(len(peers), nbytes, by_links))
        pool.shutdown()
        return {
            "atoll_mb_s": round(statistics.median(rate for rate, _ in atoll)),
            "bare_mb_s": round(statistics.median(rate for rate, _ in plain)),
            "ratio": round(statistics.median(a / b for (a, _), (b, _) in zip(atoll, plain, strict=True)), 3),
            "atoll_cpu_ms": round(statistics.median(cpu for _, cpu in atoll), 1),
            "bare_cpu_ms": round(statistics.median(cpu for _, cpu in plain), 1),
        }


async def measure(pipe: Connection, keys: Path, counts: list[int], rounds: int, repeats: int) -> dict[str, Any]:
    address, port = pipe.recv()
    found = load_learner(keys, 0)
    credentials = client_credentials(found.ca, found.certificate, found.key, SYNCER_NAME)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(keys / "learner-0.pem", keys / "learner-0.key")
    context.load_verify_locations(keys / "ca.pem")
    load, found_all = Load(pipe, rounds), {}
    for count in counts:
        peers = [Peer() for _ in range(count)]
        for number, peer in enumerate(peers):
            peer.link = await dial(address, peer, peer="syncer", metadata={"name": str(number)}, credentials=credentials)
        bare = [Bare(port, context) for _ in range(count)]
        for name, direction in (("contributions", UP), ("announcements", DOWN)):
            found_all[f"{name}_{count}"] = await load.compare(peers, bare, direction, repeats)
        for peer in peers:
            peer.link.close("measured")
            await peer.link.wait_closed()
    return found_all


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="append the line to this file too")
    chosen = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        make_keys(keys, learners=1)
        here, there = spawn.Pipe()
        syncer = spawn.Process(target=serve, args=(there, keys), daemon=True)
        syncer.start()
        found = asyncio.run(measure(here, keys, chosen.peers, chosen.rounds, chosen.repeats))
        here.send(False)
        syncer.join(10)
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    line = json.dumps({**found, "load": load, "commit": commit(), "machine": platform.machine(), "cores": os.cpu_count()})
    print(line, flush=True)
    if chosen.out is not None:
        with chosen.out.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
