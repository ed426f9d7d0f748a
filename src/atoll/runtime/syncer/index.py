"""The index that a syncer appends. One that goes on from a checkpoint goes on with its index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from atoll.protocol.syncer import SyncerMachine
from atoll.runtime.index import RunIndex
from atoll.tape.format import Header
from atoll.views.index.files import IndexWriter
from atoll.views.index.fold import IndexFold
from atoll.views.index.state import IndexState, read_index_state, write_index_state


class SyncerIndex(RunIndex):
    def __init__(self, directory: Path, header: Header, machine: SyncerMachine) -> None:
        """`machine` stands where the segment of this header begins."""
        self._state: Callable[[], IndexState]

        def begin(folder: Path) -> tuple[IndexWriter, Callable[..., None], int]:
            before = read_index_state(folder, header.segment) if header.segment is not None else None
            writer = IndexWriter(folder, header, before.written) if before is not None else IndexWriter(folder, header)
            fold = IndexFold(machine, writer, before.fold if before is not None else None)
            self._state = lambda: IndexState(self.records, writer.state(), fold.state)
            return writer, fold, before.records if before is not None else 0

        super().__init__(directory, begin)

    def segment_begins(self, number: int) -> None:
        """Called before the tape goes on in this segment: a restart begins there."""
        if not self.is_given_up:
            self.guarded(lambda: write_index_state(self.folder, number, self._state()))
