"""The evaluator: a process that reads the versions a live run's syncer stores and measures their held-out loss. The run neither
sends it anything nor waits for it, and does not depend on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from atoll.errors import DataError, UserError
from atoll.executor.merging import remerge_for
from atoll.ids import OuterStep
from atoll.store.striped import open_versions
from atoll.store.version_file import FOLDER
from atoll.store.version_folder import newest_step
from atoll.store.weights import THETA_FILE
from atoll.tape.format import Tape
from atoll.tape.heldout import HeldoutPoint, append_point, points_in
from atoll.tasks.task import Task

POLL_SECONDS: Final = 0.5
TRIES_MAX: Final = 20
"""A version may be deleted while it is read, because newer ones replace it. One that stays and cannot be read for so many polls
is damaged."""


class Evaluator:
    def __init__(self, run: Path, task: Task, every: int) -> None:
        """`run`: a live run's folder, or that of a syncer started alone."""
        home = next((h for h in (run, run / "syncer") if (h / FOLDER).is_dir()), None)
        if home is None:
            raise UserError(f"run {run}: holds no versions of a syncer; --follow takes a live run")
        if Tape(home / "run.tape").header.data_fingerprint != task.fingerprint:
            raise UserError(f"run {run}: its data ({task.config.data.corpus}) has changed, so losses would not compare")
        self._run, self._home, self._task, self._every = run, home, task, every
        self._remerge_of = remerge_for(task.config, task.layout.fragments)
        self._seen: OuterStep = max((point.outer_step for point in points_in(run)), default=0)

    def follow(self, on_point: Callable[[HeldoutPoint], None], stop: threading.Event) -> None:
        """Evaluates the newest version whenever another multiple of `every` is passed, until the run is over, and then its
        result. Where evaluating takes longer than training to the next multiple, some are left out."""
        tries, tried = 0, 0
        while True:
            # The file says that the run is over, which the last step does not: it may merge nothing. Asked before what is newest.
            over = (self._home / THETA_FILE).exists()
            step = newest_step(self._home)
            if over and step <= self._seen:
                return
            if over or step // self._every > self._seen // self._every:
                try:
                    point = self._evaluate_point()
                except DataError:  # deleted between listing and reading, if newer ones follow
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
        disk = open_versions(self._home, self._remerge_of)
        theta = disk.theta()
        return HeldoutPoint(max(max(kept) for kept in disk.kept()), self._task.evaluate_theta(*theta))
