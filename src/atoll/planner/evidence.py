"""The rows that the quality model is fitted to, the fit, and its residuals.

Published losses have known sizes and learners, and are fitted in points. The project's own rows are of other optimisers and far
shorter runs, so only the shape of each series counts: its values over their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.planner.quality import INTERVAL, SIZE
from atoll.sim.estimates.published import LOSSES_BY_LEARNERS, QUALITY, SIZES


@dataclass(frozen=True)
class LossRow:
    source: str
    parameters: float
    learners: int
    interval: int
    percent: float
    """Loss above data-parallel at equal tokens."""


@dataclass(frozen=True)
class OwnSeries:
    """Own rows that differ in H or in M alone, by the name of the run in `file` (bench/quality/results)."""

    file: str
    reference: str
    runs: tuple[str, ...]
    learners: tuple[int, ...]
    interval: tuple[int, ...]
    percent: tuple[float, ...]


OWN = (
    OwnSeries("ablations_50M.jsonl", "data_parallel", ("h12", "base", "h48"), (8, 8, 8), (12, 24, 48), (13.24, 14.41, 16.30)),
    OwnSeries("main_200M.jsonl", "data_parallel", ("streaming_m8_h30", "streaming_m8_h100"), (8, 8), (30, 100), (2.16, 3.33)),
    OwnSeries("main_200M.jsonl", "data_parallel", ("decoupled_m2", "decoupled_m4", "decoupled_m8"), (2, 4, 8), (12, 12, 12),
           (0.15, 0.32, 1.14)),
)  # fmt: skip
OWN_OVERLAP = OwnSeries(
    "ablations_50M.jsonl", "data_parallel", ("overlap_0", "overlap_2", "overlap_5", "overlap_10"), (8,) * 4, (24,) * 4,
    (14.09, 14.72, 15.81, 18.55),
)  # fmt: skip
"""By tau: 0, 2, 5, 10. The staleness that they differ in is tau."""
OVERLAPS = (0, 2, 5, 10)
OWN_SYNCHRONOUS, OWN_DECOUPLED = (30, 1.39), (12, 1.14)
"""(H, per cent) of `diloco_m8_h30` and `decoupled_m8` in main_200M.jsonl: the one pair that tells what asynchrony costs."""
DECOUPLED_STALENESS = 1.0
"""Steps from pull to adoption in `decoupled_m8`."""


def published() -> list[LossRow]:
    """Every published loss of two or more learners, as per cent above data-parallel of the same table."""
    found = [
        LossRow("scaling laws", parameters, m, INTERVAL, 100 * (loss / losses[0] - 1))
        for parameters, losses in LOSSES_BY_LEARNERS.items()
        for m, loss in zip((2, 4, 8), losses[2:], strict=False)
    ]
    alone = {size: loss for size, method, _, loss in QUALITY if method == "data_parallel"}
    return found + [
        LossRow("streaming", SIZES[size][0], 2, h, 100 * (loss / alone[size] - 1))
        for size, _, h, loss in QUALITY
        if h is not None
    ]


def shape(rows: Sequence[LossRow], size: float, interval: float, doubling: float) -> np.ndarray:
    """The model's loss of each row, with a base of 1."""
    n, m, h = (np.array([getattr(r, key) for r in rows], dtype=float) for key in ("parameters", "learners", "interval"))
    return np.asarray((n / SIZE) ** -size * (h / INTERVAL) ** interval * (1 + doubling * (np.log2(m) - 1)))


def fitted_base(size: float, interval: float, doubling: float) -> float:
    rows = published()
    predicted, known = shape(rows, size, interval, doubling), np.array([r.percent for r in rows])
    return float(predicted @ known / (predicted @ predicted))


def residuals(base: float, size: float, interval: float, doubling: float) -> list[tuple[LossRow, float]]:
    """Of the published rows, in points: the model less the row."""
    rows = published()
    return [(r, float(base * p - r.percent)) for r, p in zip(rows, shape(rows, size, interval, doubling), strict=True)]


def misfit(size: float, interval: float, doubling: float) -> float:
    """What the fit minimises: squared points of the published rows, and squared shares of the own series' means."""
    known = [r for _, r in residuals(fitted_base(size, interval, doubling), size, interval, doubling)]
    total = float(np.square(known).sum())
    for s in OWN:
        rows = [LossRow("own", SIZE, m, h, p) for m, h, p in zip(s.learners, s.interval, s.percent, strict=True)]
        predicted, measured = shape(rows, size, interval, doubling), np.array(s.percent)
        total += float(np.square(predicted / predicted.mean() - measured / measured.mean()).sum())
    return total


def fitted_staleness() -> float:
    """Least squares through tau = 0: the share of the loss that each step of tau adds."""
    first = OWN_OVERLAP.percent[0]
    added = [(tau, p / first - 1) for tau, p in zip(OVERLAPS, OWN_OVERLAP.percent, strict=True)]
    return sum(tau * share for tau, share in added) / sum(tau * tau for tau, _ in added)


def fitted_asynchrony(interval: float, staleness: float) -> float:
    h, synchronous = OWN_SYNCHRONOUS
    mine, decoupled = OWN_DECOUPLED
    return float(decoupled / (synchronous * (mine / h) ** interval * (1 + staleness * DECOUPLED_STALENESS)))
