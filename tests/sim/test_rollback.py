"""A run is rolled back in virtual time: Theta and the outer state are to the bit what they were, and replay derives it again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiers import mostly_soak

from atoll.chaos import ChaosPlan, Kill, KillSyncer, Partition, Rollback
from atoll.config import Config, load
from atoll.executor.virtual_run import TensorExecutor
from atoll.ids import SYNCER, Nanos, OuterStep, WorkerId
from atoll.protocol.ledger import Loss
from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import AnswerRollback, Effect, Event, LoadTheta, Recovered, RollbackAsked
from atoll.sim.checkers import Safety
from atoll.sim.cluster import VirtualCluster
from atoll.sim.run import replay_run, run_virtual
from atoll.store.versions import Version
from atoll.tape.format import Tape
from atoll.tasks.task import language_task

CASES: dict[str, dict[str, object]] = {
    "ddp": {},
    "fedavg": {"local_steps_per_round": 4},
    "diloco": {"local_steps_per_round": 4},
    "async_diloco": {"local_steps_per_round": 4, "overlap": 4},
    "eager": {"local_steps_per_round": 4, "overlap": 4},
    "dylu": {"local_steps_per_round": 4},
    "streaming": {"local_steps_per_round": 6, "error_feedback": True},
    "decoupled": {"fragments": 4, "local_steps_per_round": 4, "error_feedback": True},
    "decoupled_ramp": {"fragments": 3, "local_steps_per_round": 6, "ramp": 0.3, "codec_down": "int8"},
}
FAULTS = (Kill(4.3, 1, 5.0), Partition(11.0, 2, -1, 3.0), Rollback(13.2), KillSyncer(13.3, 1.5), Rollback(22.0, 2))


def small(preset: str, **protocol: object) -> Config:
    overrides = {
        "total_steps": 32, "learners": 3, "data": {"batch_size": 2, "seq_len": 16, "max_bytes": 200_000},
        "model": {"numbers": {"width": 16, "layers": 2, "mlp": 32}},
        "protocol": {"rollback_interval": 5} | CASES[preset] | protocol,
    }  # fmt: skip
    return load(preset_name=preset, overrides=overrides)


class Watch:
    """Keeps what the disk held after every event, and asks for a rollback at an outer step."""

    def __init__(self, at: OuterStep, to: OuterStep, *, reset: bool = False) -> None:
        self._at, self._to, self._reset = at, to, reset
        self.cluster: VirtualCluster | None = None
        self.executor: TensorExecutor | None = None
        self.at_step: dict[OuterStep, list[Version]] = {}
        self.answers: list[AnswerRollback] = []
        self.loads: list[LoadTheta] = []

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        assert self.cluster is not None and self.executor is not None
        self.answers += [e for e in effects if isinstance(e, AnswerRollback)]
        self.loads += [e for e in effects if isinstance(e, LoadTheta) and e.keep_optimizer == (not self._reset)]
        if worker == SYNCER:
            reached = self.cluster.syncer.outer_step
            self.at_step.setdefault(reached, self.executor.disk.newest())
            if reached == self._at:
                asked = RollbackAsked(self._to, self._reset, "once", "a test")
                self._at = -1
                self.cluster.world.after(0, self.cluster.dispatch, SYNCER, asked)


def run(preset: str, watch: Watch) -> TensorExecutor:
    config = small(preset)
    executor = watch.executor = TensorExecutor(language_task(config))
    safety = Safety(config)
    watch.cluster = VirtualCluster(config, executor_for=executor, observers=[safety, watch])
    safety.attach(watch.cluster)
    watch.cluster.run(until_seconds=600)
    return executor


def same(a: Version, b: Version) -> bool:
    outer = a.outer is b.outer is None or (
        a.outer is not None and b.outer is not None and a.outer.count == b.outer.count
        and all((x is y is None) or (x is not None and y is not None and torch.equal(x, y))
                for x, y in ((a.outer.momentum, b.outer.momentum), (a.outer.pending, b.outer.pending)))
    )  # fmt: skip
    return outer and all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("theta", "buffers", "announced"))


@pytest.mark.parametrize("preset", mostly_soak(CASES, keep=["decoupled", "streaming", "ddp"]))
def test_weights_and_outer_state_are_those_of_the_step_rolled_back_to(preset: str) -> None:
    watch = Watch(at=13, to=10)
    run(preset, watch)
    (answer,) = watch.answers
    assert answer.to == 10 and answer.outer_step > 13
    before, after = watch.at_step[10], watch.at_step[answer.outer_step]
    assert all(same(a, b) for a, b in zip(before, after, strict=True))
    assert any(not same(a, b) for a, b in zip(before, watch.at_step[answer.outer_step - 1], strict=True))
    assert watch.cluster is not None
    fates = watch.cluster.syncer.fates()
    assert fates.discarded[Loss.ROLLED_BACK] > 0 and fates.add_up()
    assert len(watch.loads) >= 3, "every learner keeps its moments"


def test_moments_start_fresh_where_that_is_asked_for() -> None:
    watch = Watch(at=13, to=10, reset=True)
    run("decoupled", watch)
    assert len(watch.loads) >= 3 and not any(load.keep_optimizer for load in watch.loads)


def test_step_that_is_not_kept_is_refused_with_those_that_are() -> None:
    watch = Watch(at=13, to=3)
    run("decoupled", watch)
    (answer,) = watch.answers
    assert answer.outer_step == 0 and "5, 10" in answer.reason.detail


def test_learner_cut_off_before_it_loads_trains_on_and_recovers_when_it_is_back() -> None:
    """History 4049: it is told in the middle of a step, and the syncer is killed before the step ends."""
    config = small("async_diloco")
    safety, recovered = Safety(config), []

    def watch(now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        recovered.extend(e.learner for e in effects if isinstance(e, Recovered) and e.reason.why is Why.VERSION_FORGOTTEN)

    cluster = VirtualCluster(config, plan=ChaosPlan((Rollback(13.2), KillSyncer(13.3, 1.5))), observers=[safety, watch])
    safety.attach(cluster)
    cluster.run(until_seconds=600)
    assert cluster.syncer.finished and sorted(recovered) == [0, 1, 2]


@pytest.mark.parametrize("preset", mostly_soak(CASES, keep=["decoupled", "diloco"]))
def test_run_rolled_back_under_faults_replays_every_theta(preset: str, tmp_path: Path) -> None:
    done = run_virtual(small(preset), ChaosPlan(FAULTS), tmp_path, tensors=True)
    outcome, theta, mismatches = replay_run(Tape(tmp_path / "run.tape"), weights=True)
    assert (outcome.outer_step, outcome.cut, mismatches) == (32, False, []) and theta == done.theta_sha256
    answers = [e for r in Tape(tmp_path / "run.tape").records() for e in r.effects if isinstance(e, AnswerRollback)]
    assert any(answer.outer_step for answer in answers)
