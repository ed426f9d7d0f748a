"""Preemption: what tells a learner's process to leave, and how long it then has.

A signal (SIGTERM, SIGUSR1, Ctrl-C), a file that appears, or a function of the user's: each means "be gone within N seconds". The
machine decides what is still delivered in that time (protocol/departure.py).
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

log = logging.getLogger("atoll.learner")

LEAVE_FILE: Final = "leave"
"""In a learner's own folder; `atoll leave` writes it. A number in it is the seconds that the learner has."""
LOOK_SECONDS: Final = 0.25
"""Between two looks for a file, and between two calls of the user's function."""
REPEAT_SECONDS: Final = 0.5
"""The same signal sooner than this is the same request: schedulers signal every process of a job, and shells pass signals on."""
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

Notice = Callable[[], float | None]
"""Returns the seconds that are left once this learner is to leave, and None until then."""


class Leave(Protocol):
    """As `LiveLearner.leave`."""

    def __call__(self, reason: str, within_seconds: float | None = None, *, returns: bool = False) -> None: ...


class LeaveRequests:
    """Everything that may ask one process to leave. Each source asks once, a signal as often as it comes: the second request
    makes the learner go at once."""

    def __init__(
        self, seconds: float | None = None, files: Sequence[Path] = (), notice: Notice | None = None, *, returns: bool = False
    ) -> None:
        """`seconds`: how long it has where the request does not say; None: as the run's limits say. `returns`: it can come back
        to its place."""
        self._seconds = seconds
        self._returns = returns
        self._sources: dict[str, Notice] = {f"the file {path}": _appeared(path, seconds) for path in files}
        if notice is not None:
            self._sources["its own program"] = notice
        self._leave: Leave | None = None
        self._ended = threading.Event()
        self._early: list[tuple[str, float | None]] = []
        self._signalled: dict[int, float] = {}
        self._was_in_run = False
        self.asked = False

    def look_for(self, path: Path) -> None:
        """For its own folder, once it has one. A file that is there already was meant for the process before."""
        with contextlib.suppress(OSError):
            path.unlink()
        self._sources[f"the file {path}"] = _appeared(path, self._seconds)

    def listen_to_signals(self) -> None:
        """In the main thread. A request that comes before the learner is in the run has nothing to deliver: the process ends."""

        def asked(number: int, frame: FrameType | None) -> None:
            if self._leave is None and not self.asked and not self._was_in_run:
                log.info("asked to stop by %s before it was in the run", signal.Signals(number).name)
                raise SystemExit(0)
            now, before = time.monotonic(), self._signalled.get(number, -math.inf)
            self._signalled[number] = now
            if now - before > REPEAT_SECONDS:
                self._ask(f"asked to stop by {signal.Signals(number).name}", self._seconds)

        for number in SIGNALS:
            signal.signal(number, asked)

    @contextlib.contextmanager
    def told_to(self, leave: Leave) -> Iterator[None]:
        """While the learner is in the run. What was asked before is passed on now."""
        watch = threading.Thread(target=self._watch, name="leave", daemon=True)
        self._leave = leave
        for reason, seconds in self._early:
            self._ask(reason, seconds)
        watch.start()
        try:
            yield
            self._was_in_run = True  # it ends in order from here on, whoever asks
        finally:
            self._leave = None
            self._ended.set()
            watch.join()
            self._ended.clear()

    def _ask(self, reason: str, seconds: float | None) -> None:
        """In any thread, and in signal handlers: no lock, no log."""
        self.asked, leave = True, self._leave
        if leave is None:
            self._early.append((reason, seconds))
        else:
            leave(reason, seconds, returns=self._returns)

    def _watch(self) -> None:
        while self._sources and not self._ended.wait(LOOK_SECONDS):
            for who, notice in list(self._sources.items()):
                left = self._look(who, notice)
                if left is not None:
                    del self._sources[who]
                    log.info("asked to leave by %s", who)
                    self._ask(f"asked to leave by {who}", left if math.isfinite(left) else self._seconds)

    def _look(self, who: str, notice: Notice) -> float | None:
        try:
            left = notice()
        except Exception as error:  # a user's function, or a file system that is gone: training goes on without it
            log.warning("%s is not asked any more whether to leave: %s", who, error)
            del self._sources[who]
            return None
        return max(0.0, left) if left is not None else None


def _appeared(path: Path, seconds: float | None) -> Notice:
    """A file asks by being there. It may say how long there is; anything else in it says nothing."""
    default = math.inf if seconds is None else seconds

    def look() -> float | None:
        if not path.exists():
            return None
        try:
            said = float(path.read_text(encoding="utf8").strip() or default)
        except ValueError:
            return default
        return default if math.isnan(said) else said

    return look
