"""The resources of a candidate: traffic, memory of a learner, and memory, cores and disk of the syncer.

The syncer's rates are those of docs/planning/benchmarks.md (bench/syncer_load.py, bench/syncer_memory.py; one Neoverse-N1 core).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.config import Limits
from atoll.config.codecs import codec_spec, wire_bits
from atoll.planner.division import DAY, Division, LearnerKind, syncer_site
from atoll.planner.score import GRADIENT_BITS, Candidate, Judge, Scored

GB = 1e9
WORD = 4
"""Bytes of an fp32 number."""
MERGE_SECONDS = 8e-9
"""Core seconds per parameter of a contribution: 0.13 s for 64 contributions of 262,144 (RDA in float64)."""
MOVE_SECONDS = 4e-9
"""Core seconds per byte up or down: the other 0.41 s of that round, for 64 times 1.05 MB up and 0.52 MB down."""
SYNCER_MODELS = 4
"""fp32 models in a syncer's memory at its peak: theta, announced, momentum, and one for merges and older versions."""
SYNCER_LEARNER_BYTES = 64 << 20
SYNCER_BASE_BYTES = 500e6


@dataclass(frozen=True)
class SiteTraffic:
    """The traffic of one site."""

    site: str
    learners: float
    """Below 1 if the site is a part of one learner."""
    up_gb_day: float
    down_gb_day: float
    peak_gbit: float


@dataclass(frozen=True)
class LearnerMemory:
    """Of one learner, evenly over its chips, without activations."""

    device_gb: float
    device_gb_chip: float
    device_ratio: float
    """Relative to data-parallel's parameters and two moments."""
    all_on_device_gb: float
    """If the outer copy and the outer momentum were on the device too."""
    host_gb: float


@dataclass(frozen=True)
class SyncerNeed:
    site: str
    memory_gb: float
    cores: float
    disk_mb_per_s: float
    disk_gb: float
    gbit: float


@dataclass(frozen=True)
class Costs:
    traffic: tuple[SiteTraffic, ...]
    memory: LearnerMemory
    syncer: SyncerNeed | None
    staleness_seconds: float
    steps_day: float


def costs(scored: Scored, judge: Judge) -> Costs:
    c = scored.candidate
    division = judge.divisions[c.learners]
    steps = DAY / division.slow_seconds * scored.utilisation * scored.goodput
    return Costs(
        tuple(_traffic(c, kind, judge, steps, scored.step_seconds) for kind in division.kinds),
        memory(c, judge, smallest(division)), syncer_need(c, judge), scored.staleness * scored.step_seconds, steps,
    )  # fmt: skip


# ---------------------------------------------------------------- bytes


def in_flight(c: Candidate) -> int:
    """Fragments between pull and adoption at a time: those due within tau steps."""
    return min(c.fragments, max(1, math.ceil(c.overlap * c.fragments / c.interval)))


def window_seconds(c: Candidate, step_seconds: float) -> float:
    """How long a fragment may take up and down without delaying a step. 0: learners wait, and it goes at the link's full rate."""
    return c.overlap * step_seconds


def _traffic(c: Candidate, kind: LearnerKind, judge: Judge, steps_day: float, step_seconds: float) -> SiteTraffic:
    """To and from the syncer; for a learner of several sites also the ring's, in each direction."""
    n = judge.cluster.model.parameters
    name = "+".join(f"{s.name}" if m == 1 else f"{m} {s.name}" for s, m in kind.members)
    learners = kind.share / kind.sites
    up = down = peak = 0.0
    if c.learners > 1:
        up, down = (learners * n * wire_bits(codec) / 8 / c.interval for codec in (c.codec_up, c.codec_down))
        due = math.ceil(c.fragments / c.interval) * n / c.fragments
        window = window_seconds(c, step_seconds)
        needed = (wire_bits(c.codec_up) + wire_bits(c.codec_down)) * due / window / 1e9 if window else math.inf
        peak = kind.share * min(kind.link.gbit, needed)
    if kind.across is not None:
        ring = 2 * (kind.sites - 1) / kind.sites * n * GRADIENT_BITS / 8
        up, down, peak = up + ring, down + ring, max(peak, kind.across.gbit)
    return SiteTraffic(name, learners, up * steps_day / GB, down * steps_day / GB, peak)


# ---------------------------------------------------------------- memory


def device_ratio(in_flight_share: float, *, momentum: bool) -> float:
    """Parameters count 1 and Adam's moments 2; the outer copy and the outer momentum in flight are added to these 3."""
    return (3 + in_flight_share * (2 if momentum else 1)) / 3


def memory(c: Candidate, judge: Judge, kind: LearnerKind) -> LearnerMemory:
    """Parameters, gradients and two moments in fp32. Outer copies of fragments that are not in flight are in host memory; the
    outer momentum is on the syncer."""
    model = judge.cluster.model.parameters * WORD
    device = 4 * model
    if c.learners == 1:
        return LearnerMemory(device / GB, device / kind.chips / GB, 1.0, device / GB, 0.0)
    share = in_flight(c) / c.fragments
    return LearnerMemory(
        (device + share * model) / GB, (device + share * model) / kind.chips / GB, device_ratio(share, momentum=False),
        (device + 2 * model) / GB, model / GB,
    )  # fmt: skip


def smallest(division: Division) -> LearnerKind:
    return min(division.kinds, key=lambda kind: kind.chips)


# ---------------------------------------------------------------- the syncer


def syncer_need(c: Candidate, judge: Judge) -> SyncerNeed | None:
    """At full speed, because it must keep up when nothing fails. Data-parallel training has no syncer."""
    if c.learners == 1:
        return None
    n, step = judge.cluster.model.parameters, judge.step_seconds(judge.divisions[c.learners])
    up, down = (wire_bits(codec) / 8 for codec in (c.codec_up, c.codec_down))
    merged_per_second = n / c.interval / step  # parameters merged, each of M contributions
    stored = 3 * WORD + down if not codec_spec(c.codec_down).lossless else 2 * WORD
    waiting = max(SYNCER_LEARNER_BYTES, in_flight(c) * n / c.fragments * up)
    return SyncerNeed(
        syncer_site(judge.cluster),
        (SYNCER_MODELS * WORD * n + c.learners * waiting + SYNCER_BASE_BYTES) / GB,
        c.learners * merged_per_second * (MERGE_SECONDS + MOVE_SECONDS * (up + down)),
        merged_per_second * stored / 1e6,
        Limits().versions_max * stored * n / GB,
        c.learners * merged_per_second * max(up, down) * 8 / GB,
    )  # fmt: skip


def shortage(c: Candidate, judge: Judge) -> str | None:
    """The key whose value is too small for this candidate, with what it needs; None if the candidate fits."""
    for kind in judge.divisions[c.learners].kinds:
        need = memory(c, judge, kind)
        host = need.host_gb / kind.chips
        for s, _ in kind.members:
            needs = f"a learner of {kind.chips} chips needs"
            if s.chip_memory_gb is not None and need.device_gb_chip > s.chip_memory_gb:
                return f"key sites.chip_memory_gb = {s.chip_memory_gb:g}: {needs} {need.device_gb_chip:.3g} GB per chip"
            if s.host_memory_gb is not None and host > s.host_memory_gb:
                return f"key sites.host_memory_gb = {s.host_memory_gb:g}: {needs} {host:.3g} GB per chip on its hosts"
    wants, has = syncer_need(c, judge), judge.cluster.syncer
    if wants is None:
        return None
    for key, needed in (("cores", wants.cores), ("memory_gb", wants.memory_gb), ("disk_mb_per_s", wants.disk_mb_per_s)):
        limit = getattr(has, key)
        if limit is not None and needed > limit:
            return f"key syncer.{key} = {limit:g}: {c.preset} with {c.learners} learners and H {c.interval} needs {needed:.3g}"
    return None


def fits(c: Candidate, judge: Judge) -> bool:
    return shortage(c, judge) is None
