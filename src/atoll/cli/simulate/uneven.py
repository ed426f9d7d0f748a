"""`atoll simulate uneven`: what waiting costs learners of different speed, by rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from atoll.cli.bars import Bars
from atoll.cli.shared import JsonOption, err, out, print_json
from atoll.config import Config, load
from atoll.errors import UserError

if TYPE_CHECKING:
    from atoll.sim.estimates.uneven import UnevenEstimate

Learners = Annotated[int, typer.Option("--learners", help="M.")]
SlowShare = Annotated[float, typer.Option("--slow-share", help="Share of the learners that are slow.")]
SlowFactor = Annotated[float, typer.Option("--slow-factor", help="Their step time over that of the others.")]
StepNoise = Annotated[float, typer.Option("--step-noise", help="Standard deviation of a step over its mean, of every learner.")]
Interval = Annotated[int, typer.Option("--interval", help="H and P: one fragment is due in each inner step.")]
Overlap = Annotated[int, typer.Option("--overlap", help="tau: rounds in flight.")]
Lead = Annotated[
    list[int] | None,
    typer.Option("--lead", help="Steps that a learner may take past a round that is not back, where K is all. 0 is a barrier at "
                 "every step. Repeatable. Default: tau and 0."),
]  # fmt: skip
Latency = Annotated[float, typer.Option("--latency", help="Over the mean step: delay between a learner and the syncer, one way.")]
Steps = Annotated[int, typer.Option("--steps", help="Outer steps of each run.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of step times.")]
LEARNERS_MAX, STEPS_MAX, INTERVAL_MAX = 512, 10**5, 10**4


def uneven(
    learners: Learners = 8,
    slow_share: SlowShare = 0.5,
    slow_factor: SlowFactor = 1.18,
    step_noise: StepNoise = 0.1,
    interval: Interval = 24,
    overlap: Overlap = 2,
    lead: Lead = None,
    latency: Latency = 0.02,
    steps: Steps = 300,
    seed: Seed = 0,
    as_json: JsonOption = False,
) -> None:
    """Print how many learners a round merges and how long they wait, by rule, where some are slower than others.

    The protocol's own state machines run in virtual time, on links that carry a fragment at once. Every rule is one that a live
    run has too: keys quorum, lead, grace and pace of [protocol].
    """
    leads = list(dict.fromkeys(lead if lead else (overlap, 0)))
    settings = _settings(learners, slow_share, slow_factor, step_noise, interval, overlap, leads, latency, steps, seed)
    found = _measured(settings, overlap, leads)
    if as_json:
        print_json(found)
    else:
        _show(found, settings)


def _settings(
    learners: int, slow_share: float, slow_factor: float, step_noise: float, interval: int, overlap: int, leads: list[int],
    latency: float, steps: int, seed: int,
) -> Config:  # fmt: skip
    for wrong, sentence in (
        (not 2 <= learners <= LEARNERS_MAX, f"--learners {learners}: must be from 2 to {LEARNERS_MAX}"),
        (not 0 <= slow_share <= 1, f"--slow-share {slow_share:g}: must be from 0 to 1"),
        (not 1 <= slow_factor <= 1e6, f"--slow-factor {slow_factor:g}: must be from 1 (as fast as the others) to 1e6"),
        (not 0 <= step_noise < 1, f"--step-noise {step_noise:g}: must be from 0 to below 1"),
        (not 2 <= interval <= INTERVAL_MAX, f"--interval {interval}: must be from 2 to {INTERVAL_MAX}"),
        (not 1 <= overlap < interval, f"--overlap {overlap}: must be from 1 to below --interval {interval}"),
        (min(leads) < 0, f"--lead {min(leads)}: must be 0 (a barrier) or more"),
        (not 0 <= latency <= 1e6, f"--latency {latency:g}: must be from 0 to 1e6"),
        (not interval <= steps <= STEPS_MAX, f"--steps {steps}: must be from --interval {interval} to {STEPS_MAX}"),
    ):
        if wrong:
            raise UserError(sentence)
    cluster = {"slow_share": slow_share, "slow_factor": slow_factor, "step_noise": step_noise, "latency_seconds": latency}
    protocol = {"local_steps_per_round": interval, "fragments": interval, "overlap": overlap}
    size = {"learners": learners, "total_steps": steps, "seed": seed}
    return load(preset_name="decoupled", overrides=size | {"cluster": cluster, "protocol": protocol})


def _measured(settings: Config, overlap: int, leads: list[int]) -> list[UnevenEstimate]:
    from atoll.sim.estimates.uneven import measure_uneven, rules

    asked, found = rules(overlap, leads), []
    with Bars(err) as bars:
        for number, (name, keys) in enumerate(asked.items()):
            bars.update("simulating", number, len(asked), "rules", note=name)
            found.append(measure_uneven(settings, name, keys))
    return found


def _show(found: list[UnevenEstimate], settings: Config) -> None:
    p, c = settings.protocol, settings.cluster
    table = Table(title="Time in inner steps, since the first round", title_justify="left")
    table.add_column("rule", no_wrap=True)
    for name in ("learners merged", "fast learners", "slow learners", "step times a round"):
        table.add_column(name, justify="right")
    for a in found:
        shares = ("" if share is None else f"{share:.1%}" for share in (a.fast, a.slow))
        table.add_row(a.rule, f"{a.merged:.2f}", *shares, f"{a.seconds_a_round / c.step_seconds:.2f}")
    out.print(table)
    out.print(
        f"constants: {settings.learners} learners, {c.slow_share:.0%} of them {c.slow_factor:g} times as slow, noise "
        f"{c.step_noise:.0%}, H = P = {p.local_steps_per_round}, tau {p.overlap}, latency {c.latency_seconds:g} of a step, "
        f"{settings.total_steps} outer steps",
        soft_wrap=True,
    )  # fmt: skip
