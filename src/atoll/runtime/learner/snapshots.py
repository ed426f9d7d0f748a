"""A live learner's part of snapshots, written and checked in its own thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from atoll.config import Config
from atoll.config.resuming import refuse_changed
from atoll.errors import UNDECODABLE, AtollError, DataError
from atoll.ids import LearnerId, OuterStep
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import LearnerState, StateWritten
from atoll.runtime.syncer.snapshots import log
from atoll.store.snapshots import WrittenPart, load_learner_part, load_machine_state, read_manifest, write_learner

OfRanks: TypeAlias = Callable[[], Mapping[int, WrittenPart]]
FLAW_MAX = 300
"""Characters of what went wrong, for the syncer's log."""


class LearnerSnapshots:
    """`put_learner` receives a copy of the state from a step boundary; training does not wait while it is written.
    `on_written` is told what became of it, in the thread that wrote it."""

    def __init__(self, directory: Path, run: str, config: Config, resume: Path | None = None) -> None:
        self.directory = directory
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

    @property
    def busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def put_learner(
        self, snapshot: OuterStep, learner: LearnerId, learner_state: LearnerState, state: Any, of_ranks: OfRanks = dict
    ) -> StateWritten | None:
        """Skips a snapshot while the previous one is being written: a slow disk must not fill memory with copies. `of_ranks`: see
        `write_learner`."""
        if self.busy:
            return _given_up(snapshot, "the one before is still being written")
        self._writing = self._thread.submit(lambda: self.on_written(self._write(snapshot, learner_state, state, of_ranks)))
        return None

    def _write(self, snapshot: OuterStep, learner_state: LearnerState, state: Any, of_ranks: OfRanks) -> StateWritten:
        try:
            keep = self._config.limits.snapshots_kept + 1  # the syncer may abandon the newest
            write_learner(
                self.directory, snapshot, state, msgspec.json.encode(learner_state), keep, run=self._run,
                config=msgspec.to_builtins(self._config), protect=self._kept, of_ranks=of_ranks,
            )  # fmt: skip
        except (AtollError, OSError) as error:
            return _given_up(snapshot, str(error))
        return StateWritten(snapshot)

    def learner_state(self, snapshot: OuterStep, learner: LearnerId) -> Any:
        assert self._resume is not None
        return load_learner_part(self._resume).state

    def close(self) -> None:
        self._thread.shutdown(wait=True)


class SavedParts:
    """What one rank of several reads of the snapshot that its learner resumes from; rank 0's `LearnerSnapshots` writes."""

    def __init__(self, resume: Path) -> None:
        self._resume = resume

    def put_learner(self, snapshot: OuterStep, learner: LearnerId, learner_state: LearnerState, state: Any) -> None:
        raise AssertionError("a rank writes its part when rank 0 says so")

    def learner_state(self, snapshot: OuterStep, learner: LearnerId) -> Any:
        """Mapped: a rank takes only its own from all parts."""
        return load_learner_part(self._resume, mapped=True).state


def _given_up(snapshot: OuterStep, why: str) -> StateWritten:
    log.error("snapshot %d: this learner's part is given up: %s", snapshot, why)
    return StateWritten(snapshot, Reason(Why.NOT_WRITTEN, why[:FLAW_MAX]))


def learner_state_of(part: Path) -> tuple[OuterStep, LearnerState]:
    """The outer step and the state of a learner, from its part of a snapshot."""
    machine_state, manifest = load_machine_state(part)
    try:
        return manifest.snapshot, msgspec.json.decode(machine_state, type=LearnerState)
    except UNDECODABLE as error:
        raise DataError(f"snapshot {part}: the learner's state cannot be read ({error}); choose another snapshot") from None
