"""Memory that is a file without a name, whose pages the system writes out when it needs the memory for something else."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

EASE_SECONDS: Final = 0.02


class _Eased:
    """Takes the pages of spooled files out of this process, many times a second while there are any. They stay in the system's
    cache, and come back when they are used. Else a whole state would be resident by the time it is read or sent: nothing but a
    shortage makes the system look for pages that are not used any more, and whoever limits this process may not wait for it."""

    def __init__(self) -> None:
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._running = False

    def add(self, pages: mmap.mmap) -> None:
        with self._lock:
            self._maps.add(pages)
            if not self._running and sys.platform == "linux":  # elsewhere the advice may mean that what was written is lost
                self._running = True
                threading.Thread(target=self._work, name="spool", daemon=True).start()

    def _work(self) -> None:
        pause = threading.Event()
        while self._ease():
            pause.wait(EASE_SECONDS)

    def _ease(self) -> bool:
        """False: there are none left, and this thread ends."""
        with self._lock:
            maps = list(self._maps)
            self._running = bool(maps)
        for pages in maps:
            with suppress(OSError, ValueError):  # closed meanwhile
                pages.madvise(mmap.MADV_DONTNEED)
        return bool(maps)


_EASED: Final = _Eased()


def spooled(total: int, folder: Path) -> mmap.mmap:
    """The blocks are taken at once: a disk that turns out to be full while pages are written would end the process. The file
    goes with the last who uses it."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, total)
        else:
            file.truncate(total)
        pages = mmap.mmap(file.fileno(), total)
    _EASED.add(pages)
    return pages
