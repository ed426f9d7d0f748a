"""The fork server of a local cluster: a process that has imported everything forks the others.

Importing torch takes seconds of a core, and a killed learner should be back sooner. A child is a process like any other, with its
own pid and its own log. The fork server holds no thread, no socket and no model, so a fork copies nothing that is half done. It
ends when its launcher ends; its children's standard input then ends, and they leave.

Lines in:  {"spawn": key, "argv": [...], "log": path}   {"say": pid, "text": "..."}
Lines out: {"key": key, "pid": pid}                     {"pid": pid, "code": code, "failure": {...} or null}
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from atoll.errors import RunFailed
from atoll.runtime.local.failure import FAILURE_FD, Failure, read_failure

TICK_SECONDS = 0.02
SERVES = "atoll.cli.forkserver"
"""The module that calls `serve` with the command line's `main`, which this room may not import."""


class Child:
    """A process that the fork server started, as the launcher sees it."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self._fork_server = fork_server
        self.pid = pid

    def poll(self) -> int | None:
        return self._fork_server.code_of(self.pid)

    @property
    def failure(self) -> Failure | None:
        """What it reported when it ended."""
        return self._fork_server.failure_of(self.pid)

    def signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def say(self, text: str) -> None:
        self._fork_server.tell({"say": self.pid, "text": text})

    def wait(self, seconds: float = 30.0) -> None:
        self._fork_server.wait_for_end(self.pid, seconds)


class ForkServer:
    """The launcher's end. `command` runs a module that calls `serve`."""

    def __init__(self, command: Sequence[str] = ("-m", SERVES)) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self._codes: dict[int, int] = {}
        self._failures: dict[int, Failure] = {}
        self._pids: dict[int, int] = {}
        self._keys = 0
        self._changed = threading.Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read, name="fork server", daemon=True)
        self._reader.start()

    def spawn(self, argv: Sequence[str], log: Path) -> Child:
        """`argv` as after `atoll`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._keys += 1
        key = self._keys
        self.tell({"spawn": key, "argv": list(argv), "log": str(log)})
        with self._changed:
            self._changed.wait_for(lambda: key in self._pids or self._over, timeout=120.0)
            if key not in self._pids:
                raise RunFailed("no process could be started: the fork server has ended")
            return Child(self, self._pids[key])

    def tell(self, words: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(words) + b"\n")
            self._process.stdin.flush()

    def code_of(self, pid: int) -> int | None:
        with self._changed:
            return self._codes.get(pid, -9 if self._over else None)

    def failure_of(self, pid: int) -> Failure | None:
        with self._changed:
            return self._failures.get(pid)

    def wait_for_end(self, pid: int, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes or self._over, timeout=seconds)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = msgspec.json.decode(line)
            with self._changed:
                if "key" in words:
                    self._pids[words["key"]] = words["pid"]
                else:
                    if words["failure"] is not None:
                        self._failures[words["pid"]] = msgspec.convert(words["failure"], Failure)
                    self._codes[words["pid"]] = words["code"]
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def close(self) -> None:
        """Children that are left are killed."""
        for pid in [pid for pid in self._pids.values() if pid not in self._codes]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.wait_for_end(pid, 10.0)
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._reader.join(timeout=5.0)
        self._process.stdout.close()


# ---------------------------------------------------------------- the fork server's end


def _warm_up() -> None:
    """Imports everything a worker needs; torch's optimisers import more when the first one is built."""
    import torch

    import atoll.executor.learner
    import atoll.runtime.learner.process
    import atoll.runtime.syncer.process  # noqa: F401

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def _say(words: dict[str, Any]) -> None:
    os.write(1, msgspec.json.encode(words) + b"\n")


class _Forked:
    def __init__(self, become: Callable[[], None]) -> None:
        self._become = become
        self._inputs: dict[int, int] = {}
        self._failures: dict[int, int] = {}
        """By pid: where its standard input is written, and where its failure is read."""

    def spawn(self, words: dict[str, Any]) -> None:
        reader, writer = os.pipe()
        failure_reader, failure_writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            for other in (writer, failure_reader, *self._inputs.values(), *self._failures.values()):
                os.close(other)  # else a sibling's input would not end while this child lives
            os.environ[FAILURE_FD] = str(failure_writer)
            _live(self._become, words["argv"], words["log"], reader)
        os.close(reader)
        os.close(failure_writer)
        self._inputs[pid], self._failures[pid] = writer, failure_reader
        _say({"key": words["spawn"], "pid": pid})

    def say(self, pid: int, text: str) -> None:
        if pid in self._inputs:
            with suppress(OSError):
                os.write(self._inputs[pid], text.encode())

    def reap(self) -> None:
        while self._inputs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            os.close(self._inputs.pop(pid))
            failure = read_failure(fd := self._failures.pop(pid))
            os.close(fd)
            _say({"pid": pid, "code": os.waitstatus_to_exitcode(status), "failure": failure})

    def close(self) -> None:
        """A stopped child (SIGSTOP) would never see its input end."""
        for pid, writer in self._inputs.items():
            os.close(writer)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _live(become: Callable[[], None], argv: list[str], log: str, stdin: int) -> None:
    """In the child: become `atoll ARGV`, and never return."""
    code = 1
    try:
        os.setsid()
        written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number, source in ((0, stdin), (1, written), (2, written)):
            os.dup2(source, number)
        sys.stdin = os.fdopen(0, "r", closefd=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        sys.argv = ["atoll", *argv]
        become()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        _leave(code)


def _leave(code: int) -> None:
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


def serve(become: Callable[[], None]) -> None:
    """Until standard input ends. `become` is what a child does with its arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to hear
    _warm_up()
    forked = _Forked(become)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        rest = b""
        while True:
            if selector.select(TICK_SECONDS):
                more = os.read(0, 1 << 16)
                if not more:
                    forked.close()
                    return
                *lines, rest = (rest + more).split(b"\n")
                for line in lines:
                    words = msgspec.json.decode(line)
                    if "spawn" in words:
                        forked.spawn(words)
                    else:
                        forked.say(words["say"], words["text"])
            forked.reap()
