"""The fork server of a local cluster: a process that has imported everything forks the others.

Importing torch takes seconds of a core, and a killed learner should be back sooner. A child is a process like any other, with its
own pid and its own log. The fork server ends when its launcher ends; its children's standard input then ends, and they leave.
This file is the launcher's end, `forked.py` the fork server's.

Lines in:  {"spawn": key, "argv": [...], "log": path}   {"say": pid, "text": "..."}
Lines out: {"key": key, "pid": pid}                     {"pid": pid, "code": code, "failure": {...} or null}
"""

from __future__ import annotations

import os
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
from atoll.runtime.local.failure import Failure
from atoll.runtime.local.forked import serve_from_here

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


class _Fork:
    """A fork of this process, with the words of `subprocess.Popen`."""

    def __init__(self, become: Callable[[], None]) -> None:
        words, said = os.pipe()
        heard, news = os.pipe()
        sys.stdout.flush()  # what lies in a buffer would be written by the children once more
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(said)
            os.close(heard)
            serve_from_here(become, words, news)
        os.close(words)
        os.close(news)
        self.stdin, self.stdout = os.fdopen(said, "wb"), os.fdopen(heard, "rb")

    def wait(self) -> None:
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


class ForkServer:
    """The launcher's end. `command` runs a module that calls `serve`. With `become` the fork server is a fork of this process
    instead, which must have imported what the children need, and have started no thread."""

    def __init__(self, command: Sequence[str] = ("-m", SERVES), *, become: Callable[[], None] | None = None) -> None:
        self._process = _Fork(become) if become is not None else subprocess.Popen(
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
