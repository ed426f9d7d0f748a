"""The promise of a plan, held against the machines: the written recipe, read again and run whole in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.config import Config, changed, load
from atoll.planner import recipe
from atoll.planner.score import Judge, SimulatorCache
from atoll.planner.search import SearchResult, search
from atoll.planner.site import ClusterDescription
from atoll.sim.cluster import VirtualCluster
from atoll.sim.slices import SliceHardware
from atoll.views.run import RunView

POINTS = 0.02


@dataclass(frozen=True)
class Planned:
    cluster: ClusterDescription
    found: SearchResult
    judge: Judge
    config: Config
    """The recipe, as it was written and read again."""


def planned(cluster: ClusterDescription, folder: Path) -> Planned:
    cache = SimulatorCache()
    found, judge = search(cluster, cache), Judge(cluster, cache)
    path = folder / "plan.recipe.toml"
    path.write_text(recipe.recipe_toml(found.best, judge, "cluster.toml"), encoding="utf8")
    return Planned(cluster, found, judge, load(path))


def shown(config: Config, steps: int, *, failures: bool, seed: int) -> float:
    """The goodput after start-up of a whole run with all learners. Without failures it is the utilisation."""
    calm = {} if failures else {"chips": 0, "mtbf_seconds": 0.0}
    config = changed(config, overrides={"total_steps": steps, "seed": seed, "cluster": calm})
    view = RunView(config.learners)
    VirtualCluster(config, observers=[view], hardware=SliceHardware.of_config(config)).run()
    return view.goodput_after_startup
