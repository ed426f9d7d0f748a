"""The syncer's part of a live run's snapshots: versions are hard-linked, so nothing is copied."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from atoll.config import Config
from atoll.errors import AtollError
from atoll.ids import LearnerId, OuterStep
from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import Envelope, SyncerState
from atoll.store.durable import DurableVersions
from atoll.store.snapshots import add_syncer_file, begin_syncer, seal_syncer

log = logging.getLogger("atoll.snapshots")

IN_FLIGHT_MAX = 10_000
"""Messages recorded for one snapshot."""


class SyncerSnapshots:
    """A snapshot that cannot be written is abandoned with a reason in the log, and the run goes on."""

    def __init__(self, directory: Path, disk: DurableVersions, run: str, config: Config) -> None:
        self._directory = directory
        self._disk = disk
        self._run = run
        self._config = config
        self._in_flight: list[Envelope] = []

    def begin(self, snapshot: OuterStep, syncer_state: SyncerState) -> None:
        self._in_flight.clear()
        try:
            begin_syncer(self._directory, snapshot, self._disk, msgspec.json.encode(syncer_state))
            uploaded = self._directory / "model.upload"
            if uploaded.exists():
                add_syncer_file(self._directory, snapshot, "model.upload", [uploaded.read_bytes()])
        except (AtollError, OSError) as error:
            log.error("snapshot %d is given up: %s", snapshot, error)

    def put_in_flight(self, snapshot: OuterStep, envelope: Envelope, payload: Payload | None) -> None:
        if len(self._in_flight) < IN_FLIGHT_MAX:
            self._in_flight.append(envelope)

    def seal(self, snapshot: OuterStep, learners: tuple[LearnerId, ...], complete: bool) -> None:
        try:
            if complete:
                add_syncer_file(self._directory, snapshot, "in_flight.json", [msgspec.json.encode(self._in_flight)])
            keep = self._config.limits.snapshots_kept
            config = msgspec.to_builtins(self._config)
            sealed = seal_syncer(self._directory, snapshot, learners, complete, keep, run=self._run, config=config)
            log.info("snapshot %d %s", snapshot, f"of {len(learners)} learners is complete" if sealed else "is abandoned")
        except (AtollError, OSError) as error:
            log.error("snapshot %d is given up: %s", snapshot, error)
