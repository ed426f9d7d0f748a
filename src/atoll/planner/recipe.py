"""Writes a plan as a recipe for `atoll train`: the protocol's numbers, the learners, and the cluster for virtual runs."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll import config
from atoll.config import Config
from atoll.planner.division import MEMBERS_MAX
from atoll.planner.score import Candidate, Judge, Scored
from atoll.planner.site import ClusterDescription


def ranks(chips: int) -> int:
    """Ranks of data-parallel training: one per chip, or the largest divisor of the chips that `limits.members_max` allows."""
    return max(n for n in range(1, min(chips, MEMBERS_MAX) + 1) if chips % n == 0)


def keys(scored: Scored, judge: Judge) -> dict[str, Any]:
    """The keys that the recipe sets; the preset sets the rest."""
    c, cluster = scored.candidate, judge.cluster
    protocol: dict[str, Any] = {}
    if c.preset != "ddp":
        protocol = {"local_steps_per_round": c.interval, "codec_up": c.codec_up, "codec_down": c.codec_down}
    if c.preset in ("streaming", "decoupled", "async_diloco"):
        protocol["overlap"] = c.overlap
    if c.preset == "decoupled":
        protocol |= {"fragments": c.fragments, "quorum": c.quorum}
    if c.preset == "streaming":
        protocol["layers_per_fragment"] = max(1, round(cluster.model.layers / max(1, c.fragments - 1)))
    return {
        "preset": c.preset, "learners": ranks(cluster.chips) if c.preset == "ddp" else c.learners,
        "total_steps": max(200, 4 * c.interval), "protocol": protocol, "cluster": _cluster(c, judge),
    }  # fmt: skip


def _cluster(c: Candidate, judge: Judge) -> dict[str, Any]:
    division = judge.divisions[c.learners]
    fast = min(kind.fast_seconds for kind in division.kinds)
    found: dict[str, Any] = {"step_seconds": fast, "parameters": round(judge.cluster.model.parameters)}
    if division.slow_seconds > fast:
        found |= {"slow_share": 0.5, "slow_factor": round(division.slow_seconds / fast, 4)}
    gbit, latency = division.gbit(synchronous=c.synchronous, syncer_gbit=judge.cluster.syncer.gbit), division.latency
    if c.learners == 1:  # a virtual run charges data-parallel's ring as one transfer up and one down
        kind = division.kinds[0]
        gbit, latency = (kind.across.gbit, kind.across.latency_seconds) if kind.across else (kind.inside_gbit, 0.0)
    return found | {"latency_seconds": latency, "up_gbit": gbit, "down_gbit": gbit}


def settings(scored: Scored, judge: Judge) -> Config:
    values = keys(scored, judge)
    return config.load(preset_name=values.pop("preset"), overrides=values)


def recipe_toml(scored: Scored, judge: Judge, source: str) -> str:
    c, values = scored.candidate, keys(scored, judge)
    settings(scored, judge)  # fails here rather than when the recipe is read
    lines = [
        f"# Made by `atoll plan` from {source}: {100 * scored.score:.3g} % of the ideal speed expected",
        f"# (utilisation {100 * scored.utilisation:.3g} %, goodput {100 * scored.goodput:.3g} %, "
        f"token efficiency {100 * scored.tokens:.3g} %).",
        "#",
        "# It sets the protocol, the learners, and the cluster that `atoll train --virtual` and `atoll sim` simulate.",
        f"# Model and data are the reference ones: replace them with yours. {_fragments_note(c, judge.cluster)}",
    ]  # fmt: skip
    tables = msgspec.toml.encode({key: value for key, value in values.items() if value != {}}).decode()
    return "\n".join([*lines, tables])


def _fragments_note(c: Candidate, cluster: ClusterDescription) -> str:
    if c.preset == "streaming":
        return f"P follows from the layers: {c.fragments} for the {cluster.model.layers} of the plan."
    return "The outer settings are the preset's, which suit long runs."
