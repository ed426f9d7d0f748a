"""`atoll compare`: several presets on the same recipe, in one table and a figure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from atoll.chaos import ChaosPlan, load_plan
from atoll.cli.bars import Bars
from atoll.cli.building import check_buildable
from atoll.cli.options import AllowOption, DeviceOption, PluginOption
from atoll.cli.recipes import RecipeOption
from atoll.cli.runs import _refuse_custom, check_live, run_live, run_virtually
from atoll.cli.shared import (
    ChaosOption,
    JsonOption,
    LearnersOption,
    OutOption,
    SeedOption,
    SetOption,
    ThreadsOption,
    VirtualOption,
    err,
    new_directory,
    out,
    print_json,
    settings_from,
)
from atoll.config import PRESETS, Config
from atoll.errors import UserError
from atoll.tape.folder import refuse_used
from atoll.views.run import Summary
from atoll.views.tables import comparison_table


def compare(
    presets: Annotated[list[str] | None, typer.Argument(help="Presets to train. Default: all of them.")] = None,
    recipe: RecipeOption = None,
    virtual: VirtualOption = False,
    learners: LearnersOption = None,
    set_: SetOption = None,
    chaos: ChaosOption = None,
    seed: SeedOption = None,
    out_dir: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = 1,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="File for the figure, .png or .svg. Default: comparison.png in --out.")
    ] = None,
    device: DeviceOption = "cpu",
    allow_model: AllowOption = None,
    allow_plugin: PluginOption = None,
) -> None:
    """Train several presets on the same recipe, data and number of steps; print one table and draw it."""
    names = list(dict.fromkeys(presets or PRESETS))
    each = [settings_from(recipe, name, learners, seed, set_) for name in names]
    plan = load_plan(chaos, min(settings.learners for settings in each)) if chaos is not None else ChaosPlan()
    if chaos is not None and not virtual and "ddp" in names:
        raise UserError("--chaos: torch's DDP survives no faults; leave ddp out, or use --virtual")
    base, allowed = out_dir or new_directory("compare", each[0].seed), allow_model or []
    refuse_used(base)
    _check_comparison(each, figure, device, allowed, virtual=virtual)
    summaries: list[Summary] = []
    try:
        for settings in each:
            directory = base / settings.preset
            if virtual:
                done = run_virtually(
                    settings, plan, directory, tensors=True, threads=threads, quiet=as_json, device=device, allowed=allowed
                )
            else:
                done = run_live(settings, plan, directory, threads, as_json, device, allowed)
            summaries.append(done)
    finally:  # runs that are done are shown even if a later one fails
        if summaries and as_json:
            print_json(summaries)
        elif summaries:
            out.print(comparison_table(summaries))
            out.print(f"summaries and trained weights of each preset: {base}", soft_wrap=True)
    _draw(summaries, figure or base / "comparison.png", asked=figure is not None)


def _check_comparison(
    each: Sequence[Config], figure: Path | None, device: str, allowed: Collection[str], *, virtual: bool
) -> None:
    """Refuses everything that can be refused of any of the runs, before the first."""
    from atoll.executor.virtual_run import checked_device
    from atoll.views.figures import check_suffix

    if figure is not None:
        check_suffix(figure)
    for settings in each:
        _refuse_custom(settings)
        if virtual:
            checked_device(device)
        else:
            check_live(settings, device)
    with Bars(err) as bars:
        check_buildable(each, allowed, lambda text: err.print(text, soft_wrap=True), bars)


def _draw(summaries: Sequence[Summary], path: Path, *, asked: bool) -> None:
    from atoll.views.figures import plot_comparison

    try:
        plot_comparison(summaries, path)
    except UserError as error:
        if asked:
            raise
        err.print(f"no figure: {error}", style="yellow", soft_wrap=True)
        return
    err.print(f"figure: {path}", soft_wrap=True)
