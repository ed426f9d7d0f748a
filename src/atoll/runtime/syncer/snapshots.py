"""The syncer's part of a live run's snapshots: versions are hard-linked, so nothing is copied."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from atoll.config import Config
from atoll.errors import AtollError
from atoll.ids import LearnerId, OuterStep
from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import Envelope, SyncerState
from atoll.store.snapshots import Linkable, add_syncer_file, begin_syncer, seal_syncer, sealed_steps, snapshot_dir

log = logging.getLogger("atoll.snapshots")

IN_FLIGHT_BYTES_MAX = 1 << 26
"""Bytes of the messages recorded for one snapshot. The machine bounds their number for each learner; a report is of some hundred
bytes, or 20 kB in a run with a thousand members."""


class SyncerSnapshots:
    """A snapshot that cannot be written is abandoned with a reason in the log, and the run goes on."""

    def __init__(
        self, directory: Path, disk: Linkable, run: str, config: Config,
        on_kept: Callable[[Sequence[str]], None] = lambda names: None,
    ) -> None:  # fmt: skip
        """`on_kept` is told the names of those that are kept, after one was sealed or abandoned."""
        self._directory = directory
        self._on_kept = on_kept
        self._disk = disk
        self._run = run
        self._config = config
        self.kept = sealed_steps(directory)
        """Snapshots that can be resumed from. Learners are told, and keep their parts of them."""
        self._begun: OuterStep | None = None
        self._in_flight: list[bytes] = []
        self._in_flight_bytes = 0

    def begin(self, snapshot: OuterStep, syncer_state: SyncerState) -> None:
        self._in_flight.clear()
        self._in_flight_bytes = 0
        self._begun = snapshot
        try:
            begin_syncer(self._directory, snapshot, self._disk, msgspec.json.encode(syncer_state))
            uploaded = self._directory / "model.upload"
            if uploaded.exists():
                add_syncer_file(self._directory, snapshot, "model.upload", [uploaded.read_bytes()])
        except (AtollError, OSError) as error:
            log.error("snapshot %d is given up: %s", snapshot, error)

    def put_in_flight(self, snapshot: OuterStep, envelope: Envelope, payload: Payload | None) -> None:
        """Without their payloads: those are part of their learners' weights, and no resumed run delivers them."""
        if self._in_flight_bytes <= IN_FLIGHT_BYTES_MAX:
            message = msgspec.json.encode(envelope)
            self._in_flight.append(message)
            self._in_flight_bytes += len(message)

    def seal(
        self, snapshot: OuterStep, learners: tuple[LearnerId, ...], complete: bool, left_out: tuple[LearnerId, ...] = ()
    ) -> None:
        if complete and self._in_flight_bytes > IN_FLIGHT_BYTES_MAX:
            log.error("snapshot %d is given up: more than %d bytes were in flight", snapshot, IN_FLIGHT_BYTES_MAX)
            complete = False
        try:
            if complete:
                messages = b"[" + b",".join(self._in_flight) + b"]"
                add_syncer_file(self._directory, snapshot, "in_flight.json", [messages])
            keep = self._config.limits.snapshots_kept
            config = msgspec.to_builtins(self._config)
            sealed = seal_syncer(
                self._directory, snapshot, learners, complete, keep, run=self._run, config=config, left_out=left_out
            )
            self.kept = sealed_steps(self._directory)
            begun = {self._begun} - {snapshot, None}  # the next one may have begun meanwhile
            self._on_kept([snapshot_dir(self._directory, step).name for step in (*self.kept, *begun) if step is not None])
            log.info("snapshot %d %s", snapshot, _outcome(sealed, learners, left_out))
        except (AtollError, OSError) as error:
            log.error("snapshot %d is given up: %s", snapshot, error)


def _outcome(sealed: bool, learners: tuple[LearnerId, ...], left_out: tuple[LearnerId, ...]) -> str:
    if not sealed:
        return "is abandoned"
    without = f", without learners {', '.join(map(str, left_out))}" if left_out else ""
    return f"of {len(learners)} learners is complete{without}"
