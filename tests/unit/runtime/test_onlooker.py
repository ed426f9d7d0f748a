"""An onlooker looks when another multiple is reached, at whatever is newest then, and knows a version that is gone from one that
is damaged."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.errors import DataError, UserError
from atoll.executor.durable import DurableDisk
from atoll.executor.syncer import Version
from atoll.runtime import onlooker
from atoll.runtime.onlooker import Onlooker
from atoll.tape.looks import Look, add_look, looks_in

EVERY = 10


def worth(step: int) -> Version:
    theta = torch.full((3,), float(step))
    return Version(theta, torch.empty(0), None, None, theta, None)


class Run:
    """Two fragments that take turns, and a model whose loss is the sum of their first numbers."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onlooker, "POLL_SECONDS", 0.001)
        monkeypatch.setattr(onlooker, "Tape", lambda path: SimpleNamespace(header=SimpleNamespace(data_fingerprint="data")))
        self.directory = directory
        self.disk = DurableDisk.create(directory / "syncer", [worth(0), worth(0)])
        self.told: list[Look] = []

    def end(self) -> None:
        (self.directory / "syncer" / onlooker.THETA).touch()

    def store(self, *steps: int) -> None:
        for step in steps:
            self.disk.put(step, {step % 2: worth(step)})

    def onlooker(self, fingerprint: str = "data") -> Onlooker:
        config = SimpleNamespace(data=SimpleNamespace(corpus="stdlib"))
        bench: Any = SimpleNamespace(
            config=config, fingerprint=fingerprint, evaluate_theta=lambda params, _: sum(float(p[0]) for p in params)
        )
        return Onlooker(self.directory, bench, EVERY)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_looks_at_the_newest_once_for_each_multiple_and_at_the_end(run: Run) -> None:
    then = {13: (18, 19, 35), 35: (36, 38)}

    def looked(look: Look) -> None:
        run.told.append(look)
        run.store(*then.get(look.outer_step, ()))
        if look.outer_step == 35:
            run.end()

    run.store(8, 9, 12, 13)
    run.onlooker().follow(looked, threading.Event())
    assert run.told == [Look(13, 12.0 + 13.0), Look(35, 18.0 + 35.0), Look(38, 38.0 + 35.0)] == looks_in(run.directory)


def test_a_run_that_is_over_is_looked_at_once(run: Run) -> None:
    run.store(8, 9)
    run.end()
    for _ in range(2):
        run.onlooker().follow(run.told.append, threading.Event())
    assert run.told == [Look(9, 17.0)]


def test_goes_on_after_what_was_looked_at_before_and_stops_when_it_is_told(run: Run) -> None:
    add_look(run.directory, Look(13, 25.0))
    run.store(18, 19)
    stop = threading.Event()
    stop.set()
    run.onlooker().follow(run.told.append, stop)
    assert run.told == [], "19 is of the same ten as 13"


def test_a_version_that_stays_and_cannot_be_read_is_damaged(run: Run) -> None:
    run.store(13)
    run.disk.path(1, 13).write_bytes(b"rubbish")
    with pytest.raises(DataError, match=r"0001-000000013\.safetensors"):
        run.onlooker().follow(run.told.append, threading.Event())


def test_a_version_that_goes_as_newer_ones_come_is_no_damage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, failures = DurableDisk.open, iter(range(13, 39))

    def open_late(directory: Path, *, read_only: bool = False) -> DurableDisk:
        """What was listed is gone when it is read, more often than a damaged one would be tried."""
        if (step := next(failures, None)) is not None:
            run.store(step)
            raise DataError("is missing")
        return opened(directory, read_only=read_only)

    monkeypatch.setattr(DurableDisk, "open", staticmethod(open_late))
    run.store(12)
    stop = threading.Event()

    def looked(look: Look) -> None:
        run.told.append(look)
        stop.set()

    run.onlooker().follow(looked, stop)
    assert [look.outer_step for look in run.told] == [38]


def test_data_that_is_not_what_it_was_is_refused(run: Run) -> None:
    with pytest.raises(UserError, match=r"its data \(stdlib\) is not what it was"):
        run.onlooker("other data")
