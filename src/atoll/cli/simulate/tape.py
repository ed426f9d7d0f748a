"""`atoll simulate tape`: a history of failures of a cluster nobody owns, as an ordinary tape to train on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.chaos import ChaosPlan
from atoll.cli.runs import readable_tape, virtual_summary
from atoll.cli.shared import (
    JsonOption,
    LearnersOption,
    PresetOption,
    Recipe,
    RunProgress,
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

Chips = Annotated[int, typer.Option("--chips", help="Of the whole cluster, dealt to the learners.")]
Out = Annotated[Path | None, typer.Option("--out", help="Where the tape goes; by default a new folder under runs/.")]


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
    out_dir: Out = None,
    as_json: JsonOption = False,
) -> None:
    """Write a synthetic tape: the failure model under the real machines, in virtual time. Then: atoll train --tape DIR.

    Chips fail by chance, slices go and come back, learners resize and take smaller batches; who merges with whom follows from
    that. The recipe's protocol, learners and outer steps are taped; its model may be another when it is trained on.
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

    slices = SliceHardware(settings, chips, model, settings.seed)
    view = RunView(settings.learners)
    with RunProgress(settings, view, quiet, "virtual ") as progress, readable_tape(directory):
        done = run_virtual(settings, ChaosPlan(), directory, tensors=False, slices=slices, observers=[view, progress])
    show(virtual_summary(settings, view, done, directory), quiet)
