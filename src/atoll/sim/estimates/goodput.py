"""Goodput and uptime of N chips in M learners, by simulating every chip's failures (sim/estimates/failures.py).

Learners do not wait for each other, so a failure stops one learner. Data-parallel training is one learner of all chips.

* goodput: share of the allocated chip time spent in steps that count.
* uptime: share of time in which at least one learner steps.
* effective batch: share of its chips that a learner has while it steps; its batch shrinks by the same factor.

The closed form checks the simulation and is never a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atoll.errors import UserError
from atoll.sim.estimates.failures import FailureModel, SlicedLearner, Stretch

DAY = 86400.0
BATCHES = 20
"""Pieces of the run, each long compared with an absence; the scatter of their means gives the standard error."""
FAILURES_FIRST = 2000
"""Failures that a run to a given precision simulates before its first estimate of the precision."""
FAILURES_MAX = 3_000_000
QUANTILES = (0.01, 0.1, 0.5, 0.9)


@dataclass(frozen=True)
class GoodputEstimate:
    learners: int
    elastic: bool
    chips: int
    goodput: float
    """Per cent, like all shares here."""
    uptime: float
    standard_error: float
    """Percentage points; the greater of goodput's and uptime's."""
    effective_batch: float
    live: tuple[float, ...]
    """Per cent of a learner's slices that are up, at the QUANTILES of its time."""
    days: float
    stops: int
    """Simulated resizes and restarts."""


def check_sizes(chips: int, learners: int, model: FailureModel) -> None:
    if chips < 1:
        raise UserError(f"--chips {chips}: must be at least 1")
    if learners < 1:
        raise UserError(f"--learners {learners}: must be at least 1")
    slices = math.ceil(chips / model.slice_chips)
    if learners > slices:
        raise UserError(
            f"--learners {learners}: more than the {slices} slices that {chips} chips make in slices of {model.slice_chips}; "
            f"a learner needs at least one"
        )


def simulate(
    chips: int, learners: int, model: FailureModel, *, elastic: bool = True, days: float | None = None,
    precision: float = 0.1, seed: int = 0, progress: Callable[[float], None] | None = None,
) -> GoodputEstimate:  # fmt: skip
    """For `days`, or until the standard error is at most `precision` points. `progress` gets the days simulated so far."""
    check_sizes(chips, learners, model)
    if days is not None and not (0 < days < math.inf):
        raise UserError(f"--days {days:g}: must be above 0")
    if not precision > 0:
        raise UserError(f"--precision {precision:g}: must be above 0 points")
    each = _Cluster(chips, learners, model, elastic, seed)
    if days is not None:
        return each.run(days * DAY, progress)
    mean_gap = model.mtbi_seconds / chips
    span = max(FAILURES_FIRST * mean_gap, BATCHES * 4 * model.return_seconds)
    while True:
        answer = each.run(span, progress)
        if answer.standard_error <= precision or span > FAILURES_MAX * mean_gap:
            return answer
        span *= min(4.0, max(1.3, 1.2 * (answer.standard_error / precision) ** 2))


class _Cluster:
    def __init__(self, chips: int, learners: int, model: FailureModel, elastic: bool, seed: int) -> None:
        self._chips, self._model, self._elastic = chips, model, elastic
        self._learners = learners_of(chips, learners, model, seed, elastic=elastic)
        self._histories: list[list[Stretch]] = [[] for _ in self._learners]

    def run(self, until: float, progress: Callable[[float], None] | None) -> GoodputEstimate:
        """Continue up to `until`. The time before the first absences are over does not count."""
        for done, (learner, history) in enumerate(zip(self._learners, self._histories, strict=True), 1):
            history += learner.advance(until)
            if progress is not None:
                progress(until / DAY * done / len(self._learners))
        edges = np.linspace(min(2 * self._model.return_seconds, until / 10), until, BATCHES + 1)
        span = edges[1] - edges[0]
        useful = sum(np.diff(_useful_by(edges, history)) for history in self._histories)
        goodput = 100 * useful / (self._chips * span)
        uptime = 100 * (1 - np.diff(_idle_by(edges, self._histories)) / span)
        errors = [float(np.std(shares, ddof=1)) / math.sqrt(BATCHES) for shares in (goodput, uptime)]
        batch, live = self._sizes()
        return GoodputEstimate(
            len(self._learners), self._elastic, self._chips, float(np.mean(goodput)), float(np.mean(uptime)), max(errors),
            batch, live, until / DAY, sum(len(h) for h in self._histories),
        )  # fmt: skip

    def _sizes(self) -> tuple[float, tuple[float, ...]]:
        """Shares of a learner's chips that step, weighted by time: their mean over all chips, and their quantiles."""
        owned = [(m.chips, s) for m, history in zip(self._learners, self._histories, strict=True) for s in history]
        shares = np.array([s.live / chips for chips, s in owned])
        lasts = np.array([s.seconds for _, s in owned])
        order = np.argsort(shares)
        below = np.cumsum(lasts[order]) / np.sum(lasts)
        at = np.minimum(np.searchsorted(below, QUANTILES), len(order) - 1)
        live = tuple(float(share) for share in 100 * shares[order][at])
        weights = lasts * np.array([chips for chips, _ in owned])
        return float(100 * np.average(shares, weights=weights)), live


def learners_of(chips: int, learners: int, model: FailureModel, seed: int, *, elastic: bool = True) -> list[SlicedLearner]:
    """Each learner has its share of the chips and its own random stream."""
    streams = np.random.default_rng([seed, chips, learners]).spawn(learners)
    return [SlicedLearner(n, model, rng, elastic=elastic) for n, rng in zip(deal(chips, learners), streams, strict=True)]


def deal(chips: int, learners: int) -> list[int]:
    """As evenly as whole chips allow."""
    each, more = divmod(chips, learners)
    return [each + (m < more) for m in range(learners)]


def _useful_by(edges: np.ndarray, history: list[Stretch]) -> np.ndarray:
    """Chip seconds of useful steps up to each edge: linear while a learner steps, flat while it pauses."""
    table = np.array([(s.start, s.start + s.seconds, s.useful) for s in history])
    times = table[:, :2].reshape(-1)
    done = np.concatenate([[0.0], np.cumsum(table[:, 2])])
    values = np.stack([done[:-1], done[1:]], axis=1).reshape(-1)
    return np.asarray(np.interp(edges, times, values))


def _idle_by(edges: np.ndarray, histories: list[list[Stretch]]) -> np.ndarray:
    """Seconds up to each edge in which no learner steps."""
    stops = np.array([(s.start + s.seconds, s.end) for h in histories for s in h if s.stop > 0])
    if len(stops) == 0:
        return np.zeros(len(edges))
    times = stops.T.reshape(-1)
    change = np.repeat([1, -1], len(stops))
    order = np.argsort(times, kind="stable")
    times = times[order]
    all_stand = np.cumsum(change[order])[:-1] == len(histories)
    idle = np.concatenate([[0.0], np.cumsum(np.where(all_stand, np.diff(times), 0.0))])
    return np.asarray(np.interp(edges, times, idle))


def closed_form(chips: int, learners: int, model: FailureModel, *, elastic: bool = True) -> float:
    """Goodput in per cent if every failure and every return has a resize of its own: a check of the simulator.

    A step of a learner with x expected failures sees a failure with probability 1 - exp(-x), and a return equally often.
    """
    step = model.step_seconds
    x = chips / learners * step / model.mtbi_seconds
    hit = -math.expm1(-x)
    if not elastic:
        return 100 * step / (step + model.restart_seconds * hit)
    either = -math.expm1(-2 * x)
    both = 2 * hit - either
    longer = max(model.down_seconds, model.up_seconds)
    stop = (hit - both) * (model.down_seconds + model.up_seconds) + both * longer
    present = 1 / (1 + model.slice_chips * model.return_seconds / model.mtbi_seconds)
    return 100 * present * step / (step + stop)
