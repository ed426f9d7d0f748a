"""The summary of a live run, from its tapes and the versions its syncer stored. The tapes are fed to new machines on the way, so
the summary is also a replay of every decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from atoll.config import Config
from atoll.errors import RunFailed
from atoll.executor.merging import remerge_for
from atoll.executor.virtual_run import TensorExecutor
from atoll.ids import SYNCER, LearnerId, OuterStep
from atoll.protocol.interface import Machine
from atoll.store.memory_snapshots import MemorySnapshots
from atoll.store.snapshots import load_learner_part
from atoll.store.striped import RemergeOf, open_versions
from atoll.store.versions import MemoryVersions, digest
from atoll.store.weights import AVERAGE_FILE, THETA_FILE
from atoll.tape.format import Record
from atoll.tape.heldout import points_in
from atoll.tape.replay import replay
from atoll.tape.weave import open_run
from atoll.tasks.registry import task_for
from atoll.tasks.task import Task, initial_versions
from atoll.tensors.access import read_buffers, read_params
from atoll.views.run import RunView, Summary, summarise


def verdict(
    config: Config, directory: Path, *, faults: Sequence[str] = (), task: Task | None = None,
    progress: Callable[[int, OuterStep], None] | None = None, first: Callable[[], float] | None = None,
) -> Summary:  # fmt: skip
    """`first` gives the held-out loss of what the run began with, if that was measured while it trained."""
    view = RunView(config.learners, from_first_step=True)

    def observe(record: Record, machine: Machine | None) -> None:
        view(record.now, record.worker, record.event, record.effects)

    outcome = replay(open_run(directory), progress=progress, observe=observe)
    if outcome.fates is None or not outcome.fates.add_up():
        raise RunFailed(f"the token counts of {directory} do not add up: {outcome.fates}")
    task = task or task_for(config)
    loss_first = first() if first else task.evaluate_theta(*_start(directory, task).theta())
    theta = _final_theta(directory / "syncer", task)
    average = _final_average(directory / "syncer", task)
    points = [point for point in points_in(directory) if point.outer_step < config.total_steps]
    headers = open_run(directory).headers()
    return summarise(
        config, view, outcome.fates, loss_first=loss_first, loss_final=task.evaluate_theta(*theta),
        loss_average=None if average is None else task.evaluate_theta(*average),
        theta_sha256=digest([*theta[0], *theta[1]]), tape=str(directory / "syncer" / "run.tape"), run_dir=str(directory),
        clock="wall", theta=str(directory / "syncer" / THETA_FILE), faults=faults, accuracy=task.accuracy_of_theta(*theta),
        points=points, missing=outcome.missing,
        compute={str(h.worker): h.compute for h in headers if h.compute},
        kernels=next((h.kernels for h in headers if h.worker == SYNCER), ""),
    )  # fmt: skip


def _start(directory: Path, task: Task) -> MemoryVersions:
    """What the run began with: version 0, or the snapshot it was resumed from."""
    start = directory / "syncer" / "start"
    if not start.exists():
        return MemoryVersions(initial_versions(task))
    stored = open_versions(start, _remerge_of(task))
    disk = MemoryVersions(())
    disk.versions = [{v: stored.at(p, v) for v in kept} for p, kept in enumerate(stored.kept())]
    return disk


def _final_theta(home: Path, task: Task) -> tuple[list[Tensor], list[Tensor]]:
    """From the file that a run leaves, as those who use it will read it. The versions say the same, but what of them is stored by
    its inputs would be merged again; they are asked where there is no file, or where it has other dtypes than they."""
    fragments, path = task.layout.fragments, home / THETA_FILE
    same = all(slot.dtype == torch.float32 for f in fragments for slot in (*f.params, *f.buffers))
    if not same or not path.is_file():
        return open_versions(home, _remerge_of(task)).theta()
    tensors = load_file(path)
    return [read_params(tensors, f) for f in fragments], [read_buffers(tensors, f) for f in fragments]


def _final_average(home: Path, task: Task) -> tuple[list[Tensor], list[Tensor]] | None:
    if not (home / AVERAGE_FILE).is_file():
        return None
    tensors, fragments = load_file(home / AVERAGE_FILE), task.layout.fragments
    return [read_params(tensors, f) for f in fragments], [read_buffers(tensors, f) for f in fragments]


def _remerge_of(task: Task) -> RemergeOf:
    return remerge_for(task.config, task.layout.fragments)


class _StartSnapshots(MemorySnapshots):
    """The learners of a resumed run began with their parts of the snapshot, which lie beside their tapes."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def learner_state(self, snapshot: OuterStep, learner: LearnerId) -> Any:
        return load_learner_part(self._directory / "learners" / str(learner) / "start").state


def executor_for_replay(directory: Path, device: torch.device | None = None) -> Callable[[Task], TensorExecutor]:
    """An executor that trains a live run again from its start, with its learners on `device`."""
    return lambda task: TensorExecutor(
        task, _start(directory, task), _StartSnapshots(directory), device, hosted=device is not None
    )
