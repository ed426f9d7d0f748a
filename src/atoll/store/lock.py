"""One syncer, or one learner, per directory. No torch here: a second one is refused before it loads anything."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from atoll.errors import UserError

LOCK_FILE: Final = "lock"


@contextlib.contextmanager
def lock_directory(directory: Path, who: str = "syncer", option: str = "--dir") -> Iterator[None]:
    """The kernel releases the lock when the process ends, in whatever way; the file stays."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / LOCK_FILE).open("a+", encoding="ascii")
    except OSError as error:
        raise UserError(f"directory {directory}: cannot be used ({error.strerror}); choose a folder of your own") from None
    with lock as file:
        _take(file, directory, who, option)
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the number, which is for people
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), str(os.getpid()).encode())
        yield


def refuse_locked(directory: Path, who: str = "syncer", option: str = "--dir") -> None:
    """Refuses at once what `lock_directory` would refuse after minutes of loading. Writes nothing."""
    with contextlib.suppress(OSError), (directory / LOCK_FILE).open("r", encoding="ascii") as file:
        _take(file, directory, who, option)


def is_locked(directory: Path) -> bool:
    try:
        refuse_locked(directory)
    except UserError:
        return True
    return False


def is_held(directory: Path) -> bool:
    """Like `is_locked`, without taking the lock for a moment: who asks again and again would keep out one that comes back."""
    path = directory / LOCK_FILE
    try:
        inode = str(path.stat().st_ino)
        table = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return path.exists() and _is_alive(path)
    return any(words[1] == "FLOCK" and words[-3].rpartition(":")[2] == inode for words in map(str.split, table) if len(words) > 5)


def _is_alive(path: Path) -> bool:
    """Where the system has no table of locks: by the number in the file."""
    try:
        number = int(path.read_text(encoding="ascii"))
        if number < 1:
            return False  # to the system 0 and below are groups of processes
        os.kill(number, 0)
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _take(file: IO[str], directory: Path, who: str, option: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        held = f"another {who} (pid {file.read(20).strip() or '?'}) uses it"
        raise UserError(f"directory {directory}: {held}; stop that one, or give another {option}") from None
