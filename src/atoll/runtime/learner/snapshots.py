"""A live learner's part of snapshots, written by a thread of its own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from atoll.config import Config
from atoll.config.resuming import refuse_changed
from atoll.errors import AtollError
from atoll.ids import LearnerId, OuterStep
from atoll.protocol.vocabulary import LearnerState
from atoll.runtime.syncer.snapshots import log
from atoll.store.snapshots import load_learner_part, read_manifest, syncer_root, write_learner


class LearnerSnapshots:
    """`put_learner` is given a copy of the state, taken at a step boundary; writing it holds nobody up."""

    def __init__(self, directory: Path, run: str, config: Config, resume: Path | None = None) -> None:
        self._directory = directory
        self._run = run
        self._config = config
        self._resume = resume
        if resume is not None and (was := read_manifest(resume).config):
            refuse_changed(was, config)  # the syncer was asked the same of its own part, and cannot see which this one is
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._writing: Future[None] | None = None

    def put_learner(self, snapshot: OuterStep, learner: LearnerId, learner_state: LearnerState, state: Any) -> None:
        """A disk slower than the snapshots are asked for must not fill the memory with copies."""
        if self._writing is not None and not self._writing.done():
            log.warning("snapshot %d: this learner's part is given up: the one before is still being written", snapshot)
            return
        self._writing = self._thread.submit(self._write, snapshot, learner_state, state)

    def _write(self, snapshot: OuterStep, learner_state: LearnerState, state: Any) -> None:
        try:
            keep = self._config.limits.snapshots_kept + 1  # the syncer may abandon the newest
            write_learner(
                self._directory, snapshot, state, msgspec.json.encode(learner_state), keep, run=self._run,
                config=msgspec.to_builtins(self._config), protect=sealed_beside(self._directory, self._run),
            )  # fmt: skip
        except (AtollError, OSError) as error:
            log.error("snapshot %d: this learner's part is given up: %s", snapshot, error)

    def learner_state(self, snapshot: OuterStep, learner: LearnerId) -> Any:
        assert self._resume is not None
        return load_learner_part(self._resume).state

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def sealed_beside(directory: Path, run: str) -> set[OuterStep]:
    """Which snapshots the syncer keeps, for a learner that shares a run's folder with it: its parts of those are never pruned,
    however many were abandoned since, and they are no more than the syncer's own limit. A learner elsewhere is not told, and
    keeps the newest; without its part it joins a resumed run as a newcomer."""
    if directory.absolute().parent.name != "learners":
        return set()
    sealed = set()
    for path in (syncer_root(directory.absolute().parents[1]) / "snapshots").glob("[0-9]*/manifest.json"):
        with suppress(AtollError):  # one that is being removed, or is damaged: not to be resumed from
            manifest = read_manifest(path.parent)
            if manifest.run == run and path.parent.name == str(manifest.snapshot):
                sealed.add(manifest.snapshot)
    return sealed


def learner_state_of(part: Path) -> tuple[OuterStep, LearnerState]:
    """Where a learner stood, from its part of a snapshot."""
    found = load_learner_part(part)
    return found.manifest.snapshot, msgspec.json.decode(found.machine_state, type=LearnerState)
