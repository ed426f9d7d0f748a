"""bench/quality/queue.py: what is left of queue.toml, packed and worked off in time; what stops goes on to the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from atoll.config.merges import MERGES
from atoll.workload.models.stacked import stacked_loss

BENCH = Path(__file__).parents[2] / "bench" / "quality"


@pytest.fixture
def worklist(bench_script: Callable[[str], ModuleType]) -> Any:
    return bench_script("quality/worklist")


@pytest.fixture
def study(bench_script: Callable[[str], ModuleType]) -> Any:
    return bench_script("quality/study")


@pytest.fixture
def train(bench_script: Callable[[str], ModuleType]) -> Any:
    return bench_script("quality/train")


QUEUE = tomllib.loads((BENCH / "queue.toml").read_text(encoding="utf8"))


def test_main_group_is_that_of_the_study_run_by_run(worklist: Any, study: Any) -> None:
    group = QUEUE["groups"]["main"]
    found = {row["name"]: worklist.arguments_of(QUEUE, group, row) for row in group["runs"]}
    assert found == {run.name: run.arguments for run in study.main_runs()}


@pytest.fixture
def tried(train: Any) -> Iterator[None]:
    """Its merges are registered, for one test."""
    before = set(MERGES)
    train.tried.register()
    yield
    for name in set(MERGES) - before:
        del MERGES[name]


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("name", QUEUE["groups"])
def test_every_run_of_a_group_has_its_own_name_and_settings_that_atoll_takes(worklist: Any, train: Any, name: str) -> None:
    group = QUEUE["groups"][name]
    rows = group["runs"]
    assert len({row["name"] for row in rows}) == len(rows) and group["size"] in QUEUE["sizes"]
    seen = set()
    for row in rows:
        words = worklist.arguments_of(QUEUE, group, row)
        config = train.settings(train.options().parse_args([*words, "--name", row["name"], "--out", "x"]), 100)
        seen.add((str(config), row.get("chips"), row.get("scavenge"), row.get("share_moments")))
    assert len(seen) == len(rows), "no two of them are the same run"


def test_runs_of_the_committed_lines_count_as_done(worklist: Any, tmp_path: Path) -> None:
    entries = worklist.entries_of(QUEUE, ["main"], BENCH / "results", [], "cpu")
    left = {entry.job.name for entry in worklist.left_of(entries, tmp_path)}
    assert not left & {f"{name}.s{seed}" for name in ("data_parallel", "decoupled_m2", "decoupled_m8") for seed in range(3)}


def test_script_beside_queue_py_still_finds_the_standard_librarys_module() -> None:
    words = f"import sys; sys.path.insert(0, {str(BENCH)!r}); import queue, concurrent.futures; queue.SimpleQueue().put(1)"
    subprocess.run([sys.executable, "-c", words], check=True)


# ---------------------------------------------------------------- packing


def test_runs_are_packed_by_memory_and_compute_and_a_large_one_goes_alone(worklist: Any, study: Any) -> None:
    def entry(name: str, seconds: float, gib: float, compute: float) -> Any:
        return worklist.Entry(study.Job(study.Run(name, ()), 0, Path("x")), 2, worklist.Cost(seconds, gib, compute))

    room = worklist.Room(50.0)
    small = [entry(f"s{n}", 10.0, 20.0, 0.2) for n in range(3)]
    assert worklist.startable(small, [], room) == small[:2], "memory"
    busy = [entry(f"b{n}", 10.0, 1.0, 0.5) for n in range(3)]
    assert worklist.startable(busy, [], room) == busy[:2], "compute"
    huge = entry("huge", 30.0, 99.0, 1.0)
    assert worklist.startable([huge, *small], [], room) == [huge], "larger than the room: alone"
    assert worklist.packed_seconds([*small, huge], room) == 10.0 + 10.0 + 30.0


# ---------------------------------------------------------------- working off

FAKE = """
import json, pathlib, signal, sys
value = dict(zip(sys.argv[1::1], sys.argv[2::1]))
name, seed, out, state = value["--name"], int(value["--seed"]), value["--out"], pathlib.Path(value["--state"])
if name == "long" and not state.exists():
    def stop(number, frame):
        state.write_text("half"); sys.exit(75)
    signal.signal(signal.SIGTERM, stop)
    print(f"{name}: begun", flush=True)
    while True:
        signal.pause()
state.unlink(missing_ok=True)
line = {"name": name, "seed": seed, "train_seconds": 6.0, "trained_tokens": 100, "device": "cpu", "size": "s", "learners": 2}
open(out, "a").write(json.dumps(line) + chr(10))
"""
SMALL = """
sizes.s = {tokens_per_second = 100, gib = 1, compute = 0.5}
settings.muon = ["inner.optimizer=Muon"]
[groups.one]
file = "one.jsonl"
size = "s"
tokens = 100
step_tokens = 10
seeds = [0]
runs = [
  {name = "short", preset = "diloco", learners = 2, with = ["muon"], seeds = [0, 1]},
  {name = "long", preset = "diloco", learners = 2, priority = 1},
]
"""


class ReadyClock:
    """Stands at zero until the short runs are done and the long one has begun: processes may start as slowly as they like."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._zero, self._patience = folder, 0.0, time.monotonic() + 60.0
        self.Timer = partial(ClockTimer, self)
        self.Lock = threading.Lock

    def monotonic(self) -> float:
        if not self._zero and (self._is_ready() or time.monotonic() > self._patience):
            self._zero = time.monotonic()
        return time.monotonic() - self._zero if self._zero else 0.0

    def _is_ready(self) -> bool:
        begun = any("begun" in path.read_text(encoding="utf8") for path in self._folder.glob("*.log"))
        lines = self._folder / "one.jsonl"
        return begun and lines.exists() and lines.read_bytes().count(b"\n") == 2


class ClockTimer(threading.Timer):
    def __init__(self, clock: ReadyClock, seconds: float, function: Callable[..., object], args: Sequence[Any] = ()) -> None:
        super().__init__(seconds, function, args)
        self._clock, self._due = clock, clock.monotonic() + seconds

    def run(self) -> None:
        while self._clock.monotonic() < self._due:
            if self.finished.wait(0.05):
                return
        self.function(*self.args)


def test_queue_stops_in_time_goes_on_where_it_was_and_repeats_nothing(
    worklist: Any, study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fake.py").write_text(FAKE, encoding="utf8")
    (tmp_path / "queue.toml").write_text(SMALL, encoding="utf8")
    monkeypatch.setattr(study, "TRAIN", tmp_path / "fake.py")
    clock = ReadyClock(tmp_path)
    for module in (study, worklist):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(study, "threading", clock)
    words = ["one", "--results", str(tmp_path), "--states", str(tmp_path / "states"), "--device", "cpu", "--memory", "2"]
    assert worklist.main([*words, "--minutes", "0.51", "--grace", "30"], tmp_path / "queue.toml") == 0
    told = capsys.readouterr().out
    assert "3 runs: 0 are done, 3 are left. They take about 1 min on cpu with 2 GiB, by the times of an H200" in told
    assert "2 of 3 runs are done, 1 were stopped and can go on" in told
    assert worklist.main([*words, "--list"], tmp_path / "queue.toml") == 0
    told = capsys.readouterr().out
    assert "2 are done, 1 are left, 1 of them begun" in told and "by the runs that this device has done" in told
    for _ in range(2):
        assert worklist.main(words, tmp_path / "queue.toml") == 0
    lines = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text(encoding="utf8").splitlines()]
    assert [(line["name"], line["seed"]) for line in lines] == [("short", 0), ("short", 1), ("long", 0)]
    assert all(line["commit"] and line["arguments"] for line in lines)
    assert not list((tmp_path / "states").iterdir())


def test_whole_starts_nothing_that_would_not_end_in_time(worklist: Any, study: Any, tmp_path: Path) -> None:
    started: list[str] = []
    late = worklist.Entry(study.Job(study.Run("late", ()), 0, Path("x")), 2, worklist.Cost(100.0, 1.0, 0.1))
    soon = late._replace(job=study.Job(study.Run("soon", ()), 0, Path("x")), cost=worklist.Cost(1.0, 1.0, 0.1))
    until = worklist.time.monotonic() + 50.0
    worklist.Worker(lambda job: started.append(job.run.name), worklist.Room(9.0), until, whole=True).work_off([late, soon])
    assert started == ["soon"]


# ---------------------------------------------------------------- stopping in the middle


@pytest.mark.parametrize("chips", [0, 1_200_000])
def test_run_that_was_stopped_twice_ends_with_the_bits_of_one_that_was_not(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chips: int
) -> None:
    words = [
        "--name", "x", "--out", "x", "--preset", "decoupled", "--learners", "2", "--tokens", "3072", "--step-tokens", "128",
        "--size", "width=16,layers=2,heads=2,mlp=16,tied=1", "--corpus", "stdlib", "--heldout", "", "--tokenizer", "bytes",
        "--seq-len", "16", "--heldout-batches", "2", "--device", "cpu", "--threads", "1", "--chips", str(chips),
        "--set", "protocol.fragments=4", "--set", "protocol.error_feedback=true", "--set", "data.max_bytes=200000",
        "--set", "data.cache=off", "--set", "data.heldout_every=10",
    ]  # fmt: skip
    plain = train.train(train.options().parse_args(words))
    asked: list[int] = []

    def stop_now_and_then(stopper: Any) -> bool:
        asked.append(1)
        stopper.stopped = len(asked) in (90, 220)
        return bool(stopper.stopped)

    monkeypatch.setattr(train.Stopper, "__call__", stop_now_and_then)
    chosen = train.options().parse_args([*words, "--state", str(tmp_path / "x.kept")])
    assert train.train(chosen) is None and train.train(chosen) is None
    line = train.train(chosen)
    apart = {"wall_seconds", "rehearsal_seconds", "train_seconds"}
    assert {key: line[key] for key in line.keys() - apart} == {key: plain[key] for key in plain.keys() - apart}


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_function_is_kept_by_its_source_and_compiled_anew(
    bench_script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    kept = bench_script("quality/kept")
    kept.write(tmp_path / "f", [torch.compile(stacked_loss, dynamic=False)])
    (found,) = kept.read(tmp_path / "f", None)
    assert found is not stacked_loss and found._torchdynamo_orig_callable is stacked_loss
