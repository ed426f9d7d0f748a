"""Follow a tape while it is being written."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.tape.format import Record, Tape


class Tail:
    """`more` yields the whole records that were appended since; half a line waits for its other half."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._reader = tape.following()

    def more(self) -> Iterator[Record]:
        for record in self._reader:
            if record is None:
                return
            yield record
