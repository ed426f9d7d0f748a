"""The score of a candidate: its expected training speed at equal quality, as a share of all chips busy all the time.

    score = utilisation * goodput * pace * token efficiency

Utilisation comes from the graph simulator (synchronous presets, and the exchange inside a learner) or from the protocol's
machines in virtual time (decoupled); goodput from the failure simulator; token efficiency from quality.py. This file calls
the simulators and caches their results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from atoll.config import Config
from atoll.config.codecs import wire_bits
from atoll.planner import quality
from atoll.planner.division import Division, LearnerKind, divisions, failure_model, pace_share
from atoll.planner.site import FREE, ClusterDescription
from atoll.sim.estimates import goodput
from atoll.sim.estimates.decoupled import MEASURED, DecoupledEstimate, measure_decoupled, settings_for
from atoll.sim.estimates.failures import FailureModel
from atoll.sim.estimates.utilisation import Compute, Curve, Exchange, Method, utilisation

RATES = np.logspace(-6, 9, 901)
"""Gbit/s x step seconds per bit and parameter: the axis of cached curves, 60 points per decade."""
LOG_RATES = np.log10(RATES)
GOODPUT_PRECISION, ROUGH_PRECISION = 0.3, 0.8
"""Percentage points: for the answer, and for the search of what would change it."""
FAILURES_MAX = 200_000
LEARNERS_SIMULATED = 3
"""Learners in a decoupled run: further ones have their own links and see the same rounds."""
FAIL_APART = 16
"""Learners in a goodput run: further ones fail independently and at the same rate."""
WARM_UP = 2
SMALLEST = 4
"""Fragments in a decoupled run: with fewer fragments of the same size and spacing in time, the link behaves the same."""
INTERVAL_SIMULATED = 24
HOPELESS = 1.5
"""If the link needs more than this many intervals to carry the model, the candidate is not run but scored by what it carries."""
GRADIENT_BITS = 32.0


@dataclass(frozen=True)
class Candidate:
    preset: str
    learners: int
    interval: int
    fragments: int
    overlap: int
    quorum: int
    """0: all."""
    codec_up: str
    codec_down: str

    @property
    def synchronous(self) -> bool:
        return self.preset != "decoupled"


@dataclass(frozen=True)
class Scored:
    candidate: Candidate
    score: float
    utilisation: float
    goodput: float
    pace: float
    tokens: float
    """Token efficiency."""
    loss_percent: float
    interval_kept: float
    staleness: float
    """Inner steps from pull to adoption."""
    step_seconds: float
    """One inner step of the slowest learner, with the exchange inside it."""


class Judge:
    """Scores candidates for one cluster. Judges of similar clusters may share a `SimulatorCache`."""

    def __init__(
        self, cluster: ClusterDescription, cache: SimulatorCache | None = None, *, precision: float = GOODPUT_PRECISION
    ) -> None:
        self.cluster = cluster
        self._precision = precision
        self.cache = cache or SimulatorCache()
        self.divisions = {d.learners: d for d in divisions(cluster)}
        self._shares: dict[LearnerKind, float] = {}
        self._goodputs: dict[tuple[str, int], float] = {}

    def score(self, candidate: Candidate) -> Scored:
        return self._scored(candidate, *self._measured(candidate))

    def bound(self, candidate: Candidate) -> float:
        """An upper bound on the score of a decoupled candidate, without its run: no waiting, and every round is kept."""
        kept = max(float(candidate.interval), self._carried(candidate)) if candidate.learners > 1 else 1.0
        return self._scored(candidate, 1.0, kept, 0.0).score

    def _carried(self, candidate: Candidate) -> float:
        """Inner steps in which the link carries one model: no shorter interval can be kept."""
        division = self.divisions[candidate.learners]
        gbit = division.gbit(synchronous=False, syncer_gbit=self.cluster.syncer.gbit)
        bits = max(wire_bits(candidate.codec_up), wire_bits(candidate.codec_down)) * self.cluster.model.parameters
        return bits / (gbit * 1e9) / self.step_seconds(division)

    def _measured(self, candidate: Candidate) -> tuple[float, float, float]:
        """(utilisation between learners, the interval that is kept, staleness)."""
        if candidate.learners == 1:
            return 1.0, 1.0, 0.0
        division = self.divisions[candidate.learners]
        step = self.step_seconds(division)
        gbit = division.gbit(synchronous=candidate.synchronous, syncer_gbit=self.cluster.syncer.gbit)
        if candidate.synchronous:
            latency = float(f"{division.latency / step:.2g}")  # rounded, so that divisions with similar steps share curves
            shares = self.cache.curve(self.cluster.model.layers, exchange_of(candidate, self.cluster, latency))
            bits = wire_bits(candidate.codec_up) + wire_bits(candidate.codec_down)
            share = at_rate(shares, gbit * step, bits, self.cluster.model.parameters)
            return share, candidate.interval, float(candidate.overlap)
        carried = self._carried(candidate)
        if carried > HOPELESS * candidate.interval:
            return 1.0, carried, carried
        fast = min(k.fast_seconds for k in division.kinds) / division.slow_seconds * step
        slow = [k.number * (0.5 if k.several else 1.0) for k in division.kinds if k.slow_seconds > 1.05 * k.fast_seconds]
        slow += [k.number for k in division.kinds if k.fast_seconds == k.slow_seconds > 1.05 * fast]
        answer = self.cache.decoupled(
            candidate, parameters=self.cluster.model.parameters, gbit=gbit, latency=division.latency, step_seconds=fast,
            slow_share=min(1.0, sum(slow) / division.learners), slow_factor=max(1.0, step / fast),
        )  # fmt: skip
        kept = candidate.interval / max(answer.schedule_kept, 1e-3)
        return answer.compute_share, kept, answer.staleness

    def _scored(self, candidate: Candidate, between: float, kept: float, staleness: float) -> Scored:
        division = self.divisions[candidate.learners]
        inside = min(self._inside(kind) for kind in division.kinds)
        loss = quality.loss_percent(
            self.cluster.quality, parameters=self.cluster.model.parameters, learners=candidate.learners, interval=kept,
            staleness=staleness, asynchronous=not candidate.synchronous, codecs=(candidate.codec_up, candidate.codec_down),
        )  # fmt: skip
        tokens = quality.token_efficiency(loss, self.cluster.quality)
        alive = self._goodput(candidate, division)
        pace = pace_share(self.cluster, division, synchronous=candidate.synchronous)
        score = inside * between * alive * pace * tokens * self._advisable(candidate, kept)
        return Scored(
            candidate, score, inside * between, alive, pace, tokens, loss, kept, staleness, division.slow_seconds / inside
        )  # fmt: skip

    def _advisable(self, candidate: Candidate, kept: float) -> float:
        """A penalty below 1 for a decoupled schedule that the links do not keep."""
        least = self.cluster.quality.kept_share
        return min(1.0, candidate.interval / kept / least) if least and not candidate.synchronous else 1.0

    # ------------------------------------------------------------ inside a learner

    def step_seconds(self, division: Division) -> float:
        """One inner step of the slowest learner, with the exchange of gradients inside it."""
        return max(kind.slow_seconds / self._inside(kind) for kind in division.kinds)

    def _inside(self, kind: LearnerKind) -> float:
        if kind not in self._shares:
            self._shares[kind] = self._data_parallel(kind)
        return self._shares[kind]

    def _data_parallel(self, kind: LearnerKind) -> float:
        """Utilisation of data-parallel steps inside a learner: between its chips first, then between its sites."""
        share, seconds = 1.0, kind.slow_seconds
        if kind.inside_gbit < FREE and kind.chips > kind.sites:
            share *= self._ring(kind.chips // kind.sites, kind.inside_gbit, 0.0, seconds)
        if kind.across is not None:
            seconds /= share
            share *= self._ring(kind.sites, kind.across.gbit, kind.across.latency_seconds, seconds)
        return share

    def _ring(self, members: int, gbit: float, latency: float, seconds: float) -> float:
        exchange = Exchange("data_parallel", bits=1.0, datacentres=members, latency_seconds=latency / seconds)
        shares = self.cache.curve(self.cluster.model.layers, exchange)
        return at_rate(shares, gbit * seconds, GRADIENT_BITS, self.cluster.model.parameters)

    # ------------------------------------------------------------ failures

    def _goodput(self, candidate: Candidate, division: Division) -> float:
        """The learners of a synchronous preset stop together, so they count as one learner of all chips."""
        key = (candidate.preset if candidate.preset in ("ddp", "decoupled") else "synchronous", candidate.learners)
        if key not in self._goodputs:
            self._goodputs[key] = self._simulated_goodput(candidate, division)
        return self._goodputs[key]

    def _simulated_goodput(self, candidate: Candidate, division: Division) -> float:
        if candidate.synchronous:
            model = failure_model(self.cluster, division.kinds, self.step_seconds(division))
            return self.cache.goodput(self.cluster.chips, 1, model, candidate.preset != "ddp", self._precision)
        total = 0.0
        for kind in division.kinds:
            model = failure_model(self.cluster, (kind,), kind.slow_seconds / self._inside(kind))
            alike = min(kind.number, FAIL_APART)
            total += kind.number * kind.chips * self.cache.goodput(alike * kind.chips, alike, model, True, self._precision)
        return total / self.cluster.chips


def exchange_of(candidate: Candidate, cluster: ClusterDescription, latency: float) -> Exchange:
    """In units of a step. A learner's fragment goes up to the syncer and comes down again. That is a serial link with the bits
    and latencies of both directions, which the simulator models as a ring of two."""
    names: dict[str, Method] = {"diloco": "diloco", "async_diloco": "async_diloco", "streaming": "streaming"}
    fragments = min(candidate.fragments, cluster.model.layers) if candidate.preset == "streaming" else None
    overlap = candidate.overlap if candidate.preset == "streaming" else 0
    return Exchange(
        names[candidate.preset], interval=candidate.interval, overlap=overlap, fragments=fragments, bits=1.0, datacentres=2,
        latency_seconds=latency,
    )  # fmt: skip


def at_rate(shares: Curve, gbit_seconds: float, bits: float, parameters: float) -> float:
    """The curve is for 1e9 parameters of one bit: only the ratio of rate and size matters."""
    rate = gbit_seconds * 1e9 / (bits * parameters)
    return float(np.interp(math.log10(max(rate, RATES[0])), LOG_RATES, shares))


class SimulatorCache:
    """Results of the simulators, keyed by all of their arguments."""

    def __init__(self) -> None:
        self._curves: dict[tuple[int, Exchange], Curve] = {}
        self._runs: dict[bytes, DecoupledEstimate] = {}
        self._goodputs: dict[tuple[int, int, FailureModel, bool, float], float] = {}
        self.asked = 0
        """Decoupled runs so far: the slow simulations."""

    def curve(self, layers: int, exchange: Exchange) -> Curve:
        """Utilisation over RATES for a step of 1 s and 1e9 parameters of `exchange.bits`."""
        key = (layers, exchange)
        if key not in self._curves:
            steps = None if exchange.method in ("data_parallel", "async_diloco") else exchange.interval
            self._curves[key] = utilisation(Compute(layers, 1e9, 1.0), exchange, RATES, steps, steady=True)
        return self._curves[key]

    def goodput(self, chips: int, learners: int, model: FailureModel, elastic: bool, precision: float) -> float:
        key = (chips, learners, model, elastic, precision)
        if key not in self._goodputs:
            self._goodputs[key] = _goodput(chips, learners, model, elastic, precision)
        return self._goodputs[key]

    def decoupled(
        self, candidate: Candidate, *, parameters: float, gbit: float, latency: float, step_seconds: float, slow_share: float,
        slow_factor: float,
    ) -> DecoupledEstimate:  # fmt: skip
        settings = _short_run(candidate, parameters, gbit, latency, step_seconds, slow_share, slow_factor)
        key = msgspec.json.encode((settings.learners, settings.protocol, settings.cluster))
        if key not in self._runs:
            self.asked += 1
            self._runs[key] = measure_decoupled(settings)
        return self._runs[key]


def _goodput(chips: int, learners: int, model: FailureModel, elastic: bool, precision: float) -> float:
    gap = model.mtbi_seconds / chips
    expected = 80 * model.return_seconds / gap
    days = FAILURES_MAX * gap / goodput.DAY if expected > FAILURES_MAX else None
    return goodput.simulate(chips, learners, model, elastic=elastic, days=days, precision=precision).goodput / 100


def _short_run(
    c: Candidate, parameters: float, gbit: float, latency: float, step_seconds: float, slow_share: float, slow_factor: float
) -> Config:
    """A run with few learners and, of a long interval, only a part with its share of the fragments: the same bytes per step."""
    few = min(c.learners, LEARNERS_SIMULATED)
    common = math.gcd(c.interval, c.fragments)
    part = max(
        (k for k in range(1, common + 1)
         if common % k == 0 and c.interval // k >= INTERVAL_SIMULATED and c.fragments // k >= min(SMALLEST, c.fragments)),
        default=1,
    )  # fmt: skip
    layers = {
        "learners": few,
        "protocol": {
            "local_steps_per_round": c.interval // part, "fragments": c.fragments // part, "overlap": c.overlap,
            "quorum": 1 if c.quorum <= 1 else math.ceil(few * c.quorum / c.learners), "codec_up": c.codec_up,
            "codec_down": c.codec_down,
        },
        "cluster": {
            "parameters": max(1, round(parameters / part)), "step_seconds": step_seconds, "up_gbit": gbit, "down_gbit": gbit,
            "latency_seconds": latency, "slow_share": slow_share, "slow_factor": slow_factor,
        },
    }  # fmt: skip
    settings = settings_for("decoupled", layers)
    return msgspec.structs.replace(settings, total_steps=(WARM_UP + MEASURED) * (c.interval // part))
