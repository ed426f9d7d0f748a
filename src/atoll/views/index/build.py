"""An index from a tape: built at once, or kept up to date while the tape is being written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from atoll.config import from_builtins
from atoll.errors import ConfigError, TapeError
from atoll.ids import SYNCER
from atoll.protocol.checkpoint import thaw
from atoll.protocol.syncer import SyncerMachine
from atoll.tape.format import Record, Tape
from atoll.views.index.files import Complete, IndexWriter
from atoll.views.index.fold import IndexFold
from atoll.views.index.sums import state_behind

EVERY = 2000
"""Records between two calls of `progress`."""


class IndexBuilder:
    """Feeds the syncer's records to a new machine and to the fold."""

    def __init__(self, tape: Tape, directory: Path) -> None:
        try:
            config = from_builtins(tape.header.config)
        except ConfigError as error:
            raise TapeError(f"tape {tape.path}: the config in its header is refused: {error}") from None
        self._machine = SyncerMachine(config)
        begins, state = tape.begins_with(), None
        if begins is not None:  # older segments are not kept: the index begins where the tape does
            state = state_behind(thaw(begins[0], self._machine))
        self._writer = IndexWriter(directory, tape.header)
        self._fold = IndexFold(self._machine, self._writer, state)
        self.total_steps = config.total_steps
        self.records = 0

    @property
    def outer_step(self) -> int:
        return self._machine.outer_step

    @property
    def finished(self) -> bool:
        return self._machine.finished

    def feed(self, records: Iterable[Record]) -> None:
        for record in records:
            if record.worker == SYNCER:
                self._machine.on(record.event, record.now)
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
