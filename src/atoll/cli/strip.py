"""`atoll strip`: print a tape as text."""

from __future__ import annotations

from typing import Annotated

import typer

from atoll.cli.shared import RunArgument, err
from atoll.tape.weave import open_run
from atoll.views.stages import timing_lines
from atoll.views.strip import strip_lines


def strip(
    run: RunArgument,
    timing: Annotated[
        bool,
        typer.Option(
            "--timing",
            help="Instead, one line per merged round: how long the syncer gathered, queued, merged and stored it, and the time "
            "since the commit before.",
        ),
    ] = False,
) -> None:
    """Print a run as text, one line of fixed width per event: number, time, worker, event, effects.

    A folder stands for all tapes of its run, in causal order; a tape that is named itself is printed alone."""
    tape = open_run(run)
    for line in timing_lines(tape.records()) if timing else strip_lines(tape.records()):
        typer.echo(line)
    for each in tape.missing():
        err.print(f"warning: {each}", style="yellow", soft_wrap=True)
