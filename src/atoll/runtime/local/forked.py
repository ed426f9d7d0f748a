"""The fork server's own end: it forks a child for each line that asks for one, and tells of those that ended.

It holds no thread, no socket and no model, so a fork copies nothing that is half done.
"""

from __future__ import annotations

import os
import runpy
import selectors
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from atoll.runtime.local.failure import FAILURE_FD, read_failure

TICK_SECONDS = 0.02


def as_atoll() -> None:
    """What `python -m atoll` does with its arguments."""
    runpy.run_module("atoll", run_name="__main__")


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


def serve_from_here(become: Callable[[], None], words: int, news: int) -> NoReturn:
    """In a fork of the launcher, which has imported what the children need."""
    code = 1
    try:
        os.setsid()
        os.dup2(words, 0)
        os.dup2(news, 1)
        for name in os.listdir("/dev/fd"):  # a lock among them would be held for as long as this process lives
            with suppress(OSError):
                if int(name) > 2:
                    os.close(int(name))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        serve(become)
        code = 0
    finally:
        os._exit(code)
