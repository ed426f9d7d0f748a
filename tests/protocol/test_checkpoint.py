"""A machine that was frozen and thawed decides as the one that it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from scenario import Scenario

from atoll.config import Config, load
from atoll.ids import SYNCER, Nanos, WorkerId
from atoll.protocol.checkpoint import Unusable, freeze, thaw
from atoll.protocol.interface import Machine
from atoll.protocol.learner import LearnerMachine
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import Effect, Event, Started
from atoll.sim.cluster import VirtualCluster

EVERY = 7
"""Events between two freezings of one machine: all of them would take minutes."""


class Shadows:
    """Beside each machine of a run one that is frozen again and again, and must decide the same."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._machines: dict[WorkerId, Machine] = {}
        self._incarnation: dict[WorkerId, int] = {}
        self._events = 0
        self.frozen = 0
        self.largest = 0

    def _new(self, worker: WorkerId) -> Machine:
        if worker == SYNCER:
            return SyncerMachine(self._config)
        return LearnerMachine(self._config, worker, self._incarnation[worker])

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, Started) and (worker != SYNCER or worker not in self._machines):
            self._incarnation[worker] = event.incarnation
            self._machines[worker] = self._new(worker)
        machine = self._machines[worker]
        assert list(machine.on(event, now)) == list(effects)
        self._events += 1
        if self._events % EVERY == 0:
            state = freeze(machine)
            fresh = self._machines[worker] = thaw(state, self._new(worker))
            assert freeze(fresh) == state
            assert fresh.deadline() == machine.deadline()
            self.frozen += 1
            self.largest = max(self.largest, len(state))


@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (3, 12, 73, 4049, 4055))])
def test_thawed_machines_decide_as_those_that_were_frozen(seed: int) -> None:
    """Kills, partitions, rollbacks and hostile learners: whatever a machine can be in the middle of."""
    scenario = Scenario(seed)
    shadows = Shadows(scenario.config)
    VirtualCluster(scenario.config, plan=scenario.plan, observers=[shadows]).run(until_seconds=3000)
    assert shadows.frozen > 500
    assert shadows.largest < 200_000


def test_a_bounded_queue_stays_bounded() -> None:
    """Theta's moves are judged by the last so many. Runs without tensors measure none."""
    config = load(preset_name="decoupled")
    machine = SyncerMachine(config)
    for jump in range(1, 100):
        machine.merging.norms.moved(0, float(jump), 1.0)
    fresh = thaw(freeze(machine), SyncerMachine(config))
    for jump in range(1, 100):
        machine.merging.norms.moved(0, 1.0 / jump, 1.0)
        fresh.merging.norms.moved(0, 1.0 / jump, 1.0)
        assert fresh.merging.norms.jump_limit(0, 1.0) == machine.merging.norms.jump_limit(0, 1.0)


def frozen_syncer() -> tuple[Config, bytes]:
    config = load(preset_name="decoupled", overrides={"learners": 2, "total_steps": 20})
    cluster = VirtualCluster(config)
    cluster.run()
    return config, freeze(cluster.syncer)


def altered(state: bytes, change: Callable[[list[Any]], None]) -> bytes:
    parts = msgspec.msgpack.decode(state)
    change(parts)
    return msgspec.msgpack.encode(parts)


def renamed_field(parts: list[Any]) -> None:
    parts[0][1]["another"] = parts[0][1].pop("outer_step")


def foreign_class(parts: list[Any]) -> None:
    parts[-1][0] = "subprocess:Popen"


def foreign_value(parts: list[Any]) -> None:
    parts[0][1]["outer_step"] = ["struct", "os:system", "true"]


def attribute_as_method(parts: list[Any]) -> None:
    parts[0][1]["outer_step"] = ["method", 0, "config"]


@pytest.mark.parametrize("change", [renamed_field, foreign_class, foreign_value, attribute_as_method])
def test_state_of_other_code_is_refused(change: Callable[[list[Any]], None]) -> None:
    config, state = frozen_syncer()
    with pytest.raises(Unusable):
        thaw(altered(state, change), SyncerMachine(config))


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_state_that_is_cut_short_is_refused(cut: int) -> None:
    config, state = frozen_syncer()
    with pytest.raises(Unusable):
        thaw(state[:cut], SyncerMachine(config))


def test_what_the_walk_does_not_know_is_refused_when_it_is_written() -> None:
    machine = SyncerMachine(load(preset_name="decoupled"))
    machine.outer_step = open  # type: ignore[assignment]
    with pytest.raises(TypeError, match="cannot be part of a machine's state"):
        freeze(machine)
