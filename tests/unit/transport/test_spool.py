"""Spooled bytes are a file's: what was written stays, and its pages do not stay in this process."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from atoll.transport import spooled

SIZE = 48 << 20


def resident() -> int:
    """Bytes of pages of files that this process has in memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc, and pages are given back on Linux")
def test_pages_of_a_spooled_file_leave_the_process_and_come_back(tmp_path: Path) -> None:
    for _ in range(2):  # the thread that does it ends with the last file, and starts again
        before = resident()
        pages = memoryview(spooled(SIZE, tmp_path))
        block = bytes(range(256)) * (SIZE // 256)
        pages[:] = block
        until = time.monotonic() + 60.0
        while resident() > before + SIZE // 8:
            assert time.monotonic() < until, f"{(resident() - before) >> 20} MiB are still here"
            threading.Event().wait(0.01)
        assert pages == block
        del pages
        while any(thread.name == "spool" for thread in threading.enumerate()):
            assert time.monotonic() < until, "its thread does not end"
            threading.Event().wait(0.01)
