"""`atoll down`: end a run that was brought up by `atoll up`."""

from __future__ import annotations

from pathlib import Path

from atoll.cli.shared import err, out
from atoll.cli.status import UpRunArgument
from atoll.engines.choose import engine
from atoll.engines.record import find_record


def down(run: UpRunArgument = None) -> None:
    """End a run: its learners deliver what they trained and leave, then the syncer stops. Nothing is left running.

    Everything is on disk: `atoll up` with the same recipe and folder goes on from there."""
    record = find_record(run, Path("runs"))
    chosen = engine(record.engine)
    if not chosen.status(record).is_up:
        err.print(f"the run in {record.run} is not up", soft_wrap=True)
    chosen.down(record)
    out.print(f"nothing of the run in {record.run} is left running", soft_wrap=True)
