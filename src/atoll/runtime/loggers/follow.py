"""Logs a run to a sink: what is on its tape and not in the sink yet, to the tape's end or while it grows.

A logger reads files that the run writes anyway. The run neither waits for it nor knows of it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from atoll.errors import AtollError, RunFailed
from atoll.ids import OuterStep
from atoll.runtime.loggers.sinks import LogSink, LogTarget, open_sink
from atoll.store.lock import lock_directory
from atoll.tape.folder import RunFolder
from atoll.tape.format import Record, Tape
from atoll.tape.heldout import HeldoutPoint, points_in
from atoll.views.log_points import STREAMS, LogFold, LogPoint, identity_of

POLL_SECONDS = 0.5
BATCH = 500
"""Points that a sink is given at once."""
Progress = Callable[[OuterStep], None]


def own_folder(run: Path, target: LogTarget) -> Path:
    """What a logger keeps of itself in a run's folder: its lock, and its log."""
    return run / "loggers" / f"{target.kind}-{hashlib.sha256(target.where.encode()).hexdigest()[:8]}"


def log_run(
    run: RunFolder, target: LogTarget, *, follow: bool = False, stop: threading.Event | None = None, lingers: bool = False,
    progress: Progress = lambda step: None,
) -> int:  # fmt: skip
    """How many points were logged. `follow`: until the tape has its end, or until `stop`. `lingers`: until `stop` alone, for
    held-out losses that are measured after the end."""
    stop = stop or threading.Event()
    tape = Tape(run.tape)
    with lock_directory(own_folder(run.folder, target), "logger", "--to"), _opened(target, tape, run) as sink:
        logger = _Logger(run, tape, sink, progress)
        for record in tape.following() if follow else tape.records():
            if record is not None:
                logger.take(record)
                continue
            stopped = stop.is_set()  # asked before the tape is read to its end once more
            logger.flush()
            if stopped or stop.wait(POLL_SECONDS):
                break
        if lingers:
            stop.wait()
        logger.flush()
        return logger.logged


@contextmanager
def _opened(target: LogTarget, tape: Tape, run: RunFolder) -> Iterator[LogSink]:
    """Whatever a sink raises, its name is in the message."""
    try:
        with closing(open_sink(target, identity_of(tape.header, run.folder.resolve().name))) as sink:
            yield sink
    except (AtollError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise RunFailed(f"{target}: cannot be logged to: {error or type(error).__name__}") from error


class _Logger:
    def __init__(self, run: RunFolder, tape: Tape, sink: LogSink, progress: Progress) -> None:
        self._folders = dict.fromkeys((run.folder, run.home))
        self._fold, self._sink, self._progress = LogFold(tape.header), sink, progress
        self._last = {stream: sink.last_step(stream) for stream in STREAMS}
        self._waiting: list[LogPoint] = []
        self.logged = 0

    def take(self, record: Record) -> None:
        self._waiting += self._new(self._fold.feed(record))
        if len(self._waiting) >= BATCH:
            self._write()

    def flush(self) -> None:
        measured: list[HeldoutPoint] = [point for folder in self._folders for point in points_in(folder)]
        self._waiting += self._new(point for point in self._fold.heldout(measured))
        self._write()

    def _new(self, points: Iterator[LogPoint]) -> Iterator[LogPoint]:
        """What the sink lacks: nothing is logged twice."""
        for point in points:
            if point.step > self._last[point.stream]:
                self._last[point.stream] = point.step
                yield point

    def _write(self) -> None:
        if self._waiting:
            self._sink.write(self._waiting)
            self.logged += len(self._waiting)
            self._progress(max(point.step for point in self._waiting))
            self._waiting.clear()
