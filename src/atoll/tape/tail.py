"""Follow a tape while it is being written."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.tape.format import Record, Tape


class Tail:
    """`more` yields the records appended since the last call; an incomplete line waits for the next call."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._reader = tape.following()

    def more(self) -> Iterator[Record]:
        for record in self._reader:
            if record is None:
                return
            yield record
