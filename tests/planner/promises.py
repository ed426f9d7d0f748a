"""The promise of a plan, held against the machines: the written recipe, read again and run whole in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.config import Config, changed, load
from atoll.ids import LearnerId, Nanos, nanos
from atoll.planner import recipe
from atoll.planner.score import Judge, SimulatorCache
from atoll.planner.search import SearchResult, search
from atoll.planner.site import ClusterDescription
from atoll.sim.cluster import VirtualCluster
from atoll.sim.hardware import Boundary, Hardware
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


class CountedSlices(SliceHardware):
    """Remembers which share of which learner was away, and when."""

    def __init__(self, config: Config, *arguments: Any) -> None:
        super().__init__(config, *arguments)
        self.missing: list[tuple[Nanos, Nanos, float]] = []
        self._since: dict[LearnerId, tuple[Nanos, float]] = {}
        for m in range(config.learners):
            self._change(m, 0, 1.0 - self.share(m), self.absent_at_start(m))

    def boundary(self, learner: LearnerId, now: Nanos) -> Boundary | None:
        found = super().boundary(learner, now)
        if found is not None:
            self._change(learner, now, 1.0 - self.share(learner), found.stop if found.share == 0 else 0)
        return found

    def _change(self, learner: LearnerId, now: Nanos, missing: float, dead: Nanos) -> None:
        start, before = self._since.get(learner, (now, 0.0))
        self.missing += [(start, now, before), (now, now + dead, 1.0)]
        self._since[learner] = (now + dead, missing)

    def drawn(self, began: Nanos, end: Nanos) -> float:
        """Learners times nanoseconds."""
        still = [(start, end, missing) for start, missing in self._since.values()]
        return sum(max(0, min(b, end) - max(a, began)) * missing for a, b, missing in [*self.missing, *still])


class CountedRanks(Hardware):
    """Remembers when ranks of data-parallel training were away. All wait for one."""

    now: Callable[[], Nanos] = staticmethod(lambda: 0)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._learners, self._away = config.learners, [(0, 0)]

    def repair_seconds(self, learner: LearnerId) -> float:
        found = super().repair_seconds(learner)
        self._away.append((self.now(), self.now() + nanos(found)))
        return found

    def drawn(self, began: Nanos, end: Nanos) -> float:
        return self._learners * sum(max(0, min(b, end) - max(a, began)) for a, b in self._away)


def shown(config: Config, steps: int, *, failures: bool, seed: int) -> float:
    """The goodput after start-up of a whole run with all learners. Without failures it is the utilisation.

    A run of hours has a few failures more or fewer than the mean, which is no fault of the promise: the absences that were
    drawn are replaced by their mean. What they cost beyond that, the machines say.
    """
    calm = {} if failures else {"chips": 0, "mtbf_seconds": 0.0}
    config = changed(config, overrides={"total_steps": steps, "seed": seed, "cluster": calm})
    view = RunView(config.learners)
    hardware = CountedSlices.of_config(config) if config.cluster.chips else CountedRanks(config)
    cluster = VirtualCluster(config, observers=[view], hardware=hardware)
    if isinstance(hardware, CountedRanks):
        hardware.now = lambda: cluster.world.now
    cluster.run()
    assert isinstance(hardware, CountedSlices | CountedRanks)
    began = view.first_round or 0
    luck = hardware.drawn(began, view.now) / (config.learners * (view.now - began)) - _mean_absence(config)
    return view.goodput_after_startup + luck


def startup(config: Config) -> float:
    """Seconds from the start to the first round, while nothing fails."""
    steps = 2 + config.protocol.local_steps_per_round // max(1, config.protocol.fragments)
    config = changed(config, overrides={"total_steps": steps, "cluster": {"chips": 0, "mtbf_seconds": 0.0}})
    view = RunView(config.learners)
    VirtualCluster(config, observers=[view]).run()
    assert view.first_round is not None
    return view.first_round / 1e9


def _mean_absence(config: Config) -> float:
    c = config.cluster
    if c.chips:
        away = c.slice_chips * c.repair_seconds / (3600 * c.mtbi_hours)
    else:
        away = config.learners * c.repair_seconds / c.mtbf_seconds if c.mtbf_seconds else 0.0
    return away / (1 + away)
