"""`atoll simulate ...`: answers about clusters nobody has rented yet."""

from __future__ import annotations

import typer

from atoll.cli.bandwidth import bandwidth
from atoll.cli.goodput import goodput
from atoll.cli.scavenge import scavenge
from atoll.cli.synthetic import tape

simulate = typer.Typer(no_args_is_help=True, help="Simulate clusters: the papers' tables, then anybody's.")
for command in (bandwidth, goodput, scavenge, tape):
    simulate.command()(command)
