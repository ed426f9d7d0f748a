"""The process that holds a local run: it starts the syncer and the learners, starts one that died again, alone, and ends them.

Its children end with it, in whatever way it ends: they hold the other end of a pipe. It is started by `atoll up --on local` as
`python -m atoll.engines.supervisor RUN/engine`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec

from atoll.engines.deployment import LEFT_CODE
from atoll.engines.record import write_whole
from atoll.errors import UNDECODABLE
from atoll.store.lock import lock_directory

PLAN_FILE: Final = "local.json"
STATE_FILE: Final = "state.json"
TICK_SECONDS: Final = 0.1
BACK_SECONDS: Final = 1.0
RESTARTS_MAX: Final = 5
"""In a row: a process that ran for STABLE_SECONDS starts counting anew."""
STABLE_SECONDS: Final = 60.0
STOP_SECONDS: Final = 15.0
"""What a syncer needs to stop, and a learner beyond its time to leave."""
USERS_FAULT: Final = 2
"""The exit code that says that starting it again cannot help."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    argv: list[str]
    log: str
    environment: dict[str, str] = {}


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    syncer: Process
    learners: list[Process]
    address: str
    """The file that a syncer writes once it listens."""
    leave_seconds: float


class ProcessStage(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    AGAIN = "starts again"
    DONE = "done"
    LEFT = "left"
    FAILED = "failed"
    ENDED = "ended"
    KILLED = "killed"


UNENDED: Final = (ProcessStage.WAITING, ProcessStage.RUNNING, ProcessStage.AGAIN)


class Seen(msgspec.Struct, frozen=True):
    """A worker as the supervisor sees it."""

    stage: ProcessStage
    pid: int = 0
    restarts: int = 0
    code: int | None = None
    """Its last exit code; below zero, the signal that ended it."""

    def __str__(self) -> str:
        how = "" if not self.code or self.stage is ProcessStage.RUNNING else f" (code {self.code})"
        return f"{self.stage}{how}" + (f", restarts: {self.restarts}" if self.restarts else "")


def seen_workers(folder: Path) -> dict[str, Seen]:
    try:
        return msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=dict[str, Seen])
    except (OSError, *UNDECODABLE):
        return {}


@dataclass
class _Worker:
    process: Process
    stage: ProcessStage = ProcessStage.WAITING
    code: int | None = None
    restarts: int = 0
    failures: int = 0
    back_at: float = 0.0
    began: float = 0.0
    child: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        with open(self.process.log, "ab") as log:
            self.child = subprocess.Popen(
                self.process.argv, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | self.process.environment,
            )  # fmt: skip
        self.stage, self.began = ProcessStage.RUNNING, time.monotonic()

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def signal(self, number: int) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)

    def tend(self, now: float) -> None:
        """Starts it if that is due; looks whether it has ended, and why."""
        if self.stage in (ProcessStage.WAITING, ProcessStage.AGAIN) and now >= self.back_at:
            self.restarts += self.stage is ProcessStage.AGAIN
            self.start()
        elif self.stage is ProcessStage.RUNNING and self.child is not None and (code := self.child.poll()) is not None:
            self._ended(code, now)

    def _ended(self, code: int, now: float) -> None:
        self.code, self.failures = code, 1 if now - self.began > STABLE_SECONDS else self.failures + 1
        if code == 0:
            self.stage = ProcessStage.DONE
        elif code == LEFT_CODE:
            self.stage = ProcessStage.LEFT
        elif code == USERS_FAULT or self.failures > RESTARTS_MAX:
            self.stage = ProcessStage.FAILED
        else:
            self.stage, self.back_at = ProcessStage.AGAIN, now + BACK_SECONDS


class Supervisor:
    def __init__(self, folder: Path, plan: ProcessPlan) -> None:
        self._folder, self._plan = folder, plan
        self._syncer = _Worker(plan.syncer)
        self._learners = [_Worker(process) for process in plan.learners]
        self._asked = threading.Event()
        self._pause = threading.Event()
        self._written: dict[str, Seen] = {}

    def run(self) -> int:
        """Until the run is over, or it is asked to end, or the syncer fails for good."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)
        Path(self._plan.address).unlink(missing_ok=True)  # of a syncer before: nobody listens there
        try:
            while not self._asked.is_set() and self._goes_on():
                now = time.monotonic()
                self._syncer.tend(now)
                if Path(self._plan.address).exists():  # before, there is no token for them either
                    for learner in self._learners:
                        learner.tend(now)
                self._write()
                self._pause.wait(TICK_SECONDS)
        finally:
            self._end()
        return 0 if self._asked.is_set() or self._syncer.stage is ProcessStage.DONE else 1

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()

    def _goes_on(self) -> bool:
        if self._syncer.stage is ProcessStage.DONE:
            return any(learner.running for learner in self._learners) and self._in_time()
        return self._syncer.stage is not ProcessStage.FAILED

    def _in_time(self) -> bool:
        """After the syncer's end: learners hear of it, and need no longer than to leave."""
        self._syncer.back_at = self._syncer.back_at or time.monotonic() + self._plan.leave_seconds
        return time.monotonic() < self._syncer.back_at

    def _end(self) -> None:
        """Learners first, so that a syncer is there to merge what they deliver."""
        self._stop(self._learners, self._plan.leave_seconds + STOP_SECONDS)
        self._stop([self._syncer], STOP_SECONDS)
        for worker in (*self._learners, self._syncer):
            if worker.stage in UNENDED:
                worker.stage = ProcessStage.ENDED
        self._write()

    def _stop(self, workers: Iterable[_Worker], seconds: float) -> None:
        workers, until = list(workers), time.monotonic() + seconds
        for worker in workers:
            worker.signal(signal.SIGTERM)
        while any(worker.running for worker in workers) and time.monotonic() < until:
            self._pause.wait(TICK_SECONDS)
        for worker in workers:
            if worker.running:
                worker.stage = ProcessStage.KILLED
                worker.signal(signal.SIGKILL)
            if worker.child is not None:
                worker.child.wait()
                if worker.stage is ProcessStage.RUNNING:
                    done = worker.child.returncode == 0 and not self._asked.is_set()
                    left = ProcessStage.LEFT if worker.child.returncode == LEFT_CODE else ProcessStage.ENDED
                    worker.stage = ProcessStage.DONE if done else left

    def _write(self) -> None:
        seen = {
            worker.process.worker: Seen(
                worker.stage, worker.child.pid if worker.child is not None else 0, worker.restarts, worker.code
            )
            for worker in (self._syncer, *self._learners)
        }
        if seen != self._written:
            self._written = seen
            write_whole(self._folder / STATE_FILE, msgspec.json.encode(seen))


def main(folder: Path) -> int:
    plan = msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=ProcessPlan)
    with lock_directory(folder, "supervisor", "--out"):
        return Supervisor(folder, plan).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
