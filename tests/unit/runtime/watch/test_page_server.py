"""Who may ask the page's server, what it answers, and what it does with those who ask too much or read too little."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from atoll.chaos import ChaosPlan, Kill
from atoll.config import load
from atoll.errors import UserError
from atoll.runtime.watch.server import STREAMS_MAX, PageThread
from atoll.runtime.watch.source import WatchedRun
from atoll.sim.run import run_virtual
from atoll.tape.folder import RunFolder, find_run

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = load(preset_name="decoupled", overrides={"learners": 3, "total_steps": 30, "protocol": {"fragments": 4}})
    directory = tmp_path_factory.mktemp("watched") / "run"
    run_virtual(config, ChaosPlan((Kill(6.0, 0, 4.0),)), directory, tensors=False)
    return directory


class Asker:
    """Requests to one page, with whatever headers a stranger may send."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.address = (parts.hostname, parts.port)
        self.token = parts.query.removeprefix("token=")

    def __call__(
        self, path: str, method: str = "GET", body: bytes | None = None, token: str | None = None, **headers: str
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=10)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        given.setdefault("Authorization", f"Bearer {self.token if token is None else token}")
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        try:
            return answer.status, answer.read()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        status, body = self(path)
        assert status == 200, body
        return json.loads(body)

    @property
    def origin(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"


@pytest.fixture(scope="module")
def ask(run: Path) -> Iterator[Asker]:
    watched = WatchedRun(find_run(run))
    watched.prepare()
    page = PageThread(watched)
    yield Asker(page.url)
    page.close()


QUESTIONS = ["status", "bins", "rounds?first=1", "round_at", "events", "heldout", "news"]
PATHS = ["/", *(f"/api/{question}" for question in QUESTIONS), "/none"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", ["", "wrong", "x" * 32, "é"])
def test_wrong_token_gets_nothing(ask: Asker, path: str, token: str) -> None:
    status, body = ask(path, token=token.encode().decode("latin-1"))
    assert status == 403 and b"learner" not in body and len(body) < 100


def test_token_in_the_address_opens_the_page_and_asks_but_does_not_post(ask: Asker) -> None:
    assert ask(f"/?token={ask.token}", token="")[0] == 403, "a wrong header is not mended by the address"
    connection = http.client.HTTPConnection(*ask.address, timeout=10)
    connection.request("GET", f"/?token={ask.token}")
    answer = connection.getresponse()
    assert answer.status == 200 and b"<title>Atoll</title>" in answer.read()
    connection.request("POST", f"/api/fault?token={ask.token}", b"{}", {"Origin": ask.origin})
    assert connection.getresponse().status == 403
    connection.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
    ids=lambda headers: "-".join(*headers.items()),
)
def test_cross_site_request_is_refused_though_the_token_is_right(ask: Asker, path: str, headers: dict[str, str]) -> None:
    assert ask(path, **headers)[0] == 403


def test_page_reached_through_a_tunnel_is_served(ask: Asker) -> None:
    assert ask("/api/status", Host="localhost:9999", Origin="http://localhost:9999")[0] == 200


def test_page_allows_itself_nothing_from_elsewhere_and_names_no_other_address(ask: Asker) -> None:
    connection = http.client.HTTPConnection(*ask.address, timeout=10)
    connection.request("GET", f"/?token={ask.token}")
    answer = connection.getresponse()
    document, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    connection.close()
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert not re.findall(r"https?://(?!www\.w3\.org)", document), "no address but its own"
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", document)


def test_answers_by_range_have_the_rounds_of_the_run(ask: Asker) -> None:
    status = ask.json("/api/status")
    assert (status["state"], status["rounds"], status["settings"]["learners"]) == ("finished", 30, 3)
    bins = ask.json("/api/bins?from=0&to=1e9&most=7")
    assert bins[0]["first"] == 1 and bins[-1]["last"] == 30 and len(bins) < 20
    (one,) = ask.json("/api/rounds?first=12&last=12")
    assert one["outer_step"] == 12 and one["text"] and one["participants"]
    assert ask.json(f"/api/round_at?at={one['closed']}")["outer_step"] == 12
    assert ask.json("/api/rounds?first=9000&last=9000") == []
    events = ask.json("/api/events")
    assert any("is lost" in e["text"] for e in events["events"]) and any(e["kind"] == "recovered" for e in events["events"])


@pytest.mark.parametrize("query", ["from=x", "to=nan.", "most=1e", "from=0&to=5&most=lots"])
def test_numbers_that_are_none_are_refused_in_a_sentence(ask: Asker, query: str) -> None:
    status, body = ask(f"/api/bins?{query}")
    assert status == 400 and b"is no number" in body


@pytest.mark.parametrize("query", ["from=nan&to=inf", "from=-5&to=-1", "from=9e14&to=1e300", "most=-3", "most=0"])
def test_numbers_without_sense_are_answered_with_what_there_is(ask: Asker, query: str) -> None:
    assert ask(f"/api/bins?{query}")[0] == 200


def test_run_that_allows_no_faults_refuses_them(ask: Asker) -> None:
    body = json.dumps({"fault": "kill", "learner": 0}).encode()
    status, said = ask("/api/fault", "POST", body, Origin=ask.origin)
    assert status == 403 and b"--allow-chaos" in said
    assert ask.json("/api/status")["chaos"] == []


def test_fault_needs_a_post_from_the_page_with_the_token(run: Path) -> None:
    struck: list[tuple[str, int]] = []

    def strike(fault: str, learner: int) -> str:
        if learner > 2:
            raise UserError(f"learner {learner}: there is none")
        struck.append((fault, learner))
        return "it will be"

    page = PageThread(WatchedRun(find_run(run), chaos=("kill",)), strike=strike)
    try:
        ask, body = Asker(page.url), json.dumps({"fault": "kill", "learner": 1}).encode()
        assert ask("/api/fault", "GET")[0] == 405
        assert ask("/api/fault", "POST", body)[0] == 403, "without an Origin it is not the page"
        assert ask("/api/fault", "POST", body, Origin="http://evil.example")[0] == 403
        assert ask("/api/fault", "POST", body, token="wrong", Origin=ask.origin)[0] == 403
        assert ask("/api/fault", "POST", b"{", Origin=ask.origin)[0] == 400
        assert ask("/api/fault", "POST", b'{"fault": "kill", "learner": 7}', Origin=ask.origin)[0] == 409
        assert struck == []
        assert ask("/api/fault", "POST", body, Origin=ask.origin)[0] == 200
        assert struck == [("kill", 1)]
    finally:
        page.close()


def test_run_that_has_not_begun_is_starting(tmp_path: Path) -> None:
    page = PageThread(WatchedRun(RunFolder(tmp_path / "new", tmp_path / "new" / "syncer")))
    try:
        ask = Asker(page.url)
        assert ask.json("/api/status")["state"] == "starting"
        assert ask.json("/api/bins") == [] and ask.json("/api/round_at") is None
    finally:
        page.close()


def raw(ask: Asker, data: bytes) -> bytes:
    with socket.create_connection(ask.address, timeout=10) as connection:
        connection.sendall(data)
        received = b""
        while part := connection.recv(65536):
            received += part
        return received


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (b"GET / HTTP/2\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", b"413"),
        (b"POST /api/fault HTTP/1.1\r\nContent-Length: 999999\r\n\r\n", b"413"),
        (b"POST /api/fault HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /api/fault HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
    ],
)
def test_what_is_no_request_is_refused_and_the_server_goes_on(ask: Asker, request_: bytes, status: bytes) -> None:
    assert raw(ask, request_).startswith(b"HTTP/1.1 " + status)
    assert ask("/api/status")[0] == 200


def news(ask: Asker) -> socket.socket:
    connection = socket.create_connection(ask.address, timeout=10)
    head = f"GET /api/news HTTP/1.1\r\nHost: {ask.address[0]}\r\nAuthorization: Bearer {ask.token}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


def test_news_come_as_events_and_pages_beyond_the_limit_are_told_so(ask: Asker) -> None:
    open_ = [news(ask) for _ in range(STREAMS_MAX)]
    try:
        for connection in open_:
            received = b""
            while b"\n\n" not in received.partition(b"\r\n\r\n")[2]:
                received += connection.recv(65536)
            assert received.startswith(b"HTTP/1.1 200") and b"text/event-stream" in received
            assert json.loads(received.partition(b"data: ")[2])["rounds"] == 30
        with news(ask) as late:
            assert late.recv(65536).startswith(b"HTTP/1.1 503")
        assert ask("/api/status")[0] == 200, "streams leave the threads free"
    finally:
        for connection in open_:
            connection.close()


def test_page_that_does_not_read_loses_its_connection_and_holds_nobody(ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.runtime.watch.http.REQUEST_SECONDS", 0.3)
    asked = f"GET /api/bins HTTP/1.1\r\nHost: {ask.address[0]}\r\nAuthorization: Bearer {ask.token}\r\n\r\n".encode()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.settimeout(20)
        deaf.connect(ask.address)
        with pytest.raises(OSError):  # its requests are not read any more, then the connection is gone
            while True:
                deaf.sendall(asked * 50)
                assert ask("/api/status")[0] == 200


def test_index_is_built_once_and_read_after_that(run: Path) -> None:
    watched, calls = WatchedRun(find_run(run)), []
    watched.prepare(lambda *progress: calls.append(progress))
    assert (run / "index" / "complete.json").exists() and calls == []


def test_index_of_a_folder_that_cannot_be_written_is_built_elsewhere(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.runtime.watch import source

    def refused(*_: Any) -> Any:
        raise UserError("directory: cannot be used")

    monkeypatch.setattr(source, "complete_in", lambda directory: None)
    monkeypatch.setattr(source, "lock_directory", refused)
    watched = WatchedRun(find_run(run))
    watched.prepare()
    assert watched.status().rounds == 30
    watched.close()


def test_built_page_belongs_to_its_sources() -> None:
    """`make page` after a change in web/: users need no node, so what is built is part of the repository."""
    web, sources = ROOT / "web", hashlib.sha256()
    names = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"]
    for name in sorted([*names, *(f"src/{path.name}" for path in (web / "src").iterdir())]):
        sources.update(name.encode() + b"\0" + (web / name).read_bytes() + b"\0")
    built = ROOT / "src" / "atoll" / "runtime" / "watch" / "page" / "sources.sha256"
    assert built.read_text().strip() == sources.hexdigest(), "web/ has changed: run make page"
