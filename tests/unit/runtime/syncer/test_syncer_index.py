"""The index that a syncer appends: a disk that refuses it costs the index, never the run."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from atoll.config import load
from atoll.executor.environment import tape_header
from atoll.ids import SYNCER
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import Envelope, Hello, Received, Started
from atoll.runtime.syncer.index import SyncerIndex
from atoll.views.index.files import IndexReader, complete_in


def started(directory: Path) -> tuple[SyncerMachine, SyncerIndex]:
    config = load(preset_name="decoupled", overrides={"learners": 2})
    machine = SyncerMachine(config)
    header = tape_header(config, data_fingerprint="", tensors=False, plan=[], run="r", worker=SYNCER, epoch=5, kernels="")
    index = SyncerIndex(directory, header, machine)
    event = Started(0)
    index(0, SYNCER, event, machine.on(event, 0))
    return machine, index


def greet(machine: SyncerMachine, index: SyncerIndex, learner: int) -> None:
    fragments = machine.config.protocol.fragments
    hello = Hello((-1,) * fragments, 0, 0, True, (), 0, Reason(Why.JOINS))
    event = Received(Envelope(learner, 0, SYNCER, 0, 0, hello), 0)
    index(1000, SYNCER, event, machine.on(event, 1000))


def test_change_of_standing_is_in_the_index_at_once(tmp_path: Path) -> None:
    machine, index = started(tmp_path)
    greet(machine, index, 1)
    _, events = IndexReader(tmp_path / "index").events_between(0, 10**9, 10)
    assert [event.learner for event in events] == [1]
    index.close(complete=True)
    assert complete_in(tmp_path / "index") is not None


def test_full_disk_ends_the_index_and_not_the_syncer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine, index = started(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.WARNING):
        greet(machine, index, 0)
        greet(machine, index, 1)
    index.close(complete=True)
    assert caplog.text.count("index cannot be written") == 1
    assert not (tmp_path / "index").exists(), "half an index would look like a run that stands still"
    assert {member.learner for member in machine.roster} == {0, 1}


def test_bug_in_the_fold_ends_the_index_and_not_the_syncer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine, index = started(tmp_path)
    monkeypatch.setattr("atoll.views.index.files.IndexWriter.put_event", lambda self, row: {}[row])
    with caplog.at_level(logging.WARNING):
        greet(machine, index, 0)
    index.close(complete=True)
    assert "failed by a bug" in caplog.text and "Traceback" in caplog.text and not (tmp_path / "index").exists()


def test_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "index").write_text("a file")
    with caplog.at_level(logging.WARNING):
        machine, index = started(tmp_path)
    greet(machine, index, 0)
    index.close(complete=False)
    assert "index cannot be written" in caplog.text
