"""Twenty clusters of many kinds: the shipped examples, some made by hand, and some drawn from a seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from atoll.planner.site import ClusterDescription, cluster_from_builtins, load_cluster

PLANS = Path(__file__).parents[2] / "examples" / "plans"


def _of(
    parameters: float, layers: int, sites: list[dict[str, Any]], gbit: float, latency: float, **more: Any
) -> ClusterDescription:
    model = {"parameters": parameters, "layers": layers}
    link = {"gbit": gbit, "latency_seconds": latency, **more.pop("line", {})}
    return cluster_from_builtins({"model": model, "sites": sites, "link": link, **more})


def _spots(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"name": "spot", "count": count, "chips": 1, "step_seconds": 2.0, **more}]


def _halls(*names: str, chips: int = 64, **more: Any) -> list[dict[str, Any]]:
    return [{"name": n, "chips": chips, "step_seconds": 1.0, "inside_gbit": 1600, **more} for n in names]


def by_hand() -> dict[str, ClusterDescription]:
    """By name."""
    return {
        **{path.stem: load_cluster(path) for path in sorted(PLANS.glob("*.toml"))},
        "spot_nodes": _of(350e6, 24, _spots(30, preemptions_per_day=2, away_minutes=20), 0.5, 0.03),
        "uneven_spot": _of(350e6, 24, _spots(8, preemptions_per_day=24, away_minutes=10, speed_spread=0.4), 1.0, 0.03),
        "shared_line": _of(1e9, 24, _halls("a", "b"), 1.0, 0.05),
        "three_datacentres": _of(1e9, 24, _halls("a", "b", "c"), 100.0, 0.01),
        "uneven_sites": _of(
            2e9, 32, [*_halls("new"), {"name": "old", "chips": 64, "step_seconds": 1.4, "inside_gbit": 800}], 2.0, 0.04
        ),
        "far_and_thin": _of(300e6, 12, _halls("here", "there", chips=8), 0.05, 0.25),
        "varying_line": _of(1e9, 24, _halls("a", "b", "c", "d", chips=8), 2.0, 0.05, line={"variation": 0.6}),
        "priced": _of(
            1e9, 24, _halls("a", "b", chips=8, price_per_chip_hour=2.0, price_per_gb=0.08), 5.0, 0.05
        ),
        "fragile_chips": _of(3e9, 32, _halls("a", "b", chips=256, mtbi_hours=300.0), 5.0, 0.02),
    }  # fmt: skip


def drawn(number: int) -> ClusterDescription:
    """The same cluster for the same number."""
    rng = random.Random(f"cluster {number}")
    kinds = []
    for name in ("a", "b")[: rng.choice((1, 2, 2))]:
        kinds.append({
            "name": name, "chips": rng.choice((1, 4, 16)), "count": rng.choice((1, 2, 6)),
            "step_seconds": round(rng.uniform(0.3, 6.0), 2), "mtbi_hours": rng.choice((2000.0, 20000.0)),
            "preemptions_per_day": rng.choice((0, 0, 12)), "away_minutes": rng.choice((5, 15)),
            "speed_spread": rng.choice((0.0, 0.0, 0.3)),
        })  # fmt: skip
    parameters, layers = 10 ** rng.uniform(7.5, 9.7), rng.choice((8, 16, 32))
    return _of(parameters, layers, kinds, round(10 ** rng.uniform(-1, 2), 3), rng.choice((0.002, 0.04, 0.15)))


def twenty() -> dict[str, ClusterDescription]:
    found = by_hand()
    return found | {f"drawn_{number}": drawn(number) for number in range(20 - len(found))}
