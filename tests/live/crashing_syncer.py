"""A fork server whose syncers kill themselves, by SIGKILL, at a named moment of a round."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from atoll.cli import main
from atoll.executor.syncer import TensorSyncer
from atoll.protocol.vocabulary import Accept, Announce, FixParticipants, Merge, Pull, Send, Stored
from atoll.runtime.local.forkserver import serve
from atoll.runtime.syncer.process import SyncerProcess
from atoll.store.durable import DurableVersions
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
    before(fuse, DurableVersions, "put", lambda t, versions: "before storing" if t else "")
    after(fuse, DurableVersions, "put", lambda t, versions: "stored, not taped" if t else "")


def crash_or_be() -> None:
    """A child's arguments: `crash MOMENT ROUNDS ...` is a syncer that will die; anything else is `atoll` as it is."""
    if sys.argv[1] == "crash":
        set_up(Fuse(sys.argv[2], int(sys.argv[3])))
        sys.argv = ["atoll", *sys.argv[4:]]
    main()


if __name__ == "__main__":
    serve(crash_or_be)
