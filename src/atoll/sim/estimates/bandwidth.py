"""The bandwidth table: for a model, a method and its settings, the bandwidth that each utilisation needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal

import numpy as np

from atoll.config import Config
from atoll.config.codecs import wire_bits
from atoll.sim.estimates.decoupled import (
    DecoupledEstimate,
    at_bandwidth,
    first_reaching_by_bisection,
    measure_decoupled,
    settings_for,
)
from atoll.sim.estimates.published import (
    BANDWIDTH,
    CALIBRATION,
    INTERVAL,
    LAYERS_PER_FRAGMENT,
    MODELS,
    TARGETS,
    bandwidth_grid,
    printed,
)
from atoll.sim.estimates.utilisation import Compute, Curve, Exchange, Method, Pattern, first_reaching, utilisation

ONE_ROUND: Final = -1
"""tau of `async_diloco` by default: its interval."""
GRAPH_METHODS: Final[dict[str, tuple[Method, int]]] = {
    "data_parallel": ("data_parallel", 0),
    "diloco": ("diloco", 0),
    "async_diloco": ("async_diloco", ONE_ROUND),
    "streaming": ("streaming", 0),
    "streaming_overlap": ("streaming", 1),
    "streaming_overlap_fp4": ("streaming", 1),
}
"""By name: the graph's method and its default tau."""
SYNCER_METHODS: Final = ("decoupled", "decoupled_ramp")
METHODS: Final = (*GRAPH_METHODS, *SYNCER_METHODS)
PUBLISHED_METHODS: Final = tuple(dict.fromkeys(method for _, method in BANDWIDTH))
FP4: Final = "streaming_overlap_fp4"
CURVE_POINTS: Final = 16
"""Of a decoupled curve: each point takes a run of the protocol machines."""


@dataclass(frozen=True)
class LinkSettings:
    """How datacentres exchange data. The defaults are those of the published table."""

    interval: int = INTERVAL
    overlap: int | None = None
    """tau of the methods that overlap; None: 1 for Streaming, 2 for Decoupled."""
    layers_per_fragment: int = LAYERS_PER_FRAGMENT
    fragments: int | None = None
    pattern: Pattern = "strided"
    codec: str = "bf16"
    bits: float | None = None
    """Effective bits per parameter; replaces codec and calibration."""
    calibration: Literal["published", "plain"] = "published"
    datacentres: int = 2
    latency_seconds: float = 0.0
    run_steps: int | None = None
    steady: bool = False

    @property
    def shrink(self) -> float:
        return CALIBRATION if self.calibration == "published" else 1.0

    def fragment_count(self, layers: int) -> int:
        return self.fragments or math.ceil(layers / self.layers_per_fragment)


@dataclass(frozen=True)
class Star:
    """Settings of Decoupled alone, which has a syncer in the middle. None: the preset's value."""

    learners: int | None = None
    """None: one per datacentre."""
    per_datacentre: int = 1
    """Learners that share a datacentre's link."""
    shards: int = 1
    """Of the syncer. 1: it is in no datacentre, and each datacentre's link carries its own learners' bytes only."""
    topology: Literal["star", "ring"] = "star"
    quorum: int | None = None
    grace: bool | None = None
    ramp: float | None = None
    codec_up: str | None = None
    codec_down: str | None = None
    down_ratio: float = 1.0
    """Bandwidth of a learner's down link over that of its up link; the table's bandwidth is the up link's."""

    @property
    def simulation_only(self) -> bool:
        """No live learner sums for others. A star of shards is `atoll syncer --shard-at`."""
        return self.shards > 1 and self.topology == "ring"


@dataclass(frozen=True)
class Question:
    model: str
    compute: Compute
    method: str
    link: LinkSettings = LinkSettings()
    star: Star = Star()

    @property
    def interval(self) -> int:
        return 1 if self.method == "data_parallel" else self.link.interval


@dataclass(frozen=True)
class Reached:
    """Utilisation at one bandwidth."""

    gbit: float
    utilisation: float
    remark: str = ""


@dataclass(frozen=True)
class Row:
    question: Question
    found: tuple[float | None, ...]
    """One value of the grid per target; None: no value of the grid reaches it."""
    published: tuple[float | None, ...] | None
    """None: the paper has no such row, or has it for other settings."""
    at: tuple[Reached, ...] = ()
    curve: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    """(Gbit/s, utilisation), for a figure."""

    @property
    def cells(self) -> tuple[float | None, ...]:
        """Rounded as in the paper where its cells are shown too, otherwise to four digits."""
        shown = printed if self.published else _four_digits
        return tuple(None if gbit is None else shown(gbit) for gbit in self.found)


def _four_digits(gbit: float) -> float:
    return float(f"{gbit:.4g}")


def row(question: Question, targets: Sequence[float], axis: Curve, at: Sequence[float] = (), *, curve: bool = False) -> Row:
    """One row of the table. `targets` are in per cent."""
    shares = [target / 100 for target in targets]
    if question.method in SYNCER_METHODS:
        found, reached, drawn = _through_the_syncer(question, shares, axis, at, curve)
    else:
        found, reached, drawn = _through_the_graph(question, shares, axis, at)
    beside = _published(question, targets, axis)
    return Row(question, tuple(found), beside, tuple(reached), tuple(drawn) if curve else ())


def _published(question: Question, targets: Sequence[float], axis: Curve) -> tuple[float | None, ...] | None:
    cells = BANDWIDTH.get((question.model, question.method))
    published = question.compute == MODELS.get(question.model) and question.link == LinkSettings()
    if cells is None or not published or not np.array_equal(axis, bandwidth_grid()):
        return None
    known = dict(zip(TARGETS, cells, strict=True))
    return tuple(known.get(int(target)) if target == int(target) else None for target in targets)


_Answer = tuple[list[float | None], list[Reached], list[tuple[float, float]]]

# ---------------------------------------------------------------- by the graph


def exchange_for(question: Question) -> Exchange:
    link = question.link
    method, overlap = GRAPH_METHODS[question.method]
    if overlap and link.overlap is not None:
        overlap = link.overlap
    overlap = link.interval if overlap == ONE_ROUND else overlap
    return Exchange(
        method, link.interval, overlap, link.layers_per_fragment, link.fragments, link.pattern,
        effective_bits(question.method, link), link.datacentres, link.latency_seconds,
    )  # fmt: skip


def effective_bits(method: str, link: LinkSettings) -> float:
    """The published calibration counts 4 bits as a quarter of 16; the plain one counts e3m0 with its scales."""
    if link.bits is not None:
        return link.bits / 4 if method == FP4 else link.bits
    if method == FP4:
        return 4.0 / link.shrink if link.calibration == "published" else wire_bits("e3m0")
    return wire_bits(link.codec) / link.shrink


def _through_the_graph(question: Question, shares: Sequence[float], axis: Curve, at: Sequence[float]) -> _Answer:
    link, exchange = question.link, exchange_for(question)
    rates = np.concatenate([axis, np.asarray(at, dtype=np.float64)])
    curve = utilisation(question.compute, exchange, rates, link.run_steps, steady=link.steady)
    shown, asked = curve[: len(axis)], curve[len(axis) :]
    reached = [Reached(gbit, float(value)) for gbit, value in zip(at, asked, strict=True)]
    drawn = [(float(gbit), float(value)) for gbit, value in zip(axis, shown, strict=True)]
    return first_reaching(shown, shares, axis), reached, drawn


# ---------------------------------------------------------------- by the machines


def config_for(question: Question) -> Config:
    """The preset with the question's settings. The published calibration shrinks the model instead of the bits: the link
    carries their product, and a codec's bits cannot be scaled."""
    link, star, compute = question.link, question.star, question.compute
    protocol: dict[str, Any] = {
        "local_steps_per_round": link.interval, "fragments": link.fragment_count(compute.layers),
        "overlap": link.overlap, "quorum": star.quorum, "ramp": star.ramp, "codec_up": star.codec_up,
        "codec_down": star.codec_down, "grace": None if star.grace is None else "adaptive" if star.grace else "none",
    }  # fmt: skip
    return settings_for(question.method, {
        "learners": star.learners or link.datacentres * star.per_datacentre,
        "protocol": {key: value for key, value in protocol.items() if value is not None},
        "cluster": {
            "step_seconds": compute.step_seconds, "latency_seconds": link.latency_seconds * _hops(question),
            "parameters": max(1, round(compute.parameters / link.shrink)),
        },
    })  # fmt: skip


def _hops(question: Question) -> int:
    """Links between a learner and the shard that it exchanges with."""
    ring = question.star.shards > 1 and question.star.topology == "ring"
    return question.link.datacentres - 1 if ring else 1


def shares_of_link(question: Question, up_bits: float, down_bits: float) -> tuple[float, float]:
    """The shares of a datacentre's link that one learner has, up and down. `up_bits`, `down_bits`: of a parameter.

    Shards are in datacentres, one in each of the first S. In a star every learner exchanges with every shard, so the link of a
    datacentre with a shard carries what its learners send to the others, and what its shard sends to the others' learners. In a
    ring the learners of a datacentre are summed first: each link carries (D-1)/D of the model as sums and as much as results.
    Bits that share a direction are charged as if they went one after the other.
    """
    star, d, s = question.star, question.link.datacentres, question.star.shards
    if s == 1:
        return 1 / star.per_datacentre, 1 / star.per_datacentre
    if star.topology == "ring":
        both = (d - 1) / d * (up_bits + down_bits)
        return up_bits / both, down_bits / both
    each = star.per_datacentre
    sent = max(each * up_bits * (1 - 1 / s) + (d - 1) * each * down_bits / s, each * up_bits if s < d else 0.0)
    received = max(each * down_bits * (1 - 1 / s) + (d - 1) * each * up_bits / s, each * down_bits if s < d else 0.0)
    return up_bits / sent, down_bits / received


def _through_the_syncer(
    question: Question, shares: Sequence[float], axis: Curve, at: Sequence[float], curve: bool
) -> _Answer:
    settings, down = config_for(question), question.star.down_ratio
    codecs = settings.protocol
    mine = shares_of_link(question, wire_bits(codecs.codec_up), wire_bits(codecs.codec_down))

    @cache
    def answer(gbit: float) -> DecoupledEstimate:
        return measure_decoupled(at_bandwidth(settings, gbit * mine[0], gbit * down * mine[1]))

    values = [float(gbit) for gbit in axis]
    found = [first_reaching_by_bisection(lambda gbit: answer(gbit).utilisation, values, share) for share in shares]
    reached = [Reached(gbit, answer(gbit).utilisation, _remark(answer(gbit), question.interval)) for gbit in at]
    points = sorted({round(p) for p in np.linspace(0, len(values) - 1, CURVE_POINTS)}) if curve else []
    drawn = [(values[p], answer(values[p]).utilisation) for p in points]
    return found, reached, drawn


def _remark(answer: DecoupledEstimate, interval: int) -> str:
    return (
        f"computes {answer.compute_share:.1%} of the time, a fragment every {answer.interval_kept:.1f} steps instead of "
        f"{interval}, adopted {answer.staleness:.1f} steps after its round closed"
    )


