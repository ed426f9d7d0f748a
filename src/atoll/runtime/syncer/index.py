"""The index of a run, appended by its syncer as it goes. It can be built from the tape at any time, so an index that cannot be
written is given up, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.errors import TapeError
from atoll.ids import Nanos, WorkerId
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import Effect, Event
from atoll.tape.format import Header
from atoll.views.index.files import INDEX_FOLDER, Complete, IndexWriter, remove_index
from atoll.views.index.fold import IndexFold
from atoll.views.index.state import IndexState, read_state, write_state

log = logging.getLogger("atoll.syncer")


class SyncerIndex:
    """An observer of the syncer's events, after the machine and the tape."""

    def __init__(self, directory: Path, header: Header, machine: SyncerMachine) -> None:
        """`machine` stands where the segment of this header begins."""
        self._folder = directory / INDEX_FOLDER
        self._records = 0
        self._writer: IndexWriter | None = None
        self._fold: IndexFold | None = None
        self._guarded(lambda: self._open(header, machine))

    def _open(self, header: Header, machine: SyncerMachine) -> None:
        state = read_state(self._folder, header.segment) if header.segment is not None else None
        if state is None:
            self._writer = IndexWriter(self._folder, header)
            self._fold = IndexFold(machine, self._writer)
            return
        self._records = state.records
        self._writer = IndexWriter(self._folder, header, state.written)
        self._fold = IndexFold(machine, self._writer, state.fold)

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        self._records += 1
        fold = self._fold
        if fold is not None:
            self._guarded(lambda: fold(now, worker, event, effects))

    def segment_begins(self, number: int) -> None:
        """Called before the tape goes on in this segment: a restart begins there."""
        writer, fold = self._writer, self._fold
        if writer is not None and fold is not None:
            self._guarded(lambda: write_state(self._folder, number, IndexState(self._records, writer.state(), fold.state)))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._give_up(error.strerror or str(error))
        except TapeError as error:
            self._give_up(str(error))
        except Exception as error:  # a bug in a view must not end the run that it shows
            log.exception("the run's index failed by a bug; the run goes on")
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        """Half an index would look like a run that stands still: it is removed, and `atoll watch` builds another."""
        log.warning("the run's index cannot be written (%s); atoll watch will build it from the tape", why)
        self._fold = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        remove_index(self._folder)

    def close(self, *, complete: bool) -> None:
        writer = self._writer
        if writer is not None:
            self._guarded(lambda: writer.close(Complete(self._records, cut=False) if complete else None))
