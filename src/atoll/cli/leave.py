"""`atoll leave`: asks one learner to leave its run, and waits until it has."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from atoll.errors import RunFailed, UserError
from atoll.store.lock import is_locked

LOOK_SECONDS = 0.1


def ask_to_leave(directory: Path, seconds: float | None, waits: float) -> bool:
    """False: it is still there after `waits` seconds."""
    from atoll.runtime.learner.leaving import LEAVE_FILE

    request = directory / LEAVE_FILE
    partial = request.with_name(LEAVE_FILE + ".partial")
    partial.write_text("" if seconds is None else str(seconds), encoding="ascii")
    partial.replace(request)  # whole or not at all: the learner may be reading
    until, pause = time.monotonic() + waits, threading.Event()
    while is_locked(directory):
        if time.monotonic() > until:
            return False
        pause.wait(LOOK_SECONDS)
    request.unlink(missing_ok=True)
    return True


def leave(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The learner's folder: what it has as --out.")],
    within: Annotated[
        float | None,
        typer.Option("--within", min=0.0, show_default=False, help="Seconds that it has. Default: as it was started with."),
    ] = None,
    wait: Annotated[float, typer.Option("--wait", min=0.0, help="Seconds to wait until it has left.")] = 60.0,
) -> None:
    """Ask the learner of this folder to deliver what it trained and to leave, and wait until it has.

    Its place is kept (limits.return_seconds): the command that started it brings it back. Exit code 1: it is still there."""
    if not directory.is_dir():
        raise UserError(f"DIR {directory}: there is no such folder; name the one that the learner has as --out")
    if not is_locked(directory):
        raise UserError(f"DIR {directory}: no learner runs there; name the folder that a running learner has as --out")
    if not ask_to_leave(directory, within, wait):
        raise RunFailed(f"the learner in {directory} has not left within {wait:.0f} s")
