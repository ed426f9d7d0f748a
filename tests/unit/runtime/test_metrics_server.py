"""The metrics endpoint: who may read it, and that nobody who does, or who fails to, holds the worker."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from ports import unused_port

from atoll.errors import UserError
from atoll.protocol.vocabulary import DeadlinePassed
from atoll.runtime.clock import Clock, wall
from atoll.runtime.driver import Driver
from atoll.runtime.metrics import (
    CONNECTIONS_MAX,
    MetricsAt,
    MetricsServer,
    NewestHeldout,
    careful,
    metrics_at,
    refuse_taken_ports,
)
from atoll.tape.heldout import HeldoutPoint, append_point
from atoll.transport.keys import load_learner, load_server, make_keys

TOKEN = "0123456789abcdef"


@contextmanager
def served(at: MetricsAt, page: str = "atoll_outer_step 3\n") -> Iterator[tuple[str, int]]:
    server = MetricsServer(at, lambda: page)
    host, _, port = server.address.rpartition(":")
    try:
        yield host, int(port)
    finally:
        server.close()


def ask(where: tuple[str, int], path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*where, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


LOCAL = MetricsAt("127.0.0.1:0")


def test_page_is_served_on_loopback_and_nothing_else_is() -> None:
    with served(LOCAL) as where:
        assert ask(where) == (200, "atoll_outer_step 3\n")
        assert ask(where, method="HEAD") == (200, "")
        assert ask(where, "/")[0] == ask(where, "/metrics/x")[0] == 404
        assert ask(where, method="POST")[0] == 405


def test_name_that_is_not_this_machine_s_is_refused_where_no_token_is_asked_for() -> None:
    with served(LOCAL) as where:
        for host, status in (("evil.example", 403), ("evil.example:9100", 403), ("localhost", 200), ("[::1]:9100", 200)):
            assert ask(where, Host=host)[0] == status


def test_wrong_token_gets_nothing() -> None:
    with served(MetricsAt("127.0.0.1:0", TOKEN)) as where:
        assert ask(where)[0] == ask(where, Authorization=f"Bearer {TOKEN}x")[0] == ask(where, Authorization="Bearer")[0] == 401
        assert ask(where, "/nothing")[0] == 401, "nor what is there and what is not"
        assert ask(where, Authorization=f"Bearer {TOKEN}") == (200, "atoll_outer_step 3\n")


def test_certificate_of_the_run_s_authority_is_required_beyond_this_machine(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", learners=1)
    make_keys(tmp_path / "others", learners=1)
    at = metrics_at("0.0.0.0:0", None, lambda: load_server(tmp_path / "keys"))
    assert at is not None and at.credentials is not None
    context = ssl.create_default_context(cafile=str(tmp_path / "keys" / "ca.pem"))
    with served(at) as (_, port):
        for keys, admitted in (("keys", True), ("others", False), (None, False)):
            context = ssl.create_default_context(cafile=str(tmp_path / "keys" / "ca.pem"))
            if keys is not None:
                context.load_cert_chain(tmp_path / keys / "learner-0.pem", tmp_path / keys / "learner-0.key")
            answer = b""
            try:
                with (
                    socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
                    context.wrap_socket(plain, server_hostname="atoll-syncer") as secure,
                ):
                    secure.sendall(b"GET /metrics HTTP/1.1\r\nHost: syncer.example\r\n\r\n")
                    answer = secure.recv(4096)
            except OSError:
                pass
            assert answer.startswith(b"HTTP/1.1 200 ") == admitted


def test_other_machines_need_a_token_or_certificates(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    with pytest.raises(UserError, match=r"^--metrics-at 0\.0\.0\.0:9100: other machines .* give --keys .* or --metrics-"):
        metrics_at("0.0.0.0:9100", None, lambda: None)
    with pytest.raises(UserError, match=r"^metrics_at 10\.0\.0\.5:1: other machines .*; give metrics_token, a file, or"):
        metrics_at("10.0.0.5:1", None, dash="")
    assert metrics_at("0.0.0.0:9100", token) == MetricsAt("0.0.0.0:9100", TOKEN)
    make_keys(tmp_path / "keys", learners=1)
    assert metrics_at("127.0.0.1:9100", None, lambda: load_learner(tmp_path / "keys")) == MetricsAt("127.0.0.1:9100")
    assert metrics_at(None, None) is None
    assert TOKEN not in repr(metrics_at("0.0.0.0:9100", token))


@pytest.mark.parametrize(
    ("address", "token", "says"),
    [
        ("9100", None, "^--metrics-at: address '9100': must be host:port"),
        (None, TOKEN, "^--metrics-token .*: is for --metrics-at"),
        ("127.0.0.1:1", "short", "one word of at least 16 characters"),
        ("127.0.0.1:1", "two words that are long enough", "one word of at least 16 characters"),
    ],
)
def test_what_cannot_be_served_is_refused(address: str | None, token: str | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token or "")
    with pytest.raises(UserError, match=says):
        metrics_at(address, file if token is not None else None)
    with pytest.raises(UserError, match=r"gone: cannot be read \(No such file"):
        metrics_at("127.0.0.1:1", tmp_path / "gone")


def test_port_that_is_taken_is_refused_and_the_next_learner_has_the_next_port() -> None:
    with served(LOCAL) as (host, port), pytest.raises(UserError, match=rf"^--metrics-at {host}:{port}: cannot be listened on"):
        MetricsServer(MetricsAt(f"{host}:{port}"), str)
    free = unused_port(2)
    at = MetricsAt(f"127.0.0.1:{free + 1}")
    with served(at) as (host, port), pytest.raises(UserError, match=rf"^--metrics-at .*: cannot listen on {host}:{port}"):
        refuse_taken_ports(MetricsAt(f"{host}:{free}"), 2)
    with pytest.raises(UserError, match=r"^--metrics-at 127\.0\.0\.1:65535: address '127\.0\.0\.1:65536': must be host:port"):
        refuse_taken_ports(MetricsAt("127.0.0.1:65535"), 2)
    assert MetricsAt("127.0.0.1:9100").next_to(3) == "127.0.0.1:9103"
    assert MetricsAt("[::1]:9100").next_to(1) == "[::1]:9101" and LOCAL.next_to(3) == "127.0.0.1:0"


def test_scrapers_that_say_nothing_are_bounded_and_keep_nobody_out_for_long() -> None:
    with served(LOCAL) as where:
        silent = [socket.create_connection(where) for _ in range(CONNECTIONS_MAX + 4)]
        began = time.monotonic()
        try:
            while True:
                try:
                    if ask(where)[0] == 200:
                        break
                except OSError:  # no place is free yet
                    assert time.monotonic() - began < 20
                    threading.Event().wait(0.2)
            assert silent[0].recv(1) == b"", "closed after its time"
        finally:
            for each in silent:
                each.close()


def test_request_that_never_ends_is_cut_off() -> None:
    with served(LOCAL) as where, socket.create_connection(where, timeout=10) as endless:
        endless.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000)
        with suppress(ConnectionResetError):
            assert endless.recv(1) == b""
        assert ask(where)[0] == 200


def test_page_that_cannot_be_made_is_an_error_of_that_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    pages = iter((KeyError("x"), "fine\n"))

    def page() -> str:
        found = next(pages)
        if isinstance(found, Exception):
            raise found
        return found

    server = MetricsServer(LOCAL, page)
    host, _, port = server.address.rpartition(":")
    try:
        assert ask((host, int(port)))[0] == 500
        assert ask((host, int(port))) == (200, "fine\n")
    finally:
        server.close()
    assert "the metrics could not be rendered" in caplog.text


class Nothing:
    """A machine that decides nothing."""

    def on(self, event: object, now: int) -> tuple[()]:
        return ()

    def deadline(self) -> None:
        return None


def test_bug_in_the_metrics_ends_the_metrics_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[object] = []

    def buggy(now: int, worker: int, event: object, effects: object) -> None:
        seen.append(event)
        raise ZeroDivisionError

    driver = Driver(Nothing(), 0, Clock(wall()), None, lambda *_: None, lambda _: None, observers=careful(buggy))
    for _ in range(3):
        driver.dispatch(DeadlinePassed())
    assert driver.events == 3 and len(seen) == 1
    assert caplog.text.count("metrics are not counted any more") == 1


def test_newest_heldout_loss_is_found_beside_and_in_the_syncer_s_folder(tmp_path: Path) -> None:
    home = tmp_path / "syncer"
    home.mkdir()
    (tmp_path / "config.toml").touch()
    newest = NewestHeldout(home)
    assert newest() is None
    append_point(tmp_path, HeldoutPoint(10, 3.0))
    append_point(home, HeldoutPoint(5, 4.0))
    assert newest() == HeldoutPoint(10, 3.0)
    append_point(tmp_path, HeldoutPoint(20, 2.5))
    assert newest() == HeldoutPoint(20, 2.5)
