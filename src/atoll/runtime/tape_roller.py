"""A worker's tape goes on in a new segment when the current one has grown to its limit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from atoll.config.sections import Limits
from atoll.protocol.checkpoint import checkpoint
from atoll.protocol.learner import LearnerMachine
from atoll.protocol.syncer import SyncerMachine
from atoll.tape.format import TapeWriter
from atoll.tape.segments import can_compress, tidy

log = logging.getLogger("atoll.tape")


class TapeRoller:
    """`look` is called between two events. `later` does work that no event waits for: it compresses what ended. `begins` is told
    the number of a segment before the tape goes on in it."""

    def __init__(
        self, tape: TapeWriter, machine: SyncerMachine | LearnerMachine, limits: Limits,
        later: Callable[[Callable[[], None]], None], begins: Callable[[int], None] = lambda number: None,
    ) -> None:  # fmt: skip
        self._tape, self._machine, self._limits, self._later, self._begins = tape, machine, limits, later, begins
        self._path = tape.path
        self._roll_at = limits.tape_segment_bytes
        if not can_compress():
            log.warning("the package zstandard is not installed: older segments of the tape stay uncompressed")

    def look(self) -> None:
        if self._tape.segment_bytes < self._roll_at or self._machine.mailbox.incarnation < 0:
            return
        self._begins(1 + self._tape.header.number)
        try:
            self._tape.roll(checkpoint(self._machine))
            self._roll_at = self._limits.tape_segment_bytes
        except OSError as error:  # a full disk: the segment grows, and the next attempt comes later
            self._roll_at = self._tape.segment_bytes + self._limits.tape_segment_bytes // 4
            log.warning("the tape %s cannot begin a new segment (%s); it goes on in this one", self._path, error.strerror)
            return
        self._later(lambda: tidy(self._path, self._limits.tape_bytes_max))


def in_thread(work: Callable[[], None]) -> None:
    """For a worker without a thread for such things: it comes once in many thousand events."""

    def run() -> None:
        try:
            work()
        except OSError as error:
            log.warning("older segments of the tape stay as they are (%s)", error.strerror)

    threading.Thread(target=run, name="tape segments", daemon=True).start()
