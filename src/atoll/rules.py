"""The protocol's arithmetic on plain numbers: schedule, weight, freshness, grace, pacing, moving averages.

Symbols (docs/research/presets.md): P fragments, H interval, tau overlap, K quorum, T outer steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import median, median_low

import msgspec

from atoll.config import ALL, CUSTOM, Config
from atoll.ids import FragmentId, LearnerId, LocalStep, Nanos, OuterStep

# ---------------------------------------------------------------- schedule


class Policy(msgspec.Struct, frozen=True):
    """The rules of one outer step. Without a ramp every outer step has the same policy."""

    start: OuterStep
    """Outer steps at or below `start` belong to the phase before; offsets count from here."""
    interval: int
    overlap: int
    quorum_all: bool
    quorum: int
    exact: bool
    lead: int
    """-1: unlimited."""
    plain_average: bool
    """The synchronous part of a ramp: mean and outer SGD at rate 1.0, in place of the run's merge and outer optimiser."""


class Schedule:
    """Which fragments are due at an outer step, and under which policy. A function of the config alone."""

    def __init__(self, config: Config) -> None:
        self.fragments = config.protocol.fragments
        self._phases = _phases(config)
        self._starts = [phase.start for phase in self._phases]
        self._only = self._phases[0] if len(self._phases) == 1 else None
        """Without a ramp."""
        self._between: dict[tuple[int, int], tuple[FragmentId, ...]] = {}
        """What `due_between` found, by its place in the interval: every learner asks at every boundary."""

    def policy(self, outer_step: OuterStep) -> Policy:
        if self._only is not None:
            return self._only
        return self._phases[max(0, bisect_right(self._starts, outer_step - 1) - 1)]

    def due(self, outer_step: OuterStep) -> tuple[FragmentId, ...]:
        if outer_step < 1:
            return ()
        policy = self.policy(outer_step)
        return _due_table(self.fragments, policy.interval)[(outer_step - policy.start) % policy.interval]

    def next_due(self, outer_step: OuterStep) -> OuterStep:
        """The first outer step at or after this one at which a fragment is due."""
        while not self.due(outer_step):
            outer_step += 1
        return outer_step

    def due_between(self, first: OuterStep, last: OuterStep) -> tuple[FragmentId, ...]:
        """Sorted."""
        if self._only is None or first < 1:
            return self._found_between(first, last)
        key = (first - self._only.start) % self._only.interval, last - first
        found = self._between.get(key)
        if found is None:
            found = self._between[key] = self._found_between(first, last)
        return found

    def _found_between(self, first: OuterStep, last: OuterStep) -> tuple[FragmentId, ...]:
        return tuple(sorted({p for outer_step in range(first, last + 1) for p in self.due(outer_step)}))


@lru_cache(maxsize=256)
def _due_table(fragments: int, interval: int) -> tuple[tuple[FragmentId, ...], ...]:
    """Fragment p is due when (t - t_p) mod H == 0, its offset t_p = floor(p*H/P)."""
    rows: list[list[FragmentId]] = [[] for _ in range(interval)]
    for fragment, offset in enumerate(offsets(fragments, interval)):
        rows[offset % interval].append(fragment)
    return tuple(tuple(row) for row in rows)


def offsets(fragments: int, interval: int) -> tuple[int, ...]:
    return tuple(p * interval // fragments for p in range(fragments))


def ramp_intervals(interval: int) -> tuple[int, ...]:
    """1, 2, 4, ... below H."""
    out, h = [], 1
    while h < interval:
        out.append(h)
        h *= 2
    return tuple(out)


def _phases(config: Config) -> tuple[Policy, ...]:
    p = config.protocol
    # A quorum of as many learners as there are bounds nobody's lead: only a preset that is defined to wait does, by name.
    lead = p.lead if p.lead >= 0 else (p.overlap if p.quorum == ALL else -1)
    usual = Policy(
        start=0, interval=1 if p.dynamic_steps else p.local_steps_per_round, overlap=p.overlap, quorum_all=p.quorum == ALL,
        quorum=1 if p.quorum == ALL else int(p.quorum), exact=p.adopt == "exact", lead=lead, plain_average=False,
    )  # fmt: skip
    intervals = ramp_intervals(p.local_steps_per_round) if p.ramp > 0 else ()
    length = round(config.total_steps * p.ramp) / len(intervals) if intervals else 0.0
    phases = []
    for k, h in enumerate(intervals):
        start = round(k * length)
        change = msgspec.structs.replace(usual, start=start, interval=h)
        if h <= p.overlap:  # too short to overlap: this phase is synchronous, and learners may wait
            change = msgspec.structs.replace(
                change, overlap=0, quorum_all=True, quorum=1, exact=True, lead=0, plain_average=True
            )  # fmt: skip
        if start < round((k + 1) * length):
            phases.append(change)
    phases.append(msgspec.structs.replace(usual, start=round(len(intervals) * length)))
    return tuple(phases)


# ---------------------------------------------------------------- rounds


def fresh(exact: bool, outer_step: OuterStep, position: OuterStep, reported: LocalStep, counted: LocalStep) -> bool:
    """Adoption on arrival: the reported local step exceeds the one last counted. Exact: the learner is at this outer step."""
    return position >= outer_step if exact else reported > counted


def contribution_weight(weighting: str, c_steps: int, c_tokens: int, c_samples: int) -> float:
    """`tokens` is quantity times quality: tokens x tokens per step. A learner that took no step has weight 0."""
    if c_steps == 0:
        return 0.0
    if weighting == "uniform":
        return 1.0
    if weighting == "num_samples":
        return float(c_samples)
    return c_tokens * (c_tokens / c_steps)


FASTER_MAX = 2
"""The pace that others are measured by is at most so many times the usual one: a learner that reports steps it did not train
must not make everybody else's intervals arbitrarily short."""


def dynamic_local_steps(interval: int, own: Nanos | None, paces: Sequence[Nanos]) -> int:
    """DyLU: floor(H * v_m / v_max), at least 1; `paces` are measured times of a step of all who were measured, 1/v. One that is
    faster than v_max may be gets more than H: then reporting faster does not mean being merged more often."""
    if own is None or not paces:
        return interval
    fastest, *rest = sorted(paces)
    shortest = max(fastest, median_low(rest) // FASTER_MAX) if rest else fastest
    return max(1, interval * shortest // max(1, own))


def grace_window(overlap: int, step_time: Nanos, quorum_time: Nanos, sync_time: Nanos, gamma: float) -> Nanos:
    """slack = tau*step_time - (quorum_time + sync_time); grace = clip(gamma*slack, 0, step_time)."""
    slack = overlap * step_time - (quorum_time + sync_time)
    return max(0, min(step_time, int(gamma * slack)))


def paced_until(last_fixed_at: Nanos | None, pace: float, step_time: Nanos) -> Nanos:
    """One outer step stands for one inner step of every learner, so pace is in step times."""
    return 0 if last_fixed_at is None else last_fixed_at + int(pace * step_time)


def ema(old: Nanos | None, new: Nanos, weight: float) -> Nanos:
    return new if old is None else int(old + weight * (new - old))


def median_nanos(values: Iterable[Nanos | None]) -> Nanos:
    known = [v for v in values if v is not None]
    return int(median(known)) if known else 0


def learner_overlap(config: Config, policy: Policy, learner: LearnerId) -> int:
    """With exact adoption, tau may differ per learner."""
    per_learner = config.protocol.overlap_by_learner
    return per_learner[learner] if per_learner and policy.exact and learner < len(per_learner) else policy.overlap


def tokens_per_step_max(config: Config) -> int:
    """The most tokens in one inner step, which bounds a learner's counters. For a user's own loop, the recipe sets it."""
    if config.limits.tokens_per_step_max:
        return config.limits.tokens_per_step_max
    if config.model.name == CUSTOM:
        return 10**12
    return samples_max(config) * config.data.seq_len * config.inner.accumulate


def samples_per_step_max(config: Config) -> int:
    """The most samples in one inner step. A bound of its own, because a user's loop may count samples and no tokens."""
    if config.model.name == CUSTOM:
        return tokens_per_step_max(config)
    return samples_max(config) * config.inner.accumulate


def samples_max(config: Config) -> int:
    return max(config.data.samples_by_learner or (config.data.batch_size,))


def samples_of(config: Config, learner: LearnerId) -> int:
    """Samples in one batch of this learner. A scavenged learner, which the config does not list, takes the largest size."""
    sizes = config.data.samples_by_learner
    return sizes[learner] if learner < len(sizes) else samples_max(config)


GOLDEN = (math.sqrt(5) - 1) / 2


def shrunk(samples: int, share: float, position: int) -> int:
    """A learner with fewer slices trains with a proportionally smaller batch of at least one sample. A fraction of a sample is
    rounded up in that fraction of positions, so that small batches shrink too, on average."""
    return max(1, min(samples, math.floor(samples * share + position * GOLDEN % 1.0)))


# ---------------------------------------------------------------- the inner learning rate


def learning_rate(config: Config, outer_step: OuterStep) -> float:
    """A function of outer_step / T: the global outer step ends the training, so the schedule follows it."""
    inner = config.inner
    done = outer_step / config.total_steps
    if done < inner.warmup_share:
        warm = (outer_step + 1) / (inner.warmup_share * config.total_steps + 1)
        return inner.learning_rate * min(1.0, warm)
    if inner.schedule == "constant":
        return inner.learning_rate
    left = (min(done, 1.0) - inner.warmup_share) / max(1e-9, 1.0 - inner.warmup_share)
    return inner.learning_rate * (inner.final_share + (1.0 - inner.final_share) * 0.5 * (1.0 + math.cos(math.pi * left)))
