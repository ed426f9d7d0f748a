"""A run as it is watched: with its syncer's index, without one, while it is live, after it was cut, and when it goes on."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.chaos import ChaosPlan
from atoll.config import load
from atoll.errors import TapeError
from atoll.runtime.watch.answers import RunState
from atoll.runtime.watch.source import WatchedRun
from atoll.sim.run import run_virtual
from atoll.store.lock import lock_directory
from atoll.tape.folder import RunFolder, find_run
from atoll.tape.heldout import HeldoutPoint, append_point


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = load(preset_name="decoupled", overrides={"learners": 2, "total_steps": 30, "protocol": {"fragments": 4}})
    directory = tmp_path_factory.mktemp("run")
    run_virtual(config, ChaosPlan(), directory / "run", tensors=False)
    return directory / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("index")))


def until(what: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not what():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_live_run_whose_syncer_writes_no_index_is_followed_by_its_tape(run: Path) -> None:
    tape = run / "run.tape"
    data = tape.read_bytes()
    tape.write_bytes(data[: len(data) // 2])
    with lock_directory(run):
        watched = WatchedRun(RunFolder(run, run))
        watched.prepare()
        until(lambda: watched.status().rounds > 5)
        assert watched.status().state is RunState.LIVE and watched.status().rounds < 30
        with tape.open("ab") as growing:
            growing.write(data[len(data) // 2 :])
        until(lambda: watched.status().rounds == 30)
    until(lambda: watched.status().state is RunState.FINISHED)
    watched.close()
    assert not (run / "index").exists(), "the syncer's place is its own"


def test_cut_run_is_indexed_once_and_again_when_its_tape_went_on(run: Path) -> None:
    tape = run / "run.tape"
    data = tape.read_bytes()
    tape.write_bytes(data[: len(data) // 2])
    first = WatchedRun(find_run(run))
    first.prepare()
    status = first.status()
    assert status.state is RunState.CUT and 5 < status.rounds < 30
    built = (run / "index" / "complete.json").stat().st_mtime_ns
    WatchedRun(find_run(run)).prepare()
    assert (run / "index" / "complete.json").stat().st_mtime_ns == built, "nothing was built again"
    tape.write_bytes(data)
    os.utime(tape, ns=(built + 10**9, built + 10**9))
    again = WatchedRun(find_run(run))
    again.prepare()
    assert again.status().state is RunState.FINISHED and again.status().rounds == 30


def test_progress_of_building_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr("atoll.views.index.build.EVERY", 100)
    WatchedRun(find_run(run)).prepare(lambda *progress: told.append(progress))
    records, steps, totals = zip(*told, strict=True)
    assert list(records) == sorted(records) and steps[-1] > steps[0] and set(totals) == {30}


def test_folder_without_a_tape_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    with pytest.raises(TapeError, match="nothing to watch"):
        WatchedRun(find_run(tmp_path)).prepare()


def test_heldout_losses_are_thinned_and_keep_their_last(run: Path) -> None:
    watched = WatchedRun(find_run(run))
    watched.prepare()
    assert watched.heldout() == []
    for step in range(1, 2502):
        append_point(run, HeldoutPoint(step, 1.0))
    points = watched.heldout()
    assert len(points) <= 1001 and points[0].outer_step == 1 and points[-1].outer_step == 2501
    assert watched.status().heldout == 2501
