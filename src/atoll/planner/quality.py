"""The cost of less communication in loss, and of that loss in tokens. All constants are those of `site.Quality`.

    loss above data-parallel = base * g(M) * (parameters / 35M)^-size * (H / 30)^interval * (1 + s * staleness) [* asynchrony]
                               + codec
    token efficiency         = (1 + loss)^(-1 / slope)

`base` and the two exponents are a least-squares fit of the published table (Streaming DiLoCo, table 5: two replicas, 35M to
4B). g is 1 at two learners and grows by a constant with each doubling, through the published +0.7 % and +3.9 % of 2 and 8
decoupled learners at 35M. `slope` is the exponent at which loss falls with compute over the sizes of the same table: it says
how much compute makes up for a loss. The other constants are our estimates; docs/planning/planner.md gives their reasons.
"""

from __future__ import annotations

import math

from atoll.config.codecs import codec_spec
from atoll.errors import ConfigError
from atoll.planner.site import Quality

SIZE = 35e6
INTERVAL = 30
PUBLISHED_LEARNERS = 8


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


def token_efficiency(loss: float, quality: Quality) -> float:
    """Tokens that data-parallel needs for the same loss, divided by those of this candidate. `loss` is in per cent."""
    return float((1.0 + loss / 100.0) ** (-1.0 / quality.loss_slope))
