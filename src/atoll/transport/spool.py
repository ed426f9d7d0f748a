"""Memory that is a file without a name, whose pages the system writes out when it needs the memory for something else."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path


def spooled(total: int, folder: Path) -> mmap.mmap:
    """The blocks are taken at once: a disk that turns out to be full while pages are written would end the process. The file
    goes with the last who uses it."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, total)
        else:
            file.truncate(total)
        return mmap.mmap(file.fileno(), total)
