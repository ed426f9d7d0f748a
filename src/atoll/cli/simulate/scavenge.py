"""`atoll simulate scavenge`: what learners that join at night and leave in the morning are worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from atoll.cli.bars import Bars
from atoll.cli.shared import JsonOption, err, out, print_json
from atoll.cli.simulate.failure_options import model_from_options
from atoll.config import load
from atoll.errors import UserError

if TYPE_CHECKING:
    from atoll.sim.estimates.scavenge import ScavengeEstimate, ScavengeScenario

Extra = Annotated[
    list[float] | None,
    typer.Option("--extra", help="f: scavenged chips over base chips. Repeatable. Default: 0.25, 0.5, 1 and 3."),
]
Learners = Annotated[int, typer.Option("--learners", min=1, max=512, help="Learners that are always there (the base).")]
Day = Annotated[float, typer.Option("--day", help="Hours of the base alone for half of a cycle's work.")]
Cycles = Annotated[int, typer.Option("--cycles", help="Number of days, each with its night.")]
StepTime = Annotated[float, typer.Option("--step-time", help="Seconds of an inner step.")]
Parameters = Annotated[float, typer.Option("--parameters", help="Of the model; a newcomer gets 12 bytes for each.")]
Layers = Annotated[int, typer.Option("--layers", min=1, help="Layers of the model, for data-parallel.")]
Gbit = Annotated[float, typer.Option("--gbit", help="Gbit/s of every learner's link, up and down.")]
Latency = Annotated[float, typer.Option("--latency", help="Seconds of delay, one way.")]
Up = Annotated[float, typer.Option("--resize", help="Seconds that elastic data-parallel stops at dusk and at dawn.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of step times.")]


def scavenge(
    extra: Extra = None,
    learners: Learners = 4,
    day: Day = 2.0,
    cycles: Cycles = 2,
    step_time: StepTime = 6.0,
    parameters: Parameters = 1e9,
    layers: Layers = 24,
    gbit: Gbit = 10.0,
    latency: Latency = 0.02,
    resize: Up = 12.0,
    seed: Seed = 0,
    as_json: JsonOption = False,
) -> None:
    """Print the time to finish the same work when more learners join at night: ideal, decoupled, data-parallel.

    The protocol's own state machines run in virtual time, with recoveries and their transfers. Half of the work is done at
    night, so the ideal is 0.5 + 0.5/(1+f) of the time that the base alone needs.
    """
    from atoll.sim.estimates.scavenge import ScavengeScenario, base_alone_seconds, check_share
    from atoll.sim.estimates.scavenge import scavenge as answer

    for option, value in {"--step-time": step_time, "--parameters": parameters, "--gbit": gbit}.items():
        if not 0 < value < 1e15:
            raise UserError(f"{option} {value:g}: must be above 0")
    if latency < 0:
        raise UserError(f"--latency {latency:g}: must be 0 s or more")
    model = model_from_options(down=resize, up=resize)
    cluster = {
        "step_seconds": step_time, "step_noise": 0.02, "parameters": int(parameters), "up_gbit": gbit, "down_gbit": gbit,
        "latency_seconds": latency,
    }  # fmt: skip
    limits = {"leave_seconds": 10 * step_time}
    settings = load(preset_name="decoupled", overrides={"learners": learners, "seed": seed, "cluster": cluster, "limits": limits})
    scenario = ScavengeScenario(settings, 3600 * day, cycles, layers)
    shares = extra or [0.25, 0.5, 1.0, 3.0]
    for share in shares:
        check_share(share, learners)
    found = []
    with Bars(err) as bars:
        _say(bars, 0, 1 + len(shares), "the base alone")
        base = base_alone_seconds(scenario)
        for number, share in enumerate(shares, 1):
            _say(bars, number, 1 + len(shares), f"{share:g} times as many chips at night")
            found.append(answer(scenario, share, model, base))
    if as_json:
        print_json(found)
    else:
        _show(found, scenario)


def _say(bars: Bars, number: int, of: int, what: str) -> None:
    bars.update("simulating", number, of, "clusters", note=what)
    if not bars.shown:
        err.print(f"simulating {what} ...")


def _show(found: list[ScavengeEstimate], scenario: ScavengeScenario) -> None:
    c = scenario.settings.cluster
    table = Table(title="Time to finish, relative to the base alone", title_justify="left")
    for name in ("scavenged f", "ideal", "decoupled", "off the ideal", "elastic data-parallel", "joins", "seconds to join"):
        table.add_column(name, justify="right")
    for a in found:
        table.add_row(
            f"{a.share:g}", f"{a.ideal:.4f}", f"{a.decoupled:.4f}", f"{a.decoupled / a.ideal - 1:+.2%}", f"{a.data_parallel:.4f}",
            str(a.joins), f"{a.joining_seconds:.1f}",
        )  # fmt: skip
    out.print(table)
    out.print(
        f"constants: {scenario.settings.learners} learners, {scenario.cycles} days of {scenario.day_seconds / 3600:g} h "
        f"and nights that do the same work, step {c.step_seconds:g} s, {c.parameters:.3g} parameters, "
        f"{c.up_gbit:g} Gbit/s up and down, latency {c.latency_seconds:g} s. "
        f"A learner that leaves trains until its fragments are merged, which can beat the ideal. "
        f"Data-parallel exchanges bf16 gradients over the same link, and leaves the extra learners out where they slow it down.",
        soft_wrap=True,
    )  # fmt: skip
