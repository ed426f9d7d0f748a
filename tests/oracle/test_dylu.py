"""Preset dylu: asynchronous merges by delayed Nesterov, after each learner's own number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dylu_loop
import pytest
import torch
from task import CLIP, Net, adamw, batches, configured, loss, relative, task_module, theta

from atoll.config import Config
from atoll.executor.virtual_run import TensorExecutor
from atoll.ids import SYNCER, LearnerId, Nanos, WorkerId
from atoll.protocol.vocabulary import Accept, Adopt, Announce, Contribution, Effect, Event, InnerStep, Merge, Received, Send
from atoll.rules import learning_rate
from atoll.sim.cluster import VirtualCluster
from atoll.tensors.outer import OuterRule, initial_state, outer_step

LEARNERS = 3
UNEVEN = {"slow_share": 0.34, "slow_factor": 2.5, "step_noise": 0.05, "up_gbit": 1.0, "down_gbit": 1.0, "latency_seconds": 0.05}


class Course:
    """What a run decided, in the order in which its workers did it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.events: list[tuple[Any, ...]] = []
        self.merged: list[tuple[LearnerId, ...]] = []
        self.told: dict[LearnerId, list[int]] = {m: [] for m in range(LEARNERS)}
        self._sent: dict[tuple[int, LearnerId], Contribution] = {}

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case InnerStep(batch=batch, outer_step=t):
                    self.events.append(("step", worker, batch, learning_rate(self.config, t)))
                case Adopt(version=version):
                    self.events.append(("adopt", worker, version))
                case Accept(outer_step=t, learner=m):
                    assert isinstance(event, Received) and isinstance(event.envelope.body, Contribution)
                    self._sent[t, m] = event.envelope.body
                case Merge(outer_step=t, shares=shares):
                    who = tuple(share.learner for share in shares)
                    self.merged.append(who)
                    taken = [(m, self._sent[t, m].local_step, self._sent[t, m].anchor) for m in who]
                    self.events.append(("merge", t, taken))
                case Send(envelope=envelope) if worker == SYNCER and isinstance(envelope.body, Announce):
                    self.told[envelope.receiver].append(envelope.body.local_steps)
                case _:
                    pass


def run(**sections: Any) -> tuple[TensorExecutor, Course]:
    protocol = {"local_steps_per_round": 6} | sections.pop("protocol", {})
    config = configured("dylu", total_steps=60, protocol=protocol, cluster=UNEVEN, **sections)
    executor, course = TensorExecutor(task_module(config)), Course(config)
    VirtualCluster(config, executor_for=executor, observers=[course]).run(until_seconds=2_000.0)
    return executor, course


def test_asynchronous_run_is_the_plain_loop_on_the_same_course() -> None:
    """Up to rounding: Atoll takes the mean of those merged together and multiplies it by their number."""
    executor, course = run()
    outer = {"rate": 0.7, "momentum": 0.9, "delay": LEARNERS}
    expected, models = dylu_loop.train(
        Net, loss, batches(), adamw, course.events, learners=LEARNERS, clip=CLIP, **outer
    )  # fmt: skip
    names = [name for name, _ in Net().named_parameters()]
    assert relative(theta(executor), dict(zip(names, expected, strict=True))) < 1e-5
    for learner, model in enumerate(models):
        assert relative(executor.learners[learner].model.state_dict(), model.state_dict()) < 1e-4
    assert {len(who) for who in course.merged} >= {1, 2}, "some are merged alone and some together"


def test_slower_learners_are_told_fewer_steps_and_are_merged_as_often() -> None:
    _, course = run()
    slow = min(course.told, key=lambda m: course.told[m][-1])
    assert course.told[slow][-1] in (2, 3), "6 / 2.5, and half a step of noise"
    assert all(course.told[m][-1] in (5, 6) for m in course.told if m != slow)
    times = [sum(m in who for who in course.merged) for m in range(LEARNERS)]
    assert max(times) <= 1.35 * min(times)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_all_learners_in_one_round_take_the_nesterov_step_of_their_mean(momentum: float) -> None:
    torch.manual_seed(0)
    at, deltas = torch.randn(64), [torch.randn(64) for _ in range(5)]
    delayed, usual = (OuterRule(kind, 0.7, momentum, delay=4) for kind in ("delayed_nesterov", "nesterov"))
    one, other = (at, initial_state(delayed, 64)), (at, initial_state(usual, 64))
    for delta in deltas:
        one, other = outer_step(one[0], delta, one[1], delayed, 4), outer_step(other[0], delta, other[1], usual)
        assert torch.allclose(one[0], other[0], atol=1e-5)


def test_momentum_moves_with_the_contribution_that_completes_n_however_they_come() -> None:
    rule = OuterRule("delayed_nesterov", 1.0, 0.5, delay=4)
    ones, state = torch.ones(2), initial_state(OuterRule("delayed_nesterov", 1.0, 0.5, delay=4), 2)
    moved = []
    at = torch.zeros(2)
    for together in (3, 3, 1, 1):  # 3, 6, 7 and 8 contributions: the momentum moves with the 4th and the 8th
        at, state = outer_step(at, ones, state, rule, together)
        assert state.momentum is not None
        moved.append(float(state.momentum[0]))
    assert moved == [0.0, 1.5, 1.5, 1.25]
