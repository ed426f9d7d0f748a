"""The index of a run, appended as it goes. It can be built from the tape at any time, so an index that cannot be written is given
up, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.errors import TapeError
from atoll.ids import Nanos, WorkerId
from atoll.protocol.vocabulary import Effect, Event
from atoll.views.index.files import INDEX_FOLDER, Complete, IndexWriter, remove_index

log = logging.getLogger("atoll.index")


class RunIndex:
    """An observer of a run's events, after its tape."""

    def __init__(self, directory: Path, begin: Callable[[Path], tuple[IndexWriter, Callable[..., None], int]]) -> None:
        """`begin` opens the folder: a writer, the fold that puts rows into it, and the records that they have seen."""
        self.folder = directory / INDEX_FOLDER
        self.records = 0
        self._writer: IndexWriter | None = None
        self._fold: Callable[..., None] | None = None

        def opened() -> None:
            self._writer, self._fold, self.records = begin(self.folder)

        self.guarded(opened)

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        self.records += 1
        fold = self._fold
        if fold is not None:
            self.guarded(lambda: fold(now, worker, event, effects))

    @property
    def is_given_up(self) -> bool:
        return self._fold is None

    def guarded(self, work: Callable[[], None]) -> None:
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
        remove_index(self.folder)

    def close(self, *, complete: bool) -> None:
        writer = self._writer
        if writer is not None:
            self.guarded(lambda: writer.close(Complete(self.records, cut=False) if complete else None))
