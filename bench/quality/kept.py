"""A virtual run between two of its events as a file, and back: the run that goes on from it is bit for bit the one that was
never stopped.

Everything the run consists of is written: virtual time and what is scheduled, machines, links, hardware, weights, moments,
versions, and what observers counted. Only what follows from the settings is built anew: the task, merges, compiled functions. A
file is read by the code that wrote it, where it was written: it is a pickle, and no exchange format.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from atoll.executor.merging import FragmentMerger
from atoll.protocol.checkpoint import freeze, thaw
from atoll.protocol.learner import LearnerMachine
from atoll.protocol.syncer import SyncerMachine
from atoll.tasks.task import Task

_tasks: list[Task] = []
"""That of the run that is being read."""


class _Writer(pickle.Pickler):
    """torch.save gives it the storages, so that what shares memory still does."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Task):
            return _task, ()
        if isinstance(obj, FragmentMerger):
            return _merger, ()
        if isinstance(obj, SyncerMachine):
            return _syncer, (freeze(obj),)
        if isinstance(obj, LearnerMachine):
            return _learner, (obj.learner, obj.incarnation, freeze(obj))
        if isinstance(obj, FunctionType) and hasattr(obj, "_torchdynamo_orig_callable"):
            return _compiled, (obj._torchdynamo_orig_callable,)
        return NotImplemented


def write(path: Path, run: object) -> None:
    """In one step: a file that is there is whole."""
    beside = path.with_name(f"{path.name}.part")
    torch.save(run, beside, pickle_module=SimpleNamespace(__name__="kept", Pickler=_Writer))
    os.replace(beside, path)


def read(path: Path, task: Task) -> Any:
    _tasks.append(task)
    try:
        return torch.load(path, weights_only=False)
    finally:
        _tasks.pop()


def _task() -> Task:
    return _tasks[-1]


def _merger() -> FragmentMerger:
    return FragmentMerger(_task().config, _task().layout.fragments)


def _syncer(state: bytes) -> SyncerMachine:
    return thaw(state, SyncerMachine(_task().config))


def _learner(learner: int, incarnation: int, state: bytes) -> LearnerMachine:
    return thaw(state, LearnerMachine(_task().config, learner, incarnation))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
