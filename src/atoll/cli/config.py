"""`atoll config`: print the complete resolved config."""

from __future__ import annotations

import typer

from atoll import config
from atoll.cli.options import PluginOption
from atoll.cli.shared import LearnersOption, PresetOption, Recipe, SeedOption, SetOption, settings_from


def show_config(
    recipe: Recipe = None,
    preset: PresetOption = None,
    learners: LearnersOption = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    allow_plugin: PluginOption = None,
) -> None:
    """Print the complete config as TOML that `atoll train` accepts, after preset, recipe, options and --set.

    It refuses what `atoll train` would refuse, as far as that can be said without data and without torch."""
    typer.echo(config.to_toml(settings_from(recipe, preset, learners, seed, set_)), nl=False)
