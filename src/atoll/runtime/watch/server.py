"""The page's server: one document, JSON by range, and news as server-sent events.

It reads files and holds no part of the run. Who may ask is decided in one place, `_refuse_strangers`: a request needs the token
of this server, must name this machine as its host (a foreign name that resolves to it is an attack by DNS), and must not come
from a page of another site. A fault may be asked for by POST only, with the token in a header, which no foreign form can set.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from atoll.errors import UNDECODABLE, UserError
from atoll.ids import LearnerId
from atoll.runtime.loop import LoopThread
from atoll.runtime.watch.answers import Status
from atoll.runtime.watch.http import HttpAnswer, HttpRefusal, HttpRequest, HttpServer
from atoll.runtime.watch.source import WatchedRun

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})
NEWS_SECONDS = 1.0
"""Between two looks for news."""
BEAT_SECONDS = 15.0
"""After so long without news an empty line says that the server is there."""
STREAMS_MAX = 16
Strike = Callable[[str, LearnerId], str]
"""Carries a fault out (its name, the learner) and says what will happen; raises UserError."""


class FaultAsked(msgspec.Struct, forbid_unknown_fields=True):
    fault: str
    learner: int


class PageServer:
    def __init__(self, run: WatchedRun, *, host: str = "127.0.0.1", strike: Strike | None = None) -> None:
        self._run, self._host, self._strike = run, host, strike
        self.token = secrets.token_urlsafe(24)
        self._http = HttpServer(self._answer)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="page")
        self._streams = 0
        self._document, self._policy = _document()

    async def start(self, port: int) -> str:
        """The address to open."""
        try:
            port = await self._http.start(self._host, port)
        except OSError as error:
            why = f"cannot be listened on ({error.strerror}); give another port, or 0 for any that is free"
            raise UserError(f"--listen {self._host}:{port}: {why}") from None
        shown = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{shown}:{port}/?token={self.token}"

    async def stop(self) -> None:
        await self._http.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ who may ask

    def _refuse_strangers(self, request: HttpRequest) -> None:
        host = request.headers.get("host", "")
        name = _name_in(host)
        if name not in LOOPBACK and name != self._host:
            raise HttpRefusal(403, "this server does not have that name")
        origin = request.headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            raise HttpRefusal(403, "requests of another site are refused")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise HttpRefusal(403, "requests of another site are refused; copy the address into the browser")
        if not hmac.compare_digest(self._token_of(request).encode(), self.token.encode()):
            raise HttpRefusal(403, "the token is missing or wrong; open the address that was printed")
        if request.method == "POST" and origin is None:
            raise HttpRefusal(403, "a fault is asked for from the page")

    @staticmethod
    def _token_of(request: HttpRequest) -> str:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return given.strip()
        return request.query.get("token", "") if request.method == "GET" else ""

    # ------------------------------------------------------------ answers

    async def _answer(self, request: HttpRequest) -> HttpAnswer:
        self._refuse_strangers(request)
        if request.path == "/api/fault":
            return await self._fault(request)
        if request.method != "GET":
            raise HttpRefusal(405, "only GET")
        if request.path == "/":
            return HttpAnswer(body=self._document, content_type="text/html; charset=utf-8", headers=_shut(self._policy))
        if request.path == "/api/news":
            return self._news()
        ask = self._question(request)
        body = await asyncio.get_running_loop().run_in_executor(self._threads, lambda: msgspec.json.encode(ask()))
        return HttpAnswer(body=body, headers=_shut("default-src 'none'"))

    def _question(self, request: HttpRequest) -> Callable[[], Any]:
        run, query = self._run, request.query
        match request.path:
            case "/api/status":
                return run.status
            case "/api/bins":
                begins, ends, most = _number(query, "from", 0.0), _number(query, "to", 1e9), int(_number(query, "most", 300))
                return lambda: run.bins(begins, ends, most)
            case "/api/rounds":
                first = int(_number(query, "first", 1))
                last = int(_number(query, "last", first))
                return lambda: run.rounds(first, last)
            case "/api/round_at":
                at = _number(query, "at", 1e9)
                return lambda: run.round_at(at)
            case "/api/events":
                begins, ends, most = _number(query, "from", 0.0), _number(query, "to", 1e9), int(_number(query, "most", 200))
                return lambda: run.events(begins, ends, most)
            case "/api/heldout":
                return run.heldout
        raise HttpRefusal(404, "there is no such page")

    async def _fault(self, request: HttpRequest) -> HttpAnswer:
        if request.method != "POST":
            raise HttpRefusal(405, "a fault is asked for by POST")
        if self._strike is None:
            raise HttpRefusal(403, "faults are not allowed; start the run with atoll train --dashboard --allow-chaos")
        try:
            asked = msgspec.json.decode(request.body, type=FaultAsked)
            said = self._strike(asked.fault, asked.learner)
        except UserError as error:
            raise HttpRefusal(409, str(error)) from None
        except UNDECODABLE as error:
            raise HttpRefusal(400, f"give a fault and a learner: {error}") from None
        return HttpAnswer(body=json.dumps({"said": said}).encode())

    def _news(self) -> HttpAnswer:
        if self._streams >= STREAMS_MAX:
            raise HttpRefusal(503, f"{STREAMS_MAX} pages are open already")
        return HttpAnswer(content_type="text/event-stream", headers=_shut("default-src 'none'"), stream=self._stream())

    async def _stream(self) -> AsyncIterator[bytes]:
        """Of several changes the newest: each says all of how the run stands."""
        self._streams += 1
        try:
            told, beat, loop = b"", 0.0, asyncio.get_running_loop()
            while True:
                status = await loop.run_in_executor(self._threads, self._run.status)
                news = msgspec.json.encode(_without_clock(status))
                if news != told:
                    told, beat = news, loop.time()
                    yield b"data: " + msgspec.json.encode(status) + b"\n\n"
                elif loop.time() - beat > BEAT_SECONDS:
                    beat = loop.time()
                    yield b": still here\n\n"
                await asyncio.sleep(NEWS_SECONDS)
        finally:
            self._streams -= 1


def _name_in(host: str) -> str:
    """Without the port: through a tunnel the page is reached by another one."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _without_clock(status: Status) -> Status:
    """A run that stands still has no news, though its clock goes on."""
    return msgspec.structs.replace(status, ends=0.0)


def _number(query: Any, name: str, default: float) -> float:
    try:
        value = float(query.get(name, default))
        return value if -1e15 < value < 1e15 else default
    except ValueError:
        raise HttpRefusal(400, f"{name} is no number") from None


def _shut(policy: str) -> dict[str, str]:
    """Nothing of it is kept, framed, or sent anywhere."""
    return {
        "Content-Security-Policy": policy, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
    }  # fmt: skip


def _document() -> tuple[bytes, str]:
    """One file, so that nothing is served without the token; and a policy by which it loads nothing from elsewhere."""
    page = resources.files("atoll.runtime.watch") / "page"
    script, style = ((page / name).read_text(encoding="utf8") for name in ("page.js", "page.css"))
    whole = (page / "page.html").read_text(encoding="utf8")
    whole = whole.replace("/*style*/", style).replace("/*script*/", script)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    policy = f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; connect-src 'self'; "
    return whole.encode(), policy + "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class PageThread:
    """The server in a thread with a loop of its own."""

    def __init__(self, run: WatchedRun, *, host: str = "127.0.0.1", port: int = 0, strike: Strike | None = None) -> None:
        self._server, self._run = PageServer(run, host=host, strike=strike), run
        self._loop = LoopThread()
        try:
            self.url: str = self._loop.run(self._server.start(port))
        except BaseException:
            self._loop.stop()
            raise

    def close(self) -> None:
        self._loop.run(self._server.stop())
        self._loop.stop()
        self._run.close()
