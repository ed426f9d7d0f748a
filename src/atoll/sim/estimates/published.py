"""Published tables as data, and the known constants behind them."""

from __future__ import annotations

from typing import Final

import numpy as np

from atoll.sim.estimates.utilisation import Compute, Curve

# ---------------------------------------------------------------- Streaming DiLoCo (arXiv 2501.18512), Table 4

MODELS: Final[dict[str, Compute]] = {
    "1B": Compute(layers=24, parameters=1e9, step_seconds=0.1),
    "10B": Compute(layers=48, parameters=1e10, step_seconds=0.8),
    "100B": Compute(layers=108, parameters=1e11, step_seconds=4.9),
}
INTERVAL: Final = 100
LAYERS_PER_FRAGMENT: Final = 3
CALIBRATION: Final = 1.2
"""The printed step times fit the printed bandwidths if a step takes 1.2 times as long, or 16 bits count as 13.33."""

TARGETS: Final = (50, 80, 90, 95, 99)
"""Per cent of compute utilisation."""
BANDWIDTH: Final[dict[tuple[str, str], tuple[float, ...]]] = {
    ("1B", "data_parallel"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "diloco"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "streaming_overlap"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "streaming_overlap_fp4"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10B", "data_parallel"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10B", "diloco"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10B", "streaming"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10B", "streaming_overlap"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10B", "streaming_overlap_fp4"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("100B", "data_parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "diloco"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", "streaming"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100B", "streaming_overlap"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", "streaming_overlap_fp4"): (0.5, 0.9, 1.1, 1.1, 1.4),
}
"""Gbit/s by model and method, one for each of TARGETS."""


def bandwidth_grid() -> Curve:
    """The bandwidths at which the table was evaluated."""
    return np.logspace(-1, 3, 50)


def printed(gbit: float) -> float:
    """As the table prints it. It has 2.947 as 3.0 and 1.151 as 1.1: rounded to two decimals first, then to one."""
    return round(round(float(gbit), 2), 1)  # numpy's own floats round differently


def grid_points_apart(ours: float | None, published: float) -> int:
    """Distance, in points of the grid, from our value to the nearest one that would be printed as the published cell."""
    values = bandwidth_grid()
    at = len(values) if ours is None else int(np.abs(values - ours).argmin())
    return min(abs(at - point) for point, value in enumerate(values) if printed(value) == published)


# ---------------------------------------------------------------- Decoupled DiLoCo (arXiv 2604.21428), Table 1

GOODPUT: Final[dict[tuple[int, bool], dict[int, int]]] = {
    (1, False): {150_000: 72, 300_000: 57, 600_000: 38, 1_200_000: 27, 2_400_000: 18},
    (1, True): {150_000: 88, 300_000: 80, 600_000: 69, 1_200_000: 58, 2_400_000: 40},
    (2, True): {150_000: 94, 300_000: 88, 600_000: 80, 1_200_000: 70, 2_400_000: 54},
    (4, True): {150_000: 96, 300_000: 93, 600_000: 89, 1_200_000: 82, 2_400_000: 73},
    (8, True): {150_000: 98, 300_000: 96, 600_000: 94, 1_200_000: 88, 2_400_000: 80},
    (16, True): {150_000: 99, 300_000: 98, 600_000: 96, 1_200_000: 93, 2_400_000: 86},
}
"""By (learners, elastic) and chips: per cent of chip time in steps that count. The mean time between interruptions of a chip
is a year."""
UPTIME: Final[dict[tuple[int, bool], dict[int, int]]] = {
    (1, False): {150_000: 72, 300_000: 57, 600_000: 38, 1_200_000: 27, 2_400_000: 18},
    (1, True): {150_000: 88, 300_000: 81, 600_000: 69, 1_200_000: 59, 2_400_000: 42},
    (2, True): {150_000: 100, 300_000: 97, 600_000: 96, 1_200_000: 90, 2_400_000: 80},
    (4, True): {150_000: 100, 300_000: 100, 600_000: 99, 1_200_000: 99, 2_400_000: 99},
    (8, True): {150_000: 100, 300_000: 100, 600_000: 100, 1_200_000: 100, 2_400_000: 99},
    (16, True): {150_000: 100, 300_000: 100, 600_000: 100, 1_200_000: 100, 2_400_000: 99},
}
"""Per cent of the time in which at least one learner trains."""

# ---------------------------------------------------------------- quality

QUALITY: Final[tuple[tuple[str, str, int | None, float], ...]] = (
    ("35M", "data_parallel", None, 3.51), ("35M", "diloco", 30, 3.54), ("35M", "streaming", 30, 3.53),
    ("35M", "streaming", 100, 3.56),
    ("100M", "data_parallel", None, 3.19), ("100M", "diloco", 30, 3.21), ("100M", "streaming", 30, 3.21),
    ("100M", "streaming", 100, 3.22), ("200M", "data_parallel", None, 2.97), ("200M", "streaming", 30, 2.98),
    ("500M", "data_parallel", None, 2.67), ("500M", "streaming", 30, 2.67), ("1B", "data_parallel", None, 2.49),
    ("1B", "streaming", 30, 2.48), ("4B", "data_parallel", None, 2.25), ("4B", "streaming", 100, 2.26),
)  # fmt: skip
"""Streaming DiLoCo, Table 5: size, method (streaming overlaps and sends 4 bits), H, held-out loss. Two replicas."""
SIZES: Final[dict[str, tuple[float, float]]] = {
    "35M": (35e6, 0.7e9), "100M": (1e8, 1.5e9), "200M": (2e8, 3.5e9), "300M": (3e8, 6e9), "500M": (5e8, 11e9), "1B": (1e9, 25e9),
    "4B": (4e9, 83e9),
}  # fmt: skip
"""Streaming DiLoCo, Table 2: parameters and training tokens."""
LOSSES_BY_LEARNERS: Final[dict[float, tuple[float, ...]]] = {
    35e6: (3.485, 3.482, 3.508, 3.554, 3.621), 90e6: (3.167, 3.162, 3.182, 3.213, 3.265),
    180e6: (2.950, 2.943, 2.957, 2.981, 3.019), 335e6: (2.784, 2.777, 2.788, 2.808, 2.841),
    550e6: (2.653, 2.645, 2.657, 2.673, 2.698), 1.3e9: (2.460, 2.451, 2.464, 2.472, 2.493),
    2.4e9: (2.326, 2.317, 2.323, 2.332, 2.351), 4e9: (2.224, 2.219, 2.220, 2.230), 10e9: (2.090, 2.086, 2.086, 2.096),
}  # fmt: skip
"""DiLoCo scaling laws (arXiv 2503.09799), Tables 4 and 5, by parameters: held-out loss of data-parallel and of synchronous DiLoCo
with 1, 2, 4 and 8 learners. H = 30, AdamW inside, Nesterov outside, 20 tokens a parameter."""
COMPRESSION: Final[dict[int, float]] = {16: 0.0, 4: 0.09, 2: 32.0, 1: 83.0}
"""Decoupled DiLoCo, Table 10: by bits, how much the validation loss exceeds that of 16 bits, in per cent."""
