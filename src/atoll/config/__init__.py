"""The config of a run: one frozen value, checked here once. All other rooms trust its types.

A preset is a function that returns a complete `Config`; a recipe (TOML) and `--set key=value` change keys of it.
Every algorithm of the family is a choice of numbers and policies in `Protocol` and `Outer`: see docs/research/presets.md.
"""

from __future__ import annotations

from atoll.config.border import changed, from_builtins, load, recipe_for
from atoll.config.checks import warnings
from atoll.config.placement import ClusterPlacement, Group, load_placement
from atoll.config.presets import PRESETS, preset
from atoll.config.sections import ALL, CUSTOM, CodecName, Config, Data, Limits, Outer
from atoll.toml import read_toml, to_toml

__all__ = [
    "ALL",
    "CUSTOM",
    "PRESETS",
    "ClusterPlacement",
    "CodecName",
    "Config",
    "Data",
    "Group",
    "Limits",
    "Outer",
    "changed",
    "from_builtins",
    "load",
    "load_placement",
    "preset",
    "read_toml",
    "recipe_for",
    "to_toml",
    "warnings",
]
