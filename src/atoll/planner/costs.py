"""The resources of a candidate: traffic, memory of a learner, and memory, cores and disk of the syncer.

The syncer's core seconds are measured ones (sim/estimates/measured.py); its memory is that of bench/syncer_memory.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.config import Limits
from atoll.config.codecs import codec_spec, wire_bits
from atoll.planner.candidate import Candidate
from atoll.planner.division import Division, LearnerKind, syncer_site
from atoll.planner.score import Judge, Scored
from atoll.planner.traffic import GB, crossings, link_load, over_limit, peak_gbit, steps_a_day
from atoll.sim.estimates.measured import round_cost

WORD = 4
"""Bytes of an fp32 number."""
SYNCER_MODELS = 4
"""fp32 models in a syncer's memory at its peak: theta, announced, momentum, and one for merges and older versions."""
SYNCER_LEARNER_BYTES = 64 << 20
SYNCER_BASE_BYTES = 500e6
SERVER = {"cores": 16.0, "gbit": 25.0}
"""What a syncer may need where [syncer] does not say what it has: a common server."""


@dataclass(frozen=True)
class SiteTraffic:
    """What one site exchanges with other sites. A learner beside the syncer exchanges nothing."""

    site: str
    learners: float
    """Below 1 if the site is a part of one learner."""
    sent_gb_day: float
    received_gb_day: float
    peak_gbit: float
    price_day: float
    """Of the bytes sent."""


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
    """Of one shard, and of the coordinator with it: the machine that needs the most."""

    site: str
    shards: int
    memory_gb: float
    cores: float
    disk_mb_per_s: float
    disk_gb: float
    gbit: float
    """Of all shards together."""


@dataclass(frozen=True)
class Costs:
    traffic: tuple[SiteTraffic, ...]
    memory: LearnerMemory
    syncer: SyncerNeed | None
    staleness_seconds: float
    steps_day: float
    link_load: float | None
    """The mean rate of the busiest link between sites, as a share of the line. None: no such link is used."""


def costs(scored: Scored, judge: Judge) -> Costs:
    c = scored.candidate
    division = judge.divisions[c.learners]
    speed = scored.utilisation * scored.inside * scored.goodput
    steps = steps_a_day(division, speed)
    kept = max(1.0, scored.interval_kept / c.interval)
    busy = link_load(c, judge.cluster, division, scored.step_seconds)
    return Costs(
        tuple(_traffic(c, judge, scored, steps / kept)), memory(c, judge, smallest(division)), syncer_need(c, judge),
        scored.staleness * scored.step_seconds, steps, None if busy is None else busy * scored.utilisation / kept,
    )  # fmt: skip


# ---------------------------------------------------------------- bytes


def in_flight(c: Candidate) -> int:
    """Fragments between pull and adoption at a time: those due within tau steps."""
    return min(c.fragments, max(1, math.ceil(c.overlap * c.fragments / c.interval)))


def _traffic(c: Candidate, judge: Judge, scored: Scored, steps_day: float) -> list[SiteTraffic]:
    found = []
    for x in crossings(c, judge.cluster, judge.divisions[c.learners]):
        sent, received = x.sent * steps_day / GB, x.received * steps_day / GB
        peak = peak_gbit(c, judge.cluster, x.kind, scored.step_seconds) if x.kind and x.sent else 0.0
        found.append(SiteTraffic(x.name, x.learners, sent, received, peak, sent * x.site.price_per_gb))
    return found


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
    shards = judge.cluster.syncer.shards
    remote = sum(kind.number for kind in judge.divisions[c.learners].kinds if not kind.local)
    up, down = (wire_bits(codec) / 8 for codec in (c.codec_up, c.codec_down))
    merged_per_second = n / shards / c.interval / step  # parameters merged, each of M contributions
    rounds_per_second = c.fragments / c.interval / step
    spent = round_cost(n / c.fragments, c.learners, 8 * up, 8 * down)
    stored = 3 * WORD + down if not codec_spec(c.codec_down).lossless else 2 * WORD
    waiting = max(SYNCER_LEARNER_BYTES, in_flight(c) * n / shards / c.fragments * up)
    return SyncerNeed(
        syncer_site(judge.cluster), shards,
        (SYNCER_MODELS * WORD * n / shards + c.learners * waiting + SYNCER_BASE_BYTES) / GB,
        rounds_per_second * (spent.coordinator + spent.shards / shards),
        merged_per_second * stored / 1e6,
        Limits().versions_max * stored * n / shards / GB,
        remote * shards * merged_per_second * max(up, down) * 8 / GB,  # of all shards together, as [syncer] gbit is
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
    if (bytes_too_many := over_limit(c, judge.cluster, judge.divisions[c.learners])) is not None:
        return bytes_too_many
    wants, has = syncer_need(c, judge), judge.cluster.syncer
    if wants is None:
        return None
    for key in ("cores", "memory_gb", "disk_mb_per_s", "gbit"):
        given, needed = getattr(has, key), getattr(wants, key)
        limit = given if given is not None else SERVER.get(key)
        if limit is not None and needed > limit:
            what = f"key syncer.{key} = {limit:g}" + (" (a common server's: it is not given)" if given is None else "")
            return f"{what}: {c.preset} with {c.learners} learners and H {c.interval} needs {needed:.3g}"
    return None


def fits(c: Candidate, judge: Judge) -> bool:
    return shortage(c, judge) is None
