"""Files that nobody needs any more, to be written over.

To write 190 MB into a new file takes two to four times the CPU of writing them over an old one, and deleting the old one takes
longer still: the system finds, clears and gives back pages and blocks. A syncer of eight learners does that every round.

A file is written over only while nothing else can see it. Its old name must be gone from the disk first, or a power cut could
leave that name with another version's bytes. Nobody may have it open, by whatever name: a reader of a run that trains, a backup.
A file that a snapshot links is never kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from pathlib import Path
from typing import Final, NamedTuple

from atoll.store.tensor_files import discard, sync_directory, temporary_name

HAS_LEASES: Final = hasattr(fcntl, "F_SETLEASE")
"""On Linux. Elsewhere nothing shows whether somebody reads a file, and none is written over."""
WORTHWHILE_BYTES: Final = 4 << 20
BYTES_MAX: Final = 2 << 30
"""Of all that are kept: the inputs of ten rounds of eight learners and 46.7 million parameters."""
LARGER_MOST: Final = 2.0
"""By how many times a file may be larger than what is to be written into it."""


class _Spare(NamedTuple):
    path: Path
    size: int


class SpareFiles:
    """Of one folder. Any thread may call any method. A kept file has a temporary name: the next start deletes it."""

    def __init__(self, bytes_max: int = BYTES_MAX, worthwhile_bytes: int = WORTHWHILE_BYTES) -> None:
        self._bytes_max, self._worthwhile_bytes = bytes_max, worthwhile_bytes
        self._kept: list[_Spare] = []
        self._lock = threading.Lock()

    def keep(self, path: Path) -> bool:
        """Whether it is kept: it has another name then. If not, the caller deletes it."""
        with self._lock, contextlib.suppress(OSError):
            found = path.lstat()
            room = self._bytes_max - sum(spare.size for spare in self._kept)
            if not HAS_LEASES or found.st_nlink != 1 or not self._worthwhile_bytes <= found.st_size <= room:
                return False
            os.replace(path, temporary_name(path))
            self._kept.append(_Spare(temporary_name(path), found.st_size))
            return True
        return False

    def take(self, temporary: Path, size: int) -> int | None:
        """A descriptor of a file that has this name now, to write from its first byte; the caller cuts it at its end. None if
        there is no fitting one."""
        with self._lock:
            fitting = [spare for spare in self._kept if size <= spare.size <= LARGER_MOST * size]
            if not fitting:
                return None
            spare = min(fitting, key=lambda spare: spare.size)
            self._kept.remove(spare)
        try:
            os.replace(spare.path, temporary)
            sync_directory(temporary.parent)
            return _opened_alone(temporary)
        except OSError:  # the disk refuses, or somebody reads it
            for path in (spare.path, temporary):
                discard(path)
            return None

    def close(self) -> None:
        """Deletes them: at the end, and when the disk is full."""
        with self._lock:
            for spare in self._kept:
                discard(spare.path)
            self._kept.clear()


def _opened_alone(path: Path) -> int:
    """OSError if anybody else has it open. A lease is what the kernel gives only then; nobody can open the file later, for nobody
    knows this name."""
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        if os.fstat(handle).st_nlink != 1:
            raise OSError("it has another name")
        # Who opens the file just now has the kernel tell us; its usual signal would end the process, this one is ignored.
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BaseException:
        os.close(handle)
        raise
    return handle
