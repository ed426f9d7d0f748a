"""One learner's history of failures: a chip that fails takes its slice down.

The model is the papers' chaos model. Chips fail only while they execute, independently of each other, so the failures of a
step are Poisson. A failed chip takes its whole slice down, and the slice returns after an exponentiated-Weibull delay. A
failure is noticed at the end of the step, which still counts for the remaining slices. One resize at a step boundary covers
all slices that failed or returned since the last resize, and at least one step lies between two resizes. Without elasticity
a spare slice replaces the failed one, and all chips restart.

The simulation has no averages: every failure names a chip, every chip a slice, every slice a time of return.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from atoll.errors import UserError

YEAR = 365 * 86400.0
DRAWS = 4096
"""Random numbers drawn at once."""


@dataclass(frozen=True)
class FailureModel:
    """The papers describe the model without these constants; the defaults reproduce the published table."""

    mtbi_seconds: float = YEAR
    """Mean time between interruptions of one chip, while it executes."""
    slice_chips: int = 128
    step_seconds: float = 5.0
    step_noise: float = 0.02
    """Standard deviation of a step's duration, as a share of its mean."""
    down_seconds: float = 16.0
    """Duration of a resize after failures."""
    up_seconds: float = 8.0
    """Duration of a resize that adds returned slices; one that does both takes the longer of the two."""
    restart_seconds: float = 85.0
    """Without elasticity: from a failure to the next step, on a spare slice."""
    return_seconds: float = 3600.0
    """Mean of the exponentiated-Weibull delay until a failed chip returns."""
    return_shape: float = 0.8
    return_exponent: float = 2.0

    def __post_init__(self) -> None:
        may_be_zero = ("step_noise", "down_seconds", "up_seconds", "restart_seconds")
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0 or (value == 0 and field.name not in may_be_zero):
                least = "0 or more" if field.name in may_be_zero else "above 0"
                raise UserError(f"{field.name} = {value:g}: must be {least}, and finite")
        if self.step_noise >= 1:
            raise UserError(f"step_noise = {self.step_noise:g}: is a share of a step's mean, and must be below 1")

    def describe(self) -> str:
        """One line that is printed with every table."""
        return (
            f"MTBI {self.mtbi_seconds / 86400:g} days a chip, slices of {self.slice_chips} chips, step {self.step_seconds:g} s "
            f"(noise {self.step_noise:g}), resize down {self.down_seconds:g} s and up {self.up_seconds:g} s, restart without "
            f"elasticity {self.restart_seconds:g} s, return after {self.return_seconds / 60:g} min on average "
            f"(exponentiated Weibull, shape {self.return_shape:g}, exponent {self.return_exponent:g})"
        )


@dataclass(frozen=True)
class Delays:
    """Exponentiated Weibull, scaled to its mean: F(x) = (1 - exp(-(x/scale)^shape))^exponent."""

    mean: float
    shape: float
    exponent: float

    def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
        u = rng.random(size)
        scale = self.mean / _unit_mean(self.shape, self.exponent)
        drawn: np.ndarray = scale * (-np.log1p(-(u ** (1 / self.exponent)))) ** (1 / self.shape)
        return drawn


@lru_cache(maxsize=64)
def _unit_mean(shape: float, exponent: float) -> float:
    """With y = (x/scale)^shape the mean is the integral of y^(1/shape) exponent (1 - e^-y)^(exponent-1) e^-y."""
    y = np.linspace(0.0, 60.0 + 4.0 / shape, 400_001)[1:]
    density = y ** (1 / shape) * exponent * (-np.expm1(-y)) ** (exponent - 1) * np.exp(-y)
    return float(np.sum(density) * (y[1] - y[0]))


class Stretch(NamedTuple):
    """Whole steps without an event, and the pause that follows."""

    start: float
    """Seconds."""
    steps: int
    seconds: float
    """Duration of the steps."""
    live: int
    """Chips that step."""
    last_live: int
    """Chips whose last step counts: failures are noticed at its end."""
    stop: float
    """Seconds of pause after the steps."""
    moved: tuple[int, ...] = ()
    """Slices that failed or returned at the end of the steps."""

    @property
    def useful(self) -> float:
        """Chip seconds."""
        return self.seconds * (self.live - (self.live - self.last_live) / self.steps) if self.steps else 0.0

    @property
    def end(self) -> float:
        return self.start + self.seconds + self.stop


class SlicedLearner:
    """A learner's chips. `advance` returns its history up to a time; a later call continues it."""

    def __init__(self, chips: int, model: FailureModel, rng: np.random.Generator, *, elastic: bool = True) -> None:
        self.chips, self._model, self._rng, self._elastic = chips, model, rng, elastic
        self.slices = math.ceil(chips / model.slice_chips)
        self.now = 0.0
        self._away: list[tuple[float, int]] = []
        """A heap of (time of return, slice)."""
        self._down = bytearray(self.slices)
        self._live = chips
        self._steps = 0
        """Executed so far. Chips fail by this clock, because they fail only while they execute."""
        self._per_step = chips * model.step_seconds / model.mtbi_seconds
        self._delays = Delays(model.return_seconds, model.return_shape, model.return_exponent)
        self._refill()
        self._next_failure = self._gaps[0]

    def _refill(self) -> None:
        self._gaps = self._rng.exponential(1 / self._per_step, DRAWS).tolist()
        self._victims = self._rng.integers(0, self.chips, DRAWS).tolist()
        self._absences = self._delays.draw(self._rng, DRAWS).tolist()
        self._noises = self._rng.standard_normal(DRAWS).tolist()
        self._drawn = self._noisy = 0

    def advance(self, until: float, *, exactly: bool = False) -> list[Stretch]:
        """`exactly`: the last stretch ends at the first step boundary after `until`, and not at the next failure, which may be
        days later."""
        history: list[Stretch] = []
        while self.now < until:
            history.append(self._stretch(until if exactly else math.inf))
        return history

    def _stretch(self, until: float = math.inf) -> Stretch:
        """Up to the next step boundary at which a slice failed or returned."""
        start, live, step = self.now, self._live, self._model.step_seconds
        steps = int(self._next_failure) + 1 - self._steps
        if until < math.inf:
            steps = min(steps, max(1, math.ceil((until - start) / step)))
        if self._away:
            steps = min(steps, max(1, math.ceil((self._away[0][0] - start) / step)))
        seconds = self._duration(steps)
        survivors, stop, moved = self._boundary(start + seconds, steps)
        return Stretch(start, steps, seconds, live, survivors, stop, moved)

    def step(self, now: float) -> Stretch:
        """For a caller with its own clock: one step ended at `now`."""
        live, seconds = self._live, self._model.step_seconds
        survivors, stop, moved = self._boundary(now, 1)
        return Stretch(now - seconds, 1, seconds, live, survivors, stop, moved)

    @property
    def live(self) -> int:
        return self._live

    def _boundary(self, now: float, steps: int) -> tuple[int, float, tuple[int, ...]]:
        """After `steps` more steps: chips that survived the last one, seconds of pause, slices that failed or returned."""
        self.now = now
        self._steps += steps
        failed = self._failures()
        survivors = self._live
        if not self._elastic:
            stop, returned = self._model.restart_seconds if failed else 0.0, []
        elif survivors:
            returned = self._returns(now)
            stop = max(self._model.down_seconds if failed else 0.0, self._model.up_seconds if returned else 0.0)
        else:  # no slice is left: the learner continues when the first one returns
            back = self._away[0][0]
            returned = self._returns(back)
            stop = back - now + self._model.up_seconds
        self.now += stop
        return survivors, stop, (*failed, *returned)

    def _duration(self, steps: int) -> float:
        """The sum of `steps` noisy steps, drawn at once."""
        mean = steps * self._model.step_seconds
        if self._model.step_noise == 0 or steps == 0:
            return mean
        self._noisy = (self._noisy + 1) % DRAWS
        noise = self._model.step_noise * self._noises[self._noisy] / math.sqrt(steps)
        return float(mean * max(0.1, 1.0 + noise))

    def _failures(self) -> list[int]:
        """Slices that lost a chip in the steps just executed. A chip of a slice that is down executes nothing, so it cannot
        fail."""
        failed: list[int] = []
        while self._next_failure < self._steps:
            chip, absence = self._victims[self._drawn], self._absences[self._drawn]
            self._drawn += 1
            if self._drawn == DRAWS:
                self._refill()
            self._next_failure += self._gaps[self._drawn]
            slice_ = chip // self._model.slice_chips
            if self._down[slice_]:
                continue
            failed.append(slice_)
            if self._elastic:
                self._down[slice_] = 1
                self._live -= self.size(slice_)
                heapq.heappush(self._away, (self.now + absence, slice_))
        return failed

    def _returns(self, by: float) -> list[int]:
        back: list[int] = []
        while self._away and self._away[0][0] <= by:
            slice_ = heapq.heappop(self._away)[1]
            self._down[slice_] = 0
            self._live += self.size(slice_)
            back.append(slice_)
        return back

    def size(self, slice_: int) -> int:
        """Chips of a slice; the last one may be smaller."""
        return min(self._model.slice_chips, self.chips - slice_ * self._model.slice_chips)
