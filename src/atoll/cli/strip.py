"""`atoll strip`: print a tape, one line an event."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.tape.weave import open_run
from atoll.views.strip import strip_lines


def strip(path: Annotated[Path, typer.Argument(metavar="TAPE", help="A tape or a run's folder.")]) -> None:
    """Print a run, one fixed-width line per event."""
    for line in strip_lines(open_run(path).records()):
        typer.echo(line)
