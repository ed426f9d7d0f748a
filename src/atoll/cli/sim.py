"""`atoll sim`: the protocol alone, without tensors."""

from __future__ import annotations

from atoll.chaos import ChaosPlan, load_plan
from atoll.cli.options import PluginOption
from atoll.cli.runs import run_virtually
from atoll.cli.shared import (
    ChaosOption,
    JsonOption,
    LearnersOption,
    OutOption,
    PresetOption,
    Recipe,
    SeedOption,
    SetOption,
    settings_from,
    show,
)


def sim(
    recipe: Recipe = None,
    preset: PresetOption = None,
    learners: LearnersOption = None,
    set_: SetOption = None,
    chaos: ChaosOption = None,
    seed: SeedOption = None,
    out_dir: OutOption = None,
    as_json: JsonOption = False,
    allow_plugin: PluginOption = None,
) -> None:
    """Run the protocol alone, without tensors, in virtual time: who merges with whom, who waits, how many bytes travel."""
    settings = settings_from(recipe, preset, learners, seed, set_)
    plan = load_plan(chaos, settings.learners) if chaos is not None else ChaosPlan()
    show(run_virtually(settings, plan, out_dir, tensors=False, threads=1, quiet=as_json), as_json)
