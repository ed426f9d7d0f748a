"""Serves `/metrics` from a thread of its own: a scraper that is slow, dead or hostile costs the run nothing.

On a loopback address it is open to this machine. Elsewhere it wants a bearer token, or the run's certificates: then it speaks TLS
and admits clients with a certificate of the same CA. It answers one request per connection, within seconds, and a few connections
at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from atoll.config import Config
from atoll.errors import UserError
from atoll.ids import LearnerId, Nanos, WorkerId
from atoll.protocol.interface import Observer
from atoll.protocol.vocabulary import Effect, Event
from atoll.runtime.loop import LoopThread
from atoll.tape.heldout import HELDOUT_FILE, HeldoutPoint, points_in
from atoll.transport.acceptor import refuse_taken
from atoll.transport.keys import Credentials, is_loopback, split_address
from atoll.views.metrics import CONTENT_TYPE
from atoll.views.worker_metrics import LearnerMetrics, SyncerMetrics

log = logging.getLogger("atoll.metrics")

REQUEST_BYTES_MAX = 8192
REQUEST_SECONDS = 5.0
"""For a whole request with its answer, the TLS handshake excluded, which has as long."""
CONNECTIONS_MAX = 16
ADDRESS_FILE = "metrics.address"
"""Where a worker writes the address that it serves them at: port 0 takes a free one."""
TOKEN_LEAST = 16


@dataclass(frozen=True)
class MetricsAt:
    """Where to serve metrics, and to whom."""

    address: str
    token: str = field(default="", repr=False)
    """Empty: none is asked for."""
    credentials: Credentials | None = None

    @property
    def is_open(self) -> bool:
        return not self.token and self.credentials is None

    def next_to(self, offset: int) -> str:
        """The address `offset` ports further; of port 0 the same."""
        host, port = split_address(self.address)
        return f"{f'[{host}]' if ':' in host else host}:{port + offset if port else 0}"


def metrics_at(
    address: str | None, token_file: Path | None, credentials: Callable[[], Credentials | None] | None = None, dash: str = "--"
) -> MetricsAt | None:
    """None: no metrics are served. Certificates count beyond this machine only: a local scraper need not have one. `credentials`
    is None where the caller takes no certificates; `dash` is how it spells its arguments."""
    option, token_option = (f"{dash}metrics{'-' if dash else '_'}{word}" for word in ("at", "token"))
    if address is None:
        if token_file is not None:
            raise UserError(f"{token_option} {token_file}: is for {option}; give that too")
        return None
    try:
        local = is_loopback(address)
    except UserError as error:
        raise UserError(f"{option}: {error}") from None
    token = _read_token(token_file, token_option) if token_file is not None else ""
    found = credentials() if credentials is not None and not local else None
    if not local and not token and found is None:
        keys = f"{dash}keys (see `atoll keys`) or " if credentials is not None else ""
        raise UserError(
            f"{option} {address}: other machines can reach it; give {keys}{token_option}, a file, or listen on 127.0.0.1"
        )
    return MetricsAt(address, token, found)


def _read_token(path: Path, option: str) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise UserError(f"{option} {path}: cannot be read ({why})") from None
    if len(token) < TOKEN_LEAST or not token.isprintable() or " " in token:
        raise UserError(f"{option} {path}: must hold one word of at least {TOKEN_LEAST} characters")
    return token


def refuse_taken_ports(at: MetricsAt, workers: int) -> None:
    """Before a run begins: of so many workers, each at the next port."""
    for offset in range(workers):
        try:
            refuse_taken(at.next_to(offset))
        except UserError as error:
            raise UserError(f"--metrics-at {at.address}: {error}") from None


class MetricsServer:
    """`page` is called in the server's own thread, at most once for each request."""

    def __init__(self, at: MetricsAt, page: Callable[[], str]) -> None:
        self._at, self._page = at, page
        self._talking = 0
        host, port = split_address(at.address)
        tls = _tls(at.credentials) if at.credentials is not None else None
        self._loop = LoopThread("metrics")
        try:
            self._server: asyncio.Server = self._loop.run(
                asyncio.start_server(
                    self._serve, host, port, limit=REQUEST_BYTES_MAX, ssl=tls,
                    ssl_handshake_timeout=REQUEST_SECONDS if tls is not None else None,
                )
            )  # fmt: skip
        except OSError as error:
            self._loop.stop()
            raise UserError(f"--metrics-at {at.address}: cannot be listened on ({error.strerror or error})") from None
        self.address = at.next_to(0) if port else f"{at.next_to(0).rpartition(':')[0]}:{self._server.sockets[0].getsockname()[1]}"
        scheme = "https" if tls is not None else "http"
        log.info("metrics at %s://%s/metrics", scheme, self.address)

    def close(self) -> None:
        self._loop.loop.call_soon_threadsafe(self._server.close)
        self._loop.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._talking += 1
        try:
            if self._talking <= CONNECTIONS_MAX:
                async with asyncio.timeout(REQUEST_SECONDS):
                    writer.write(scrape_answer(await reader.readuntil(b"\r\n\r\n"), self._at, self._page))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked is slow, gone, or no browser
        finally:
            self._talking -= 1
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                await writer.wait_closed()


def scrape_answer(request: bytes, at: MetricsAt, page: Callable[[], str]) -> bytes:
    """To one HTTP request, up to its empty line."""
    line, *rest = request.decode("latin-1").split("\r\n")
    method, _, target = line.partition(" ")
    headers = {name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
    refusal = _refusal(headers, at)
    if refusal is not None:
        return refusal
    if target.split(" ")[0].partition("?")[0] != "/metrics":
        return _response("404 Not Found", "metrics are at /metrics\n")
    if method not in ("GET", "HEAD"):
        return _response("405 Method Not Allowed", "metrics are only read\n", "Allow: GET, HEAD\r\n")
    try:
        shown = page()
    except Exception:
        log.exception("the metrics could not be rendered")
        return _response("500 Internal Server Error", "the metrics could not be rendered; see the log\n")
    found = _response("200 OK", shown, f"Content-Type: {CONTENT_TYPE}\r\n")
    return found if method == "GET" else found.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def _refusal(headers: dict[str, str], at: MetricsAt) -> bytes | None:
    """With a token, whoever lacks it. An open page answers only to this machine's own names: a browser that was lured to another
    name, which resolves to this machine, would pass its contents on."""
    if at.token:
        shown = headers.get("authorization", "").encode("latin-1")
        if hmac.compare_digest(shown, f"Bearer {at.token}".encode()):
            return None
        return _response("401 Unauthorized", "a bearer token is required\n", "WWW-Authenticate: Bearer\r\n")
    if at.credentials is not None or _names_this_machine(headers.get("host", "")):
        return None  # a client of TLS has shown its certificate
    return _response("403 Forbidden", "ask by the address that the metrics are served at\n")


def _names_this_machine(host: str) -> bool:
    try:
        return is_loopback(host if ":" in host.rpartition("]")[2] else f"{host}:80")
    except UserError:
        return False


def _response(status: str, body: str, header: str = "") -> bytes:
    content = body.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\nConnection: close\r\nCache-Control: no-store\r\n{header}\r\n"
    return head.encode() + content


def _tls(found: Credentials) -> ssl.SSLContext:
    """Clients must have a certificate of the run's CA. Python reads a key from a file only: one that nobody else can read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=found.ca.decode())
    with tempfile.NamedTemporaryFile() as file:
        file.write(found.certificate + found.key)
        file.flush()
        context.load_cert_chain(file.name)
    return context


# ---------------------------------------------------------------- a worker's metrics


class _Careful:
    """An observer whose bug ends the metrics and not the run."""

    def __init__(self, observe: Observer) -> None:
        self._observe: Observer | None = observe

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if self._observe is not None:
            try:
                self._observe(now, worker, event, effects)
            except Exception:
                self._observe = None
                log.exception("metrics are not counted any more")


def careful(metrics: Observer | None) -> list[Observer]:
    return [_Careful(metrics)] if metrics is not None else []


@contextlib.contextmanager
def learner_metrics(at: MetricsAt | None, config: Config, learner: LearnerId, directory: Path) -> Iterator[LearnerMetrics | None]:
    """Of the learner that is built inside."""
    metrics = LearnerMetrics(config, learner, torch.__version__) if at is not None else None
    with metrics_served(at, metrics, directory):
        yield metrics


@contextlib.contextmanager
def metrics_served(at: MetricsAt | None, metrics: SyncerMetrics | LearnerMetrics | None, directory: Path) -> Iterator[None]:
    """Serves them while the worker runs, and writes where into its directory."""
    if at is None or metrics is None:
        yield
        return
    metrics.series("process_start_time_seconds").set(time.time())

    def page() -> str:
        metrics.series("process_cpu_seconds_total").set(time.process_time())
        resident = _resident_bytes()
        if resident is not None:
            metrics.series("process_resident_memory_bytes").set(resident)
        return metrics.page()

    server = MetricsServer(at, page)
    try:
        with contextlib.suppress(OSError):  # a full disk
            (directory / ADDRESS_FILE).write_text(server.address + "\n", encoding="ascii")
        yield
    finally:
        server.close()


def _resident_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


class NewestHeldout:
    """The newest held-out loss of a run. The evaluator of a local cluster writes them beside the syncer's folder, `atoll eval` of
    a syncer started alone into it. A file is read again when it has grown."""

    def __init__(self, home: Path) -> None:
        above = home.absolute().parent
        self._folders = (home, above) if (above / "config.toml").is_file() else (home,)
        self._sizes: tuple[int, ...] = ()
        self._newest: HeldoutPoint | None = None

    def __call__(self) -> HeldoutPoint | None:
        sizes = tuple(self._size(folder / HELDOUT_FILE) for folder in self._folders)
        if sizes != self._sizes:
            self._sizes = sizes
            points = [point for folder in self._folders for point in points_in(folder)]
            self._newest = max(points, key=lambda point: point.outer_step, default=None)
        return self._newest

    @staticmethod
    def _size(path: Path) -> int:
        try:
            return path.stat().st_size
        except OSError:
            return 0
