"""Log files of a run: the last line for a status, and all of them line by line, following what is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

TAIL_BYTES: Final = 4096
LOOK_SECONDS: Final = 0.2


def last_line(path: Path) -> str:
    """Empty: there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


def lines_of(files: Mapping[str, Path], follow: bool, goes_on: Callable[[], bool]) -> Iterator[tuple[str, str]]:
    """(worker, line). With `follow` also what is written later, until nothing goes on; a file may appear only then."""
    read = dict.fromkeys(files, 0)
    pause = threading.Event()
    while True:
        last = not follow or not goes_on()  # asked before reading: what was written until then is read
        for worker, path in files.items():
            for line in _more(path, read, worker, whole=not last):
                yield worker, line
        if last:
            return
        pause.wait(LOOK_SECONDS)


def _more(path: Path, read: dict[str, int], worker: str, *, whole: bool) -> Iterator[str]:
    """`whole`: a line without its end is left for the next time."""
    try:
        with path.open("rb") as file:
            file.seek(read[worker])
            content = file.read()
    except OSError:
        return
    if whole:
        content = content[: content.rfind(b"\n") + 1]
    read[worker] += len(content)
    yield from content.decode(errors="replace").splitlines()
