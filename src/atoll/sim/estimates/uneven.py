"""Learners of uneven speed: what each rule for waiting costs them, on the real machines in virtual time.

A rule says how many reports close a round and how far a learner may run ahead of one. All of them are rules of the live system
too: they are keys of `[protocol]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.config import Config, changed
from atoll.ids import SYNCER, Nanos, WorkerId, seconds
from atoll.protocol.vocabulary import Effect, Event, FixParticipants
from atoll.sim.cluster import VirtualCluster
from atoll.sim.estimates.machines import StepWatch


@dataclass(frozen=True)
class UnevenEstimate:
    rule: str
    merged: float
    """Learners merged in a round, on average."""
    fast: float | None
    """The share of the fast learners' time in inner steps, since the first round; None: there is no fast learner."""
    slow: float | None
    """The same of the slow learners."""
    seconds_a_round: float


def rules(overlap: int, leads: Sequence[int]) -> dict[str, Mapping[str, Any]]:
    """By name: keys of `[protocol]`. `leads`: one row of K = all for each."""
    words = {0: "lead 0 (a barrier at every step)", overlap: f"lead {overlap} (tau)"}
    everybody: dict[str, Mapping[str, Any]] = {
        f"K all, {words.get(lead, f'lead {lead}')}": {"quorum": "all", "lead": lead} for lead in leads
    }
    return everybody | {
        "K 1, no grace, pace 0": {"quorum": 1, "grace": "none", "pace": 0.0},
        "K 1, adaptive grace, pace 1": {"quorum": 1, "grace": "adaptive", "pace": 1.0},
    }


class _Rounds:
    """How many learners took part in each round, and when it closed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.closed: list[Nanos] = []

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        for effect in effects if worker == SYNCER else ():
            if isinstance(effect, FixParticipants):
                self.sizes.append(len(effect.participants))
                self.closed.append(now)


def measure_uneven(settings: Config, rule: str, keys: Mapping[str, Any]) -> UnevenEstimate:
    config = changed(settings, overrides={"protocol": dict(keys)})
    rounds, watch = _Rounds(), StepWatch(0)
    VirtualCluster(config, observers=[rounds, watch]).run()
    shares = [watch.steps[m].share(1) if m in watch.steps else 0.0 for m in range(config.learners)]
    slow = round(config.cluster.slow_share * config.learners)  # the first ones, as in hardware.py
    lasted = seconds(rounds.closed[-1] - rounds.closed[0]) / max(1, len(rounds.closed) - 1)
    return UnevenEstimate(rule, sum(rounds.sizes) / len(rounds.sizes), _mean(shares[slow:]), _mean(shares[:slow]), lasted)


def _mean(shares: Sequence[float]) -> float | None:
    return sum(shares) / len(shares) if shares else None
