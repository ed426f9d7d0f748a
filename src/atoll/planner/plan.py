"""The answer: what to run, what to expect, why, and what would change it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from atoll.config.codecs import wire_bits
from atoll.planner import quality
from atoll.planner.candidate import Candidate
from atoll.planner.changes import Change, changes
from atoll.planner.costs import Costs, costs
from atoll.planner.costs import fits as costs_fit
from atoll.planner.score import HOPS, Judge, Scored, SimulatorCache
from atoll.planner.search import TOLERANCE, Progress, SearchResult, all_axes, risk, search, waiting_is_refused
from atoll.planner.site import ClusterDescription, Quality


@dataclass(frozen=True)
class Runner:
    """A scored candidate with the factors of its score."""

    candidate: Candidate
    score: float
    utilisation: float
    goodput: float
    pace: float
    tokens: float


@dataclass(frozen=True)
class Plan:
    candidate: Candidate
    division: str
    chips_per_learner: int
    scored: Scored
    costs: Costs
    choices: tuple[str, ...]
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]
    runners_up: tuple[Runner, ...]
    quality: Quality
    loss_band: tuple[float, float]
    """Per cent: the least and the most that the quality model's rows allow."""
    token_band: tuple[float, float]
    simulated: int
    """Simulated runs of the protocol's machines."""
    startup_if_away: float
    """Seconds until the first round if a learner is away at the start: so long the others wait for it. 0: none is lost whole."""


def plan(cluster: ClusterDescription, *, what_if: bool = True, runners: int = 3, progress: Progress | None = None) -> Plan:
    cache = SimulatorCache()
    found = search(cluster, cache, progress=progress)
    judge = Judge(cluster, cache)
    best = found.best
    division = judge.divisions[best.candidate.learners]
    spent = costs(best, judge)
    c = best.candidate
    low, high = quality.loss_band(
        best.loss_percent, cluster.quality, parameters=cluster.model.parameters, learners=c.learners,
        codecs=(c.codec_up, c.codec_down),
    )  # fmt: skip
    tokens = (quality.token_efficiency(high, cluster.quality), quality.token_efficiency(low, cluster.quality))
    return Plan(
        best.candidate, division.name, min(kind.chips for kind in division.kinds), best, spent,
        tuple(choices(cluster, judge, found)), tuple(changes(cluster, found, cache, progress)) if what_if else (),
        tuple(plan_warnings(cluster, best, spent)), tuple(_runners(found, runners)), cluster.quality, (low, high),
        tokens, cache.asked, _startup_if_away(judge, best),
    )  # fmt: skip


def _startup_if_away(judge: Judge, best: Scored) -> float:
    c = best.candidate
    if c.learners == 1 or not judge.loses_learners(c):
        return 0.0
    return max(best.startup_seconds, judge.settings(c).limits.start_wait_seconds)


def _runners(found: SearchResult, number: int) -> list[Runner]:
    """The best candidate of every other preset first, then the others, best first."""
    left = {c: s for c, s in found.scored.items() if c != found.best.candidate}
    others = [left.pop(s.candidate) for s in found.families.values() if s.candidate in left]
    some = [*sorted(others, key=_descending), *sorted(left.values(), key=_descending)][:number]
    return [Runner(s.candidate, s.score, s.utilisation, s.goodput, s.pace, s.tokens) for s in some]


def _descending(s: Scored) -> float:
    return -s.score


# ---------------------------------------------------------------- sentences


def choices(cluster: ClusterDescription, judge: Judge, found: SearchResult) -> list[str]:
    c = found.best.candidate
    if c.preset == "ddp":
        alone = f"M: all {cluster.chips} chips are one learner, so infrequent merges cost nothing."
        return [_preset_sentence(cluster, found), alone]
    return [
        _preset_sentence(cluster, found), _learners_sentence(cluster, judge, found), _interval_sentence(judge, found),
        _fragments_sentence(found.best, judge), _quorum_sentence(c), _codecs_sentence(cluster, judge, c),
    ]  # fmt: skip


def _preset_sentence(cluster: ClusterDescription, found: SearchResult) -> str:
    """The preset against the best candidate of another preset, and the factor that differs most."""
    best = found.best
    others = [s for s in found.families.values() if s.candidate.preset != best.candidate.preset]
    if not others:
        return f"Preset: {best.candidate.preset} is the only one that fits."
    rival = max(others, key=lambda s: s.score)
    text = f"Preset: {best.candidate.preset} trains at {_percent(best.score)} of the ideal speed, "
    text += f"{rival.candidate.preset} at {_percent(rival.score)}"
    if rival.score > best.score and waiting_is_refused(cluster) and rival.candidate.synchronous:
        return f"{text}, but its rounds wait for nodes that are preempted and uneven in speed."
    if rival.score > best.score:
        why = "the simpler one" if risk(best.candidate, cluster) == risk(rival.candidate, cluster) else "the one that waits less"
        return f"{text}: within {100 * TOLERANCE:g} % the planner takes {why}."
    reasons = {
        "utilisation": (best.utilisation, rival.utilisation), "goodput": (best.goodput, rival.goodput),
        "pace": (best.pace, rival.pace), "token efficiency": (best.tokens, rival.tokens), "price": (best.price, rival.price),
    }  # fmt: skip
    what, (mine, theirs) = max(reasons.items(), key=lambda item: item[1][0] / max(item[1][1], 1e-9))
    return f"{text}; the largest advantage is in {what}, {_percent(mine)} against {_percent(theirs)}."


def _learners_sentence(cluster: ClusterDescription, judge: Judge, found: SearchResult) -> str:
    c, q = found.best.candidate, cluster.quality
    text = f"M: {judge.divisions[c.learners].name} gives {c.learners} learners"
    cost = f"the loss is {found.best.loss_percent:.2g} % above data-parallel at equal tokens"
    others = [m for m in judge.divisions if m not in (1, c.learners)]
    if not others:
        return f"{text}; {cost}."
    m = min(others, key=lambda m: abs(m - c.learners))
    factor = quality.learners_factor(m, q) / max(quality.learners_factor(c.learners, q), 1e-9)
    return f"{text}; {cost}; with {m} learners it would be {factor:.2g} times that."


def _interval_sentence(judge: Judge, found: SearchResult) -> str:
    """H, and the best scored candidate on either side of it."""
    best = found.best
    c = best.candidate
    kept = f" (kept as {best.interval_kept:.3g})" if best.interval_kept > 1.01 * c.interval else ""
    parts = [f"H: {c.interval}{kept} gives utilisation {_percent(best.utilisation)} and token efficiency {_percent(best.tokens)}"]
    same = [s for s in found.scored.values() if (s.candidate.preset, s.candidate.learners) == (c.preset, c.learners)]
    for word, side in (
        ("shorter", [s for s in same if s.candidate.interval < c.interval]),
        ("longer", [s for s in same if s.candidate.interval > c.interval]),
    ):
        if side:
            near = max(side, key=lambda s: s.score)
            parts.append(f"the best {word} one, {near.candidate.interval}, scores {_percent(near.score)} "
                        f"({_percent(near.utilisation)} and {_percent(near.tokens)})")  # fmt: skip
        else:
            parts.append(_unscored(judge, c, word))
    return "; ".join(parts) + "."


def _unscored(judge: Judge, c: Candidate, word: str) -> str:
    """Why no candidate on this side was scored."""
    axes = next(a for a in all_axes(judge) if (a.preset, a.learners) == (c.preset, c.learners))
    side = [h for h in axes.interval if (h < c.interval) == (word == "shorter") and h != c.interval]
    if not side:
        return f"the grid has no {word} one"
    if not any(costs_fit(replace(c, interval=h), judge) for h in side):
        return f"a {word} one exceeds the syncer's capacity or the memory"
    return f"a {word} one scores less even if the links keep every round"


def _fragments_sentence(best: Scored, judge: Judge) -> str:
    c = best.candidate
    if c.preset == "diloco":
        return "P and tau: the whole model at once, and learners wait for the result."
    if c.preset == "async_diloco":
        return f"P and tau: the whole model at once, and the result is applied one round ({c.interval} steps) later."
    division = judge.divisions[c.learners]
    gbit = judge.gbit(c)
    bits = (wire_bits(c.codec_up) + wire_bits(c.codec_down)) * judge.cluster.model.parameters / c.fragments
    seconds = bits / (gbit * 1e9) + HOPS * division.latency
    allowed = c.overlap * best.step_seconds
    needs = f"one of {c.fragments} fragments needs {seconds:.3g} s up and down"
    return f"P and tau: {needs}, and tau = {c.overlap} allows {allowed:.3g} s."


def _quorum_sentence(c: Candidate) -> str:
    if c.synchronous:
        return "K: all; a synchronous preset merges every learner in sync."
    if c.quorum == 1:
        return f"K: 1 of {c.learners} is enough, so no round waits; the grace window includes learners that are nearly done."
    return f"K: {c.quorum} of {c.learners} make a round: this keeps the schedule better than 1."


def _codecs_sentence(cluster: ClusterDescription, judge: Judge, c: Candidate) -> str:
    cost = sum(quality.codec_percent(codec, cluster.quality) for codec in (c.codec_up, c.codec_down))
    text = f"Codecs: {c.codec_up} up and {c.codec_down} down add {cost:.2g} % of loss; "
    text += f"a learner may use {judge.gbit(c):.3g} Gbit/s"
    links = (*cluster.links, *((cluster.link,) if cluster.link else ()))
    if any(link.variation > 0 for link in links):
        slow_end, middle = "the slow end of its range, because rounds wait", "the middle of its range, because no round waits"
        return f"{text}, {slow_end if c.synchronous else middle}."
    return f"{text}."


def plan_warnings(cluster: ClusterDescription, best: Scored, spent: Costs) -> list[str]:
    c, found = best.candidate, []
    if c.learners > quality.PUBLISHED_LEARNERS:
        found.append(
            f"{c.learners} learners are more than the published {quality.PUBLISHED_LEARNERS}: the token efficiency of "
            f"{_percent(best.tokens)} is extrapolated by doublings"
        )
    if c.codec_down in ("int8", "int4"):
        found.append(f"the loss of {c.codec_down} on the way down is assumed: no published row has it")
    if c.learners > 1 and cluster.model.parameters > quality.PUBLISHED_SIZE:
        found.append(f"the model is larger than the published {quality.PUBLISHED_SIZE / 1e9:g}B: its loss is extrapolated")
    if c.synchronous and c.preset != "ddp" and best.utilisation < 0.8:
        found.append(f"utilisation is {_percent(best.utilisation)}: the links are slow for a model of this size")
    need = spent.syncer
    if need is not None and cluster.syncer.cores is not None and need.cores > 0.8 * cluster.syncer.cores:
        found.append(
            f"the syncer uses {need.cores:.2g} of {cluster.syncer.cores:g} cores; "
            f"with more cores (syncer.cores) H could be shorter"
        )
    if need is not None and cluster.syncer.gbit is None:
        lines = [cluster.link_between(need.site, s.name).gbit for s in cluster.sites if s.name != need.site or s.count > 1]
        if lines and need.gbit > max(lines):
            found.append(
                f"the syncer needs {need.gbit:.3g} Gbit/s of its own, and {need.site} has links of {max(lines):g}: place it "
                f"where it has them (syncer.site), or say what it has (syncer.gbit)"
            )
    if any(s.price_per_chip_hour for s in cluster.sites) and not any(s.price_per_gb for s in cluster.sites):
        found.append("price_per_chip_hour changes nothing without price_per_gb: it is what bytes are weighed against")
    if need is not None and need.shards > 1:
        found.append(
            f"cores, memory and disk are those of one of {need.shards} shards, with the coordinator: `atoll shard` runs each on "
            f"a machine of its own, `atoll syncer --shards {need.shards}` all of them on one"
        )
    if best.score < 0.3:
        found.append(f"the best plan trains at {_percent(best.score)} of the ideal speed of these chips")
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
