"""What a learner's process keeps of its place, to come back to it, and where it goes on in another one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from atoll.ids import LearnerId
from atoll.runtime.syncer.places import Placement, write_private
from atoll.store.lock import lock_directory, refuse_locked

log = logging.getLogger("atoll.learner")

PLACE_FILE: Final = "place.key"
LEARNERS_OUT: Final = ("learner", "--out")


class KeptPlace(msgspec.Struct, frozen=True):
    """The place of a process without a certificate, with the key that it got for it."""

    learner: LearnerId = -1
    key: str = ""


NO_PLACE: Final = KeptPlace()


def kept_place(directory: Path | None) -> KeptPlace:
    """From the folder of a process that was here before, and is not any more."""
    if directory is None:
        return NO_PLACE
    refuse_locked(directory, *LEARNERS_OUT)
    path = directory / PLACE_FILE
    if not path.exists():
        return NO_PLACE
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeptPlace)
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s is not read, so this learner may get another place than before: %s", path, error)
        return NO_PLACE


@contextlib.contextmanager
def own_directory(out: Path | None, placement: Placement) -> Iterator[Path]:
    """Makes the folder of a learner, keeps its place there, and holds the folder."""
    directory = out or Path("runs") / f"{placement.run}-learner{placement.learner}"
    with lock_directory(directory, *LEARNERS_OUT):
        if placement.place_key:
            try:
                write_private(directory / PLACE_FILE, msgspec.json.encode(KeptPlace(placement.learner, placement.place_key)))
            except OSError as error:  # a full disk: it trains all the same
                log.warning("%s is not written, so a restart may get another place: %s", directory / PLACE_FILE, error.strerror)
        yield directory


def moved_out(out: Path | None, before: Placement, now: Placement) -> Path | None:
    """The folder for another place than before: tapes are named by incarnation, which each place counts for itself. It is beside
    the old one, where `atoll replay` finds it."""
    if out is None or now.learner == before.learner:
        return out
    return out.with_name(str(now.learner) if out.name == str(before.learner) else f"{out.name}-learner{now.learner}")
