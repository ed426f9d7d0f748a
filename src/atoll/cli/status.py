"""`atoll status`: how a run that was brought up by `atoll up` stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from atoll.cli.shared import JsonOption, out, print_json
from atoll.engines.choose import engine
from atoll.engines.record import UpRecord, find_record

UpRunArgument = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", show_default=False, help="The run's folder. Default: the only one below runs/."),
]


def show_status(record: UpRecord, as_json: bool = False) -> None:
    state = engine(record.engine).status(record)
    if as_json:
        workers = {each.worker: {"state": each.state, "where": each.where, "note": each.note} for each in state.workers}
        print_json({"run": record.run, "engine": record.engine, "is_up": state.is_up, "workers": workers})
        return
    table = Table("worker", "state", record.engine, "last line of its log", title=f"{record.name} on {record.engine}")
    for each in state.workers:
        table.add_row(each.worker, each.state, each.where, each.note)
    out.print(table)


def status(run: UpRunArgument = None, as_json: JsonOption = False) -> None:
    """Show the processes of a run that `atoll up` brought up: how the engine sees each, and the last line of its log."""
    show_status(find_record(run, Path("runs")), as_json)
