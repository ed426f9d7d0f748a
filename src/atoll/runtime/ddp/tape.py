"""The tape of a data-parallel run: what torch did, in the words of the other presets' tapes, so that the same views read it.

A step of a rank is a StepDone with its loss, and a Resume that says how long it waited for the all-reduce. The all-reduce itself
is a round in which everybody takes part. No machine decided any of it, and the header says so: nothing can be derived again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from atoll.ids import SYNCER, Nanos, WorkerId
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import (
    DeadlinePassed,
    Effect,
    Event,
    Finished,
    FixParticipants,
    Merge,
    Resume,
    Share,
    StepDone,
    Stored,
)
from atoll.runtime.ddp.report import Stepped
from atoll.runtime.index import RunIndex
from atoll.tape.folder import TAPE_FILE
from atoll.tape.format import Header
from atoll.tape.gaps import LossyTapeWriter
from atoll.views.index.files import IndexWriter
from atoll.views.index.ranks import RankFold


class DdpTape:
    """A disk that is full makes gaps, and does not end the run. The index for pages goes with it."""

    def __init__(self, directory: Path, header: Header, total_steps: int, say: Callable[[str], None]) -> None:
        self._writer = LossyTapeWriter.begin(directory / TAPE_FILE, header, say)
        self._index = RunIndex(directory, lambda folder: _ranks(folder, header))
        self._total = total_steps
        self._first: Nanos | None = None
        self._latest: Nanos = 0

    def append(self, steps: Sequence[Stepped]) -> None:
        """One step, as all ranks reported it."""
        if self._first is None:
            self._first = min(step.began for step in steps)
        number = steps[0].step + 1
        ranks = tuple(sorted(step.rank for step in steps))
        fixed = FixParticipants(number, (0,), ranks, Reason(Why.ALL_REPORTED, f"all {len(ranks)} ranks reduced their gradients"))
        merge = Merge(number, 0, tuple(Share(rank, 1.0, number - 1, number) for rank in ranks), number - 1, True)
        self._put(max(step.ready for step in steps), SYNCER, DeadlinePassed(), (fixed, merge))
        for step in sorted(steps, key=lambda step: (step.ended, step.rank)):
            waited = step.reduced - step.ready
            done = StepDone(step.tokens, step.samples, step.ended - step.began - waited, step.loss)
            self._put(step.ended, step.rank, done, (Resume(waited, Reason(Why.VERSION_AWAITED, "the all-reduce")),))
        last = (Finished(number),) if number == self._total else ()
        self._put(max(step.ended for step in steps), SYNCER, Stored(number, ""), last)

    def _put(self, at: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        """Ranks stop their clocks for the held-out loss, one a little longer than the other: times on a tape never go back."""
        assert self._first is not None
        self._latest = max(self._latest, at - self._first)
        self._writer.append(self._latest, worker, event, effects)
        self._index(self._latest, worker, event, effects)

    def __enter__(self) -> DdpTape:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """A run that failed leaves a tape without its footer, as others do."""
        self._writer.__exit__(kind, error, trace)
        self._index.close(complete=kind is None)


def _ranks(folder: Path, header: Header) -> tuple[IndexWriter, RankFold, int]:
    writer = IndexWriter(folder, header)
    return writer, RankFold(writer), 0
