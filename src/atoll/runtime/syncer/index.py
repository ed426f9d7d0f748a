"""The index of a run, appended by its syncer as it goes. It can be built from the tape at any time, so an index that cannot be
written is given up, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from atoll.ids import Nanos, WorkerId
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import Effect, Event
from atoll.tape.format import Header
from atoll.views.index.files import INDEX_FOLDER, Complete, IndexWriter, remove_index
from atoll.views.index.fold import IndexFold

log = logging.getLogger("atoll.syncer")


class SyncerIndex:
    """An observer of the syncer's events, after the machine and the tape."""

    def __init__(self, directory: Path, header: Header, machine: SyncerMachine) -> None:
        self._folder = directory / INDEX_FOLDER
        self._records = 0
        self._writer: IndexWriter | None = None
        self._fold: IndexFold | None = None
        try:
            self._writer = IndexWriter(self._folder, header)
            self._fold = IndexFold(machine, self._writer)
        except OSError as error:
            self._give_up(error)

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        self._records += 1
        if self._fold is not None:
            try:
                self._fold(now, worker, event, effects)
            except OSError as error:
                self._give_up(error)
            except Exception as error:  # a bug in a view must not end the run that it shows
                log.exception("the run's index failed by a bug; the run goes on")
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        why = error.strerror if isinstance(error, OSError) else str(error)
        self.give_up(str(why or error))

    def give_up(self, why: str) -> None:
        """Half an index would look like a run that stands still: it is removed, and `atoll watch` builds another."""
        log.warning("the run's index cannot be written (%s); atoll watch will build it from the tape", why)
        self._fold = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        remove_index(self._folder)

    def close(self, *, complete: bool) -> None:
        if self._writer is not None:
            try:
                self._writer.close(Complete(self._records, cut=False) if complete else None)
            except OSError as error:
                self._give_up(error)
