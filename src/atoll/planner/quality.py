"""The cost of less communication in loss, and of that loss in tokens. All constants are those of `site.Quality`.

    loss above data-parallel = base * g(M) * (parameters / 35M)^-size * (H / 30)^interval * (1 + s * staleness) [* asynchrony]
                               + codec
    token efficiency         = (1 + loss)^(-1 / slope)

`base`, the exponents and the growth of g with each doubling of the learners are fitted to published losses of synchronous DiLoCo
(35M to 10B, 1 to 8 learners) and of Streaming DiLoCo, and to the shape of the project's own rows: evidence.py has the rows and
their residuals. `slope` is the exponent at which loss falls with compute over the sizes of a published table: it says how much
compute makes up for a loss. SUPPORT says what each constant rests on; docs/planning/planner.md gives the reasons.
"""

from __future__ import annotations

import math

from atoll.config.codecs import codec_spec
from atoll.errors import ConfigError
from atoll.planner.site import Quality

SIZE = 35e6
INTERVAL = 30
PUBLISHED_LEARNERS, PUBLISHED_SIZE = 8, 10e9
RESIDUAL_POINTS = 0.21
"""Root mean square of the fit's residuals, in points of loss."""
CONVEX = (0.593, 1.417, 0.763)
"""Base, growth and curvature of g in the logarithm of M, fitted to the same published rows. Up to 8 learners it fits them as
well; beyond, it grows faster, and is the other end of the band."""
SUPPORT = {
    "base_percent": "fitted", "size_exponent": "fitted", "interval_exponent": "fitted", "learners_doubling": "fitted",
    "asynchrony": "fitted to one pair of own rows", "staleness_step": "fitted to four own rows", "four_bit_percent": "published",
    "kept_share": "assumed", "loss_slope": "fitted",
}  # fmt: skip
"""By key of [quality]: what the constant rests on."""


def learners_factor(learners: int, quality: Quality) -> float:
    """0 for one learner, 1 for two."""
    if learners <= 1:
        return 0.0
    return 1.0 + quality.learners_doubling * (math.log2(learners) - 1.0)


def codec_percent(codec: str, quality: Quality) -> float:
    spec = codec_spec(codec)
    if spec.loss_percent is None:
        raise ConfigError(f"codec {codec!r}: its loss is not known; give its row a loss_percent, which the planner needs")
    return spec.loss_percent + spec.four_bit_share * quality.four_bit_percent


def loss_percent(
    quality: Quality, *, parameters: float, learners: int, interval: float, staleness: float, asynchronous: bool,
    codecs: tuple[str, str],
) -> float:  # fmt: skip
    """Above data-parallel at equal tokens. `interval` is the one that is kept; `staleness` is in inner steps."""
    if learners <= 1:
        return 0.0
    cost = quality.base_percent * learners_factor(learners, quality)
    cost *= math.pow(parameters / SIZE, -quality.size_exponent) * math.pow(interval / INTERVAL, quality.interval_exponent)
    cost *= 1.0 + quality.staleness_step * staleness
    cost *= quality.asynchrony if asynchronous else 1.0
    return cost + sum(codec_percent(codec, quality) for codec in codecs)


def loss_band(
    central: float, quality: Quality, *, parameters: float, learners: int, codecs: tuple[str, str]
) -> tuple[float, float]:
    """(least, most) per cent around a loss of `central`. Within the published rows, their residuals; beyond 8 learners also the
    difference to a convex growth with them, and beyond 10B parameters a loss that falls no further."""
    if learners <= 1:
        return 0.0, 0.0
    codec = sum(codec_percent(each, quality) for each in codecs)
    own, other = central - codec, central - codec
    if learners > PUBLISHED_LEARNERS:
        base, growth, curve = CONVEX
        doublings = math.log2(learners) - 1.0
        convex = base * (1 + growth * doublings + curve * doublings**2)
        other *= convex / (quality.base_percent * learners_factor(learners, quality))
    most = max(own, other) * max(1.0, parameters / PUBLISHED_SIZE) ** quality.size_exponent
    return max(0.0, min(own, other) - RESIDUAL_POINTS) + codec, most + RESIDUAL_POINTS + codec


def token_efficiency(loss: float, quality: Quality) -> float:
    """Tokens that data-parallel needs for the same loss, divided by those of this candidate. `loss` is in per cent."""
    return float((1.0 + loss / 100.0) ** (-1.0 / quality.loss_slope))
