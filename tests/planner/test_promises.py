"""What a plan promises, its own recipe keeps on the protocol's machines; and no neighbour is better there."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import msgspec
import pytest
from clusters import twenty
from promises import POINTS, Planned, planned, shown, startup

from atoll.errors import ConfigError
from atoll.planner.candidate import Candidate
from atoll.planner.costs import costs
from atoll.planner.score import Judge
from atoll.planner.search import neighbours, search, waiting_is_refused
from atoll.planner.site import ClusterDescription, Fixed
from atoll.planner.virtual import shortened

CLUSTERS = twenty()
QUICK = ("shared_line", "uneven_spot", "two_continents")
"""In `make test`; the others in `make soak`."""
LEARNER_STEPS = 8_000
"""Of a run with failures, at most."""
each = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.soak]) for name in CLUSTERS]
)


@cache
def plan_of(name: str) -> Planned:
    with tempfile.TemporaryDirectory() as folder:
        return planned(CLUSTERS[name], Path(folder))


def test_there_are_twenty_clusters() -> None:
    assert len(CLUSTERS) == 20


@each
def test_the_recipe_keeps_the_promised_utilisation_and_goodput(name: str) -> None:
    plan = plan_of(name)
    best, config = plan.found.best, plan.config
    steps = max(200, 6 * config.protocol.local_steps_per_round)
    assert shown(config, steps, failures=False, seed=101) == pytest.approx(best.utilisation, abs=POINTS), best
    if best.goodput > 0.995:  # a failure in days: a run of hours has none, or one too many
        return
    absences = 20 * config.cluster.repair_seconds / config.cluster.step_seconds
    steps = max(steps, min(LEARNER_STEPS // config.learners, round(absences)))
    kept = [shown(config, steps, failures=True, seed=seed) for seed in (101, 102)]
    assert sum(kept) / len(kept) == pytest.approx(best.utilisation * best.goodput, abs=POINTS), best


@each
def test_start_up_is_that_of_the_recipe(name: str) -> None:
    """The promise is that of the slow learners, so where speeds differ it may be a step too long."""
    plan = plan_of(name)
    best, cluster = plan.found.best, plan.config.cluster
    if best.candidate.learners == 1:
        assert best.startup_seconds == 0
        return
    late = cluster.step_seconds * (cluster.slow_factor if cluster.slow_share else 0.0)
    assert startup(plan.config) <= 1.01 * best.startup_seconds <= 1.02 * startup(plan.config) + late


def test_start_up_is_of_the_whole_model_though_a_part_of_a_long_interval_is_run() -> None:
    judge, c = Judge(CLUSTERS["far_and_thin"]), Candidate("decoupled", 2, 144, 36, 2, 1, "int4", "bf16")
    whole = judge.settings(c)
    assert shortened(c, whole).cluster.parameters < whole.cluster.parameters
    assert judge.score(c).startup_seconds == pytest.approx(startup(whole), rel=0.01)


@each
def test_no_neighbour_is_better_by_2_percent_on_the_machines(name: str) -> None:
    """All of them that satisfy the same limits, and the best of every other preset, run anew, with failures of another seed."""
    plan = plan_of(name)
    judge = Judge(plan.cluster, seed=7)
    mine = judge.score(plan.found.best.candidate).score
    families = [s.candidate for s in plan.found.families.values()]
    if waiting_is_refused(plan.cluster):
        families = [c for c in families if not c.synchronous]
    others = [*neighbours(judge, plan.found.best.candidate), *families]
    assert {c.preset for c in others} - {plan.found.best.candidate.preset} or waiting_is_refused(plan.cluster)
    for other in others:
        assert mine >= 0.98 * judge.score(other).score, other


# ---------------------------------------------------------------- single promises


def test_nodes_that_are_preempted_and_uneven_get_no_quorum_of_all() -> None:
    best = plan_of("uneven_spot").found.best.candidate
    assert best.preset == "decoupled"
    assert best.quorum == 1


def test_a_shared_line_gets_slack_and_the_plan_says_how_much() -> None:
    plan = plan_of("shared_line")
    spent = costs(plan.found.best, plan.judge)
    assert spent.link_load is not None
    assert spent.link_load <= 0.8 + 1e-9
    dedicated = shared_line(usable=1.0)
    assert dedicated.interval <= plan.found.best.candidate.interval


def shared_line(**line: float) -> Candidate:
    cluster = CLUSTERS["shared_line"]
    assert cluster.link is not None
    changed = msgspec.structs.replace(cluster, link=msgspec.structs.replace(cluster.link, **line))
    return search(changed).best.candidate


def test_100_gbit_between_three_datacentres_is_compared_with_bf16_gradients() -> None:
    """They pass half the bits of fp32 gradients, so the link that data-parallel needs is half as fast."""
    bf16 = CLUSTERS["three_datacentres"]
    fp32 = msgspec.structs.replace(bf16, model=msgspec.structs.replace(bf16.model, gradient_bits=32.0))
    ddp = Candidate("ddp", 1, 1, 1, 0, 0, "fp32", "fp32")
    share = Judge(bf16).score(ddp).utilisation
    assert share > Judge(fp32).score(ddp).utilisation + 0.01
    assert Judge(fp32.changed(rate=2.0, inside=2.0)).score(ddp).utilisation == pytest.approx(share, abs=1e-3)


def test_bytes_with_a_price_or_a_limit_are_spared() -> None:
    free = msgspec.structs.replace(CLUSTERS["shared_line"], fixed=Fixed(preset="streaming", learners=2))

    def with_sites(**keys: float) -> ClusterDescription:
        sites = tuple(msgspec.structs.replace(s, **keys) for s in free.sites)
        return msgspec.structs.replace(free, sites=sites)

    def sent(cluster: ClusterDescription) -> float:
        found = search(cluster)
        assert cluster is free or found.best.candidate.codec_down in ("int8", "int4")
        return max(t.sent_gb_day for t in costs(found.best, Judge(cluster)).traffic)

    usual = sent(free)
    assert sent(with_sites(price_per_gb=0.5, price_per_chip_hour=1.0)) < 0.7 * usual
    assert sent(with_sites(gb_per_day_max=0.03 * usual)) <= 0.03 * usual
    with pytest.raises(ConfigError, match=r"sites\.gb_per_day_max = 5 of a: streaming with 2 learners and H 1000 sends"):
        search(with_sites(gb_per_day_max=5.0))
