"""A live learner's part of snapshots, written and checked in its own thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from atoll.config import Config
from atoll.config.resuming import refuse_changed
from atoll.errors import UNDECODABLE, AtollError, DataError
from atoll.ids import LearnerId, OuterStep
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import LearnerState, StateWritten
from atoll.runtime.syncer.snapshots import log
from atoll.store.snapshots import load_learner_part, read_manifest, write_learner

FLAW_MAX = 300
"""Characters of what went wrong, for the syncer's log."""


class LearnerSnapshots:
    """`put_learner` receives a copy of the state from a step boundary; training does not wait while it is written.
    `on_written` is told what became of it, in the thread that wrote it."""

    def __init__(self, directory: Path, run: str, config: Config, resume: Path | None = None) -> None:
        self._directory = directory
        self._run = run
        self._config = config
        self._resume = resume
        if resume is not None and (was := read_manifest(resume).config):
            refuse_changed(was, config)  # the syncer checks only its own part, and does not see this one
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._writing: Future[None] | None = None
        self._kept: tuple[OuterStep, ...] = ()
        self.on_written: Callable[[StateWritten], None] = lambda written: None

    def keep(self, kept: tuple[OuterStep, ...]) -> None:
        """The syncer keeps these. This learner's parts of them are never pruned, however many snapshots were abandoned since;
        the syncer's own limit bounds them."""
        self._kept = kept

    def put_learner(
        self, snapshot: OuterStep, learner: LearnerId, learner_state: LearnerState, state: Any
    ) -> StateWritten | None:
        """Skips a snapshot while the previous one is being written: a slow disk must not fill memory with copies."""
        if self._writing is not None and not self._writing.done():
            return _given_up(snapshot, "the one before is still being written")
        self._writing = self._thread.submit(lambda: self.on_written(self._write(snapshot, learner_state, state)))
        return None

    def _write(self, snapshot: OuterStep, learner_state: LearnerState, state: Any) -> StateWritten:
        try:
            keep = self._config.limits.snapshots_kept + 1  # the syncer may abandon the newest
            write_learner(
                self._directory, snapshot, state, msgspec.json.encode(learner_state), keep, run=self._run,
                config=msgspec.to_builtins(self._config), protect=self._kept,
            )  # fmt: skip
        except (AtollError, OSError) as error:
            return _given_up(snapshot, str(error))
        return StateWritten(snapshot)

    def learner_state(self, snapshot: OuterStep, learner: LearnerId) -> Any:
        assert self._resume is not None
        return load_learner_part(self._resume).state

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def _given_up(snapshot: OuterStep, why: str) -> StateWritten:
    log.error("snapshot %d: this learner's part is given up: %s", snapshot, why)
    return StateWritten(snapshot, Reason(Why.NOT_WRITTEN, why[:FLAW_MAX]))


def learner_state_of(part: Path) -> tuple[OuterStep, LearnerState]:
    """The outer step and the state of a learner, from its part of a snapshot."""
    found = load_learner_part(part)
    try:
        return found.manifest.snapshot, msgspec.json.decode(found.machine_state, type=LearnerState)
    except UNDECODABLE as error:
        raise DataError(f"snapshot {part}: the learner's state cannot be read ({error}); choose another snapshot") from None
