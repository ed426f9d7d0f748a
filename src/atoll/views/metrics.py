"""What `/metrics` shows: the list of all metrics, their values, and Prometheus's text format.

One thread folds events into the values, another renders them. No lock is shared: a value is replaced whole, and a rendering works
on copies that the interpreter makes in one step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from enum import StrEnum

import msgspec

from atoll.protocol.ledger import Loss
from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import Standing

SYNCER_ONLY, LEARNER_ONLY, BOTH = "syncer", "learner", "both"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(msgspec.Struct, frozen=True):
    """One family. Units are base units (seconds, bytes, tokens) and in the name."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, in order, without infinity."""
    on: str = SYNCER_ONLY
    """Whose endpoint has it."""


COUNTER, GAUGE, HISTOGRAM = MetricKind
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
LEARNERS = tuple(float(1 << power) for power in range(11))

METRICS: tuple[Metric, ...] = (
    Metric("atoll_build_info", GAUGE, "Always 1; labels say what runs.", ("role", "version", "torch", "preset"), on=BOTH),
    Metric("atoll_outer_step", GAUGE, "The last outer step that is stored."),
    Metric("atoll_total_steps", GAUGE, "Outer steps of the whole run, by its config."),
    Metric("atoll_last_stored_timestamp_seconds", GAUGE, "Unix time at which the last outer step was stored; 0: none was."),
    Metric("atoll_round_seconds", HISTOGRAM, "From fixing a round's participants to its stored result.", (), SECONDS),
    Metric("atoll_grace_seconds", HISTOGRAM, "How long a round waited for more learners after its quorum was met.", (), SECONDS),
    Metric("atoll_round_participants", HISTOGRAM, "Learners whose updates a stored round merged.", (), LEARNERS),
    Metric("atoll_rounds_aborted_total", COUNTER, "Rounds that were given up and gathered again, by reason.", ("reason",)),
    Metric("atoll_learners", GAUGE, "Learners by their standing with the syncer.", ("standing",)),
    Metric("atoll_learner_step_seconds", HISTOGRAM, "Inner steps, by their learners' clocks.", ("learner",), SECONDS, on=BOTH),
    Metric("atoll_learner_staleness_rounds", GAUGE, "Versions newer than the anchor of its last merged update.", ("learner",)),
    Metric("atoll_learner_loss", GAUGE, "Train loss of a learner's last inner step.", ("learner",), on=BOTH),
    Metric(
        "atoll_link_bytes_total", COUNTER,
        "Bytes of messages on a learner's link with the syncer, up (to the syncer) and down, TLS and TCP excluded.",
        ("learner", "direction"), on=BOTH,
    ),
    Metric("atoll_trained_tokens_total", COUNTER, "Tokens trained by all learners, as far as the syncer heard of them."),
    Metric("atoll_merged_tokens", GAUGE, "Of these, merged into Theta. A rollback lowers it."),
    Metric("atoll_in_flight_tokens", GAUGE, "Of these, neither merged nor discarded yet."),
    Metric("atoll_discarded_tokens_total", COUNTER, "Of these, not merged, by reason.", ("reason",)),
    Metric("atoll_goodput_ratio", GAUGE, "Share of the learners' time in reported inner steps, since this process heard one."),
    Metric("atoll_heldout_loss", GAUGE, "The newest held-out loss of Theta, where some are measured."),
    Metric("atoll_heldout_step", GAUGE, "The outer step that this loss is of."),
    Metric("atoll_recovery_seconds", HISTOGRAM, "From a learner's Hello without state to its entering the run.", (), SECONDS),
    Metric("atoll_rollbacks_total", COUNTER, "Rollbacks that were carried out."),
    Metric("atoll_refusals_total", COUNTER, "Messages that the protocol refused, by reason.", ("reason",), on=BOTH),
    Metric("atoll_door_refusals_total", COUNTER, "Calls, connections and frames refused before the protocol.", ("kind",)),
    Metric("atoll_learner_local_step", GAUGE, "Inner steps that this learner has completed.", ("learner",), on=LEARNER_ONLY),
    Metric("atoll_learner_outer_step", GAUGE, "The outer step at which this learner trains.", ("learner",), on=LEARNER_ONLY),
    Metric("atoll_learner_tokens_total", COUNTER, "Tokens that this process has trained.", ("learner",), on=LEARNER_ONLY),
    Metric("atoll_learner_waited_seconds_total", COUNTER, "Time that the preset made it wait.", ("learner",), on=LEARNER_ONLY),
    Metric("atoll_learner_adoptions_total", COUNTER, "Versions of fragments that it took over.", ("learner",), on=LEARNER_ONLY),
    Metric("atoll_learner_connected", GAUGE, "1 with a link to the syncer, else 0.", ("learner",), on=LEARNER_ONLY),
    Metric("process_cpu_seconds_total", COUNTER, "User and system CPU time of this process.", on=BOTH),
    Metric("process_resident_memory_bytes", GAUGE, "Resident memory of this process (Linux).", on=BOTH),
    Metric("process_start_time_seconds", GAUGE, "Unix time at which this process began to count.", on=BOTH),
)  # fmt: skip

LABEL_VALUES: Mapping[str, str] = {
    "learner": "a learner's id, below `limits.members_max`",
    "direction": "`up`, `down`",
    "standing": ", ".join(f"`{each.value}`" for each in Standing),
    "kind": "a word of a fixed list (`token`, `admit`, `session`, `slow`, ...)",
    "reason": (
        f"of tokens {', '.join(f'`{each.value}`' for each in Loss)}; else a code of `protocol/reasons.py` ({len(Why)} of them)"
    ),
    "role": "`syncer`, `learner`",
    "version": "Atoll's version",
    "torch": "torch's version",
    "preset": "the preset's name",
}
"""What each label may be: no value is a peer's words, so their number is bounded."""

_BY_NAME = {metric.name: metric for metric in METRICS}
Labels = tuple[str, ...]


class MetricSeries:
    """The values of one counter or gauge, by labels."""

    def __init__(self, name: str) -> None:
        self.metric = _BY_NAME[name]
        self.values: dict[Labels, float] = {}

    def set(self, value: float, *labels: str) -> None:
        self.values[labels] = value

    def add(self, amount: float, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def lines(self) -> Iterator[str]:
        for labels, value in sorted(self.values.copy().items()):
            yield f"{self.metric.name}{_braces(self.metric.labels, labels)} {_number(value)}"


class Distribution:
    """A histogram's counts, by labels: one for each bucket, one above them all, and the sum of what was observed."""

    def __init__(self, name: str) -> None:
        self.metric = _BY_NAME[name]
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, value: float, *labels: str) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = [0] * (len(self.metric.buckets) + 1)
            self._sums[labels] = 0.0
            self._counts[labels] = counts
        counts[bisect_left(self.metric.buckets, value)] += 1
        self._sums[labels] += value

    def lines(self) -> Iterator[str]:
        name, names = self.metric.name, self.metric.labels
        bounds = [*map(_number, self.metric.buckets), "+Inf"]
        for labels, counts in sorted(self._counts.copy().items()):
            total = 0
            for bound, count in zip(bounds, counts.copy(), strict=True):
                total += count
                yield f"{name}_bucket{_braces((*names, 'le'), (*labels, bound))} {total}"
            yield f"{name}_sum{_braces(names, labels)} {_number(self._sums[labels])}"
            yield f"{name}_count{_braces(names, labels)} {total}"


def exposition(families: Mapping[str, MetricSeries | Distribution]) -> str:
    """In the order of the list. A family without a value yet is left out, except for its HELP and TYPE."""
    lines: list[str] = []
    for metric in METRICS:
        family = families.get(metric.name)
        if family is not None:
            lines += (f"# HELP {metric.name} {_escaped(metric.help)}", f"# TYPE {metric.name} {metric.kind.value}")
            lines += family.lines()
    return "\n".join(lines) + "\n"


def families_of(role: str) -> dict[str, MetricSeries | Distribution]:
    """One for each metric of a syncer, or of a learner."""
    wanted = (metric for metric in METRICS if metric.on in (role, BOTH))
    return {m.name: Distribution(m.name) if m.kind is HISTOGRAM else MetricSeries(m.name) for m in wanted}


def _braces(names: Labels, values: Labels) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))
    return f"{{{pairs}}}" if pairs else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
