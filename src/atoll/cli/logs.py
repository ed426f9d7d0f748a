"""`atoll logs`: what the processes of a run wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.engines.choose import engine
from atoll.engines.record import UpRecord, find_record
from atoll.errors import UserError


def chosen_workers(record: UpRecord, worker: str | None) -> list[str]:
    if worker is None:
        return record.workers
    name = f"learner-{worker}" if worker.isdigit() else worker
    if name not in record.workers:
        raise UserError(f"WORKER {worker}: must be syncer or a learner from 0 to {record.learners - 1}")
    return [name]


def logs(
    worker: Annotated[
        str | None, typer.Argument(metavar="WORKER", show_default=False, help="A learner's number, or syncer. Default: all.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="RUN", help="The run's folder. Default: the only one below runs/.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what is written, while the run is up.")] = False,
) -> None:
    """Print the logs of a run that `atoll up` brought up: of one process, or of all, each line with its name."""
    record = find_record(run, Path("runs"))
    workers = chosen_workers(record, worker)
    for name, line in engine(record.engine).logs(record, workers, follow):
        typer.echo(line if len(workers) == 1 else f"{name}: {line}")
