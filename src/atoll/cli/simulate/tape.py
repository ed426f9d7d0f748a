"""`atoll simulate tape`: the failures of a simulated cluster as an ordinary tape, to train on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.chaos import ChaosPlan
from atoll.cli.progress import RunProgress
from atoll.cli.runs import readable_tape, virtual_summary
from atoll.cli.shared import (
    JsonOption,
    LearnersOption,
    OutOption,
    PresetOption,
    Recipe,
    SeedOption,
    SetOption,
    new_directory,
    out,
    settings_from,
    show,
)  # fmt: skip
from atoll.cli.simulate import failure_options as o
from atoll.config import Config, changed
from atoll.views.run import RunView

if TYPE_CHECKING:
    from atoll.sim.estimates.failures import FailureModel

Chips = Annotated[int, typer.Option("--chips", help="Chips of the whole cluster, divided among the learners.")]


def tape(
    recipe: Recipe = None,
    chips: Chips = 1_200_000,
    preset: PresetOption = None,
    learners: LearnersOption = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    mtbi: o.Mtbi = o.MTBI,
    slice_chips: o.SliceChips = o.SLICE,
    step: o.Step = o.STEP,
    step_noise: o.StepNoise = o.NOISE,
    down: o.Down = o.DOWN,
    up: o.Up = o.UP,
    returns: o.Return = o.RETURN,
    return_shape: o.ReturnShape = o.SHAPE,
    return_exponent: o.ReturnExponent = o.EXPONENT,
    out_dir: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a synthetic tape: the protocol's own state machines on a cluster whose chips fail, in virtual time.

    Chips fail at random, slices leave and return, learners resize and take smaller batches; which learners merge follows from
    that. The tape fixes protocol, learners and number of steps; `atoll train --tape DIR` trains any model with its decisions.
    """
    model = o.model_from_options(mtbi, slice_chips, step, step_noise, down, up, o.RESTART, returns, return_shape, return_exponent)
    settings = settings_from(recipe, preset, learners, seed, set_)
    settings = changed(settings, overrides={"cluster": {"step_seconds": step, "step_noise": step_noise}})
    directory = out_dir or new_directory(f"tape-{settings.preset}", settings.seed)
    record(settings, chips, model, directory, as_json)
    if not as_json:
        out.print(f"{chips:,} chips; constants: {model.describe()}", soft_wrap=True)
        out.print(f"train on it: atoll train --tape {directory}", soft_wrap=True)


def record(settings: Config, chips: int, model: FailureModel, directory: Path, quiet: bool) -> None:
    from atoll.sim.run import run_virtual
    from atoll.sim.slices import SliceHardware

    began = time.monotonic()
    slices = SliceHardware(settings, chips, model, settings.seed)
    view = RunView(settings.learners)
    with RunProgress(settings, view, quiet, "virtual ") as progress, readable_tape(directory):
        done = run_virtual(settings, ChaosPlan(), directory, tensors=False, slices=slices, observers=[view, progress])
    show(virtual_summary(settings, view, done, directory, began), quiet)
