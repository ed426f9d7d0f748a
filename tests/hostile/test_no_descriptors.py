"""A process without a descriptor left, for whatever reason: the syncer waits as it does for a full disk, and then goes on."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from besieged import besieged
from thread_syncer import PATIENCE_SECONDS, Syncer, custom, model_of, train

from atoll.protocol.vocabulary import Stored


class Shortage:
    """No file below a folder can be opened, until it was tried some times."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._left = str(folder), 0
        self.failures = 0
        open_path, open_number = Path.open, os.open
        monkeypatch.setattr(Path, "open", lambda path, *words, **more: self._checked(open_path, path, *words, **more))
        monkeypatch.setattr(os, "open", lambda path, *words, **more: self._checked(open_number, path, *words, **more))

    def begin(self, failures: int) -> None:
        self._left = failures

    def _checked(self, function: Callable[..., Any], path: Any, *words: Any, **more: Any) -> Any:
        if str(path).startswith(self._folder) and self._left:
            self._left -= 1
            self.failures += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return function(path, *words, **more)


def test_syncer_that_cannot_open_a_file_waits_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It read a version for a newcomer, and ended."""
    steps = 30
    config = custom(learners=1, total_steps=steps, protocol={"codec_down": "bf16", "fragments": 2, "local_steps_per_round": 3})
    syncer = Syncer(tmp_path, config)
    shortage = Shortage(tmp_path / "versions", monkeypatch)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began = time.monotonic()
    with syncer.join(model, optimizer) as learner:
        step = 0
        while train(learner, model, optimizer, step) and time.monotonic() - began < PATIENCE_SECONDS:
            step += 1
            if step == 8:
                shortage.begin(2)
    syncer.end()
    assert shortage.failures >= 2
    stored = [record.event.outer_step for record in syncer.tape() if isinstance(record.event, Stored)]
    assert stored[-1] == steps and stored == sorted(set(stored))


@pytest.mark.soak
def test_syncer_process_survives_ten_seconds_without_descriptors(tmp_path: Path) -> None:
    with besieged(tmp_path, open_files=1024) as around:
        for number in range(2):
            around.learner(number, slow=2.0)
        while len(around.steps()) < 100:
            assert around.syncer.is_alive
            time.sleep(0.5)
        resource.prlimit(around.syncer.pid, resource.RLIMIT_NOFILE, (around.syncer.files(), 1024))
        time.sleep(10)
        assert around.syncer.is_alive
        resource.prlimit(around.syncer.pid, resource.RLIMIT_NOFILE, (1024, 1024))
        around.syncer.until("the run goes on")
        reached = around.outer_step()
        end = time.monotonic() + 30
        while around.outer_step() < reached + 20:
            assert around.syncer.is_alive and time.monotonic() < end, around.syncer.text[-2000:]
            time.sleep(0.5)
