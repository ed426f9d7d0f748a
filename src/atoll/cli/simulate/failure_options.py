"""The constants of the failure model as options, in practical units, with their checks; several commands share them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from atoll.errors import UserError

if TYPE_CHECKING:  # numpy is imported when something is simulated
    from atoll.sim.estimates.failures import FailureModel

Mtbi = Annotated[float, typer.Option("--mtbi", help="Failures: mean days between interruptions of one chip.")]
SliceChips = Annotated[int, typer.Option("--slice", help="Failures: chips of a slice; a slice with a failed chip stops.")]
Step = Annotated[float, typer.Option("--step-time", help="Failures: seconds of one inner step.")]
StepNoise = Annotated[float, typer.Option("--step-noise", help="Failures: standard deviation of a step, as a share of its mean.")]
Down = Annotated[float, typer.Option("--resize-down", help="Failures: seconds of a resize after failures.")]
Up = Annotated[float, typer.Option("--resize-up", help="Failures: seconds of a resize that adds slices.")]
Restart = Annotated[float, typer.Option("--restart", help="Failures: seconds of a restart where the run is not elastic.")]
Return = Annotated[float, typer.Option("--return", help="Failures: mean minutes until a failed chip is back.")]
ReturnShape = Annotated[float, typer.Option("--return-shape", help="Failures: shape of that exponentiated Weibull delay.")]
ReturnExponent = Annotated[float, typer.Option("--return-exponent", help="Failures: exponent of that delay.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of all failures.")]

MTBI, SLICE, STEP, NOISE, DOWN, UP, RESTART, RETURN, SHAPE, EXPONENT = 365.0, 128, 5.0, 0.02, 16.0, 8.0, 85.0, 60.0, 0.8, 2.0
"""FailureModel's own defaults, in the options' units; a test holds them equal."""


def model_from_options(
    mtbi: float = MTBI, slice_chips: int = SLICE, step: float = STEP, noise: float = NOISE, down: float = DOWN, up: float = UP,
    restart: float = RESTART, returns: float = RETURN, shape: float = SHAPE, exponent: float = EXPONENT,
) -> FailureModel:  # fmt: skip
    from atoll.sim.estimates.failures import FailureModel

    above_zero = {"--mtbi": mtbi, "--slice": slice_chips, "--step-time": step, "--return": returns,
                  "--return-shape": shape, "--return-exponent": exponent}  # fmt: skip
    for option, value in above_zero.items():
        if not 0 < value < 1e12:
            raise UserError(f"{option} {value:g}: must be above 0")
    for option, value in {"--resize-down": down, "--resize-up": up, "--restart": restart}.items():
        if not 0 <= value < 1e12:
            raise UserError(f"{option} {value:g}: must be 0 s or more")
    if not 0 <= noise < 1:
        raise UserError(f"--step-noise {noise:g}: is a share of the step's mean, from 0 to below 1")
    return FailureModel(
        mtbi * 86400.0, slice_chips, step, noise, down, up, restart, returns * 60.0, shape, exponent
    )  # fmt: skip
