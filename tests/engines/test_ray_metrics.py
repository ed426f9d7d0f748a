"""A process's metrics as Ray is given them. Ray itself is played: `tests/extras/test_ray.py` has the real one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from atoll.engines import ray_metrics
from atoll.engines.ray_cluster import METRICS_FILE
from atoll.engines.ray_metrics import MetricsCopy
from atoll.runtime.metrics import ADDRESS_FILE

PAGE = """# HELP atoll_outer_step The last outer step that is stored.
# TYPE atoll_outer_step gauge
atoll_outer_step 7
# HELP atoll_link_bytes_total Payloads.
# TYPE atoll_link_bytes_total counter
atoll_link_bytes_total{learner="0",direction="up"} 10
atoll_link_bytes_total{learner="1",direction="up"} 20
"""


class Gauges(ModuleType):
    def __init__(self) -> None:
        super().__init__("ray.util.metrics")
        self.values: dict[tuple[str, str], float] = {}

    def Gauge(self, name: str, description: str, tag_keys: tuple[str, ...]) -> Gauges:
        owner = self

        class One(Gauges):
            def set(self, value: float, tags: dict[str, str]) -> None:
                assert sorted(tags) == list(tag_keys) and description
                owner.values[name, ",".join(f"{key}={tags[key]}" for key in sorted(tags))] = value

        return One()


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> Gauges:
    found = Gauges()
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray.util.metrics", found)
    return found


@contextmanager
def serving(page: Callable[[], str]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(page().encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_sample_is_a_gauge_with_the_run_and_the_worker(gauges: Gauges, tmp_path: Path) -> None:
    file = tmp_path / METRICS_FILE
    file.write_text("127.0.0.1:1")
    copied = MetricsCopy(file, "first", "syncer")
    assert not file.exists(), "that of a process before is gone"
    copied.copy()
    with serving(lambda: PAGE) as address:
        file.write_text(address + "\n")
        copied.copy()
    whose = "run=first,worker=syncer"
    assert gauges.values == {
        ("atoll_outer_step", whose): 7.0,
        ("atoll_link_bytes_total", f"direction=up,learner=0,{whose}"): 10.0,
        ("atoll_link_bytes_total", f"direction=up,learner=1,{whose}"): 20.0,
    }


def test_number_of_series_is_bounded(gauges: Gauges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_metrics, "SERIES_MAX", 2)
    copied = MetricsCopy(tmp_path / METRICS_FILE, "first", "syncer")
    with serving(lambda: PAGE) as address:
        (tmp_path / METRICS_FILE).write_text(address)
        copied.copy()
        copied.copy()
    assert len(gauges.values) == 2


def test_process_that_does_not_answer_is_asked_again_and_a_bug_is_said_once(
    gauges: Gauges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_metrics, "EVERY_SECONDS", 0.01)
    copied, ended, turns = MetricsCopy(tmp_path / METRICS_FILE, "first", "syncer"), threading.Event(), 0

    def broken() -> None:
        nonlocal turns
        turns += 1
        if turns == 4:
            ended.set()
        raise ValueError("a bug") if turns > 1 else OSError("nobody listens")

    monkeypatch.setattr(copied, "copy", broken)
    copied.follow(ended)
    said = capsys.readouterr().err
    assert turns == 4 and said.count("Traceback") == said.count("ValueError: a bug") == 1


def test_file_is_the_one_that_workers_write() -> None:
    assert METRICS_FILE == ADDRESS_FILE
