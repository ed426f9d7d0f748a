"""Nothing is ignored: every key of a cluster file gives another answer or a refusal.

One row for each key: the cluster without it, and its value. A new key without a row fails here.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import msgspec
import pytest

from atoll.cli.plan import as_builtins
from atoll.errors import ConfigError
from atoll.planner.plan import plan
from atoll.planner.site import ClusterDescription, cluster_from_builtins

DECOUPLED = {"preset": "decoupled", "learners": 4, "interval": 24, "fragments": 12, "overlap": 2, "quorum": 2, "codec_up": "int8",
             "codec_down": "bf16"}  # fmt: skip
DILOCO = {"preset": "diloco", "learners": 4, "interval": 50, "codec_up": "bf16", "codec_down": "bf16"}


def cluster(fixed: dict[str, Any], **sites: Any) -> dict[str, Any]:
    """Two sites of eight chips, which fail now and then, on lines of 2 Gbit/s."""
    usual = {"chips": 8, "step_seconds": 1.0, "count": 2, "mtbi_hours": 500.0, "slice_chips": 2}
    return {
        "model": {"parameters": 3e8}, "sites": [{"name": "a", **usual, **sites}, {"name": "b", **usual}],
        "link": {"gbit": 2.0, "latency_seconds": 0.02}, "fixed": fixed,
    }  # fmt: skip


ROUNDS, WAITS = cluster(DECOUPLED), cluster(DILOCO)
SPOT = cluster(DECOUPLED, preemptions_per_day=12.0, away_minutes=30.0)
PRICED = cluster(DECOUPLED, price_per_gb=0.1, price_per_chip_hour=1.0)
ALONE = cluster({"preset": "ddp"}, inside_gbit=100.0)
FREE = {**cluster({}), "sites": [{"name": "a", "chips": 2, "step_seconds": 1.0, "count": 2}]}
REFUSED = "refused"
CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("model.parameters", ROUNDS, 6e8), ("model.layers", ALONE, 48), ("model.gradient_bits", ALONE, 32),
    ("sites.name", ROUNDS, "c"), ("sites.chips", ROUNDS, 16), ("sites.step_seconds", ROUNDS, 2.0), ("sites.count", ROUNDS, 3),
    ("sites.inside_gbit", ROUNDS, 10.0), ("sites.chip_memory_gb", ROUNDS, 0.1), ("sites.host_memory_gb", ROUNDS, 0.01),
    ("sites.mtbi_hours", ROUNDS, 50.0), ("sites.slice_chips", ROUNDS, 8), ("sites.preemptions_per_day", ROUNDS, 24.0),
    ("sites.away_minutes", SPOT, 90.0), ("sites.away_minutes", ROUNDS, 90.0), ("sites.speed_spread", ROUNDS, 0.4),
    ("sites.price_per_chip_hour", PRICED, 3.0), ("sites.price_per_chip_hour", ROUNDS, 3.0), ("sites.price_per_gb", PRICED, 0.3),
    ("sites.price_per_gb", ROUNDS, 0.3), ("sites.gb_per_day_max", ROUNDS, 1.0),
    ("link.gbit", WAITS, 0.5), ("link.latency_seconds", WAITS, 0.5), ("link.variation", WAITS, 0.5), ("link.usable", WAITS, 0.4),
    ("link.between", ROUNDS, ["a", "b"]), ("links.between", ROUNDS, ["a", "c"]),
    ("syncer.site", ROUNDS, "b"), ("syncer.cores", ROUNDS, 0.001), ("syncer.memory_gb", ROUNDS, 1.0),
    ("syncer.disk_mb_per_s", ROUNDS, 1.0), ("syncer.gbit", WAITS, 0.5), ("syncer.shards", ROUNDS, 2),
    ("failures.resize_seconds", ROUNDS, 300.0), ("failures.restart_seconds", ALONE, 900.0),
    ("failures.repair_minutes", ROUNDS, 300.0),
    *((f"quality.{key}", ROUNDS, value) for key, value in (
        ("base_percent", 1.0), ("size_exponent", 0.1), ("interval_exponent", 0.9), ("learners_doubling", 1.0),
        ("asynchrony", 2.0), ("staleness_step", 0.3), ("four_bit_percent", 0.5), ("loss_slope", 0.1),
    )),
    ("quality.kept_share", {**ROUNDS, "link": {"gbit": 0.15}}, 0.2),
    ("fixed.preset", FREE, "streaming"), ("fixed.learners", ROUNDS, 8), ("fixed.interval", ROUNDS, 36),
    ("fixed.fragments", ROUNDS, 24), ("fixed.overlap", ROUNDS, 1), ("fixed.quorum", ROUNDS, 1),
    ("fixed.codec_up", ROUNDS, "int4"), ("fixed.codec_down", ROUNDS, "fp32"),
]  # fmt: skip
LINKED = [("links.gbit", 0.5), ("links.latency_seconds", 0.5), ("links.variation", 0.5), ("links.usable", 0.4)]


def test_every_key_has_a_row() -> None:
    tables = {field.name: field.type for field in msgspec.structs.fields(ClusterDescription)}
    sections = {"sites": "Site", "links": "LinkDescription", "link": "LinkDescription"}
    known = set()
    for name, kind in tables.items():
        parts = [k for k in (kind, *getattr(kind, "__args__", ())) if isinstance(k, type) and issubclass(k, msgspec.Struct)]
        assert parts and parts[0].__name__ == sections.get(name, parts[0].__name__)
        known |= {f"{name}.{key}" for key in parts[0].__struct_fields__}
    assert {key for key, _, _ in CASES} | {key for key, _ in LINKED} == known


@cache
def answered(text: str) -> str:
    """The whole answer, or that it is refused."""
    try:
        answer = plan(cluster_from_builtins(json.loads(text)), what_if=False)
        return msgspec.json.encode(as_builtins(answer), order="sorted").decode()
    except ConfigError:
        return REFUSED


def changed(base: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    section, _, name = key.partition(".")
    moved = copy.deepcopy(base)
    row = moved[section][0] if section == "sites" else moved.setdefault(section, {})
    row[name] = value
    return moved


@pytest.mark.parametrize(("key", "base", "value"), CASES, ids=[f"{number} {key}" for number, (key, _, _) in enumerate(CASES)])
def test_every_key_changes_the_answer_or_is_refused(key: str, base: dict[str, Any], value: Any) -> None:
    moved = {**base, "links": [{"between": value, "gbit": 1.0}]} if key == "links.between" else changed(base, key, value)
    before = answered(json.dumps(base))
    assert before != REFUSED
    assert answered(json.dumps(moved)) != before


@pytest.mark.parametrize(("key", "value"), LINKED)
def test_every_key_of_a_pair_of_sites_changes_the_answer(key: str, value: float) -> None:
    usual = {"between": ["a", "b"], "gbit": 1.0, "latency_seconds": 0.02}
    before, after = ({**WAITS, "links": [{**usual, **more}]} for more in ({}, {key.partition(".")[2]: value}))
    assert REFUSED != answered(json.dumps(before)) != answered(json.dumps(after))
