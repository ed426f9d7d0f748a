"""A small HTTP/1.1 server for one page on this machine: requests without a body to speak of, answers in whole or as a stream.

Everything is bounded: connections, the size of a request, the time it may take, and what is queued for a page that does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qs, urlsplit

log = logging.getLogger("atoll.watch")

HEAD_MAX = 16 << 10
BODY_MAX = 4 << 10
CONNECTIONS_MAX = 64
REQUEST_SECONDS = 10.0
"""A request must be complete after so long, and an answer taken."""
IDLE_SECONDS = 60.0

STATUS_LINES: dict[int, str] = {
    200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed", 409: "Conflict",
    413: "Content Too Large", 500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip


@dataclass(frozen=True)
class HttpRequest:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By lower-case names."""
    body: bytes = b""


@dataclass(frozen=True)
class HttpAnswer:
    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: AsyncIterator[bytes] | None = None
    """In place of a body: written as it comes, until it ends or the reader is gone or too slow."""


class HttpRefusal(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.answer = HttpAnswer(status, reason.encode(), "text/plain; charset=utf-8")


class HttpServer:
    def __init__(self, answer: Callable[[HttpRequest], Awaitable[HttpAnswer]]) -> None:
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """The port that it listens on."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=HEAD_MAX)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) > CONNECTIONS_MAX:
                await self._write(writer, HttpRefusal(503, "too many connections; close a page").answer, keep=False)
            else:
                await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass  # the page went away, or does not read: it may ask again
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep = True
        while keep:
            try:
                request = await asyncio.wait_for(_read_request(reader), IDLE_SECONDS)
                if request is None:
                    return
                keep = request.headers.get("connection", "").lower() != "close"
                answer = await self._answer(request)
            except HttpRefusal as refusal:
                answer, keep = refusal.answer, False
            except Exception:
                log.exception("a request of the page failed")
                answer, keep = HttpAnswer(500, b"it failed; the log says why", "text/plain"), False
            keep = keep and answer.stream is None
            await self._write(writer, answer, keep=keep)

    async def _write(self, writer: asyncio.StreamWriter, answer: HttpAnswer, *, keep: bool) -> None:
        lines = [f"HTTP/1.1 {answer.status} {STATUS_LINES[answer.status]}", f"Content-Type: {answer.content_type}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        lines += [] if answer.stream is not None else [f"Content-Length: {len(answer.body)}"]
        lines += ["Connection: keep-alive" if keep else "Connection: close", "", ""]
        writer.write("\r\n".join(lines).encode() + answer.body)
        await asyncio.wait_for(writer.drain(), REQUEST_SECONDS)
        if answer.stream is not None:
            # Nothing is asked of the stream while the reader has not taken what came before: a slow page misses news, and its
            # memory is its own.
            async with contextlib.aclosing(answer.stream) as parts:  # type: ignore[type-var]
                async for part in parts:
                    writer.write(part)
                    await asyncio.wait_for(writer.drain(), REQUEST_SECONDS)


async def _read_request(reader: asyncio.StreamReader) -> HttpRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise HttpRefusal(413, "the request is too long") from None
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise
    request = parse_head(head)
    return replace(request, body=await _read_body(reader, request.headers))


def parse_head(head: bytes) -> HttpRequest:
    """The request without its body."""
    first, *rest = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise HttpRefusal(400, "this is no HTTP/1.1 request")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)}
    try:
        target = urlsplit(words[1])
        query = {name: values[-1] for name, values in parse_qs(target.query, max_num_fields=32).items()}
    except ValueError:
        raise HttpRefusal(400, "this is no address") from None
    return HttpRequest(words[0], target.path, query, headers)


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "transfer-encoding" in headers:
        raise HttpRefusal(400, "a body needs a Content-Length")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 9:
        raise HttpRefusal(400, "Content-Length is no number")
    if int(length) > BODY_MAX:
        raise HttpRefusal(413, f"a body has at most {BODY_MAX} bytes")
    return await asyncio.wait_for(reader.readexactly(int(length)), REQUEST_SECONDS)
