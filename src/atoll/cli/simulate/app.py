"""`atoll simulate ...`: answers about clusters nobody has rented yet."""

from __future__ import annotations

import typer

from atoll.cli.simulate.bandwidth import bandwidth
from atoll.cli.simulate.goodput import goodput
from atoll.cli.simulate.scavenge import scavenge
from atoll.cli.simulate.tape import tape

simulate = typer.Typer(no_args_is_help=True, help="Simulate clusters: the papers' tables, then anybody's.")
for command in (bandwidth, goodput, scavenge, tape):
    simulate.command()(command)
