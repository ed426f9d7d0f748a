"""One end of a link, as a process: `link_peer.py serve|dial ADDRESS PAYLOAD_BYTES STALL_SECONDS`.

Both ends send a payload as soon as the link stands, and a small message every tenth of a second that may overtake it. The one
that dialled leaves when both payloads are there. What happened is written as lines of JSON, with the clock that all processes
of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from atoll.transport import Link, LinkLimits, Server, dial

THERE = b"there"


class Peer:
    def __init__(self, payload_bytes: int) -> None:
        self._payload = bytes(payload_bytes)
        self._ticking: asyncio.Task[None] | None = None
        self.got: set[bytes] = set()
        self.over = asyncio.Event()

    def opened(self, link: Link) -> None:
        say("opened")
        if self._payload:
            link.send(b"payload", [self._payload])
        self._ticking = asyncio.create_task(self._tick(link))

    async def _tick(self, link: Link) -> None:
        while not self.over.is_set():
            link.send(b"tick", may_overtake=True)
            await asyncio.sleep(0.1)

    def arrived(self, link: Link, head: bytes, payload: memoryview | None) -> None:
        if head not in self.got or payload is not None:
            say("arrived", head=head.decode(), nbytes=0 if payload is None else payload.nbytes)
        self.got.add(head)
        if payload is not None:
            link.send(THERE)

    def closed(self, link: Link, reason: str) -> None:
        say("closed", reason=reason)
        self.over.set()


def say(what: str, **more: str | int) -> None:
    print(json.dumps({"at": time.monotonic(), "what": what, **more}), flush=True)


async def serve(address: str, peer: Peer, limits: LinkLimits) -> None:
    server = Server(peer, lambda _: "dialler", limits)
    await server.start(address)
    say("listens")
    await peer.over.wait()
    await server.stop(0.5)


async def dialling(address: str, peer: Peer, limits: LinkLimits) -> None:
    link = await dial(address, peer, peer="server", metadata={}, limits=limits)
    while not peer.over.is_set() and not {b"payload", THERE} <= peer.got:
        await asyncio.sleep(0.05)
    link.close("both payloads are there")
    await link.wait_closed()


if __name__ == "__main__":
    role, where, size, stall = sys.argv[1:]
    run = serve if role == "serve" else dialling

    async def main() -> None:
        await run(where, Peer(int(size)), LinkLimits(stall_seconds=float(stall)))

    asyncio.run(main())
