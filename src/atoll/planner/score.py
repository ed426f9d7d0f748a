"""The score of a candidate: its expected training speed at equal quality, as a share of all chips busy all the time.

    score = utilisation * goodput * pace * token efficiency * price

Utilisation between learners and the cost of a lost learner come from the protocol's machines in virtual time; utilisation of the
exchange inside a learner (and of data-parallel training) from the graph simulator; failures from the failure simulator; token
efficiency from quality.py. `bound` is an estimate without a run: it only says which candidates need none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from atoll.config import Config
from atoll.config.codecs import wire_bits
from atoll.planner import quality, virtual
from atoll.planner.candidate import Candidate
from atoll.planner.division import STATE_BYTES, Division, LearnerKind, divisions, failure_model, pace_share
from atoll.planner.site import FREE, ClusterDescription
from atoll.planner.traffic import money_share
from atoll.sim.estimates import goodput
from atoll.sim.estimates.failures import FailureModel
from atoll.sim.estimates.machines import LossCost, SteadyEstimate, measure_loss, measure_steady
from atoll.sim.estimates.utilisation import Compute, Curve, Exchange, utilisation

RATES = np.logspace(-6, 9, 901)
"""Gbit/s x step seconds per bit and parameter: the axis of cached curves, 60 points per decade."""
LOG_RATES = np.log10(RATES)
GOODPUT_PRECISION, ROUGH_PRECISION = 0.3, 0.8
"""Percentage points: for the answer, and for the search of what would change it."""
FAILURES_MAX = 200_000
FAIL_APART = 16
"""Learners in a goodput run: further ones fail independently and at the same rate."""
HOPS = 4
"""One-way latencies of a round: a report, the pull, the contribution, the announcement."""
HOPELESS = 1.5
"""If the link needs more than this many intervals to carry the model, the candidate is not run but scored by what it carries."""
LOSS_MATTERS = 2e-4
"""If an hour's wait at each loss of a learner costs a smaller share of the time, the cost of a loss is not measured."""


NO_COST = LossCost(0.0, 0.0)


@dataclass(frozen=True)
class Scored:
    candidate: Candidate
    score: float
    utilisation: float
    """The share of the learners' time in inner steps while nothing fails: what a virtual run of the recipe shows."""
    inside: float
    """The share of a learner's step that is not spent in the exchange inside it; 1 for `ddp`, whose utilisation it is."""
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
    price: float = 1.0
    """The share of the money that pays for chips; the rest pays for bytes."""
    startup_seconds: float = 0.0
    """From the start of the processes to the first round."""


@dataclass(frozen=True)
class _Measured:
    utilisation: float
    slowest: float
    """The share of a slow learner: it waits for its link only, never for other learners."""
    kept: float
    staleness: float
    startup_seconds: float = 0.0
    loss: LossCost = NO_COST


class Judge:
    """Scores candidates for one cluster. Judges of similar clusters may share a `SimulatorCache`."""

    def __init__(
        self, cluster: ClusterDescription, cache: SimulatorCache | None = None, *, precision: float = GOODPUT_PRECISION,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """`seed`: of the simulated failures."""
        self.cluster, self._seed = cluster, seed
        self._precision = precision
        self.cache = cache or SimulatorCache()
        self.divisions = {d.learners: d for d in divisions(cluster)}
        self._shares: dict[LearnerKind, float] = {}
        self._goodputs: dict[tuple[str, int], float] = {}
        self._paces: dict[int, virtual.Paces] = {}
        self._models: dict[int, FailureModel] = {}

    def score(self, candidate: Candidate) -> Scored:
        """On the machines."""
        return self._scored(candidate, self._measured(candidate))

    def bound(self, candidate: Candidate) -> float:
        """An upper bound on the score, without a run."""
        if candidate.learners == 1:
            return self.score(candidate).score
        if not candidate.synchronous:
            kept = max(float(candidate.interval), self._carried(candidate))
            return self._scored(candidate, _Measured(1.0, 1.0, kept, 0.0)).score
        best = self._at_most(candidate)
        return self._scored(candidate, _Measured(best, best, candidate.interval, float(candidate.overlap))).score

    # ------------------------------------------------------------ between learners

    def paces(self, learners: int) -> virtual.Paces:
        if learners not in self._paces:
            division = self.divisions[learners]
            inside = {number: self._inside(kind) for number, kind in enumerate(division.kinds)}
            self._paces[learners] = virtual.paces_of(division, inside)
        return self._paces[learners]

    def step_seconds(self, division: Division) -> float:
        """One inner step of the slowest learner, with the exchange of gradients inside it."""
        return self.paces(division.learners).slow_seconds

    def gbit(self, candidate: Candidate) -> float:
        """The rate of a learner's link that the plan may use."""
        division = self.divisions[candidate.learners]
        return division.gbit(synchronous=candidate.synchronous, syncer_gbit=self.cluster.syncer.gbit)

    def keys(self, candidate: Candidate) -> dict[str, object]:
        """The recipe's keys."""
        division, paces = self.divisions[candidate.learners], self.paces(candidate.learners)
        share = self._inside(division.kinds[0])
        return virtual.keys(candidate, self.cluster, division, paces, self.failures(candidate.learners), share)

    def settings(self, candidate: Candidate) -> Config:
        return virtual.settings_of(self.keys(candidate))

    def _carried(self, candidate: Candidate) -> float:
        """Inner steps in which the link carries one model: no shorter interval can be kept."""
        bits = max(wire_bits(candidate.codec_up), wire_bits(candidate.codec_down)) * self.cluster.model.parameters
        return bits / (self.gbit(candidate) * 1e9) / self.paces(candidate.learners).slow_seconds

    def _at_most(self, c: Candidate) -> float:
        """Utilisation of a synchronous preset if no transfer waits for another. A fragment is up and down again after
        `round_trip`; beyond tau steps its learners wait. Fragments in flight at the same time may share a wait."""
        step, n = self.paces(c.learners).slow_seconds, self.cluster.model.parameters
        rate, latency = self.gbit(c) * 1e9, self.divisions[c.learners].latency
        up, down = wire_bits(c.codec_up), wire_bits(c.codec_down)
        interval = c.interval * step
        round_trip = (up + down) * n / c.fragments / rate + HOPS * latency
        if c.preset == "async_diloco":  # of two rounds in a row, one has its whole interval to be exchanged
            return min(1.0, 2 * interval / (interval + round_trip))
        together = min(c.fragments, 1 + math.floor(c.overlap * c.fragments / c.interval))
        waits = math.ceil(c.fragments / together) * max(0.0, round_trip - c.overlap * step)
        return min(interval / (interval + waits), interval / max(interval, max(up, down) * n / rate))

    def _measured(self, candidate: Candidate) -> _Measured:
        if candidate.learners == 1:
            share = self._inside(self.divisions[1].kinds[0])
            return _Measured(share, share, 1.0, 0.0)
        if not candidate.synchronous and self._carried(candidate) > HOPELESS * candidate.interval:
            carried = self._carried(candidate)
            return _Measured(1.0, 1.0, carried, carried)
        whole = self.settings(candidate)
        short = virtual.shortened(candidate, whole)
        run = self.cache.steady(short)
        startup = run.startup_seconds + virtual.left_out_seconds(whole, short)
        loss = NO_COST
        if self.loses_learners(candidate):
            loss = self.cache.loss(short, run) or LossCost(0.0, self._state_seconds(candidate))
        if not candidate.synchronous:
            return _Measured(1.0, 1.0, max(candidate.interval, run.interval_kept * candidate.interval
                             / short.protocol.local_steps_per_round), run.staleness, startup, loss)  # fmt: skip
        late = self.paces(candidate.learners).slow_share
        mean = late * run.shares[0] + (1 - late) * run.shares[-1]
        return _Measured(mean, run.shares[0], candidate.interval, float(candidate.overlap), startup, loss)

    def _scored(self, candidate: Candidate, m: _Measured) -> Scored:
        division = self.divisions[candidate.learners]
        inside = min(self._inside(kind) for kind in division.kinds) if candidate.learners > 1 else 1.0
        loss = quality.loss_percent(
            self.cluster.quality, parameters=self.cluster.model.parameters, learners=candidate.learners, interval=m.kept,
            staleness=m.staleness, asynchronous=not candidate.synchronous, codecs=(candidate.codec_up, candidate.codec_down),
        )  # fmt: skip
        tokens = quality.token_efficiency(loss, self.cluster.quality)
        alive = self._goodput(candidate, division) / self._loss_factor(candidate, m.loss)
        pace = pace_share(self.cluster, division, synchronous=candidate.synchronous)
        pace *= m.slowest / m.utilisation if m.utilisation else 1.0
        speed = inside * m.utilisation * alive * pace
        price = money_share(candidate, self.cluster, division, speed / max(m.kept / candidate.interval, 1.0))
        score = speed * tokens * price * self._advisable(candidate, m.kept)
        return Scored(
            candidate, score, m.utilisation, inside, alive, pace, tokens, loss, m.kept, m.staleness,
            self.paces(candidate.learners).slow_seconds, price, m.startup_seconds,
        )  # fmt: skip

    def _advisable(self, candidate: Candidate, kept: float) -> float:
        """A penalty below 1 for a decoupled schedule that the links do not keep."""
        least = self.cluster.quality.kept_share
        return min(1.0, candidate.interval / kept / least) if least and not candidate.synchronous else 1.0

    # ------------------------------------------------------------ inside a learner

    def _inside(self, kind: LearnerKind) -> float:
        if kind not in self._shares:
            self._shares[kind] = self._data_parallel(kind)
        return self._shares[kind]

    def _data_parallel(self, kind: LearnerKind) -> float:
        """Utilisation of data-parallel steps inside a learner, hierarchically: between the chips of a site first, then between
        its sites, over whose links each site sends its sum once."""
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
        return at_rate(shares, gbit * seconds, self.cluster.model.gradient_bits, self.cluster.model.parameters)

    # ------------------------------------------------------------ failures

    def failures(self, learners: int) -> FailureModel:
        """One model for the chips of all learners; the recipe carries it."""
        if learners not in self._models:
            division = self.divisions[learners]
            self._models[learners] = failure_model(self.cluster, division.kinds, self.step_seconds(division))
        return self._models[learners]

    def _loss_rate(self, learners: int) -> float:
        """Losses of a whole learner, in one second of one learner."""
        model = self.failures(learners)
        chips = self.cluster.chips / learners
        return chips / model.mtbi_seconds if model.slice_chips >= chips else 0.0

    def loses_learners(self, c: Candidate) -> bool:
        """Whole ones, so often that it matters."""
        return c.learners * self._loss_rate(c.learners) * 3600 > LOSS_MATTERS

    def _loss_factor(self, c: Candidate, cost: LossCost) -> float:
        """How much longer training takes because learners are lost, beyond their absence."""
        rate = self._loss_rate(c.learners)
        return (1 + rate * cost.itself) * (1 + (c.learners - 1) * rate * cost.others)

    def _state_seconds(self, c: Candidate) -> float:
        return self.cluster.model.parameters * STATE_BYTES * 8 / (self.gbit(c) * 1e9)

    def _goodput(self, candidate: Candidate, division: Division) -> float:
        """The learners of a synchronous preset stop together, so they count as one learner of all chips."""
        key = (candidate.preset if candidate.preset in ("ddp", "decoupled") else "synchronous", candidate.learners)
        if key not in self._goodputs:
            self._goodputs[key] = self._simulated_goodput(candidate, division)
        return self._goodputs[key]

    def _simulated_goodput(self, candidate: Candidate, division: Division) -> float:
        model = self.failures(candidate.learners)
        if candidate.preset == "ddp":
            return self.cache.goodput(self.cluster.chips, 1, model, False, self._precision, self._seed)
        rate = self._loss_rate(candidate.learners)
        if rate:  # what a loss costs beyond the absence is measured on the machines
            return 1 / (1 + rate * model.return_seconds)
        if candidate.synchronous:
            return self.cache.goodput(self.cluster.chips, 1, model, True, self._precision, self._seed)
        alike = min(candidate.learners, FAIL_APART)
        chips = max(alike, self.cluster.chips * alike // candidate.learners)
        return self.cache.goodput(chips, alike, model, True, self._precision, self._seed)


def at_rate(shares: Curve, gbit_seconds: float, bits: float, parameters: float) -> float:
    """The curve is for 1e9 parameters of one bit: only the ratio of rate and size matters."""
    rate = gbit_seconds * 1e9 / (bits * parameters)
    return float(np.interp(math.log10(max(rate, RATES[0])), LOG_RATES, shares))


class SimulatorCache:
    """Results of the simulators, keyed by all of their arguments."""

    def __init__(self) -> None:
        self._curves: dict[tuple[int, Exchange], Curve] = {}
        self._runs: dict[bytes, SteadyEstimate] = {}
        self._losses: dict[bytes, LossCost | None] = {}
        self._goodputs: dict[tuple[int, int, FailureModel, bool, float, int], float] = {}
        self.asked = 0
        """Runs of the machines so far."""

    def curve(self, layers: int, exchange: Exchange) -> Curve:
        """Utilisation over RATES for a step of 1 s and 1e9 parameters of `exchange.bits`."""
        key = (layers, exchange)
        if key not in self._curves:
            self._curves[key] = utilisation(Compute(layers, 1e9, 1.0), exchange, RATES, steady=True)
        return self._curves[key]

    def goodput(self, chips: int, learners: int, model: FailureModel, elastic: bool, precision: float, seed: int) -> float:
        key = (chips, learners, model, elastic, precision, seed)
        if key not in self._goodputs:
            self._goodputs[key] = _goodput(chips, learners, model, elastic, precision, seed)
        return self._goodputs[key]

    def steady(self, settings: Config) -> SteadyEstimate:
        key = _key(settings)
        if key not in self._runs:
            self.asked += 1
            self._runs[key] = measure_steady(settings)
        return self._runs[key]

    def loss(self, settings: Config, steady: SteadyEstimate) -> LossCost | None:
        key = _key(settings)
        if key not in self._losses:
            self.asked += 1
            self._losses[key] = measure_loss(settings, steady)
        return self._losses[key]


def _key(settings: Config) -> bytes:
    return msgspec.json.encode((settings.learners, settings.protocol, settings.cluster))


def _goodput(chips: int, learners: int, model: FailureModel, elastic: bool, precision: float, seed: int) -> float:
    gap = model.mtbi_seconds / chips
    expected = 80 * model.return_seconds / gap
    days = FAILURES_MAX * gap / goodput.DAY if expected > FAILURES_MAX else None
    found = goodput.simulate(chips, learners, model, elastic=elastic, days=days, precision=precision, seed=seed)
    return found.goodput / 100
