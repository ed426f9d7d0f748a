"""The grid of candidates, and the search through it.

A score is a run of the protocol's machines. An upper bound, which needs no run, orders the candidates; they are run from the best
bound down, until no bound is left that could win. From there, and for decoupled from its own starting points, the search moves
one knob by one step while that helps. The result is no worse than its neighbours: tests score all of these again.

Among presets within `TOLERANCE` of the best whose risk is equal, the search takes the simplest. Each knob that departs from its
preset must gain `HANDICAP`: no constant of the quality model is known to one per cent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from atoll.config.codecs import wire_bits
from atoll.config.presets import preset as preset_config
from atoll.errors import ConfigError
from atoll.planner import costs
from atoll.planner.candidate import Candidate
from atoll.planner.score import GOODPUT_PRECISION, ROUGH_PRECISION, Judge, Scored, SimulatorCache
from atoll.planner.site import ClusterDescription, Fixed
from atoll.planner.traffic import over_limit

TOLERANCE = 0.01
HANDICAP = 0.002
PRESETS = ("ddp", "diloco", "streaming", "async_diloco", "decoupled")
"""Simplest first. Not `fedavg`, which is DiLoCo without outer momentum at the same bytes, nor `decoupled_ramp`, which needs the
length of the run."""
INTERVALS = (10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000)
DECOUPLED_INTERVALS = (12, 24, 30, 36, 48, 72, 96, 144, 192, 288, 480)
LAYERS_PER_FRAGMENT = (1, 2, 3, 6)
DECOUPLED_FRAGMENTS = (6, 12, 24, 36)
OVERLAPS = (1, 2, 3, 5)
CODECS_UP = ("fp32", "bf16", "int8", "int4")
STREAMING_UP = ("fp32", "bf16", "e3m0")
CODECS_DOWN = ("fp32", "bf16")
SPARING_DOWN = ("fp32", "bf16", "int8", "int4")
"""Where bytes have a price or a limit. The loss of int8 and int4 on the way down is assumed to be that of the way up, so they
are not taken for speed alone."""
RUNS_MAX, RUNS_MAX_NEAR = 16, 4
"""Candidates of one preset and number of learners that are run from the best bound down."""
CLOSE = 0.002
"""A bound that exceeds the best score by less is not run."""
Progress = Callable[[str, int, int], None]
"""What is done, how many parts of it, and of how many."""
SEARCHING = "searching"


@dataclass(frozen=True)
class Axes:
    """The values of each knob for one preset and number of learners, in order."""

    preset: str
    learners: int
    interval: tuple[int, ...]
    fragments: tuple[int, ...]
    overlap: tuple[int, ...]
    quorum: tuple[int, ...]
    codec_up: tuple[str, ...]
    codec_down: tuple[str, ...]

    KNOBS = ("interval", "fragments", "overlap", "quorum", "codec_up", "codec_down")

    def candidates(self) -> Iterator[Candidate]:
        for h in self.interval:
            for p in self.fragments:
                for tau in (h,) if self.preset == "async_diloco" else self.overlap:
                    for k in self.quorum:
                        for up in self.codec_up:
                            for down in self.codec_down:
                                if tau < h or tau == 0 or self.preset == "async_diloco":
                                    yield Candidate(self.preset, self.learners, h, p, tau, k, up, down)

    def neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        """Candidates that differ in one knob by one step."""
        for knob in self.KNOBS:
            values = getattr(self, knob)
            here = getattr(candidate, knob)
            if here not in values:
                continue
            at = values.index(here)
            for value in (*values[max(0, at - 1) : at], *values[at + 1 : at + 2]):
                moved = replace(candidate, **{knob: value})
                if self.preset == "async_diloco":
                    moved = replace(moved, overlap=moved.interval)
                if moved.overlap < moved.interval or moved.overlap in (0, candidate.interval):
                    yield moved

    def nearest(self, candidate: Candidate) -> Candidate:
        """The candidate on these axes that is closest to the given one."""
        def near(values: tuple[int, ...], value: int) -> int:
            return min(values, key=lambda v: abs(math.log((v + 0.1) / (value + 0.1))))

        h = near(self.interval, candidate.interval)
        return Candidate(
            self.preset, self.learners, h, near(self.fragments, candidate.fragments),
            h if self.preset == "async_diloco" else near(self.overlap, candidate.overlap),
            near(self.quorum, candidate.quorum),
            candidate.codec_up if candidate.codec_up in self.codec_up else self.codec_up[0],
            candidate.codec_down if candidate.codec_down in self.codec_down else self.codec_down[0],
        )  # fmt: skip


def all_axes(judge: Judge) -> list[Axes]:
    """The axes that the cluster and the user's fixed knobs allow."""
    cluster, fixed = judge.cluster, judge.cluster.fixed
    found = [
        axes
        for preset in PRESETS
        for learners in judge.divisions
        if (learners == 1) == (preset == "ddp") and (axes := _fixed(_axes(preset, learners, cluster), fixed)) is not None
    ]
    found = [axes for axes in found if next(axes.candidates(), None) is not None]
    if not found:
        given = ", ".join(f"{k} = {getattr(fixed, k)!r}" for k in fixed.__struct_fields__ if getattr(fixed, k) is not None)
        possible = ", ".join(str(m) for m in judge.divisions)
        raise ConfigError(
            f"key fixed ({given}): no preset allows all of it here; ddp has 1 learner, H = 1 and no overlap, only decoupled "
            f"has a quorum, and the chips can be divided among {possible} learners"
        )
    return found


def _axes(preset: str, learners: int, cluster: ClusterDescription) -> Axes:
    down = SPARING_DOWN if any(s.price_per_gb or s.gb_per_day_max for s in cluster.sites) else CODECS_DOWN
    if preset == "ddp":
        return Axes(preset, learners, (1,), (1,), (0,), (0,), ("fp32",), ("fp32",))
    if preset == "decoupled":
        quorums = tuple(sorted({1, math.ceil(learners / 2)}))
        return Axes(preset, learners, DECOUPLED_INTERVALS, DECOUPLED_FRAGMENTS, OVERLAPS, quorums, CODECS_UP, down)
    if preset == "streaming":
        layers = cluster.model.layers
        fragments = tuple(sorted({math.ceil(layers / n) + 1 for n in LAYERS_PER_FRAGMENT}))
        return Axes(preset, learners, INTERVALS, fragments, OVERLAPS, (0,), STREAMING_UP, down)
    return Axes(preset, learners, INTERVALS, (1,), (0,), (0,), CODECS_UP, down)


def _fixed(axes: Axes, fixed: Fixed) -> Axes | None:
    """The axes with the user's fixed values. None if this preset does not allow them."""
    if fixed.preset not in (None, axes.preset) or fixed.learners not in (None, axes.learners):
        return None
    for knob in Axes.KNOBS:
        value = getattr(fixed, knob)
        if value is None:
            continue
        if knob == "overlap" and axes.preset == "async_diloco":  # whose tau is H
            if fixed.interval not in (None, value):
                return None
            axes = _with(axes, "interval", value)
            continue
        if len(getattr(axes, knob)) == 1 and value not in getattr(axes, knob):
            return None
        if knob == "quorum" and value > axes.learners:
            return None
        axes = _with(axes, knob, value)
    return axes


# ---------------------------------------------------------------- the search


@dataclass(frozen=True)
class SearchResult:
    best: Scored
    families: dict[str, Scored]
    """The best candidate of each preset."""
    scored: dict[Candidate, Scored]


def search(
    cluster: ClusterDescription, cache: SimulatorCache | None = None, *, near: SearchResult | None = None,
    progress: Progress | None = None,
) -> SearchResult:  # fmt: skip
    """`near`: the result for a cluster that differs in a few numbers. Then fragments, quorum, codecs and decoupled's tau keep
    the values of each preset's best candidate there; only learners, H and tau of the other presets are searched."""
    judge = Judge(cluster, cache, precision=GOODPUT_PRECISION if near is None else ROUGH_PRECISION)
    scored: dict[Candidate, Scored] = {}
    grids = all_axes(judge)
    if near is not None:
        grids = [_narrowed(axes, near) for axes in grids if _is_near(axes, judge, near)]
    pools = [(axes, _ranked(judge, axes)) for axes in grids if axes.preset != "decoupled"]
    pools = sorted((pool for pool in pools if pool[1]), key=lambda pool: -pool[1][0][0])
    starts = sorted(
        ((axes, start) for axes in grids if axes.preset == "decoupled" for start in _starts(judge, axes, near)),
        key=lambda pair: -judge.bound(pair[1]),
    )  # the most promising first, so that more of the others can be skipped

    def done(parts: int) -> None:
        if progress:
            progress(SEARCHING, parts, len(pools) + len(starts))

    _synchronous(judge, pools, scored, near, done)
    ceiling = max((s.score for s in scored.values()), default=0.0)
    for number, (axes, start) in enumerate(starts):
        done(len(pools) + number)
        if number == 0:  # for comparison, whatever its bound
            scored[start] = judge.score(start)
        ceiling = _climb(judge, axes, start, ceiling, scored)
    if not scored:
        raise ConfigError(f"{costs.shortage(_undemanding(judge, grids), judge)}, and no candidate of the grid needs less")
    return _found(scored, cluster)


def _undemanding(judge: Judge, grids: list[Axes]) -> Candidate:
    """The candidate that needs least: few learners, a long interval, few bits. Data-parallel has one learner and no syncer, but
    sends most between sites: where their bytes are its shortage, others need less."""
    def demand(c: Candidate) -> tuple[int, int, float]:
        return c.learners, -c.interval, wire_bits(c.codec_up) + wire_bits(c.codec_down)

    every = [c for axes in grids for c in axes.candidates()]
    least = min(every, key=demand)
    if least.learners == 1 and over_limit(least, judge.cluster, judge.divisions[1]) is not None:
        return min((c for c in every if c.learners > 1), key=demand, default=least)
    return least


def _synchronous(
    judge: Judge, pools: list[tuple[Axes, list[tuple[float, Candidate]]]], scored: dict[Candidate, Scored],
    near: SearchResult | None, done: Callable[[int], None],
) -> None:  # fmt: skip
    """Runs the candidates of each grid from the best bound down, and moves on from the best of them."""
    presets, ceiling = set(), 0.0
    for number, (axes, ranked) in enumerate(pools):
        done(number)
        if axes.preset in presets and ranked[0][0] < (1 - 2 * TOLERANCE) * ceiling:
            continue
        presets.add(axes.preset)  # the best of every preset is run, whatever its bound, for comparison
        best = _from_the_top(judge, ranked[: RUNS_MAX if near is None else RUNS_MAX_NEAR], ceiling, scored)
        ceiling = max(ceiling, best.score)
        if near is None and best.score >= (1 - 2 * TOLERANCE) * ceiling:
            ceiling = _climb(judge, axes, best.candidate, ceiling, scored)


def _ranked(judge: Judge, axes: Axes) -> list[tuple[float, Candidate]]:
    """By bound, highest first, after `HANDICAP` for each departure."""
    layers = judge.cluster.model.layers
    found = [
        (judge.bound(c) * (1 - HANDICAP * departures(c, layers)), c) for c in axes.candidates() if costs.fits(c, judge)
    ]  # fmt: skip
    return sorted(found, key=lambda pair: -pair[0])


def _from_the_top(
    judge: Judge, ranked: list[tuple[float, Candidate]], ceiling: float, scored: dict[Candidate, Scored]
) -> Scored:
    """Until no bound is left that exceeds the best score so far by more than `CLOSE`, or comes near the ceiling."""
    best: Scored | None = None
    merit, layers = 0.0, judge.cluster.model.layers
    for bound, c in ranked:
        if best is not None and (bound <= (1 + CLOSE) * merit or bound < (1 - 2 * TOLERANCE) * ceiling):
            break
        found = scored[c] = judge.score(c)
        mine = found.score * (1 - HANDICAP * departures(c, layers))
        if best is None or mine > merit:
            best, merit = found, mine
    assert best is not None, "the ranking has at least one candidate"
    return best


def _is_near(axes: Axes, judge: Judge, near: SearchResult) -> bool:
    """The same number of learners as before, the next larger or smaller one, or one learner."""
    numbers = list(judge.divisions)
    at = min(range(len(numbers)), key=lambda i: abs(numbers[i] - near.best.candidate.learners))
    return axes.learners in (1, *numbers[max(0, at - 1) : at + 2])


def _narrowed(axes: Axes, near: SearchResult) -> Axes:
    if axes.preset not in near.families:
        return axes
    best = near.families[axes.preset].candidate
    kept = ("fragments", "quorum", "codec_up", "codec_down") + (("overlap",) if axes.preset == "decoupled" else ())
    same = axes.nearest(best)
    for knob in kept:
        axes = _with(axes, knob, getattr(same, knob))
    return axes


def _with(axes: Axes, knob: str, value: int | str) -> Axes:
    changes: dict[str, Any] = {knob: (value,)}
    return replace(axes, **changes)


def _starts(judge: Judge, axes: Axes, near: SearchResult | None) -> list[Candidate]:
    """The preset's settings at the H with the highest bound, and at an H two steps longer: the bound ignores latency."""
    same = near.families.get("decoupled") if near is not None else None
    usual = axes.nearest(same.candidate if same else Candidate("decoupled", axes.learners, 24, 24, 2, 1, "int4", "bf16"))
    ladder = [replace(usual, interval=h) for h in axes.interval if h > usual.overlap]
    ladder = [c for c in ladder if costs.fits(c, judge)]
    if not ladder:
        return []
    first = max(range(len(ladder)), key=lambda at: judge.bound(ladder[at]))
    return [ladder[first], *(ladder[first + 2 : first + 3] if near is None else ())]


def _climb(judge: Judge, axes: Axes, start: Candidate, ceiling: float, scored: dict[Candidate, Scored]) -> float:
    """Moves one knob by one step while that helps. `ceiling`: the best score so far; a candidate whose bound is below it is not
    run. A bound slightly below still runs, so that a preset's best is known where it is close."""
    here: Scored | None = None
    fringe = [start]
    while fringe:
        least = max((1 - 2 * TOLERANCE) * ceiling, here.score if here is not None else 0.0)
        for candidate in fringe:
            if candidate in scored or not costs.fits(candidate, judge) or judge.bound(candidate) < least:
                continue
            scored[candidate] = judge.score(candidate)
            ceiling = max(ceiling, scored[candidate].score)
        best = max((scored[c] for c in fringe if c in scored), key=lambda s: s.score, default=None)
        if best is None or (here is not None and best.score <= here.score):
            return ceiling
        here = best
        fringe = list(axes.neighbours(here.candidate))
    return ceiling


def _found(scored: dict[Candidate, Scored], cluster: ClusterDescription) -> SearchResult:
    families: dict[str, Scored] = {}
    for preset in PRESETS:
        candidates = [s for s in scored.values() if s.candidate.preset == preset]
        if candidates:
            families[preset] = simplest(candidates, cluster)
    return SearchResult(simplest(list(scored.values()), cluster), families, scored)


def waiting_is_refused(cluster: ClusterDescription) -> bool:
    """Nodes that are taken away at any time and differ in speed: no round waits for all of them, unless the user says so."""
    if cluster.fixed.preset is not None or sum(s.count for s in cluster.sites) == 1:
        return False
    return cluster.preemptible and cluster.uneven


def risk(c: Candidate, cluster: ClusterDescription) -> int:
    """1 if rounds wait for learners that may be lost or late."""
    return int(c.synchronous and (cluster.preemptible or cluster.uneven))


def simplest(scored: list[Scored], cluster: ClusterDescription) -> Scored:
    """Of the presets within `TOLERANCE` of the best those with the least risk, of these the simplest, and of its candidates the
    best after `HANDICAP` for each departure."""
    if waiting_is_refused(cluster):
        scored = [s for s in scored if not s.candidate.synchronous] or scored
    top, layers = max(s.score for s in scored), cluster.model.layers
    close = [s.candidate for s in scored if s.score >= (1 - TOLERANCE) * top]
    preset = min(close, key=lambda c: (risk(c, cluster), PRESETS.index(c.preset))).preset

    def merit(s: Scored) -> tuple[float, float]:
        return (s.score * (1 - HANDICAP * departures(s.candidate, layers)), -bytes_a_step(s))

    return max((s for s in scored if s.candidate.preset == preset), key=merit)


def departures(c: Candidate, layers: int) -> int:
    """The number of knobs that differ from the preset's. H does not count: it follows from the links."""
    usual = preset_config(c.preset).protocol  # P = 0 means groups of three layers
    fragments, overlap, up, down = usual.fragments, usual.overlap, usual.codec_up, usual.codec_down
    changed = [c.codec_up != up, c.codec_down != down, c.quorum > 1]
    if c.preset in ("streaming", "decoupled"):
        changed += [c.fragments != (fragments or math.ceil(layers / 3) + 1), c.overlap != overlap]
    return sum(changed)


def bytes_a_step(s: Scored) -> float:
    c = s.candidate
    return (wire_bits(c.codec_up) + wire_bits(c.codec_down)) / c.interval


def neighbours(judge: Judge, candidate: Candidate) -> list[Candidate]:
    """Candidates that differ by one step of one knob or of the number of learners, and the nearest of each other preset. All that
    satisfy the same limits: one that waits for all is none where that is refused."""
    grids = all_axes(judge)
    mine = next(a for a in grids if (a.preset, a.learners) == (candidate.preset, candidate.learners))
    found = list(mine.neighbours(candidate))
    same = sorted((a for a in grids if a.preset == candidate.preset), key=lambda a: a.learners)
    at = same.index(mine)
    found += [axes.nearest(candidate) for axes in (*same[max(0, at - 1) : at], *same[at + 1 : at + 2])]
    several = min((a.learners for a in grids if a.learners > 1), default=1)
    alike = (1, candidate.learners if candidate.learners > 1 else several)
    found += [axes.nearest(candidate) for axes in grids if axes.preset != candidate.preset and axes.learners in alike]
    if waiting_is_refused(judge.cluster):
        found = [c for c in found if not c.synchronous]
    return [c for c in found if costs.fits(c, judge)]
