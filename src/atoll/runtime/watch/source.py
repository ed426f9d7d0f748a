"""A run as `atoll watch` reads it: its index by range, its held-out losses, and how it stands."""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from atoll.errors import AtollError, TapeError, UserError
from atoll.ids import SECOND, Nanos, OuterStep, nanos, seconds
from atoll.runtime.watch.answers import (
    BinAnswer,
    EventsAnswer,
    LanePresent,
    RunState,
    Settings,
    Status,
    bin_answer,
    events_answer,
    round_answer,
)
from atoll.store.lock import is_held, lock_directory
from atoll.tape.folder import RunFolder
from atoll.tape.format import Tape
from atoll.tape.heldout import HELDOUT_FILE, HeldoutPoint, points_in
from atoll.tape.tail import Tail
from atoll.views.index.build import IndexBuilder, build_index
from atoll.views.index.files import COMPLETE, INDEX_FOLDER, Complete, IndexManifest, IndexReader, complete_in, manifest_in

BINS_MAX = 600
ROWS_MAX = 64
EVENTS_MAX = 500
POINTS_MAX = 1000
FOLLOW_SECONDS = 0.5
"""Between two looks at a tape whose syncer writes no index."""
Progress = Callable[[int, int, int], None]


class WatchedRun:
    """Ranges of one run. Every method may be called from any thread; none of them waits for the run."""

    def __init__(self, run: RunFolder, *, chaos: tuple[str, ...] = ()) -> None:
        self._run, self._chaos = run, chaos
        self._index = run.home / INDEX_FOLDER
        self._reader: IndexReader | None = None
        self._points: tuple[int, list[HeldoutPoint]] = (-1, [])
        self._closing = ExitStack()

    # ------------------------------------------------------------ the index

    def prepare(self, progress: Progress | None = None) -> None:
        """Sees to it that there is an index. The syncer of a live run appends to its own; of a run that ended without one it is
        built once, in the run's folder if that can be written, and else in a temporary one."""
        live = is_held(self._run.home)
        if manifest_in(self._index) is not None and (live or self._is_whole()):
            return
        if not self._run.tape.exists():
            raise TapeError(f"run {self._run.folder}: holds no {self._run.tape.name}, so there is nothing to watch")
        if live:
            self._index = self._temporary()
            self._follow(Tape(self._run.tape))
            return
        tape = Tape(self._run.tape)
        with ExitStack() as locked:
            try:
                locked.enter_context(lock_directory(self._index, "atoll watch"))
            except UserError:  # another one builds it, or the folder is not ours
                self._index = self._temporary()
            build_index(tape, self._index, progress)

    def _is_whole(self) -> bool:
        """A tape that was cut may have gone on since: that of a run whose process leaves no lock."""
        complete = complete_in(self._index)
        if complete is None or not self._run.tape.exists():
            return complete is not None
        return not complete.cut or self._run.tape.stat().st_mtime_ns <= (self._index / COMPLETE).stat().st_mtime_ns

    def _temporary(self) -> Path:
        return Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="atoll-index-")))

    def _follow(self, tape: Tape) -> None:
        """Its syncer gave its index up. The tape is read in a thread of its own as it grows."""
        stop = threading.Event()
        builder, tail = IndexBuilder(tape, self._index), Tail(tape)

        def follow() -> None:
            live = True
            with suppress(AtollError, OSError):  # a damaged tape: what was read stays visible
                while live and not stop.wait(FOLLOW_SECONDS):
                    live = is_held(self._run.home)  # asked first: what was written before it ended is read below
                    builder.feed(tail.more())
            builder.close(None if live else Complete(builder.records, cut=not builder.finished))

        thread = threading.Thread(target=follow, name="index", daemon=True)
        thread.start()
        self._closing.callback(thread.join, 5.0)
        self._closing.callback(stop.set)

    def close(self) -> None:
        self._closing.close()

    def _read(self) -> IndexReader | None:
        """None: the run has not begun."""
        if self._reader is None and manifest_in(self._index) is not None:
            self._reader = IndexReader(self._index)
        return self._reader

    # ------------------------------------------------------------ answers

    def status(self) -> Status:
        name, index = self._run.folder.resolve().name, self._read()
        if index is None:
            return Status(name=name, state=RunState.STARTING, settings=None, chaos=self._chaos)
        state, last = self._state(index), index.rows(index.rounds - 1, index.rounds)
        first = index.rows(0, 1)
        lanes, newest = self._lanes(index)
        ends = max(newest, last[0].closed_at if last else 0)
        epoch = index.manifest.epoch if index.manifest.steady else 0
        if state is RunState.LIVE and epoch:
            ends = max(ends, time.time_ns() - epoch)
        return Status(
            name=name, state=state, settings=_settings(index.manifest), rounds=index.rounds, events=index.events,
            first_step=first[0].outer_step if first else 0, last_step=last[0].outer_step if last else 0, ends=seconds(ends),
            epoch=epoch / SECOND, virtual=not index.manifest.epoch, lanes=lanes, loss=last[0].loss if last else None,
            heldout=len(self._heldout_points()), chaos=self._chaos if state is RunState.LIVE else (),
        )  # fmt: skip

    def _state(self, index: IndexReader) -> RunState:
        complete = index.complete
        if complete is not None:
            return RunState.CUT if complete.cut else RunState.FINISHED
        return RunState.LIVE if is_held(self._run.home) else RunState.STOPPED

    def _lanes(self, index: IndexReader) -> tuple[tuple[LanePresent, ...], Nanos]:
        """How the learners stand now: as in the newest row, and what changed since. The time of the newest event too."""
        last = index.rows(index.rounds - 1, index.rounds)
        closed_at = last[0].closed_at if last else 0
        found = {m.learner: LanePresent(m.learner, m.state, seconds(closed_at), m.loss) for m in last[0].learners} if last else {}
        _, events = index.events_between(closed_at, 1 << 62, EVENTS_MAX)
        for event in events:
            if event.learner is not None and event.state is not None:
                loss = found[event.learner].loss if event.learner in found else None
                found[event.learner] = LanePresent(event.learner, event.state, seconds(event.at), loss)
        return tuple(found[m] for m in sorted(found)), events[-1].at if events else 0

    def bins(self, begins: float, ends: float, most: int) -> list[BinAnswer]:
        index = self._read()
        if index is None:
            return []
        return [bin_answer(each) for each in index.bins(_at(begins), _at(ends), max(1, min(most, BINS_MAX)))]

    def rounds(self, first: OuterStep, last: OuterStep) -> list[dict[str, Any]]:
        """By outer step, both ends included; at most `ROWS_MAX` of them."""
        index = self._read()
        if index is None:
            return []
        numbers = [n for n in (index.row_of(max(first, 1)), index.row_of(last)) if n is not None]
        if len(numbers) < 2:
            numbers *= 2
        rows = index.rows(numbers[0], min(numbers[-1] + 1, numbers[0] + ROWS_MAX)) if numbers else []
        return [round_answer(row) for row in rows if first <= row.outer_step <= last]

    def round_at(self, at: float) -> dict[str, Any] | None:
        """The round that was closed first after this time; the newest, if there is none."""
        index = self._read()
        row = index.row_at(_at(at)) if index is not None else None
        return round_answer(row) if row is not None else None

    def events(self, begins: float, ends: float, most: int) -> EventsAnswer:
        index = self._read()
        if index is None:
            return EventsAnswer(0, ())
        return events_answer(*index.events_between(_at(begins), _at(ends), max(1, min(most, EVENTS_MAX))))

    def heldout(self) -> list[HeldoutPoint]:
        points = self._heldout_points()
        every = math.ceil(len(points) / POINTS_MAX) if points else 1
        return points[::every] if every == 1 or points[-1] in points[::every] else [*points[::every], points[-1]]

    def _heldout_points(self) -> list[HeldoutPoint]:
        path = self._run.folder / HELDOUT_FILE
        size = path.stat().st_size if path.exists() else 0
        if size != self._points[0]:
            self._points = size, points_in(self._run.folder) if size else []
        return self._points[1]


def _at(time_seconds: float) -> Nanos:
    """Infinity and nonsense are the ends of time."""
    return nanos(min(max(time_seconds, 0.0), 1e9)) if not math.isnan(time_seconds) else 0


def _settings(manifest: IndexManifest) -> Settings:
    config = manifest.config
    protocol, model = config.get("protocol", {}), config.get("model", {})
    return Settings(
        preset=str(config.get("preset", "")), learners=int(config.get("learners", 0)), seed=int(config.get("seed", 0)),
        total_steps=int(config.get("total_steps", 0)), fragments=int(protocol.get("fragments", 0)),
        quorum=str(protocol.get("quorum", "")), model=str(model.get("name", "")),
    )  # fmt: skip
