"""The fork server of the live tests: its children are `atoll` in the folder of whoever asked, and syncers among them may kill
themselves, by SIGKILL, at a named moment of a round."""

from __future__ import annotations

import errno
import os
import runpy
import signal
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from atoll.cli import main
from atoll.cli.forkserver import import_workers
from atoll.executor.syncer import TensorSyncer
from atoll.kernels import fused
from atoll.protocol.vocabulary import Accept, Announce, FixParticipants, Merge, Pull, Send, Stored
from atoll.runtime.local.forked import serve
from atoll.runtime.syncer import directory
from atoll.runtime.syncer.process import SyncerProcess
from atoll.store import durable
from atoll.store.durable import DurableVersions
from atoll.store.inputs_ahead import InputsAhead
from atoll.store.spare_files import SpareFiles
from atoll.tape.format import TapeWriter

MOMENTS = (
    "participants fixed, not taped", "taped, nobody pulled", "one pulled", "one contribution in", "merging", "before storing",
    "stored, not taped", "taped, not announced", "announced to one",
)  # fmt: skip


class Fuse:
    def __init__(self, moment: str, after: int) -> None:
        self.moment, self.left = moment, after

    def burn(self, moment: str) -> None:
        if moment == self.moment:
            self.left -= 1
            if self.left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)


def before(fuse: Fuse, owner: type, name: str, moment: Callable[..., str]) -> None:
    """Burn before the call."""
    real = getattr(owner, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        fuse.burn(moment(*args))
        return real(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def after(fuse: Fuse, owner: type, name: str, moment: Callable[..., str]) -> None:
    real = getattr(owner, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        fuse.burn(moment(*args))
        return result

    setattr(owner, name, wrapped)


def set_up(fuse: Fuse) -> None:
    """It stores the inputs of its merges, ahead and over old files, as it does with large fragments; the syncer after it merges
    them again by torch."""
    fused.WORTHWHILE = 1
    durable.SpareFiles = partial(SpareFiles, worthwhile_bytes=1)  # type: ignore[misc]
    directory.InputsAhead = partial(InputsAhead, worthwhile_bytes=0)  # type: ignore[misc]

    def taping(now: int, worker: int, event: object, effects: Any) -> str:
        return "participants fixed, not taped" if any(isinstance(e, FixParticipants) for e in effects) else ""

    def taped(now: int, worker: int, event: object, effects: Any) -> str:
        if isinstance(event, Stored):
            return "taped, not announced"
        return "taped, nobody pulled" if any(isinstance(e, FixParticipants) for e in effects) else ""

    def said(send: Send) -> str:
        body = send.envelope.body
        return "one pulled" if isinstance(body, Pull) else "announced to one" if isinstance(body, Announce) else ""

    def done(effect: object, payload: object) -> str:
        return "one contribution in" if isinstance(effect, Accept) else "merging" if isinstance(effect, Merge) else ""

    before(fuse, TapeWriter, "append", taping)
    after(fuse, TapeWriter, "append", taped)
    after(fuse, SyncerProcess, "_send", said)
    after(fuse, TensorSyncer, "execute", done)
    before(fuse, DurableVersions, "put", lambda t, *_: "before storing" if t else "")
    after(fuse, DurableVersions, "put", lambda t, *_: "stored, not taped" if t else "")


class FileOperations:
    """Every write, fsync, rename and link of this process on files. `kill`: by SIGKILL before operation `at`, or, if that is a
    write, after half of its bytes; else: operation `at`, and every one that many later, fails as on a full disk."""

    def __init__(self, at: int, *, kill: bool) -> None:
        self._at, self._kill, self._count = at, kill, 0
        for name in ("fsync", "replace", "rename", "link"):
            setattr(os, name, self._counted(getattr(os, name)))
        write, line = os.write, TapeWriter._write_whole

        def write_some(handle: int, data: Any) -> int:
            if stat.S_ISREG(os.fstat(handle).st_mode):
                self._next(lambda: write(handle, data[: len(data) // 2]))
            return write(handle, data)

        def write_line(tape: Any, data: bytes, sync: bool) -> None:
            self._next(lambda: tape._file.write(data[: len(data) // 2]))
            line(tape, data, sync)

        os.write, TapeWriter._write_whole = write_some, write_line  # type: ignore[method-assign]

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            self._next(lambda: None)
            return real(*args, **kwargs)

        return operation

    def _next(self, torn: Callable[[], object]) -> None:
        self._count += 1
        if self._kill and self._count == self._at:
            torn()
            os.kill(os.getpid(), signal.SIGKILL)
        if not self._kill and self._count % self._at == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def become() -> None:
    """A child's arguments: `FOLDER ...`, to be there, for the server stays where it was started. Then `crash MOMENT ROUNDS ...`
    is a syncer that will die, `cut N ...` one whose power is cut at its N-th operation on files, `full N ...` one whose disk
    refuses every N-th; `python FILE ...` is that script, and anything else is `atoll` as it is."""
    folder, *words = sys.argv[1:]
    os.chdir(folder)
    if words[0] == "python":
        sys.argv, os.environ["HF_HUB_OFFLINE"] = words[1:], "1"
        sys.path.insert(0, str(Path(words[1]).parent))
        runpy.run_path(words[1], run_name="__main__")
        return
    if words[0] == "crash":
        set_up(Fuse(words[1], int(words[2])))
        words = words[3:]
    elif words[0] in ("cut", "full"):
        fused.WORTHWHILE = 1
        FileOperations(int(words[1]), kill=words[0] == "cut")
        words = words[2:]
    sys.argv = ["atoll", *words]
    main()


if __name__ == "__main__":
    import_workers()
    serve(become)
