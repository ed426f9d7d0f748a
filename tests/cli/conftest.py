"""For tests of commands: a folder of one's own, and nothing built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Default run folders go here; the log of this process stays as pytest has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("atoll.cli.building.logging.basicConfig", lambda **_: None)
    return tmp_path


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that builds data or model before it refuses fails the test."""

    def never(*_: Any) -> None:
        raise AssertionError("built before it was refused")

    # The user of the name before its owner: this import of the user must not find the patched owner and keep it for good.
    for where in ("atoll.sim.run.task_for", "atoll.tasks.registry.task_for"):
        monkeypatch.setattr(where, never)
