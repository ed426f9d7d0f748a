"""A run in the terminal: from its folder or through a page's address, as a view or as lines."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import command
import pytest
from rich.console import Console

from atoll.chaos import ChaosPlan, Kill
from atoll.config import load
from atoll.errors import UserError
from atoll.runtime.watch.server import PageThread
from atoll.runtime.watch.source import WatchedRun
from atoll.runtime.watch.text import RemoteRun, show_text, text_lines, text_view
from atoll.sim.run import run_virtual
from atoll.tape.folder import find_run


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRun]:
    config = load(preset_name="decoupled", overrides={"learners": 3, "total_steps": 40, "protocol": {"fragments": 4}})
    directory = tmp_path_factory.mktemp("text") / "run"
    run_virtual(config, ChaosPlan((Kill(6.0, 0, 4.0),)), directory, tensors=False)
    run = WatchedRun(find_run(directory))
    run.prepare()
    yield run
    run.close()


def test_pipe_gets_a_title_the_events_and_the_end_as_plain_lines(watched: WatchedRun) -> None:
    stream = io.StringIO()
    show_text(watched, Console(file=stream, width=132))
    first, *events, last = stream.getvalue().splitlines()
    assert first == "run: decoupled, decoder, 3 learners, 4 fragments, quorum 1"
    assert any(re.search(r"s  learner0 is lost", line) for line in events)
    assert any("learner0 recovered from" in line for line in events)
    assert last.startswith("finished: step 40 of 40, 3 of 3 learners in sync") and "\x1b" not in stream.getvalue()


def test_terminal_shows_lanes_rounds_tokens_and_events(watched: WatchedRun) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    console.print(text_view(watched, watched.status()))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 40 of 40" in shown and "all reported" in shown and "merged" in shown
    lane = next(line for line in shown.splitlines() if line.startswith("0 "))
    assert "✕" in lane and lane.count("█") > 20, "killed for four of forty seconds"


def test_address_of_a_page_shows_the_same(watched: WatchedRun) -> None:
    page = PageThread(watched)
    try:
        remote = RemoteRun(page.url)
        assert remote.status() == watched.status()
        assert list(text_lines(remote, threading.Event())) == list(text_lines(watched, threading.Event()))
        with pytest.raises(UserError, match="the token is missing or wrong"):
            RemoteRun(page.url + "x").status()
    finally:
        page.close()
    with pytest.raises(UserError, match="no page answers there"):
        remote.status()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "no run is there"),
        ([".", "--listen", "8080"], "must be HOST:PORT"),
        ([".", "--listen", "0.0.0.0:8080"], "the page has no TLS"),
        (["http://127.0.0.1:1/"], "must be that of a page"),
        (["https://127.0.0.1:1/?token=x"], "must be that of a page"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], said: str, tmp_path: Path) -> None:
    ended = command.atoll("watch", *words, cwd=tmp_path)
    assert ended.returncode == 2 and said in ended.stderr and ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--allow-chaos"], "give --dashboard too"),
        (["--dashboard", "--virtual"], "use atoll watch RUN"),
        (["--dashboard", "--allow-chaos", "--preset", "ddp"], "DDP survives no faults"),
    ],
)
def test_dashboard_of_what_has_none_is_refused(words: list[str], said: str, tmp_path: Path) -> None:
    ended = command.atoll("train", *words, cwd=tmp_path)
    assert ended.returncode == 2 and said in ended.stderr
