"""A learner's tape on a disk that may be full: training goes on, and the tape says which records it lacks.

No other worker depends on a learner's tape, so a record that cannot be written is dropped and counted. When the disk takes bytes
again, a gap line comes before the next record. A tape whose disk stays full simply ends, like that of a killed learner.
(The syncer's tape is its state. It has no gaps: the syncer stands still until it can be written.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from atoll.errors import TapeError
from atoll.ids import Nanos, WorkerId
from atoll.protocol.checkpoint import Checkpoint
from atoll.protocol.vocabulary import Effect, Event
from atoll.tape.format import Gap, Header, TapeWriter


class LossyTapeWriter(TapeWriter):
    """`say` is given a sentence when the first record is lost, and when records are written again."""

    def __init__(self, file: IO[bytes], header: Header, say: Callable[[str], None]) -> None:
        self._start(file, header, flush_each=True)
        self._headed = False
        self._say = say
        self._lost_from = 0
        """Number of the first record that is lost and not noted yet; 0: none."""
        self._why = ""
        self._failing = self._broken = False
        self.lost = 0
        """Records that are not on the tape."""
        self._attempt(lambda: None)

    @classmethod
    def begin(cls, path: Path, header: Header, say: Callable[[str], None]) -> LossyTapeWriter:
        try:
            return cls(path.open("xb", buffering=0), header, say)
        except FileExistsError:
            raise TapeError(f"tape {path}: exists already; a tape is never overwritten, choose another --out") from None
        except OSError as error:
            raise TapeError(f"tape {path}: cannot be written ({error.strerror})") from None

    def append(
        self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect], *, sync: bool = False
    ) -> None:
        if not self._attempt(lambda: super(LossyTapeWriter, self).append(now, worker, event, effects, sync=sync)):
            self.count += 1
            self.lost += 1
            self._lost_from = self._lost_from or self.count

    def roll(self, at: Checkpoint) -> None:
        self._attempt(lambda: super(LossyTapeWriter, self).roll(at))

    def close(self) -> None:
        self._attempt(super().close)
        if self.lost:
            self._say(f"the tape lacks {self.lost} of {self.count} records")
        self._file.close()

    def _attempt(self, write: Callable[[], None]) -> bool:
        """False if the disk does not take it. A line that could not be taken back either is the tape's last."""
        if self._broken:
            return False
        try:
            self._catch_up()
            write()
            self._failing = False
            return True
        except OSError as error:
            self._why = self._why or error.strerror or str(error)
            if not self._failing:
                self._say(f"the tape cannot be written ({self._why}); training goes on, and its records are lost meanwhile")
            self._failing = True
        except TapeError:
            self._broken = True
            self._say("the tape cannot be written any more; training goes on without it")
        return False

    def _catch_up(self) -> None:
        if not self._headed:
            self._put_header()
            self._headed = True
        if self._lost_from:
            self.append_gap(Gap(self._lost_from, self.count, self._why))
            self._say(f"the tape is written again; records {self._lost_from} to {self.count} are lost")
            self._lost_from, self._why = 0, ""
