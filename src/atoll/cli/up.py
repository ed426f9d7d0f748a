"""`atoll up`: bring a run up on an engine."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import AllowOption, PluginOption
from atoll.cli.recipes import complete_recipe, found_recipe
from atoll.cli.shared import PresetOption, SeedOption, SetOption, err, out, settings_from
from atoll.cli.status import show_status
from atoll.config import load_placement
from atoll.engines.choose import ENGINES, engine
from atoll.engines.deployment import Deployment
from atoll.engines.record import read_record
from atoll.errors import UserError


def deployment_of(
    recipe: Path, run: Path | None, preset: str | None, seed: int | None, assignments: list[str], allowed: list[str],
    plugins: list[str], threads: int, python: str,
) -> Deployment:  # fmt: skip
    placement = load_placement(recipe, assignments)
    settings = settings_from(recipe, preset, None, seed, assignments)
    if (shards := placement.syncer.shards) > 1:
        from atoll.tensors.stripes import refuse_unsharded

        refuse_unsharded(settings, f"placement.syncer.shards = {shards}")
    folder = (run or Path("runs") / recipe.stem).absolute()
    return Deployment(
        name=_name(folder.name), run=folder, settings=settings, placement=placement, python=python, allowed=tuple(allowed),
        plugins=tuple(plugins), threads=threads,
    )  # fmt: skip


def _name(folder: str) -> str:
    """What every engine takes as a name."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-")[:40].strip("-")
    if not name or not name[0].isalpha():
        raise UserError(f"--out {folder}: the folder's name names the run's jobs, so it must begin with a letter")
    return name


def show_rendered(deployment: Deployment, on: str) -> None:
    for rendered in engine(on).render(deployment):
        typer.echo(f"# ==== {rendered.title}")
        typer.echo("# (holds secrets: not shown)" if rendered.private else rendered.text, nl=rendered.private)


def up(
    recipe: Annotated[
        Path,
        typer.Argument(
            readable=False, callback=found_recipe, autocompletion=complete_recipe,
            help="A TOML recipe, whose [placement] says where processes go, or the name of one of Atoll's own.",
        ),
    ],
    on: Annotated[str, typer.Option("--on", metavar="ENGINE", help=f"One of {', '.join(ENGINES)}.")] = "local",
    run: Annotated[
        Path | None,
        typer.Option("--out", metavar="RUN", help="The run's folder. Default: runs/ and the recipe's name."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started or submitted, and do nothing.")
    ] = False,
    preset: PresetOption = None,
    seed: SeedOption = None,
    set_: SetOption = None,
    threads: Annotated[int, typer.Option("--threads", min=1, max=256, help="CPU threads of torch in each process.")] = 1,
    python: Annotated[
        str, typer.Option("--python", show_default=False, help="The interpreter with Atoll on the machines of the run. "
                          "Default: this one.")
    ] = "",
    allow_model: AllowOption = None,
    allow_plugin: PluginOption = None,
) -> None:  # fmt: skip
    """Bring a run up on an engine, and return: the run goes on without this terminal.

    The folder names the run: `atoll status`, `logs` and `down` find it there. Given again while the run is up, it shows how it
    stands; after `atoll down` it goes on from the last stored step."""
    deployment = deployment_of(
        recipe, run, preset, seed, set_ or [], allow_model or [], allow_plugin or [], threads, python or sys.executable
    )
    chosen = engine(on)
    if dry_run:
        show_rendered(deployment, on)
        return
    _refuse_other_engine(deployment, on)
    if not chosen.up(deployment):
        err.print(f"the run in {deployment.run} is up already", soft_wrap=True)
    show_status(read_record(deployment.run))
    out.print(f"run: {deployment.run}", soft_wrap=True)


def _refuse_other_engine(deployment: Deployment, on: str) -> None:
    try:
        before = read_record(deployment.run)
    except UserError:
        return  # a new run
    if before.engine != on and engine(before.engine).status(before).is_up:
        raise UserError(f"--out {deployment.run}: the run is up on {before.engine}; `atoll down {deployment.run}` ends it there")
