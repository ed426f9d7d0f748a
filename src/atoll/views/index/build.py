"""An index from a tape: built at once, or kept up to date while the tape is being written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from atoll.config import from_builtins
from atoll.errors import ConfigError, TapeError
from atoll.ids import SYNCER, Nanos, WorkerId
from atoll.protocol.checkpoint import thaw
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import Effect, Event
from atoll.tape.format import Record, Tape
from atoll.views.index.files import Complete, IndexWriter
from atoll.views.index.fold import IndexFold, RowSink
from atoll.views.index.ranks import RankFold
from atoll.views.index.sums import FoldState, state_behind

EVERY = 2000
"""Records between two calls of `progress`."""


class RecordFold(Protocol):
    """Rows from the records of a tape, one after the other."""

    @property
    def outer_step(self) -> int: ...
    @property
    def finished(self) -> bool: ...
    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None: ...


class MachineFold:
    """Feeds the syncer's records to a machine of its own, and then to the fold, which asks that machine."""

    def __init__(self, machine: SyncerMachine, sink: RowSink, state: FoldState | None) -> None:
        self._machine, self._fold = machine, IndexFold(machine, sink, state)

    @property
    def outer_step(self) -> int:
        return self._machine.outer_step

    @property
    def finished(self) -> bool:
        return self._machine.finished

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if worker == SYNCER:
            self._machine.on(event, now)
        self._fold(now, worker, event, effects)


class IndexBuilder:
    """The index of a tape."""

    def __init__(self, tape: Tape, directory: Path) -> None:
        try:
            config = from_builtins(tape.header.config)
        except ConfigError as error:
            raise TapeError(f"tape {tape.path}: the config in its header is refused: {error}") from None
        begins = tape.begins_with()
        self._writer = IndexWriter(directory, tape.header)
        self._fold: RecordFold
        if not tape.header.derivable:
            self._fold = RankFold(self._writer)
        else:
            machine, state = SyncerMachine(config), None
            if begins is not None:  # older segments are not kept: the index begins where the tape does
                state = state_behind(thaw(begins[0], machine))
            self._fold = MachineFold(machine, self._writer, state)
        self.total_steps = config.total_steps
        self.records = 0

    @property
    def outer_step(self) -> int:
        return self._fold.outer_step

    @property
    def finished(self) -> bool:
        return self._fold.finished

    def feed(self, records: Iterable[Record]) -> None:
        for record in records:
            self._fold(record.now, record.worker, record.event, record.effects)
            self.records += 1

    def close(self, complete: Complete | None = None) -> None:
        self._writer.close(complete)


def build_index(tape: Tape, directory: Path, progress: Callable[[int, int, int], None] | None = None) -> None:
    """`progress` is called with the records read, the outer step reached and the last one of the run."""
    builder = IndexBuilder(tape, directory)
    for record in tape.records():
        builder.feed((record,))
        if progress is not None and builder.records % EVERY == 0:
            progress(builder.records, builder.outer_step, builder.total_steps)
    builder.close(Complete(builder.records, tape.cut))
