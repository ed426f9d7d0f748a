"""What a live run came to, folded from its tapes and the versions its syncer stored. Nothing is measured twice: the tapes
are fed to new machines on the way, so a verdict is also a replay of every decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atoll.config import Config
from atoll.errors import RunFailed
from atoll.executor.durable import DurableDisk
from atoll.executor.shelf import Shelf
from atoll.executor.snapshots import load_learner
from atoll.executor.syncer import Disk, TensorHands, initial_versions
from atoll.executor.tasks import workbench_for
from atoll.executor.workbench import Workbench
from atoll.ids import LearnerId, OuterStep
from atoll.tape.format import Record
from atoll.tape.looks import looks_in
from atoll.tape.replay import Machine, replay
from atoll.tape.weave import open_run
from atoll.views.run import RunView, Summary, summarise


def verdict(
    config: Config, directory: Path, *, faults: Sequence[str] = (), bench: Workbench | None = None,
    progress: Callable[[int], None] | None = None,
) -> Summary:  # fmt: skip
    view = RunView(config.learners, from_first_step=True)

    def observe(record: Record, machine: Machine) -> None:
        view(record.now, record.worker, record.event, record.effects)

    outcome = replay(open_run(directory), progress=progress, observe=observe)
    if outcome.fates is None or not outcome.fates.add_up():
        raise RunFailed(f"the fates of tokens in {directory} do not add up: {outcome.fates}")
    bench = bench or workbench_for(config)
    disk = DurableDisk.open(directory / "syncer", read_only=True)
    first = bench.evaluate_theta(*_start(directory, bench).theta())
    on_the_way = [look for look in looks_in(directory) if look.outer_step < config.outer_steps]
    return summarise(
        config, view, outcome.fates, loss_first=first, loss_final=bench.evaluate_theta(*disk.theta()),
        theta_sha256=disk.theta_sha256(), tape=str(directory / "syncer" / "run.tape"), run_dir=str(directory), clock="wall",
        faults=faults, accuracy=bench.accuracy_of_theta(*disk.theta()), looks=on_the_way,
    )  # fmt: skip


def _start(directory: Path, bench: Workbench) -> Disk:
    """What the run began with: version 0, or the snapshot it was resumed from."""
    start = directory / "syncer" / "start"
    if not start.exists():
        return Disk(initial_versions(bench))
    stored = DurableDisk.open(start, read_only=True)
    disk = Disk(())
    disk.versions = [{v: stored.at(p, v) for v in kept} for p, kept in enumerate(stored.kept())]
    return disk


class _StartShelf(Shelf):
    """A resumed run's learners began with their parts of the snapshot, which lie beside their tapes."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def learner_state(self, snapshot: OuterStep, learner: LearnerId) -> Any:
        return load_learner(self._directory / "learners" / str(learner) / "start").state


def hands_for_replay(directory: Path) -> Callable[[Workbench], TensorHands]:
    """Hands that train a live run again from what it began with."""
    return lambda bench: TensorHands(bench, _start(directory, bench), _StartShelf(directory))
