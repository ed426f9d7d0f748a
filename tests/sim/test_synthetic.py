"""Synthetic histories: the failure model under the real machines, taped, and trained on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from atoll.chaos import ChaosPlan
from atoll.config import Config, load
from atoll.errors import RunFailed, UserError
from atoll.ids import SYNCER
from atoll.protocol.vocabulary import FixParticipants, InnerStep, Recovered, Resized, StepDone
from atoll.sim.checkers import Safety
from atoll.sim.cluster import VirtualCluster
from atoll.sim.estimates.failures import FailureModel
from atoll.sim.estimates.goodput import simulate
from atoll.sim.run import Outputs, config_on_tape, replay_run, run_virtual, train_on_tape
from atoll.sim.slices import SliceHardware
from atoll.tape.format import Record, Tape


def settings(learners: int = 4, total_steps: int = 30, **sections: dict[str, object]) -> Config:
    base: dict[str, dict[str, object]] = {
        "cluster": {"step_seconds": 5.0, "step_noise": 0.02},
        "data": {"seq_len": 16, "batch_size": 8, "max_bytes": 200_000, "heldout_batches": 2},
        "model": {"numbers": {"width": 16, "layers": 2, "heads": 2, "mlp": 32}},
        "inner": {"learning_rate": 0.02},
        "protocol": {"fragments": 4, "local_steps_per_round": 8},
    }
    merged = {name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}}
    return load(preset_name="decoupled", overrides={"learners": learners, "total_steps": total_steps} | merged)


def record(config: Config, directory: Path, chips: int = 400_000, model: FailureModel | None = None) -> Tape:
    slices = SliceHardware(config, chips, model or FailureModel(), seed=1)
    done = run_virtual(config, ChaosPlan(), directory, tensors=False, slices=slices)
    assert done.tape is not None
    return Tape(done.tape)


def train(tape: Tape, directory: Path, *assignments: str) -> Outputs:
    return train_on_tape(tape, config_on_tape(tape, {}, assignments), directory)


def of(records: list[Record], kind: type) -> list[Record]:
    return [r for r in records if isinstance(r.event, kind)]


def test_learner_that_resizes_stands_for_as_long_and_trains_with_as_much_less(tmp_path: Path) -> None:
    records = list(record(settings(total_steps=200), tmp_path / "run").records())
    resized = of(records, Resized)
    assert len(resized) > 20
    for learner in range(4):
        mine = [r for r in records if r.worker == learner]
        share, stopped = 1.0, 0
        for r in mine:
            if isinstance(r.event, Resized):
                share = r.event.share
            assert all(e.share == share for e in r.effects if isinstance(e, InnerStep))
        done = [r for r in mine if isinstance(r.event, StepDone)]
        boundaries = {r.now for r in mine if isinstance(r.event, Resized)}
        for before, after in pairwise(done):
            assert isinstance(after.event, StepDone)
            stood = (after.now - before.now - after.event.nanos) / 1e9
            stopped += before.now in boundaries
            assert any(stood == pytest.approx(stop, abs=1e-6) for stop in ((8.0, 16.0) if before.now in boundaries else (0.0,)))
        assert stopped >= 3


def test_taped_goodput_is_the_simulators(tmp_path: Path) -> None:
    """Share of the learners' time in steps: the machines' own account against sim/goodput."""
    config = settings(learners=8, total_steps=750)
    records = list(record(config, tmp_path / "run", chips=1_200_000).records())
    stepping = sum(r.event.nanos for r in records if isinstance(r.event, StepDone))
    share = 100 * stepping / (8 * records[-1].now)
    one_learner = simulate(150_000, 1, FailureModel())
    assert share == pytest.approx(one_learner.uptime, abs=1.5)
    tokens = [r.event.tokens for r in records if isinstance(r.event, StepDone)]
    assert 100 * sum(tokens) / (len(tokens) * 8 * 16) == pytest.approx(one_learner.effective_batch, abs=0.5)


def test_synthetic_history_breaks_no_rule() -> None:
    """Learners of a single slice die with it and come back through recovery."""
    config = settings(learners=4, total_steps=1200)
    model = FailureModel(mtbi_seconds=128 * 1500.0, return_seconds=60.0)
    safety, recovered = Safety(config), []
    cluster = VirtualCluster(
        config, hardware=SliceHardware(config, 4 * 128, model, seed=3),
        observers=[safety, lambda now, worker, event, effects: recovered.extend(e for e in effects if isinstance(e, Recovered))],
    )  # fmt: skip
    safety.attach(cluster)
    cluster.run(until_seconds=50_000)
    assert cluster.syncer.outer_step == 1200
    assert len(recovered) > 4 + 3, "beyond joining"


def test_training_on_a_tape_follows_its_history_and_replays_bit_for_bit(tmp_path: Path) -> None:
    tape = record(settings(protocol={"snapshot_interval": 7}), tmp_path / "history")
    done = train(tape, tmp_path / "trained")
    assert done.loss_final is not None and done.loss_first is not None and done.loss_final < 0.8 * done.loss_first
    theirs, ours = list(tape.records()), list(Tape(tmp_path / "trained" / "run.tape").records())
    assert [(r.now, r.worker, type(r.event)) for r in ours] == [(r.now, r.worker, type(r.event)) for r in theirs]

    def rounds(records: list[Record]) -> list[FixParticipants]:
        return [e for r in records if r.worker == SYNCER for e in r.effects if isinstance(e, FixParticipants)]

    assert rounds(ours) == rounds(theirs)
    assert all(r.event.loss is not None for r in ours if isinstance(r.event, StepDone))
    outcome, theta, _ = replay_run(Tape(tmp_path / "trained" / "run.tape"), weights=True)
    assert outcome.records == len(ours) and theta == done.theta_sha256


def test_training_on_a_tape_equals_training_directly_on_the_same_hardware(tmp_path: Path) -> None:
    """Nothing of the tape's own sizes leaks in: with the model's true bytes on instant links both ways agree."""
    fast = {"up_gbit": 1e9, "down_gbit": 1e9, "latency_seconds": 0.0}
    config = settings(cluster=fast)
    direct = run_virtual(
        config, ChaosPlan(), tmp_path / "direct", tensors=True, slices=SliceHardware(config, 400_000, FailureModel(), seed=1)
    )
    taped = train(record(config, tmp_path / "history"), tmp_path / "trained")
    assert taped.theta_sha256 == direct.theta_sha256


def test_model_and_data_may_be_others_than_the_tapes(tmp_path: Path) -> None:
    tape = record(settings(), tmp_path / "history")
    done = train(tape, tmp_path / "trained", "data.batch_size=3", "model.numbers.layers=1", "seed=9")
    steps = [r.event for r in Tape(tmp_path / "trained" / "run.tape").records() if isinstance(r.event, StepDone)]
    assert {s.samples for s in steps} <= {2, 3} and done.loss_final is not None


def test_what_the_tape_has_decided_cannot_be_changed(tmp_path: Path) -> None:
    tape = record(settings(total_steps=5), tmp_path / "history")
    with pytest.raises(UserError, match="has fixed protocol already"):
        config_on_tape(tape, {}, ["protocol.overlap=1"])
    kept = config_on_tape(tape, {"protocol": {"overlap": 1}, "learners": 2, "inner": {"learning_rate": 0.01}}, [])
    assert (kept.learners, kept.protocol.overlap, kept.inner.learning_rate) == (4, 2, 0.01)


def test_training_that_goes_bad_says_so(tmp_path: Path) -> None:
    tape = record(settings(total_steps=20), tmp_path / "history")
    with pytest.raises(RunFailed, match=r"NaN|another course|the norm"):
        train(tape, tmp_path / "trained", "inner.learning_rate=900.0", "inner.clip_norm=0.0", "inner.optimizer='SGD'")
