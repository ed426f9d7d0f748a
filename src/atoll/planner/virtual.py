"""A candidate as a config for the protocol's machines: whole, as the recipe has it, and shortened, as the search runs it.

The promise is measured on the shortened run, and a test measures it on the recipe. Shortening keeps what the links see: the bytes
of a fragment, the steps between two fragments, tau, and the share of slow learners.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll import config
from atoll.config import Config
from atoll.planner.candidate import Candidate
from atoll.planner.division import MEMBERS_MAX, STATE_BYTES, Division
from atoll.planner.site import FREE, ClusterDescription
from atoll.sim.estimates.failures import FailureModel

LEARNERS_SIMULATED = 3
"""Learners in a decoupled run: further ones have their own links and see the same rounds."""
SYNCHRONOUS_SIMULATED = 2
"""Learners in a synchronous run: all wait for the same, one fast and one slow where speeds differ."""
INTERVAL_SIMULATED, FRAGMENTS_SIMULATED = 24, 4
"""With fewer fragments of the same size and spacing in time, the link behaves the same."""
WHOLE_MODEL_STEPS = 8
"""Steps in a simulated interval of a whole-model preset: between two exchanges nothing but time passes."""
SLOWER = 1.05
"""A learner that takes this many times as long as the fastest counts as slow."""
JOIN_BITS = 32
"""Of a parameter that a learner gets when it joins: fp32."""
GRADIENT_BITS = 32
"""Of a virtual data-parallel run."""
WAIT_SECONDS = 60.0
"""The default of `limits.start_wait_seconds` and `limits.first_pull_seconds`."""
RECOVERY_INTERVALS = 8.0
"""The default of `limits.recovery_intervals`."""


@dataclass(frozen=True)
class Paces:
    """Step times of the learners, with the exchange inside them."""

    fast_seconds: float
    slow_seconds: float
    slow_share: float
    """Share of the learners that are not fast."""

    @property
    def slow_factor(self) -> float:
        return self.slow_seconds / self.fast_seconds if self.slow_share else 1.0


def paces_of(division: Division, inside: dict[int, float]) -> Paces:
    """`inside`: by number of the kind, the share of a learner's step that is not spent in the exchange inside it."""
    steps: list[tuple[float, float]] = []
    for number, kind in enumerate(division.kinds):
        for seconds in (kind.fast_seconds, kind.slow_seconds):
            steps.append((seconds / inside[number], kind.number / 2))
    fast, slow = min(s for s, _ in steps), max(s for s, _ in steps)
    late = sum(n for seconds, n in steps if seconds > SLOWER * fast)
    return Paces(fast, slow, late / division.learners)


def ranks(chips: int) -> int:
    """Ranks of data-parallel training: one per chip, or the largest divisor of the chips that `limits.members_max` allows."""
    return max(n for n in range(1, min(chips, MEMBERS_MAX) + 1) if chips % n == 0)


# ---------------------------------------------------------------- the whole run


def keys(
    c: Candidate, cluster: ClusterDescription, division: Division, paces: Paces, failures: FailureModel, share: float
) -> dict[str, Any]:
    """The keys that the recipe sets; the preset sets the rest. `share`: the utilisation of data-parallel training."""
    found: dict[str, Any] = {"preset": c.preset, "learners": c.learners, "total_steps": max(200, 4 * c.interval)}
    if c.preset != "ddp":
        found["protocol"] = _protocol(c, cluster)
    if c.preset == "streaming":
        found["model"] = {"numbers": {"layers": cluster.model.layers}}
    gbit = division.gbit(synchronous=c.synchronous, syncer_gbit=cluster.syncer.gbit)
    found["cluster"] = {
        "parameters": round(cluster.model.parameters), "step_seconds": paces.fast_seconds, "step_noise": 0.0,
        "latency_seconds": division.latency, "up_gbit": gbit, "down_gbit": gbit,
    }  # fmt: skip
    if paces.slow_share:
        found["cluster"] |= {"slow_share": round(paces.slow_share, 6), "slow_factor": round(paces.slow_factor, 6)}
    if c.preset == "ddp":
        return found | _data_parallel(found["cluster"], cluster, failures, share)
    found["cluster"] |= _failures(c, cluster, failures)
    return found | {"limits": _waits(c, cluster, gbit, paces)}


def _data_parallel(
    there: dict[str, Any], cluster: ClusterDescription, failures: FailureModel, share: float
) -> dict[str, Any]:
    """A virtual run exchanges gradients through its syncer. Its links get the rate at which one transfer up and one down take
    as long as a step waits for the ring. A rank that fails is back after a restart, and all wait for it."""
    members = ranks(cluster.chips)
    step = there["step_seconds"] * share
    waits = step / share - step
    gbit = 2 * GRADIENT_BITS * there["parameters"] / 1e9 / waits if waits > 0 else FREE
    rate = {
        "step_seconds": step, "latency_seconds": 0.0, "up_gbit": gbit, "down_gbit": gbit,
        "mtbf_seconds": failures.mtbi_seconds * members / cluster.chips, "repair_seconds": failures.restart_seconds,
    }  # fmt: skip
    return {"learners": members, "cluster": there | rate}


def _failures(c: Candidate, cluster: ClusterDescription, failures: FailureModel) -> dict[str, Any]:
    """A learner that is lost as a whole is not resized."""
    lost_whole = failures.slice_chips >= cluster.chips / c.learners
    chips = min(failures.slice_chips, cluster.chips // c.learners) if lost_whole else failures.slice_chips
    return {
        "chips": cluster.chips, "mtbi_hours": failures.mtbi_seconds / 3600, "slice_chips": chips,
        "resize_seconds": 0.0 if lost_whole else failures.down_seconds, "repair_seconds": failures.return_seconds,
    }  # fmt: skip


def _protocol(c: Candidate, cluster: ClusterDescription) -> dict[str, Any]:
    found: dict[str, Any] = {"local_steps_per_round": c.interval, "codec_up": c.codec_up, "codec_down": c.codec_down}
    if c.preset in ("streaming", "decoupled", "async_diloco"):
        found["overlap"] = c.overlap
    if c.preset == "decoupled":
        found |= {"fragments": c.fragments, "quorum": c.quorum or "all"}
    if c.preset == "streaming":
        layers = layers_per_fragment(c.fragments, cluster.model.layers)
        found |= {"fragments": c.fragments} if layers is None else {"layers_per_fragment": layers}
    return found


def layers_per_fragment(fragments: int, layers: int) -> int | None:
    """None: no whole number of layers makes this many fragments."""
    return next((n for n in range(1, layers + 1) if math.ceil(layers / n) + 1 == fragments), None)


def _waits(c: Candidate, cluster: ClusterDescription, gbit: float, paces: Paces) -> dict[str, Any]:
    """The model crosses the link when a learner joins, and a peer's state when it recovers: on a slow link that is no failure."""
    n, interval = cluster.model.parameters, c.interval * paces.slow_seconds
    joins, recovers = (2 * n * bits / (gbit * 1e9) for bits in (JOIN_BITS, 8 * STATE_BYTES))
    found: dict[str, Any] = {}
    if joins > WAIT_SECONDS:
        found |= {"start_wait_seconds": math.ceil(joins), "first_pull_seconds": math.ceil(joins)}
    if recovers > RECOVERY_INTERVALS * interval:
        found["recovery_intervals"] = math.ceil(recovers / interval)
    return found


def settings_of(values: dict[str, Any]) -> Config:
    rest = {key: value for key, value in values.items() if key != "preset"}
    return config.load(preset_name=values["preset"], overrides=rest)


# ---------------------------------------------------------------- the shortened run


def shortened(c: Candidate, settings: Config) -> Config:
    protocol, cluster = settings.protocol, settings.cluster
    few = min(c.learners, SYNCHRONOUS_SIMULATED if c.synchronous else LEARNERS_SIMULATED)
    if c.preset in ("diloco", "async_diloco"):
        steps = min(c.interval, WHOLE_MODEL_STEPS)
        protocol = msgspec.structs.replace(protocol, local_steps_per_round=steps, overlap=steps if c.overlap else 0)
        cluster = msgspec.structs.replace(cluster, step_seconds=cluster.step_seconds * c.interval / steps)
    else:
        part = _part(c)
        protocol = msgspec.structs.replace(
            protocol, local_steps_per_round=c.interval // part, fragments=c.fragments // part,
            quorum=protocol.quorum if c.quorum == 0 else max(1, math.ceil(few * c.quorum / c.learners)),
        )  # fmt: skip
        cluster = msgspec.structs.replace(cluster, parameters=max(1, cluster.parameters // part))
    if cluster.slow_share and c.synchronous:
        cluster = msgspec.structs.replace(cluster, slow_share=1 / few)
    cluster = msgspec.structs.replace(cluster, chips=0)
    waits = msgspec.structs.replace(settings.limits, start_wait_seconds=1e9, first_pull_seconds=1e9, recovery_intervals=1e9)
    return msgspec.structs.replace(settings, learners=few, protocol=protocol, cluster=cluster, limits=waits)


def left_out_seconds(whole: Config, short: Config) -> float:
    """How much longer the model needs to cross the link when a learner joins than the part of it that the shortened run has."""
    return (whole.cluster.parameters - short.cluster.parameters) * JOIN_BITS / (whole.cluster.down_gbit * 1e9)


def _part(c: Candidate) -> int:
    """Of a long interval a part is simulated, with its share of the fragments."""
    common = math.gcd(c.interval, c.fragments)
    least = max(INTERVAL_SIMULATED, 4 * c.overlap)
    return max(
        (k for k in range(1, common + 1)
         if common % k == 0 and c.interval // k >= least and c.fragments // k >= min(FRAGMENTS_SIMULATED, c.fragments)),
        default=1,
    )  # fmt: skip

