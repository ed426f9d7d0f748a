"""Metrics: the text format, the fold of a run's events against the run's own summary, and the docs that name them all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.chaos import ChaosPlan, Kill, Partition
from atoll.config import load
from atoll.ids import SYNCER
from atoll.protocol.interface import Machine
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import Connected, ConnectionLost, Finished
from atoll.sim.run import run_virtual
from atoll.tape.format import Record, Tape
from atoll.tape.heldout import HeldoutPoint
from atoll.tape.replay import replay
from atoll.views.metrics import LABEL_VALUES, METRICS, Distribution, MetricSeries, exposition
from atoll.views.run import RunView, tokens_of
from atoll.views.worker_metrics import LearnerMetrics, LinkTotals, SyncerMetrics

DOCS = Path(__file__).parents[3] / "docs" / "operations"
LINE = re.compile(r"(\w+)(?:\{([^}]*)\})? (\S+)")


def values_of(page: str) -> dict[tuple[str, str], float]:
    """Name and labels to value; what this reads, Prometheus's own parser reads too (tests/live/test_live_metrics.py)."""
    found = (LINE.fullmatch(line) for line in page.splitlines() if not line.startswith("#"))
    return {(match[1], match[2] or ""): float(match[3]) for match in found if match is not None}


# ---------------------------------------------------------------- the text format


def test_histogram_counts_cumulatively_and_bounds_belong_to_the_lower_bucket() -> None:
    times = Distribution("atoll_round_seconds")
    for value in (0.0005, 0.001, 0.5, 1000.0):
        times.observe(value)
    found = values_of(exposition({"atoll_round_seconds": times}))
    bucket = "atoll_round_seconds_bucket"
    assert (found[bucket, 'le="0.001"'], found[bucket, 'le="0.3"'], found[bucket, 'le="1"']) == (2, 2, 3)
    assert found[bucket, 'le="300"'] == 3 and found[bucket, 'le="+Inf"'] == found["atoll_round_seconds_count", ""] == 4
    assert found["atoll_round_seconds_sum", ""] == pytest.approx(1000.5015)


def test_odd_values_and_labels_with_quotes_are_written_as_prometheus_does() -> None:
    loss = MetricSeries("atoll_learner_loss")
    for learner, value in (("0", float("nan")), ("1", float("inf")), ("2", 0.1), ('a"\\\n', 3.0)):
        loss.set(value, learner)
    lines = exposition({"atoll_learner_loss": loss}).splitlines()
    assert lines[1] == "# TYPE atoll_learner_loss gauge"
    assert [line.rpartition(" ")[2] for line in lines[2:]] == ["NaN", "+Inf", "0.1", "3"]
    assert 'learner="a\\"\\\\\\n"' in lines[-1]


# ---------------------------------------------------------------- the fold


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Tape:
    """A virtual run without tensors, with a kill and a partition."""
    config = load(overrides={"learners": 3, "total_steps": 60, "protocol": {"fragments": 4, "local_steps_per_round": 8}})
    plan = ChaosPlan((Kill(4.0, 1, 2.0), Partition(20.0, 2, lasts=3.0)))
    return Tape(run_virtual(config, plan, tmp_path_factory.mktemp("faulty"), tensors=False).tape)


def folded(tape: Tape) -> tuple[SyncerMetrics, RunView, Record, SyncerMachine]:
    config = load(overrides={"learners": 3, "total_steps": 60, "protocol": {"fragments": 4, "local_steps_per_round": 8}})
    seen: list[SyncerMetrics] = []
    view, last, machines = RunView(3), [], []

    def observe(record: Record, machine: Machine | None) -> None:
        view(record.now, record.worker, record.event, record.effects)
        if record.worker == SYNCER:
            assert isinstance(machine, SyncerMachine)
            if not seen:
                point = HeldoutPoint(40, None)
                seen.append(SyncerMetrics(config, machine, 7 * 10**9, "2.x", LinkTotals(), heldout=lambda: point))
            seen[0](record.now, record.worker, record.event, record.effects)
            machines[:], last[:] = [machine], [record]

    replay(tape, observe=observe)
    return seen[0], view, last[0], machines[0]


def test_syncer_s_metrics_agree_with_the_summary_of_the_same_tape(faulty: Tape) -> None:
    metrics, view, last, machine = folded(faulty)
    found = values_of(metrics.page())
    rounds = sum(view.participants.values())
    assert found["atoll_round_participants_count", ""] == found["atoll_round_seconds_count", ""] == rounds > 10
    assert found["atoll_round_participants_sum", ""] == sum(n * count for n, count in view.participants.items())
    assert found["atoll_recovery_seconds_count", ""] >= len(view.recoveries) > 0
    assert found["atoll_total_steps", ""] == 60 and found["atoll_outer_step", ""] >= 59
    steps = {labels: value for (name, labels), value in found.items() if name == "atoll_learner_step_seconds_count"}
    assert set(steps) == {f'learner="{m}"' for m in range(3)} and min(steps.values()) > 10
    assert found["atoll_goodput_ratio", ""] == pytest.approx(view.goodput, rel=0.15), "one counts from the first report"
    assert 7 < found["atoll_last_stored_timestamp_seconds", ""] <= 7 + last.now / 1e9
    assert any(isinstance(effect, Finished) for effect in last.effects) or machine.finished


def test_tokens_of_the_metrics_add_up_as_the_ledger_s_do(faulty: Tape) -> None:
    metrics, _, last, machine = folded(faulty)
    metrics(last.now + 10**10, SYNCER, Connected(0), ())  # later than the last look at the ledger
    found, tokens = values_of(metrics.page()), tokens_of(machine.fates())
    lost = {name: value for name, value in found.items() if name[0] == "atoll_discarded_tokens_total"}
    assert sum(lost.values()) * 4 == tokens.discarded > 0
    assert found["atoll_trained_tokens_total", ""] * 4 == tokens.trained
    assert found["atoll_merged_tokens", ""] + found["atoll_in_flight_tokens", ""] + sum(lost.values()) == tokens.trained / 4
    assert lost["atoll_discarded_tokens_total", 'reason="lost"'] > 0, "a learner was killed"


def test_heldout_loss_that_is_no_number_is_shown_as_one_that_is_none(faulty: Tape) -> None:
    page = folded(faulty)[0].page()
    assert "atoll_heldout_loss NaN" in page and values_of(page)["atoll_heldout_step", ""] == 40


def test_learner_s_metrics_count_its_own_steps_waits_and_adoptions(faulty: Tape) -> None:
    config = load(overrides={"learners": 3})
    metrics, view = LearnerMetrics(config, 2, "2.x"), RunView(3)
    for record in faulty.records():
        if record.worker == 2:
            metrics(record.now, 2, record.event, record.effects)
            view(record.now, 2, record.event, record.effects)
    found = values_of(metrics.page())
    assert found["atoll_learner_tokens_total", 'learner="2"'] == view.tokens_done > 0
    assert found["atoll_learner_local_step", 'learner="2"'] == found["atoll_learner_step_seconds_count", 'learner="2"']
    assert found["atoll_learner_adoptions_total", 'learner="2"'] > 10


class Wire:
    bytes_sent, bytes_received = 5, 7


def test_link_bytes_go_on_where_a_learner_connects_again() -> None:
    links, wires = LinkTotals(), [Wire(), Wire()]
    for wire in wires:
        links.link_of = lambda _, wire=wire: wire
        links.opened(1)
        links.lost(1)
    links.lost(1)
    links.opened(1)
    wires[1].bytes_received = 100
    assert links.by_peer() == {1: (15, 114)}


def test_report_of_an_id_that_no_learner_can_have_makes_no_label(faulty: Tape) -> None:
    metrics = folded(faulty)[0]
    for peer in range(3, 2000):
        metrics(0, SYNCER, ConnectionLost(peer, "x"), ())
    labels = {labels for name, labels in values_of(metrics.page()) if "learner=" in labels and not name.endswith("_bucket")}
    assert {re.findall(r'learner="(\d+)"', each)[0] for each in labels} == {"0", "1", "2"}


# ---------------------------------------------------------------- the docs


def names_in(text: str) -> Iterator[str]:
    yield from re.findall(r"\b(?:atoll|process)_[a-z_]+\b", text)


def test_every_name_on_the_page_and_in_the_dashboard_is_a_metric() -> None:
    endings = ("", "_bucket", "_sum", "_count")
    known = {metric.name + ending for metric in METRICS for ending in (endings if metric.buckets else ("",))}
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for expression in expressions for name in names_in(expression)}
    assert len(asked) > 15 and asked <= known
    assert set(names_in((DOCS / "metrics.md").read_text(encoding="utf8"))) <= known


def test_every_metric_has_words_base_units_and_bounded_labels() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.help.endswith(".") and set(metric.labels) <= set(LABEL_VALUES), metric.name
        assert (metric.kind.value == "counter") == metric.name.endswith("_total"), metric.name
        assert not re.search(r"_(ms|millis|minutes|kb|mb|percent)\b", metric.name)
