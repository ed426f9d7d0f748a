"""Bytes that cross the links between sites: how many, what they cost, and how much of a link they leave to others."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.config.codecs import wire_bits
from atoll.planner.candidate import Candidate
from atoll.planner.division import DAY, Division, LearnerKind, syncer_site
from atoll.planner.site import ClusterDescription, Site

GB = 1e9


@dataclass(frozen=True)
class Crossing:
    """Bytes of one inner step between one site and the others."""

    name: str
    site: Site
    number: int
    """Sites like this one."""
    learners: float
    """Of one site; below 1 if the site is a part of a learner."""
    sent: float
    received: float
    kind: LearnerKind | None
    """None: this is the syncer's traffic."""


def crossings(c: Candidate, cluster: ClusterDescription, division: Division) -> list[Crossing]:
    """Of every kind of site, and of the syncer. A learner beside the syncer sends nothing to another site."""
    up, down = (cluster.model.parameters * wire_bits(codec) / 8 / c.interval for codec in (c.codec_up, c.codec_down))
    found, remote = [], 0
    for kind in division.kinds:
        learners = kind.share / kind.sites
        far = 0.0 if c.learners == 1 or kind.local else learners
        remote += 0 if c.learners == 1 or kind.local else kind.number
        ring = 0.0
        if kind.across is not None:
            ring = 2 * (kind.sites - 1) / kind.sites * cluster.model.parameters * cluster.model.gradient_bits / 8
        name = "+".join(f"{s.name}" if m == 1 else f"{m} {s.name}" for s, m in kind.members)
        sites = kind.number * kind.sites // kind.share
        found.append(Crossing(name, kind.members[0][0], sites, learners, far * up + ring, far * down + ring, kind))
    if remote:
        home = next(s for s in cluster.sites if s.name == syncer_site(cluster))
        found.append(Crossing(f"the syncer, at {home.name}", home, 1, 0.0, remote * down, remote * up, None))
    return found


def steps_a_day(division: Division, speed: float) -> float:
    return DAY / division.slow_seconds * speed


def money_share(c: Candidate, cluster: ClusterDescription, division: Division, speed: float) -> float:
    """The share of the money that pays for chips, if bytes that leave a site have a price. `speed`: of the slowest learner,
    relative to a step that waits for nothing."""
    if not any(s.price_per_gb for s in cluster.sites):
        return 1.0
    chips = sum(s.chips * s.count * s.price_per_chip_hour for s in cluster.sites) * 24
    steps = steps_a_day(division, speed)
    spent = sum(x.sent * x.number * x.site.price_per_gb for x in crossings(c, cluster, division)) / GB * steps
    return chips / (chips + spent)


def over_limit(c: Candidate, cluster: ClusterDescription, division: Division) -> str | None:
    """The site whose limit of bytes this candidate exceeds at full speed, with what it needs."""
    sent: dict[str, float] = {}
    for x in crossings(c, cluster, division):  # the syncer's bytes are also those of its site
        sent[x.site.name] = sent.get(x.site.name, 0.0) + x.sent * steps_a_day(division, 1.0) / GB
    for site in cluster.sites:
        limit, day = site.gb_per_day_max, sent.get(site.name, 0.0)
        if limit is not None and day > limit:
            return (f"key sites.gb_per_day_max = {limit:g} of {site.name}: {c.preset} with {c.learners} learners and "
                    f"H {c.interval} sends {day:.4g} GB a day")  # fmt: skip
    return None


def link_load(c: Candidate, cluster: ClusterDescription, division: Division, step_seconds: float) -> float | None:
    """The mean rate of the busiest learner's link, in its busier direction, as a share of the line. None: no line is used."""
    if c.learners == 1:
        return None
    bits = max(wire_bits(codec) for codec in (c.codec_up, c.codec_down)) * cluster.model.parameters
    rate = bits / (c.interval * step_seconds) / GB
    lines = [k.link.gbit / k.link.usable for k in division.kinds if not k.local]
    return rate / min(lines) if lines else None


def peak_gbit(c: Candidate, cluster: ClusterDescription, kind: LearnerKind, step_seconds: float) -> float:
    """The bits of the fragments that are due at once, up and down, over tau steps. Blocking presets take what the link gives."""
    peak = kind.across.gbit if kind.across is not None else 0.0
    if c.learners == 1:
        return peak
    due = math.ceil(c.fragments / c.interval) * cluster.model.parameters / c.fragments
    window = c.overlap * step_seconds
    needed = (wire_bits(c.codec_up) + wire_bits(c.codec_down)) * due / window / GB if window else math.inf
    return max(peak, kind.share * min(kind.link.gbit, needed))
