"""The simulators' side of `agreement.py`: their settings, and kill plans drawn from the failure model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import pstdev

import msgspec
import numpy as np
from agreement_live import Calibration, Seen

from atoll.chaos import ChaosPlan, Kill
from atoll.config import Config
from atoll.executor.null import wire_bits
from atoll.ids import seconds
from atoll.sim.cluster import VirtualCluster
from atoll.sim.estimates.decoupled import AdoptionWatch
from atoll.sim.estimates.failures import FailureModel, SlicedLearner, Stretch
from atoll.sim.estimates.goodput import simulate
from atoll.sim.estimates.utilisation import Compute, Exchange, utilisation

FREE_GBIT = 10.0
"""Loopback: no transfer of these models takes as long as a step."""
PATIENCE_SECONDS = 1e5
"""Of virtual time."""
SPREAD_RUNS = 400
PRECISION = 0.1
"""Points of the expected goodput."""

# ---------------------------------------------------------------- links


def on_virtual_hardware(settings: Config, free: Calibration, parameters: int, mbit: float | None) -> Config:
    """The live run's settings with this machine as their cluster section. A virtual step lasts the whole period, so that steps
    follow each other as in the live run; results are multiplied by the share of the period that is a step
    (`Calibration.busy`). The cost of a round on an unlimited link is spread over its trips as latency."""
    gbit = FREE_GBIT if mbit is None else mbit / 1000
    cluster = msgspec.structs.replace(
        settings.cluster, step_seconds=free.period_seconds, step_noise=min(0.5, free.step_noise),
        latency_seconds=free.latency_seconds, up_gbit=gbit, down_gbit=gbit, parameters=parameters,
    )  # fmt: skip
    return msgspec.structs.replace(settings, cluster=cluster)


def virtual_run(settings: Config, plan: ChaosPlan | None = None) -> Seen:
    seen = Seen()
    VirtualCluster(settings, plan=plan, observers=[seen]).run(until_seconds=PATIENCE_SECONDS)
    return seen


def blocking_machines(settings: Config, free: Calibration, parameters: int, mbit: float, warm_up: int) -> float:
    run = virtual_run(on_virtual_hardware(settings, free, parameters, mbit))
    return free.busy * run.utilisation(settings.protocol.local_steps_per_round, warm_up)


def round_bits(settings: Config, parameters: int) -> float:
    """Bits that cross one learner's link in a blocking round, up and then down."""
    return parameters * (wire_bits(settings.protocol.codec_up) + wire_bits(settings.protocol.codec_down))


def blocking_graph(settings: Config, free: Calibration, parameters: int, mbit: float) -> float:
    """The star on the graph's serial link. Every learner has its own link, whose two directions are used one after the other:
    the merge needs the whole contribution, and the learner the whole result. So it is one link with the bits of both
    directions, and no ring. The contribution is one packet made after the last layer, so no layer's transfer starts early;
    a model of one layer expresses that."""
    exchange = Exchange(
        "diloco", interval=settings.protocol.local_steps_per_round, bits=round_bits(settings, parameters) / parameters,
        datacentres=2, latency_seconds=2 * free.latency_seconds,
    )  # fmt: skip
    compute = Compute(1, parameters, free.period_seconds)
    return free.busy * float(utilisation(compute, exchange, [mbit / 1000], steady=True)[0])


def blocking_rates(settings: Config, free: Calibration, parameters: int, targets: Sequence[float]) -> list[float]:
    """Mbit/s at which the graph gives about these utilisations, as far as the fixed cost of a round allows."""
    interval = settings.protocol.local_steps_per_round * free.period_seconds
    spare = [interval * (1 / u - 1) for u in targets]
    return [two_digits(round_bits(settings, parameters) / 1e6 / max(s - free.round_seconds, s / 4)) for s in spare]


def decoupled_rates(settings: Config, free: Calibration, parameters: int, targets: Sequence[float]) -> list[float]:
    """`targets` are shares of the rate that one direction needs to keep the schedule."""
    widest = max(wire_bits(settings.protocol.codec_up), wire_bits(settings.protocol.codec_down))
    needed = parameters * widest / 1e6 / (settings.protocol.local_steps_per_round * free.period_seconds)
    return [two_digits(u * needed) for u in targets]


def two_digits(number: float) -> float:
    return float(f"{number:.2g}")


def schedule_kept(watch: AdoptionWatch, settings: Config) -> float:
    """As in `sim/estimates/decoupled.py`, for virtual runs and for live ones."""
    interval = settings.protocol.local_steps_per_round
    return min(1.0, interval / watch.interval(settings.learners * settings.protocol.fragments))


def decoupled_machines(settings: Config, free: Calibration, parameters: int, mbit: float, since: int) -> float:
    watch = AdoptionWatch(since)
    virtual = on_virtual_hardware(settings, free, parameters, mbit)
    VirtualCluster(virtual, observers=[watch]).run(until_seconds=PATIENCE_SECONDS)
    return schedule_kept(watch, settings)


# ---------------------------------------------------------------- kills


@dataclass(frozen=True)
class Comeback:
    """Medians over the kills of an unlimited run, from the start of the new process at the end of the absence."""

    boot_seconds: float
    """To the start of its machine: fork, model, data, a place. The simulator does not include it."""
    first_step_seconds: float
    """To its first inner step, recovery included."""


def failure_model(free: Calibration, comeback: Comeback, mtbi: float, away: float) -> FailureModel:
    """Each learner is one slice of one chip."""
    return FailureModel(
        mtbi_seconds=mtbi, slice_chips=1, step_seconds=free.period_seconds, step_noise=0.0, down_seconds=0.0,
        up_seconds=comeback.first_step_seconds, return_seconds=away,
    )  # fmt: skip


def histories(model: FailureModel, learners: int, seed: int, span: float) -> list[list[Stretch]]:
    streams = np.random.default_rng([seed, learners]).spawn(learners)
    return [SlicedLearner(1, model, stream).advance(span) for stream in streams]


def kill_plan(drawn: Sequence[Sequence[Stretch]], model: FailureModel) -> ChaosPlan:
    """A failure is a kill at the end of the step in which it is noticed; the absence is the stop without the comeback."""
    kills = [
        Kill(round(s.start + s.seconds, 3), learner, max(0.05, round(s.stop - model.up_seconds, 3)))
        for learner, history in enumerate(drawn)
        for s in history
        if s.stop > 0
    ]
    return ChaosPlan(tuple(sorted(kills, key=lambda kill: kill.at)))


def on_virtual_clock(plan: ChaosPlan, first_round: float, comeback: Comeback) -> ChaosPlan:
    """A live plan's clock starts with the first round, a virtual one's with the run; a virtual process starts at once."""
    kills = (f for f in plan.faults if isinstance(f, Kill))
    return ChaosPlan(tuple(Kill(f.at + first_round, f.learner, f.lasts + comeback.boot_seconds) for f in kills))


def killed_machines(
    settings: Config, free: Calibration, parameters: int, plan: ChaosPlan, comeback: Comeback, window: float
) -> float:
    virtual = on_virtual_hardware(settings, free, parameters, None)
    start = virtual_run(msgspec.structs.replace(virtual, total_steps=2)).first_round
    assert start is not None
    run = virtual_run(virtual, on_virtual_clock(plan, seconds(start), comeback))
    return free.busy * run.goodput(min(window, run.lasted()), settings.learners)


def history_goodput(drawn: Sequence[Sequence[Stretch]], window: float) -> float:
    """The goodput simulator's count of this history, in its first `window` seconds."""
    useful = sum(s.useful * min(1.0, max(0.0, (window - s.start) / s.seconds)) for history in drawn for s in history)
    return useful / (len(drawn) * window)


def expected_goodput(model: FailureModel, learners: int, window: float) -> tuple[float, float]:
    """Goodput of an endless run, and the standard deviation of runs of one window."""
    expected = simulate(learners, learners, model, precision=PRECISION).goodput / 100
    runs = [history_goodput(histories(model, learners, seed, window), window) for seed in range(SPREAD_RUNS)]
    return expected, pstdev(runs)
