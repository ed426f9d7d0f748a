"""`atoll simulate ...`: estimates for clusters that need not exist."""

from __future__ import annotations

import typer

from atoll.cli.simulate.bandwidth import bandwidth
from atoll.cli.simulate.goodput import goodput
from atoll.cli.simulate.scavenge import scavenge
from atoll.cli.simulate.tape import tape
from atoll.cli.simulate.uneven import uneven

simulate = typer.Typer(
    no_args_is_help=True, help="Estimate bandwidth, goodput and more for any cluster; without options, the published tables."
)
for command in (bandwidth, goodput, scavenge, uneven, tape):
    simulate.command()(command)
