"""The options of `atoll simulate bandwidth` and their checks: a refusal names the option, its value and what would be right."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.config.codecs import is_codec, known_codecs
from atoll.errors import UserError

if TYPE_CHECKING:  # numpy is imported when a table is asked for
    from atoll.sim.estimates.bandwidth import LinkSettings, Question, Star
    from atoll.sim.estimates.utilisation import Compute, Curve

METHOD_NAMES = (
    "data_parallel", "diloco", "async_diloco", "streaming", "streaming_overlap", "streaming_overlap_fp4",
    "decoupled", "decoupled_ramp",
)  # fmt: skip
PATTERNS = ("strided", "sequential", "balanced")
TOPOLOGIES = ("star", "ring")
CALIBRATIONS = ("published", "plain")
USUAL_GRID = "0.1:1000:50"
USUAL_TARGETS = "50,80,90,95,99"
INTERVAL_MAX, LAYERS_MAX, STEPS_MAX, POINTS_MAX, CENTRES_MAX = 10**6, 10**5, 10**7, 10**4, 10**4
NAMELESS = "custom"
"""The name of a model that is described by options."""

# ---------------------------------------------------------------- the options


def _model(name: str, text: str) -> Any:
    return typer.Option(name, help=f"Model: {text}")


def _link(name: str, text: str) -> Any:
    return typer.Option(name, help=f"Exchange: {text}")


def _star(name: str, text: str) -> Any:
    return typer.Option(name, help=f"Decoupled: {text}")


def _answer(name: str, text: str) -> Any:
    return typer.Option(name, help=f"Answer: {text}")


Models = Annotated[
    list[str] | None,
    typer.Argument(metavar="[1B] [10B] [100B]", help="Published models. Default: all three, unless options describe another."),
]
Layers = Annotated[int | None, _model("--layers", "number of layers, all of one size.")]
Parameters = Annotated[float | None, _model("--parameters", "number of parameters, as in 7e9.")]
StepTime = Annotated[float | None, _model("--step-time", "seconds of computing in an inner step.")]
Chips = Annotated[float | None, _model("--chips", "chips of one datacentre, to derive the step time.")]
FlopsPerChip = Annotated[float | None, _model("--flops-per-chip", "peak FLOP/s of a chip, as in 1e15.")]
Mfu = Annotated[float | None, _model("--mfu", "share of the peak that is used, as in 0.4.")]
BatchTokens = Annotated[float | None, _model("--batch-tokens", "tokens that a datacentre trains on in one step.")]
Methods = Annotated[list[str] | None, _link("--method", f"{', '.join(METHOD_NAMES)}. Repeatable. Default: the published ones.")]
Interval = Annotated[int, _link("--interval", "H, inner steps between two reductions of a layer.")]
Overlap = Annotated[
    int | None,
    _link("--overlap", "tau, inner steps a reduction may take. Default: 1 in streaming_overlap*, 2 in decoupled*, H in "
          "async_diloco, where another value, H and more included, is simulation only."),
]  # fmt: skip
Fragments = Annotated[int | None, _link("--fragments", "P, instead of --layers-per-fragment.")]
LayersPerFragment = Annotated[int, _link("--layers-per-fragment", "layers of a fragment in streaming* and decoupled*.")]
PatternName = Annotated[str, _link("--pattern", f"which layers share a fragment: {', '.join(PATTERNS)}.")]
CodecOption = Annotated[
    str, _link("--codec", "how a parameter is sent: bf16, fp32, int8, int4, int2, int1, e3m0, top_k:SHARE, ...")
]
Bits = Annotated[
    float | None,
    _link("--bits-per-parameter", "effective bits, instead of --codec and --calibration; the fp4 row takes a quarter."),
]
Calibration = Annotated[
    str | None,
    _link("--calibration", "published: 16 bits count as 13.33, as if steps took 1.2 times as long. plain: bits as they are. "
          "Default: published for published models, plain for others."),
]  # fmt: skip
Datacentres = Annotated[
    int,
    _link("--datacentres", "D, on a ring: each sends 2(D-1)/D of the model. Decoupled needs it for --shards alone: each of its "
          "datacentres has a link of its own to the syncer."),
]  # fmt: skip
Latency = Annotated[float, _link("--latency", "seconds, one way between two datacentres, or to the syncer.")]
RunSteps = Annotated[
    int | None, _link("--run-steps", "inner steps of the run. Default: 2H, data_parallel 20, async_diloco its steady state.")
]
Steady = Annotated[bool, _link("--steady", "leave start and end of the run out; async_diloco does so without --run-steps.")]
Learners = Annotated[
    int | None,
    _star("--learners", "M. Default: one per datacentre. It moves no figure by itself: each learner has a link of its own, and "
          "all are equally fast."),
]  # fmt: skip
PerDatacentre = Annotated[int, _star("--learners-per-datacentre", "learners that share a datacentre's link.")]
Shards = Annotated[
    int, _star("--shards", "parts of the syncer, one in each of so many datacentres (`atoll syncer --shard-at`).")
]
ShardTopology = Annotated[
    str,
    _star("--shard-topology", "star: every learner exchanges with every shard. ring: the learners of a datacentre are summed, "
          "and the sums go round; one shard in each datacentre, the bytes of a star if each has one learner. Simulation only."),
]  # fmt: skip
Quorum = Annotated[
    int | None,
    _star("--quorum", "K, at most M. Default: 1. It moves no figure by itself: all learners are equally fast."),
]
Grace = Annotated[
    bool | None,
    _star("--grace/--no-grace", "the adaptive grace window. Default: on. Equally fast learners leave it nothing to wait for."),
]
Ramp = Annotated[float | None, _star("--ramp", "share of the run in which the interval grows to H; decoupled_ramp 0.1.")]
CodecUp = Annotated[str | None, _star("--codec-up", "codec from learner to syncer. Default: int4.")]
CodecDown = Annotated[str | None, _star("--codec-down", "codec from syncer to learner. Default: bf16.")]
DownRatio = Annotated[float, _star("--down-ratio", "a learner's down link over its up link; results are of the up link.")]
Targets = Annotated[str, _answer("--targets", "utilisations in per cent, separated by commas.")]
Grid = Annotated[str, _answer("--grid", "FROM:TO:POINTS in Gbit/s, evenly spaced in the logarithm.")]
At = Annotated[list[float] | None, _answer("--at", "also print the utilisation at this many Gbit/s. Repeatable.")]
Json = Annotated[bool, _answer("--json", "a JSON list of {model, method, interval, utilisation, gbit_per_s}; null: never.")]
Csv = Annotated[Path | None, _answer("--csv", "write the same to this file, with the published cells.")]
FigureFile = Annotated[Path | None, _answer("--figure", "file for a figure of utilisation over bandwidth, .png or .svg.")]

# ---------------------------------------------------------------- checks


@dataclass(frozen=True)
class Described:
    """A model described by options; None is taken from the published model, if one is named."""

    layers: int | None
    parameters: float | None
    step_time: float | None
    chips: float | None
    flops_per_chip: float | None
    mfu: float | None
    batch_tokens: float | None

    @property
    def speed(self) -> dict[str, float | None]:
        return {
            "--chips": self.chips, "--flops-per-chip": self.flops_per_chip, "--mfu": self.mfu, "--batch-tokens": self.batch_tokens
        }  # fmt: skip

    @property
    def says_nothing(self) -> bool:
        return all(value is None for value in (self.layers, self.parameters, self.step_time, *self.speed.values()))


def questions(
    models: Sequence[str], described: Described, methods: Sequence[str], link: LinkSettings, star: Star
) -> list[Question]:
    from atoll.sim.estimates.bandwidth import PUBLISHED_METHODS, Question

    known = computes(models, described)
    chosen = list(dict.fromkeys(methods or PUBLISHED_METHODS))
    for method in chosen:
        refuse_wrong([(method not in METHOD_NAMES, f"--method {method}: no such method; there are {', '.join(METHOD_NAMES)}")])
    check_link(link, chosen)
    check_star(star, link)
    for compute in known.values():
        p = link.fragments
        wrong = p is not None and p > compute.layers
        refuse_wrong([(wrong, f"--fragments {p}: must be at most as many as there are layers, {compute.layers}")])
    return [Question(name, compute, method, link, star) for name, compute in known.items() for method in chosen]


def refuse_wrong(checks: Iterable[tuple[bool, str]]) -> None:
    for wrong, sentence in checks:
        if wrong:
            raise UserError(sentence)


def computes(models: Sequence[str], described: Described) -> dict[str, Compute]:
    from atoll.sim.estimates.published import MODELS

    for name in models:
        refuse_wrong([(name not in MODELS, f"model {name!r}: there are {', '.join(MODELS)}; another is described by --layers, "
                 "--parameters and --step-time")])  # fmt: skip
    _check_described(described)
    if described.says_nothing:
        return {name: MODELS[name] for name in dict.fromkeys(models or MODELS)}
    return {name: _described(described, MODELS.get(name)) for name in (dict.fromkeys(models) or [NAMELESS])}


def _check_described(d: Described) -> None:
    positive = {"--parameters": d.parameters, "--step-time": d.step_time, **d.speed}
    missing = [name for name, value in d.speed.items() if value is None]
    some = len(missing) < len(d.speed)
    refuse_wrong([
        (d.layers is not None and not 1 <= d.layers <= LAYERS_MAX, f"--layers {d.layers}: must be from 1 to {LAYERS_MAX}"),
        *((not above_0(v), f"{name} {v:g}: must be a number above 0") for name, v in positive.items() if v is not None),
        (d.mfu is not None and d.mfu > 1, f"--mfu {d.mfu}: is a share of the peak and must be at most 1"),
        (some and bool(missing), f"{', '.join(missing)}: not given; the step time is 6 * parameters * --batch-tokens / "
         "(--chips * --flops-per-chip * --mfu), and needs all four"),
        (some and d.step_time is not None, f"--step-time {d.step_time}: goes without {', '.join(d.speed)}, which derive it"),
    ])  # fmt: skip


def _described(d: Described, base: Compute | None) -> Compute:
    from atoll.sim.estimates.utilisation import Compute

    layers = d.layers or (base.layers if base else None)
    parameters = d.parameters or (base.parameters if base else None)
    step = d.step_time or (base.step_seconds if base else None)
    if d.chips and d.flops_per_chip and d.mfu and d.batch_tokens and parameters:
        step = 6 * parameters * d.batch_tokens / (d.chips * d.flops_per_chip * d.mfu)
    if layers is None or parameters is None or step is None:
        lacks = [name for name, v in (("--layers", layers), ("--parameters", parameters), ("--step-time", step)) if v is None]
        raise UserError(f"{', '.join(lacks)}: not given; a model of your own needs --layers, --parameters and --step-time "
                        "(or --chips, --flops-per-chip, --mfu and --batch-tokens)")  # fmt: skip
    return Compute(layers, parameters, step)


def check_link(link: LinkSettings, methods: Sequence[str]) -> None:
    tau = link.overlap
    usual = 2 if any(m.startswith("decoupled") for m in methods) else 1 if any("overlap" in m for m in methods) else 0
    h, bits, centres, late, steps = link.interval, link.bits, link.datacentres, link.latency_seconds, link.run_steps
    refuse_wrong([
        (not 1 <= h <= INTERVAL_MAX, f"--interval {h}: must be from 1 to {INTERVAL_MAX}"),
        (tau is not None and tau < 0, f"--overlap {tau}: must be 0 (blocking) or more"),
        (tau is not None and tau >= h and any(m != "async_diloco" for m in methods),
         f"--overlap {tau}: must be below --interval {h}; only async_diloco overlaps whole rounds"),
        (tau == 0 and "async_diloco" in methods, "--overlap 0: async_diloco has at least 1; diloco blocks"),
        (tau is None and usual >= h, f"--interval {h}: must be above the overlap, which is {usual} by default"),
        (link.layers_per_fragment < 1, f"--layers-per-fragment {link.layers_per_fragment}: must be at least 1"),
        (link.fragments is not None and link.fragments < 1, f"--fragments {link.fragments}: must be at least 1"),
        (link.pattern not in PATTERNS, f"--pattern {link.pattern}: must be one of {', '.join(PATTERNS)}"),
        _codec("--codec", link.codec),
        (bits is not None and not above_0(bits), f"--bits-per-parameter {bits}: must be above 0"),
        (link.calibration not in CALIBRATIONS, f"--calibration {link.calibration}: must be one of {', '.join(CALIBRATIONS)}"),
        (not 2 <= centres <= CENTRES_MAX, f"--datacentres {centres}: must be from 2 (one has no other) to {CENTRES_MAX}"),
        (not (late == 0 or above_0(late)), f"--latency {late:g}: must be 0 s or more"),
        (steps is not None and not 1 <= steps <= STEPS_MAX, f"--run-steps {steps}: must be from 1 to {STEPS_MAX}"),
    ])  # fmt: skip


def check_star(star: Star, link: LinkSettings) -> None:
    learners = star.learners if star.learners is not None else link.datacentres * star.per_datacentre
    quorum, ramp, d = star.quorum, star.ramp, link.datacentres
    refuse_wrong([
        (star.per_datacentre < 1, f"--learners-per-datacentre {star.per_datacentre}: must be at least 1"),
        (star.learners is not None and star.per_datacentre > 1,
         f"--learners {star.learners}: follows from --datacentres and --learners-per-datacentre; give one or the other"),
        (not 1 <= star.shards <= d, f"--shards {star.shards}: must be from 1 to the {d} datacentres"),
        (star.topology not in TOPOLOGIES, f"--shard-topology {star.topology}: must be one of {', '.join(TOPOLOGIES)}"),
        (star.topology == "ring" and star.shards != d,
         f"--shard-topology ring: needs a shard in each of the {d} datacentres, --shards {d}"),
        (learners < 1, f"--learners {learners}: must be at least 1"),
        (quorum is not None and not 1 <= quorum <= learners, f"--quorum {quorum}: must be from 1 to the {learners} learners"),
        (ramp is not None and not 0 <= ramp < 1, f"--ramp {ramp}: is a share of the run and must be from 0 to below 1"),
        _codec("--codec-up", star.codec_up),
        _codec("--codec-down", star.codec_down),
        (not above_0(star.down_ratio), f"--down-ratio {star.down_ratio:g}: must be above 0"),
    ])  # fmt: skip


def _any_of(*prefixes: str, but: str = "") -> Callable[[str], bool]:
    return lambda method: method.startswith(prefixes) and method != but


_GRAPH, _DECOUPLED = _any_of("data", "diloco", "async", "streaming"), _any_of("decoupled")
_CODEC = _any_of("data", "diloco", "async", "streaming", but="streaming_overlap_fp4")
USED_BY: dict[str, tuple[str, Callable[[str], bool]]] = {
    "interval": ("--interval", lambda method: method != "data_parallel"),
    "overlap": ("--overlap", _any_of("streaming_overlap", "async", "decoupled")),
    "fragments": ("--fragments", _any_of("streaming", "decoupled")),
    "layers_per_fragment": ("--layers-per-fragment", _any_of("streaming", "decoupled")),
    "pattern": ("--pattern", _any_of("streaming")),
    "codec": ("--codec", _CODEC),
    "bits": ("--bits-per-parameter", _GRAPH),
    "run_steps": ("--run-steps", _GRAPH),
    "steady": ("--steady", _GRAPH),
    "learners": ("--learners", _DECOUPLED),
    "per_datacentre": ("--learners-per-datacentre", _DECOUPLED),
    "shards": ("--shards", _DECOUPLED),
    "shard_topology": ("--shard-topology", _DECOUPLED),
    "quorum": ("--quorum", _DECOUPLED),
    "grace": ("--grace", _DECOUPLED),
    "ramp": ("--ramp", _DECOUPLED),
    "codec_up": ("--codec-up", _DECOUPLED),
    "codec_down": ("--codec-down", _DECOUPLED),
    "down_ratio": ("--down-ratio", _DECOUPLED),
}
"""By parameter: the option, and which methods use it."""
TOGETHER = (
    ("fragments", "layers_per_fragment", "--layers-per-fragment: goes without --fragments, which replaces it"),
    ("bits", "calibration", "--calibration: goes without --bits-per-parameter, which are effective bits already"),
    ("bits", "codec", "--codec: goes without --bits-per-parameter, which replace it"),
    ("run_steps", "steady", "--run-steps: goes without --steady, which measures whole intervals of the steady state"),
)
"""Pairs of parameters of which one would be ignored."""


def refuse_ignored(given: Collection[str], methods: Sequence[str], link: LinkSettings, star: Star) -> None:
    """An option that no method of this table uses is refused rather than ignored. `given`: parameters on the command line."""
    for name in (n for n in USED_BY if n in given):
        option, uses = USED_BY[name]
        users = [method for method in METHOD_NAMES if uses(method)]
        refuse_wrong([(not any(map(uses, methods)), f"{option}: is for {', '.join(users)}, and none of them is asked for; add "
                       f"one by --method, or leave it out")])  # fmt: skip
    refuse_wrong((a in given and b in given, sentence) for a, b, sentence in TOGETHER)
    alone = "datacentres" in given and all(map(_DECOUPLED, methods)) and star.shards == 1
    refuse_wrong([(alone, f"--datacentres {link.datacentres}: moves no figure of decoupled, whose datacentres each have a link "
                   f"of their own to the syncer; give --learners-per-datacentre or --shards, or leave it out")])  # fmt: skip


def _codec(option: str, name: str | None) -> tuple[bool, str]:
    return name is not None and not is_codec(name), f"{option} {name}: must be {known_codecs()}"


def above_0(value: float) -> bool:
    return math.isfinite(value) and value > 0


# ---------------------------------------------------------------- the axis


def targets_of(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    refuse_wrong([(not found or not all(0 < t <= 100 for t in found),
             f"--targets {text}: must be numbers above 0 and up to 100, with commas, such as {USUAL_TARGETS}")])  # fmt: skip
    return list(dict.fromkeys(found))


def axis_of(text: str) -> Curve:
    import numpy as np

    from atoll.sim.estimates.published import bandwidth_grid

    if text == USUAL_GRID:
        return bandwidth_grid()
    try:
        low, high, points = text.split(":")
        first, last, count = float(low), float(high), int(points)
    except ValueError:
        raise UserError(f"--grid {text}: must be FROM:TO:POINTS, such as {USUAL_GRID}") from None
    refuse_wrong([
        (not above_0(first), f"--grid {text}: bandwidth must be above 0 Gbit/s"),
        (not (above_0(last) and last > first), f"--grid {text}: must end above its beginning"),
        (not 2 <= count <= POINTS_MAX, f"--grid {text}: must have from 2 to {POINTS_MAX} points"),
    ])  # fmt: skip
    return np.geomspace(first, last, count)


def rates_of(at: Sequence[float]) -> list[float]:
    refuse_wrong((not above_0(gbit), f"--at {gbit:g}: bandwidth must be above 0 Gbit/s") for gbit in at)
    return list(at)


def calibration_of(chosen: str | None, described: Described) -> Any:
    """Unless it is given: published for a published model, plain for a model that options describe."""
    return chosen or ("published" if described.says_nothing else "plain")
