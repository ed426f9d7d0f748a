"""What would change the answer: the search is repeated on a cluster with one number changed.

Each number moves along a ladder. Bisection finds the first rung with another answer; it assumes that an answer that has
disappeared does not return. The printed value is one at which the search gave the other answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from atoll.planner.score import Scored, SimulatorCache
from atoll.planner.search import Progress, SearchResult, search
from atoll.planner.site import ClusterDescription

LADDER = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 15.0, 25.0)
SPREADS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
WHAT_IF = "what would change the answer"


@dataclass(frozen=True)
class Change:
    number: str
    """The number that was changed."""
    value: float
    unit: str
    side: str
    """`below` or `above`."""
    preset: str
    learners: int
    interval: int
    score: float

    def sentence(self) -> str:
        answer = self.preset if self.preset == "ddp" else f"{self.preset} with {self.learners} learners and H {self.interval}"
        more = "more" if self.side == "above" else "less"
        if self.number == "speed spread":
            return f"Learners that differ in speed by {100 * self.value:.3g} % or {more}: {answer}."
        if self.number == "interruptions":
            return f"Interruptions {self.value:.3g} times as frequent or {more}: {answer}."
        return f"{self.number} {self.value:.3g} {self.unit} or {more}: {answer}."


def changes(
    cluster: ClusterDescription, found: SearchResult, cache: SimulatorCache, progress: Progress | None = None
) -> list[Change]:
    """For each number and direction, the first rung with another answer and the first with another preset."""
    same = (found.best, search(cluster, cache, near=found).best)  # the rougher search alone may already differ
    found_changes: list[Change] = []
    moves = list(_moves(cluster))
    for done, (number, unit, side, rungs, move) in enumerate(moves):
        if progress:
            progress(WHAT_IF, done, len(moves))
        climbed = _Rungs(rungs, partial(_search_moved, move, cache, found))
        for identity in (_answer, _preset):
            at = climbed.first_other(identity, same)
            if at is not None:
                s, value = climbed.best(at), _value(cluster, number, rungs[at])
                c = s.candidate
                change = Change(number, value, unit, side, c.preset, c.learners, c.interval, s.score)
                found_changes += [change] if change not in found_changes else []
    return found_changes


def _search_moved(
    move: Callable[[float], ClusterDescription], cache: SimulatorCache, near: SearchResult, value: float
) -> Scored:
    return search(move(value), cache, near=near).best


class _Rungs:
    """The best candidate at each rung; each rung is searched on demand, once."""

    def __init__(self, rungs: Sequence[float], search_at: Callable[[float], Scored]) -> None:
        self._rungs, self._search_at = rungs, search_at
        self._found: dict[int, Scored] = {}

    def best(self, at: int) -> Scored:
        if at not in self._found:
            self._found[at] = self._search_at(self._rungs[at])
        return self._found[at]

    def first_other(self, identity: Callable[[Scored], object], same: Sequence[Scored]) -> int | None:
        known = [identity(s) for s in same]
        low, high = -1, len(self._rungs) - 1
        if high < 0 or identity(self.best(high)) in known:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if identity(self.best(middle)) in known:
                low = middle
            else:
                high = middle
        return high


def _answer(s: Scored) -> tuple[str, int, int]:
    return (s.candidate.preset, s.candidate.learners, s.candidate.interval)


def _preset(s: Scored) -> str:
    return s.candidate.preset


def _moves(cluster: ClusterDescription) -> list[tuple[str, str, str, Sequence[float], Callable[[float], ClusterDescription]]]:
    down = tuple(1 / f for f in LADDER)
    found: list[tuple[str, str, str, Sequence[float], Callable[[float], ClusterDescription]]] = []
    if cluster.link is not None or cluster.links:
        for side, rungs in (("below", down), ("above", LADDER)):
            found.append(("Slowest link", "Gbit/s", side, rungs, lambda f: cluster.changed(rate=f)))
        if _value(cluster, "Longest latency", 1.0) > 0:
            found.append(("Longest latency", "ms", "above", LADDER, lambda f: cluster.changed(latency=f)))
    if any(s.inside_gbit for s in cluster.sites):
        rungs = tuple(1 / f for f in (*LADDER, 40.0, 60.0, 100.0, 160.0, 250.0, 400.0))
        found.append(("Links inside a site", "Gbit/s", "below", rungs, lambda f: cluster.changed(inside=f)))
    for side, rungs in (("below", down), ("above", LADDER)):
        found.append(("interruptions", "", side, rungs, lambda f: cluster.changed(interruptions=f)))
    if sum(s.count for s in cluster.sites) > 1:
        now = _value(cluster, "speed spread", 0.0)
        less, more = [s for s in (*SPREADS[::-1], 0.0) if s < now], [s for s in SPREADS if s > now]
        for side, spreads in (("below", less), ("above", more)):
            found.append(("speed spread", "", side, spreads, lambda x: cluster.changed(spread=x)))
    return found


def _value(cluster: ClusterDescription, number: str, factor: float) -> float:
    links = [*cluster.links, *((cluster.link,) if cluster.link else ())]
    match number:
        case "Slowest link":
            return float(factor * min(link.gbit for link in links))
        case "Longest latency":
            return float(factor * 1000 * max(link.latency_seconds for link in links))
        case "Links inside a site":
            return float(factor * min(s.inside_gbit for s in cluster.sites if s.inside_gbit))
        case "speed spread" if factor == 0.0:
            return float(max(s.speed_spread for s in cluster.sites))
    return factor
