"""Evaluates the Theta of a live run while it trains. The evaluator is a process of its own that reads the versions the syncer
stores: no process sends it anything or waits for it, and the run goes on without it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from atoll.errors import DataError, UserError
from atoll.ids import OuterStep
from atoll.store.durable import FOLDER, DurableVersions, newest_step
from atoll.tape.format import Tape
from atoll.tape.heldout import HeldoutPoint, append_point, points_in
from atoll.tasks.task import Task

POLL_SECONDS: Final = 0.5
THETA: Final = "theta.safetensors"
"""What a syncer leaves when its run is over. The last outer step alone does not tell: it may be in no merge."""
TRIES_MAX: Final = 20
"""Versions go when newer ones come: one that stays and cannot be read for so many polls is damaged."""


class Evaluator:
    def __init__(self, run: Path, task: Task, every: int) -> None:
        """`run`: a live run's folder, or that of a syncer started alone."""
        home = next((h for h in (run, run / "syncer") if (h / FOLDER).is_dir()), None)
        if home is None:
            raise UserError(f"run {run}: holds no versions that a syncer stores; --follow takes a live run's folder")
        if Tape(home / "run.tape").header.data_fingerprint != task.fingerprint:
            raise UserError(f"run {run}: its data ({task.config.data.corpus}) is not what it was, so losses would not compare")
        self._run, self._home, self._task, self._every = run, home, task, every
        self._seen: OuterStep = max((point.outer_step for point in points_in(run)), default=0)

    def follow(self, on_point: Callable[[HeldoutPoint], None], stop: threading.Event) -> None:
        """A look each time that another multiple of `every` is reached, at the newest there is: who takes longer to look than
        training takes to get there leaves some out. Until the run is over, and then at what it ended with."""
        tries, tried = 0, 0
        while True:
            over = (self._home / THETA).exists()  # asked before what is newest, so that nothing comes after
            step = newest_step(self._home)
            if over and step <= self._seen:
                return
            if over or step // self._every > self._seen // self._every:
                try:
                    point = self._evaluate_point()
                except DataError:  # gone between its listing and its reading, as long as others come in its place
                    tries, tried = (tries + 1, step) if step == tried else (1, step)
                    if tries == TRIES_MAX:
                        raise
                else:
                    append_point(self._run, point)
                    on_point(point)
                    self._seen = point.outer_step
                    continue
            if stop.wait(POLL_SECONDS):
                return

    def _evaluate_point(self) -> HeldoutPoint:
        disk = DurableVersions.open(self._home, read_only=True)
        theta = disk.theta()
        return HeldoutPoint(max(max(kept) for kept in disk.kept()), self._task.evaluate_theta(*theta))
