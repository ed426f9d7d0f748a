"""Starts the ranks of one learner on this machine, and ends them together."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from atoll.errors import RunFailed, UserError
from atoll.runtime.local.failure import FAILURE_FD

PARENT: Final = "ATOLL_RANKS_OF"
"""In a rank's environment: the process that started it."""
NEWS: Final = "ATOLL_RANKS_NEWS"
"""In rank 0's environment: the descriptor on which it names the ranks that it goes on without."""
ENDING_SECONDS: Final = 20.0
"""After one rank has failed the others find out themselves, and say what they know."""
LOOK_SECONDS: Final = 0.2
USER_ERROR: Final = 2
"""The exit code of `atoll` for what the user can mend."""
SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def ranks_in_environment() -> int:
    """As torchrun or `launch` says; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launch(ranks: int, argv: Sequence[str]) -> int:
    """Runs `atoll` with these arguments once for each rank. Returns rank 0's exit code once all have ended, and raises if another
    rank failed or one was killed. Rank 0 has this process's output and input, and gets the signals that ask to leave."""
    with tempfile.TemporaryDirectory(prefix="atoll-ranks-") as folder:
        logs = {rank: Path(folder) / f"{rank}.log" for rank in range(1, ranks)}
        lost, named = os.pipe()
        with os.fdopen(named, "wb"):
            children = _started(ranks, argv, logs, named)
        handlers = {number: signal.signal(number, _passed_to(children[0])) for number in SIGNALS}
        try:
            failed = _ended(children, lost)
        finally:
            for number, before in handlers.items():
                signal.signal(number, before)
        if failed is None:
            return 0
        rank, code = failed
        if (rank == 0 and code > 0) or code == children[0].returncode == USER_ERROR:
            return code  # rank 0 has said why; what all ranks refuse is said once
        said = logs[rank].read_text(encoding="utf8", errors="replace").strip().splitlines() if rank else []
        raise (UserError if code == USER_ERROR else RunFailed)(_failure(rank, code, said))


def _failure(rank: int, code: int, said: Sequence[str]) -> str:
    if code < 0:
        return f"rank {rank} of this learner was ended by {signal.Signals(-code).name}"
    last = said[-1].removeprefix("atoll: ") if said else f"it ended with code {code}"
    return f"rank {rank} of this learner: {last}"


def tell_launcher(rank: int) -> None:
    """In rank 0: its learner goes on without this rank, or rank 0 ends and says why not."""
    named = os.environ.get(NEWS, "")
    if named.isdigit():
        with contextlib.suppress(OSError):
            os.write(int(named), f"{rank}\n".encode())


def _started(ranks: int, argv: Sequence[str], logs: dict[int, Path], named: int) -> list[subprocess.Popen[bytes]]:
    group = {
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(),
        PARENT: os.getpid(),
    }  # fmt: skip
    children = []
    for rank in range(ranks):
        own = group | {"RANK": rank, "LOCAL_RANK": rank} | ({} if rank else {NEWS: named})
        with contextlib.ExitStack() as files:
            output = files.enter_context(logs[rank].open("wb")) if rank else None
            children.append(subprocess.Popen(
                [sys.executable, "-m", "atoll", *argv], env=os.environ | {key: str(value) for key, value in own.items()},
                stdin=subprocess.DEVNULL if rank else None, stdout=output, stderr=output,
                pass_fds=() if rank else (named, *_reported_to()),
            ))  # fmt: skip
    return children


def _reported_to() -> tuple[int, ...]:
    """Where rank 0 tells this process's launcher why it failed."""
    fd = os.environ.get(FAILURE_FD, "")
    return (int(fd),) if fd.isdigit() else ()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def _passed_to(child: subprocess.Popen[bytes]) -> signal._HANDLER:
    def handler(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    return handler


def _ended(children: Sequence[subprocess.Popen[bytes]], lost: int) -> tuple[int, int] | None:
    """Waits for all; the first rank that failed, with its code. After rank 0 has ended in order nothing counts as a failure: the
    others may have waited for it. Neither does a rank that rank 0 goes on without."""
    news: queue.Queue[tuple[int, int | None]] = queue.Queue()
    for rank, child in enumerate(children):
        threading.Thread(target=lambda rank=rank, child=child: news.put((rank, child.wait())), daemon=True).start()
    threading.Thread(target=_hear, args=(lost, news), daemon=True).start()
    left, limit = len(children), None
    failures: dict[int, int] = {}
    without: set[int] = set()
    in_order = False
    while left:
        try:
            rank, code = news.get(timeout=limit)
        except queue.Empty:
            for child in children:
                child.kill()
            limit = None
            continue
        if code is None:
            without.add(rank)
            failures.pop(rank, None)
        else:
            left -= 1
            in_order = in_order or (rank == 0 and code == 0 and not failures)
            if code and not in_order and rank not in without:
                failures[rank] = code
        limit = ENDING_SECONDS if failures or in_order else None
    return next(iter(failures.items()), None)


def _hear(lost: int, news: queue.Queue[tuple[int, int | None]]) -> None:
    with os.fdopen(lost, "r") as lines:
        for line in lines:
            news.put((int(line), None))


def end_with_parent() -> None:
    """In a rank that `launch` started: it ends when that process does, however it ended."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return

    def watch() -> None:
        never = threading.Event()
        while os.getppid() == int(parent):
            never.wait(LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def leave_signals_to_rank_0() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
