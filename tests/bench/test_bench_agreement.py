"""The pure parts of `bench/agreement.py`: no process is started and nothing is timed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

from atoll.chaos import ChaosPlan, Kill, check_plan
from atoll.ids import nanos


@pytest.fixture(scope="module")
def task(bench_script: Callable[[str], ModuleType]) -> Any:
    """The three modules as one namespace."""
    return {key: value for name in ("agreement_live", "agreement_predict", "agreement")
            for key, value in vars(bench_script(name)).items()}  # fmt: skip


@pytest.fixture
def free(task: Any) -> Any:
    return task["Calibration"](step_seconds=0.095, period_seconds=0.1, step_noise=0.0, round_seconds=0.2)


@pytest.fixture
def model(task: Any, free: Any) -> Any:
    return task["failure_model"](free, task["Comeback"](0.8, 1.5), 25.0, 4.0)


def test_a_plan_follows_the_history_it_was_drawn_from(task: Any, model: Any) -> None:
    drawn = task["histories"](model, 2, 1, 300.0)
    plan = task["kill_plan"](drawn, model)
    check_plan(plan, 2)
    assert plan == task["kill_plan"](task["histories"](model, 2, 1, 300.0), model)
    assert plan != task["kill_plan"](task["histories"](model, 2, 2, 300.0), model)
    for learner, history in enumerate(drawn):
        kills = [f for f in plan.faults if isinstance(f, Kill) and f.learner == learner]
        stops = [s for s in history if s.stop > 0]
        assert [f.at for f in kills] == [round(s.start + s.seconds, 3) for s in stops]
        for kill, later in pairwise(kills):
            assert kill.at + kill.lasts < later.at, "who is away is not killed again"


def test_histories_scatter_around_the_expectation(task: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["agreement_predict"], "SPREAD_RUNS", 40)
    monkeypatch.setattr(sys.modules["agreement_predict"], "PRECISION", 1.0)
    expected, spread = task["expected_goodput"](model, 2, 75.0)
    assert expected == pytest.approx(25 / (25 + 4 + 1.5), abs=0.02)
    assert 0.02 < spread < 0.2
    without = task["failure_model"](task["Calibration"](0.1, 0.1, 0.0), task["Comeback"](0.0, 0.0), 1e9, 4.0)
    assert task["history_goodput"](task["histories"](without, 2, 0, 75.0), 75.0) == pytest.approx(1.0)


def test_a_plan_on_the_virtual_clock(task: Any) -> None:
    plan = task["on_virtual_clock"](ChaosPlan((Kill(5.0, 1, 2.0),)), 0.5, task["Comeback"](0.8, 1.5))
    assert plan == ChaosPlan((Kill(5.5, 1, 2.8),))


def test_the_rate_limit_becomes_the_cluster_section(task: Any, free: Any) -> None:
    settings = task["blocking_settings"](40)
    virtual = task["on_virtual_hardware"](settings, free, 1_000_000, 20.0)
    assert (virtual.cluster.up_gbit, virtual.cluster.down_gbit) == (0.02, 0.02)
    assert virtual.cluster.parameters == 1_000_000
    assert virtual.cluster.step_seconds == 0.1
    assert virtual.cluster.latency_seconds == pytest.approx(0.05)
    assert virtual.protocol == settings.protocol


def test_the_rates_are_those_of_the_wanted_utilisation(task: Any, free: Any) -> None:
    """Machines and graph agree with each other: a step's report and the frames are all that they count differently."""
    settings = task["blocking_settings"](40)
    rates = task["blocking_rates"](settings, free, 1_000_000, (0.45, 0.7, 0.9))
    for mbit, wanted in zip(rates, (0.45, 0.7, 0.9), strict=True):
        graph = task["blocking_graph"](settings, free, 1_000_000, mbit)
        machines = task["blocking_machines"](settings, free, 1_000_000, mbit, 1)
        assert graph == pytest.approx(0.95 * wanted, abs=0.02)
        assert machines == pytest.approx(graph, abs=0.01)


def test_a_slow_link_stretches_the_schedule(task: Any, free: Any) -> None:
    settings = task["schedule_settings"](task["FRAGMENTS"])
    rates = task["decoupled_rates"](settings, free, 1_000_000, (0.4, 2.0))
    kept = [task["decoupled_machines"](settings, free, 1_000_000, mbit, 4 * task["FRAGMENTS"]) for mbit in rates]
    assert kept[0] < 0.6 < kept[1]


def test_virtual_kills_cost_goodput(task: Any, free: Any) -> None:
    settings, comeback = task["killed_settings"](20.0, 0.1), task["Comeback"](0.8, 1.5)
    whole, killed = (
        task["killed_machines"](settings, free, 1_000_000, plan, comeback, 20.0)
        for plan in (ChaosPlan(), ChaosPlan((Kill(5.0, 0, 8.0),)))
    )
    assert whole == pytest.approx(0.95, abs=0.02)
    assert whole - killed == pytest.approx(0.95 * (8.0 + 0.8) / 40, abs=0.03)


def test_a_bucket_makes_up_for_a_late_wake_up(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own: every sleep takes 5 ms too long, and the mean rate is kept."""
    clock = [100.0]

    async def oversleep(seconds: float) -> None:
        clock[0] += seconds + 0.005

    async def spend() -> float:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock[0])
        monkeypatch.setattr(asyncio, "sleep", oversleep)
        bucket = task["Bucket"](1e6)
        for _ in range(500):
            await bucket.spend(bucket.slice_bytes())
        return 500 * bucket.slice_bytes() / (clock[0] - 100.0)

    assert asyncio.run(spend()) == pytest.approx(1e6, rel=0.01)


def test_shares_of_what_was_seen(task: Any) -> None:
    seen = task["Seen"]()
    seen.first_round, seen.finished = nanos(10.0), nanos(20.0)
    seen.counted = [(nanos(10.5), nanos(1.0)), (nanos(14.0), nanos(2.0)), (nanos(19.5), nanos(2.0))]
    assert seen.goodput(8.0, 1) == pytest.approx(2.5 / 8), "half of the first step, all of the second"
    seen.steps[0] = [(nanos(t), nanos(t + 1)) for t in (0.0, 1.0, 4.0, 5.0, 8.0)]
    assert seen.utilisation(2, 1) == pytest.approx(0.5)


def test_the_table_and_what_is_off(task: Any) -> None:
    row, prediction = task["Row"], task["Prediction"]
    rows = [
        row("a", "utilisation", 0.50, (prediction("machines", 0.52), prediction("graph", 0.56))),
        row("b", "goodput", 0.8, (prediction("machines", 0.8),)),
    ]
    assert task["table"](rows).splitlines() == [
        "| run | of | measured | machines | graph |",
        "| --- | --- | --- | --- | --- |",
        "| a | utilisation | 50.0 | 52.0 (-2.0) | 56.0 (-6.0) |",
        "| b | goodput | 80.0 | 80.0 (+0.0) |  |",
    ]
    assert task["off_rows"](rows) == ["a: -6.0 points against the graph"]
    json.dumps([asdict(each) for each in rows])
