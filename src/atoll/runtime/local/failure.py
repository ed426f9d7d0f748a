"""Why a process of a run ended, as a value for the process that started it: the log beside it is for people, and no decision is
read from a sentence."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import msgspec

FAILURE_FD: Final = "ATOLL_FAILURE_FD"
"""Environment variable: the file descriptor that a launcher reads a `Failure` from. Unset: nobody asked."""
MESSAGE_MAX: Final = 8000
"""Characters. A pipe takes 64 KiB without a reader, and the launcher reads only after the process has ended."""


class Failure(msgspec.Struct, frozen=True):
    message: str
    users_fault: bool
    """The input is wrong, so starting the process again cannot help."""
    refused: bool = False
    """The syncer refuses this learner for good. That is its own failure, and not the run's."""


def report_failure(failure: Failure) -> None:
    fd = os.environ.get(FAILURE_FD, "")
    if fd:
        with suppress(OSError):  # the launcher is gone, and with it whoever asked
            os.write(int(fd), msgspec.json.encode(msgspec.structs.replace(failure, message=failure.message[:MESSAGE_MAX])))


def read_failure(fd: int) -> Failure | None:
    """Of a process that has ended. None: it reported nothing, as after a signal."""
    os.set_blocking(fd, False)
    try:
        return msgspec.json.decode(os.read(fd, 1 << 16), type=Failure)
    except (OSError, msgspec.MsgspecError):
        return None
