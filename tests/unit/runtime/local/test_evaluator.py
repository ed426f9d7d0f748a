"""An evaluator measures when another multiple is reached, the newest version then, and knows a version that is gone from a
damaged one."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.errors import DataError, UserError
from atoll.runtime.local import heldout as evaluator
from atoll.runtime.local.heldout import Evaluator
from atoll.store.durable import DurableVersions
from atoll.store.versions import Version
from atoll.store.weights import THETA_FILE
from atoll.tape.heldout import HeldoutPoint, append_point, points_in

EVERY = 10


def worth(step: int) -> Version:
    theta = torch.full((3,), float(step))
    return Version(theta, torch.empty(0), None, None, theta, None)


class Run:
    """Two fragments that take turns, and a model whose loss is the sum of their first numbers."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(evaluator, "POLL_SECONDS", 0.001)
        monkeypatch.setattr(evaluator, "Tape", lambda path: SimpleNamespace(header=SimpleNamespace(data_fingerprint="data")))
        self.directory = directory
        self.disk = DurableVersions.create(directory / "syncer", [worth(0), worth(0)])
        self.told: list[HeldoutPoint] = []

    def end(self) -> None:
        (self.directory / "syncer" / THETA_FILE).touch()

    def store(self, *steps: int) -> None:
        for step in steps:
            self.disk.put(step, {step % 2: worth(step)})

    def evaluator(self, fingerprint: str = "data") -> Evaluator:
        config = SimpleNamespace(data=SimpleNamespace(corpus="stdlib"))
        task: Any = SimpleNamespace(
            config=config, fingerprint=fingerprint, layout=SimpleNamespace(fragments=()),
            evaluate_theta=lambda params, _: sum(float(p[0]) for p in params),
        )  # fmt: skip
        return Evaluator(self.directory, task, EVERY)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_looks_at_the_newest_once_for_each_multiple_and_at_the_end(run: Run) -> None:
    then = {13: (18, 19, 35), 35: (36, 38)}

    def on_point(point: HeldoutPoint) -> None:
        run.told.append(point)
        run.store(*then.get(point.outer_step, ()))
        if point.outer_step == 35:
            run.end()

    run.store(8, 9, 12, 13)
    run.evaluator().follow(on_point, threading.Event())
    expected = [HeldoutPoint(13, 12.0 + 13.0), HeldoutPoint(35, 18.0 + 35.0), HeldoutPoint(38, 38.0 + 35.0)]
    assert run.told == expected == points_in(run.directory)


def test_a_run_that_is_over_is_looked_at_once(run: Run) -> None:
    run.store(8, 9)
    run.end()
    for _ in range(2):
        run.evaluator().follow(run.told.append, threading.Event())
    assert run.told == [HeldoutPoint(9, 17.0)]


def test_goes_on_after_what_was_looked_at_before_and_stops_when_it_is_told(run: Run) -> None:
    append_point(run.directory, HeldoutPoint(13, 25.0))
    run.store(18, 19)
    stop = threading.Event()
    stop.set()
    run.evaluator().follow(run.told.append, stop)
    assert run.told == [], "19 is of the same ten as 13"


def test_a_version_that_stays_and_cannot_be_read_is_damaged(run: Run) -> None:
    run.store(13)
    run.disk.path(1, 13).write_bytes(b"rubbish")
    with pytest.raises(DataError, match=r"0001-000000013\.safetensors"):
        run.evaluator().follow(run.told.append, threading.Event())


def test_a_version_that_goes_as_newer_ones_come_is_no_damage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, failures = DurableVersions.open, iter(range(13, 39))

    def open_late(directory: Path, **options: Any) -> DurableVersions:
        """What was listed is gone when it is read, more often than a damaged one would be tried."""
        if (step := next(failures, None)) is not None:
            run.store(step)
            raise DataError("is missing")
        return opened(directory, **options)

    monkeypatch.setattr(DurableVersions, "open", staticmethod(open_late))
    run.store(12)
    stop = threading.Event()

    def on_point(point: HeldoutPoint) -> None:
        run.told.append(point)
        stop.set()

    run.evaluator().follow(on_point, stop)
    assert [point.outer_step for point in run.told] == [38]


def test_data_that_is_not_what_it_was_is_refused(run: Run) -> None:
    with pytest.raises(UserError, match=r"its data \(stdlib\) has changed"):
        run.evaluator("other data")
