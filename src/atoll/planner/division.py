"""Ways to divide the chips among learners, and what follows for each learner: its pace, its links, its failures.

A learner is data-parallel inside. It is a whole site, a k-th of one (`_split`), or several sites joined by links of at least
some rate (`_joined`). A single learner of all chips is data-parallel training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from statistics import fmean

import msgspec

from atoll.planner.site import FREE, ClusterDescription, LinkDescription, Site
from atoll.sim.estimates.failures import FailureModel

DAY = 86400.0
SPLITS = (2, 4, 8)
MEMBERS_MAX = 1024
"""The default of `limits.members_max`."""
STATE_BYTES = 12
"""Per parameter, in the transfer to a recovering learner: weights and two moments in fp32."""


@dataclass(frozen=True)
class LearnerKind:
    """Identical learners."""

    members: tuple[tuple[Site, int], ...]
    """The sites of one learner, and how many of each."""
    number: int
    chips: int
    """Of one learner."""
    share: int
    """Learners that share one site."""
    link: LinkDescription
    """One learner's share of the link to the syncer."""
    across: LinkDescription | None
    """The slowest link between its sites; None if it has one site."""
    local: bool
    """It is beside the syncer, and its bytes cross no link between sites."""

    @property
    def several(self) -> bool:
        """Whether there are both fast and slow learners of this kind."""
        return self.number > 1

    @property
    def slow_seconds(self) -> float:
        """A data-parallel group steps with its slowest part."""
        return max(s.step_seconds * (1 + s.speed_spread) for s, _ in self.members)

    @property
    def fast_seconds(self) -> float:
        return max(s.step_seconds for s, _ in self.members) if self.several else self.slow_seconds

    @property
    def inside_gbit(self) -> float:
        return min(s.inside_gbit or FREE for s, _ in self.members)

    @property
    def sites(self) -> int:
        return sum(n for _, n in self.members)


@dataclass(frozen=True)
class Division:
    name: str
    kinds: tuple[LearnerKind, ...]

    @property
    def learners(self) -> int:
        return sum(kind.number for kind in self.kinds)

    @property
    def slow_seconds(self) -> float:
        return max(kind.slow_seconds for kind in self.kinds)

    @property
    def latency(self) -> float:
        return max(kind.link.latency_seconds for kind in self.kinds)

    def gbit(self, *, synchronous: bool, syncer_gbit: float | None) -> float:
        """The rate of the slowest learner's link. A synchronous preset waits for the slow end of a varying link, because among
        many transfers one is always that slow; an asynchronous one sees the mean."""
        rate = min(k.link.gbit * (1 - k.link.variation * (1.0 if synchronous else 0.5)) for k in self.kinds)
        return min(rate, syncer_gbit / self.learners) if syncer_gbit else rate


def divisions(cluster: ClusterDescription) -> list[Division]:
    """Sorted by the number of learners; data-parallel training is first."""
    found = [Division("all chips together", (_everything(cluster),))]
    if sum(s.count for s in cluster.sites) > 1:
        rates = sorted({link.gbit for link in (*cluster.links, *((cluster.link,) if cluster.link else ()))}, reverse=True)
        found += [_joined(cluster, rate) for rate in rates]
        found.append(_split(cluster, 1))
    divisor = 0
    for site in cluster.sites:
        divisor = gcd(divisor, site.chips)
    for k in sorted({*SPLITS, *_fixed_split(cluster)}):
        if divisor % k == 0 and k > 1:
            found.append(_split(cluster, k))
    by_number = {d.learners: d for d in reversed(found) if d.learners <= MEMBERS_MAX}
    return [by_number[m] for m in sorted(by_number)]


def _fixed_split(cluster: ClusterDescription) -> list[int]:
    """The split that `fixed.learners` needs, if it is a whole number per site."""
    sites = sum(s.count for s in cluster.sites)
    fixed = cluster.fixed.learners
    return [fixed // sites] if fixed and fixed % sites == 0 else []


def _everything(cluster: ClusterDescription) -> LearnerKind:
    members = tuple((s, s.count) for s in cluster.sites)
    local = LinkDescription(gbit=FREE)
    return LearnerKind(members, 1, cluster.chips, 1, local, _slowest(cluster, members), True)


def _slowest(cluster: ClusterDescription, members: Sequence[tuple[Site, int]]) -> LinkDescription | None:
    """The slow end of the slowest link between these sites, with the longest latency: a ring waits for both."""
    links = [
        cluster.link_between(a.name, b.name)
        for i, (a, _) in enumerate(members)
        for b, n in members[i:]
        if a.name != b.name or n > 1
    ]
    if not links:
        return None
    gbit = min(link.gbit * link.usable * (1 - link.variation) for link in links)
    return LinkDescription(gbit=gbit, latency_seconds=max(link.latency_seconds for link in links))


def _split(cluster: ClusterDescription, k: int) -> Division:
    home = syncer_site(cluster)
    kinds = tuple(
        LearnerKind(
            ((s, 1),), s.count * k, s.chips // k, k, _to_syncer(cluster, ((s, 1),), home, s.count == 1, k), None,
            s.name == home and s.count == 1,
        )
        for s in cluster.sites
    )  # fmt: skip
    return Division("one learner per site" if k == 1 else f"{k} learners per site", kinds)


def _joined(cluster: ClusterDescription, rate: float) -> Division:
    """Sites connected by links of at least `rate`, directly or through other sites, form one learner."""
    left, kinds, home = list(cluster.sites), [], syncer_site(cluster)
    while left:
        group, queue = [], [left.pop(0)]
        while queue:
            site = queue.pop()
            group.append(site)
            near = [b for b in left if cluster.link_between(site.name, b.name).gbit >= rate]
            left = [b for b in left if b not in near]
            queue += near
        alone = len(group) == 1
        apart = alone and group[0].count > 1 and cluster.link_between(group[0].name, group[0].name).gbit < rate
        members = tuple((s, 1 if apart else s.count) for s in group)
        number = group[0].count if apart else 1
        link = _to_syncer(cluster, members, home, not apart, 1)
        local = not apart and home in [s.name for s, _ in members]
        chips = sum(s.chips * n for s, n in members)
        kinds.append(LearnerKind(members, number, chips, 1, link, _slowest(cluster, members), local))
    return Division(f"sites joined at {rate:g} Gbit/s", tuple(kinds))


def _to_syncer(
    cluster: ClusterDescription, members: Sequence[tuple[Site, int]], home: str, may_be_local: bool, k: int
) -> LinkDescription:
    """One learner's share of what is usable of the link to the syncer: the best link of its sites, divided by k."""
    names = [s.name for s, _ in members]
    if home in names and may_be_local:
        inside = next(s.inside_gbit or FREE for s, _ in members if s.name == home)
        return LinkDescription(gbit=inside / k)
    best = max((cluster.link_between(name, home) for name in names), key=lambda link: link.gbit)
    return msgspec.structs.replace(best, gbit=best.gbit * best.usable / k)


def syncer_site(cluster: ClusterDescription) -> str:
    """`syncer.site`, or the site with the best links to the others: by its slowest link, then by their mean."""
    if cluster.syncer.site:
        return cluster.syncer.site

    def links(site: Site) -> tuple[float, float, int]:
        rates = [cluster.link_between(site.name, b.name).gbit for b in cluster.sites if b.name != site.name]
        return (min(rates, default=0.0), fmean(rates) if rates else 0.0, -cluster.sites.index(site))

    return max(cluster.sites, key=links).name


# ---------------------------------------------------------------- pace


def pace_share(cluster: ClusterDescription, division: Division, *, synchronous: bool) -> float:
    """The share of the speed at which all chips would train at their own pace. `synchronous`: all step with the slowest."""
    ideal = sum(s.chips * s.count * (1 + 1 / (1 + s.speed_spread)) / 2 / s.step_seconds for s in cluster.sites)
    if synchronous:
        return cluster.chips / division.slow_seconds / ideal
    done = sum(k.number * k.chips * (1 / k.slow_seconds + 1 / k.fast_seconds) / 2 for k in division.kinds)
    return done / ideal


# ---------------------------------------------------------------- failures


def failure_model(cluster: ClusterDescription, kinds: Sequence[LearnerKind], step_seconds: float) -> FailureModel:
    """One model for all chips of these learners, with their failures and their lost chip time.

    The simulator knows chips that fail and take a slice with them. A preemption counts as such a failure, with the whole site
    as its slice: its rate adds to that of the site's chips. Slices of different sizes become one of their mean size, and
    absences one of the length that keeps the chip time lost. A learner that is lost as a whole is not resized: what its loss
    costs is measured on the machines. Without elasticity a failed chip has a spare, but training waits for a preempted site.
    """
    f, parts = cluster.failures, _parts(kinds)
    rate = sum(n * (_chip_rate(s, chips) + _preemption_rate(s)) for s, chips, n in parts)
    slices = away = restart = 0.0
    for site, chips, n in parts:
        slice_chips = chips if site.preemptions_per_day > 0 else min(site.slice_chips, chips)
        fails, preempted = n * _chip_rate(site, chips), n * _preemption_rate(site)
        slices += (fails + preempted) * slice_chips
        away += slice_chips * (fails * 60 * f.repair_minutes + preempted * 60 * site.away_minutes)
        restart += fails * f.restart_seconds + preempted * (f.restart_seconds + 60 * site.away_minutes)
    chips = sum(kind.number * kind.chips for kind in kinds)
    return FailureModel(
        mtbi_seconds=chips / rate, slice_chips=max(1, round(slices / rate)), step_seconds=step_seconds, step_noise=0.0,
        down_seconds=f.resize_seconds, up_seconds=f.resize_seconds, restart_seconds=restart / rate,
        return_seconds=away / slices,
    )  # fmt: skip


def _parts(kinds: Sequence[LearnerKind]) -> list[tuple[Site, int, int]]:
    """(site, a learner's chips at that site, number of such parts)."""
    return [(s, s.chips // k.share, n * k.number) for k in kinds for s, n in k.members]


def _chip_rate(site: Site, chips: int) -> float:
    return chips / (site.mtbi_hours * 3600)


def _preemption_rate(site: Site) -> float:
    return site.preemptions_per_day / DAY
