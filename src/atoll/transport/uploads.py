"""Uploads: one large message from a client, received chunk by chunk into a sink that never holds all of it in memory.

The client waits for a welcome before it sends. So a client that is refused has sent nothing, and reads why.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from atoll.transport.frames import CHUNK, Violation, unpack
from atoll.transport.wire import FrameStream

UPLOAD_SECONDS: Final = 60.0
UPLOAD_BYTES_PER_SECOND_LEAST: Final = 100_000
"""On average, after the first minute: one client at a time uploads, and the others wait for it."""


class Sink(Protocol):
    bytes_max: int

    async def write(self, data: memoryview) -> None:
        """The next bytes. May raise Refused."""

    async def finish(self) -> bytes:
        """All bytes are there. The answer to the client; may raise Refused."""

    def abandon(self) -> None:
        """No more bytes come, or the upload was refused."""


async def receive(stream: FrameStream, sink: Sink) -> bytes:
    """The sink's answer. Raises Violation, Refused, StreamBroken, or TimeoutError for a client that is too slow."""
    began, at, total = asyncio.get_running_loop().time(), 0, 0
    try:
        while True:
            async with asyncio.timeout_at(began + UPLOAD_SECONDS + at / UPLOAD_BYTES_PER_SECOND_LEAST):
                data = await stream.read()
            if data is None:
                break
            chunk = unpack(data)
            if chunk.kind != CHUNK or chunk.at != at:
                raise Violation("order", f"a chunk at {chunk.at} came instead of the one at {at}")
            total = max(total, chunk.total, at + chunk.body.nbytes)
            if total > sink.bytes_max:
                raise Violation("payload_too_big", f"an upload of {total} bytes is larger than {sink.bytes_max}")
            await sink.write(chunk.body)
            at += chunk.body.nbytes
        if at < total:
            raise Violation("order", f"an upload of {total} bytes ended after {at}")
        return await sink.finish()
    except BaseException:
        sink.abandon()
        raise
