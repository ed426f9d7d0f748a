"""Loggers beside a run that trains: a process for each, which follows the tape and which the run does not depend on."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from atoll.runtime.loggers.follow import own_folder
from atoll.runtime.loggers.sinks import LogTarget
from atoll.tape.folder import TAPE_FILE

FINISH_SECONDS = 30.0
"""How long loggers have after the end of a run to log the rest."""
_LOOK_SECONDS = 0.1


class LoggerProcesses:
    """In a `with` statement around a run in `directory`. They start when the run has a tape."""

    def __init__(self, directory: Path, targets: Sequence[LogTarget], say: Callable[[str], None]) -> None:
        self._directory, self._targets, self._say = directory, targets, say
        self._over = threading.Event()
        self._processes: list[tuple[LogTarget, subprocess.Popen[bytes]]] = []
        self._thread = threading.Thread(target=self._start_all, name="loggers", daemon=True)

    def __enter__(self) -> LoggerProcesses:
        if self._targets:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._targets:
            self._thread.join()
            self._finish()

    def _start_all(self) -> None:
        """A run that is over before anybody looked is logged too."""
        while not self._over.wait(_LOOK_SECONDS) and not self._has_tape():
            pass
        for target in self._targets if self._has_tape() else ():
            try:
                self._processes.append((target, self._started(target)))
            except OSError as error:
                self._say(f"warning: no logger for {target}: {error.strerror}")

    def _has_tape(self) -> bool:
        """With a header: a tape that was just created has none, or half of one."""
        return any(_has_header(folder / TAPE_FILE) for folder in (self._directory, self._directory / "syncer"))

    def _started(self, target: LogTarget) -> subprocess.Popen[bytes]:
        """In a process group of its own: Ctrl-C ends the run, and the logger logs what there was."""
        folder = own_folder(self._directory, target)
        folder.mkdir(parents=True, exist_ok=True)
        words = ["log", str(self._directory), "--to", str(target), "--follow", "--obey-stdin"]
        with (folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "atoll", *words], stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0
            )

    def _finish(self) -> None:
        for _, process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # it reads the tape to its end, and ends
        until = time.monotonic() + FINISH_SECONDS
        for target, process in self._processes:
            try:
                code = process.wait(max(0.0, until - time.monotonic()))
                how = f"ended with exit code {code} (see {own_folder(self._directory, target) / 'log'})" if code else ""
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                how = f"was not done {FINISH_SECONDS:.0f} s after the run"
            if how:
                self._say(f"warning: the logger for {target} {how}; atoll log {self._directory} --to {target} logs the rest")


def _has_header(tape: Path) -> bool:
    try:
        with tape.open("rb") as file:
            return file.readline().endswith(b"\n")
    except OSError:
        return False
