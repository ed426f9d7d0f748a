"""Runs that `atoll up` brings up, for tests: a small recipe, waiting for what a run shows, and what is left of it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from command import Ended, atoll

PATIENCE_SECONDS = 120.0
RECIPE = """
total_steps = {steps}
[protocol]
fragments = 4
local_steps_per_round = 8
[data]
max_bytes = 200000
seq_len = 32
batch_size = 4
heldout_batches = 2
[model.numbers]
width = 16
layers = 1
heads = 2
[inner]
schedule = "constant"
warmup_share = 0.0
[limits]
patience_seconds = 5.0
{more}
"""


def write_recipe(folder: Path, steps: int = 100_000, more: str = "", placement: str = "") -> Path:
    path = folder / "recipe.toml"
    groups = placement or '[placement]\nleave_seconds = 10.0\n[[placement.learners]]\ncount = 2\n'
    path.write_text(RECIPE.format(steps=steps, more=more) + groups, encoding="utf8")
    return path


def wait_until(holds: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    until, pause = time.monotonic() + seconds, threading.Event()
    while not (found := holds()):
        assert time.monotonic() < until, f"not within {seconds:.0f} s: {what}"
        pause.wait(0.1)
    return found


def command(*words: object, cwd: Path) -> Ended:
    ended = atoll(*words, cwd=cwd)
    assert ended.returncode == 0, ended.stderr
    return ended


def workers_of(run: Path, cwd: Path) -> dict[str, dict[str, str]]:
    found = json.loads(command("status", run, "--json", cwd=cwd).stdout)
    workers: dict[str, dict[str, str]] = found["workers"]
    return workers


def pids_of(run: Path, cwd: Path) -> dict[str, int]:
    return {name: int(each["where"].split()[-1]) for name, each in workers_of(run, cwd).items() if each["where"]}


def processes_of(run: Path) -> dict[int, str]:
    """Every process whose command names the run's folder."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(run) in words and int(process.name) != os.getpid():
                found[int(process.name)] = words
    return found
