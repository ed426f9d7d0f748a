"""Every preset really trains in virtual time; a run is its seed; a tape replays to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.chaos import ChaosPlan, Kill, KillSyncer, Partition, Pause
from atoll.config import PRESETS, Config, load
from atoll.errors import ReplayDiverged, UserError
from atoll.sim.run import Outputs, replay_run, run_virtual
from atoll.tape.format import Tape, TapeWriter

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "tiny.toml"


@pytest.mark.soak
@pytest.mark.parametrize(("presets", "total_steps"), [(("ddp", "decoupled"), 40), (tuple(PRESETS), 200)])
def test_presets_of_the_default_recipe_learn_and_end_close_to_data_parallel(presets: tuple[str, ...], total_steps: int) -> None:
    """At most 0.7 of the initial held-out loss; within 10 % of ddp at equal tokens, decoupled without a ramp 15 %."""
    ends: dict[str, float] = {}
    for name in presets:
        config = load(RECIPE, preset_name=name, overrides={"total_steps": total_steps})
        run = run_virtual(config, ChaosPlan(), None, tensors=True)
        assert run.loss_first is not None
        assert run.loss_final is not None
        assert run.loss_final <= 0.7 * run.loss_first, name
        tokens = run.fates.trained / config.protocol.fragments
        assert tokens == pytest.approx(config.learners * config.total_steps * 8 * 32, rel=0.02), "equal tokens"
        ends[name] = run.loss_final
    for name, loss in ends.items():
        allowed = 1.15 if name == "decoupled" else 1.10
        assert loss <= allowed * ends["ddp"], f"{name} ends at {loss:.4f}, ddp at {ends['ddp']:.4f}"


def small(preset: str, seed: int = 0, **protocol: object) -> Config:
    overrides = {
        "seed": seed, "total_steps": 24, "learners": 3, "data": {"batch_size": 2, "seq_len": 16, "max_bytes": 400_000},
        "model": {"numbers": {"width": 16, "layers": 2, "mlp": 32}}, "protocol": {"snapshot_interval": 10} | protocol,
        "cluster": {"slow_share": 0.34},
    }  # fmt: skip
    return load(preset_name=preset, overrides=overrides)


CASES = {
    "ddp": {},
    "fedavg": {"local_steps_per_round": 4},
    "diloco": {"local_steps_per_round": 4},
    "async_diloco": {"local_steps_per_round": 4, "overlap": 4},
    "streaming": {"local_steps_per_round": 6, "error_feedback": True, "stochastic_rounding": True},
    "decoupled": {"fragments": 8, "local_steps_per_round": 8, "error_feedback": True},
    "decoupled_ramp": {"fragments": 6, "local_steps_per_round": 6, "ramp": 0.3, "codec_down": "int8"},
    "muloco": {"local_steps_per_round": 4},
    "eager": {"local_steps_per_round": 4, "overlap": 4},
    "dylu": {"local_steps_per_round": 4},
    "heloco": {"fragments": 8, "local_steps_per_round": 8},
    "pier": {"local_steps_per_round": 2},
    "sparseloco": {"local_steps_per_round": 4, "codec_up": "chunk_top_k:0.1"},
}
FAULTS = ChaosPlan((
    Kill(4.3, 1, 5.0), Pause(6.0, 0, 2.0), KillSyncer(10.5, 1.5), Partition(14.0, 2, -1, 5.0), Kill(16.2, 0, 2.0),
))  # fmt: skip


def go(preset: str, directory: Path | None, seed: int = 0, plan: ChaosPlan = FAULTS) -> Outputs:
    return run_virtual(small(preset, seed, **CASES[preset]), plan, directory, tensors=True)


@pytest.mark.parametrize("preset", CASES)
def test_run_with_faults_replays_every_decision_and_every_theta(preset: str, tmp_path: Path) -> None:
    run = go(preset, tmp_path)
    outcome, theta, mismatches = replay_run(Tape(tmp_path / "run.tape"), weights=True)
    assert (outcome.outer_step, outcome.cut, mismatches) == (24, False, [])
    assert theta == run.theta_sha256
    assert run.loss_first is not None and run.loss_final is not None and run.loss_final < run.loss_first


def test_same_seed_gives_the_same_tape_and_weights_and_another_does_not(tmp_path: Path) -> None:
    first, again, other = (go("decoupled", tmp_path / name, seed) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    tapes = [(tmp_path / name / "run.tape").read_bytes() for name in "abc"]
    assert tapes[0] == tapes[1] != tapes[2]
    assert first.theta_sha256 == again.theta_sha256 != other.theta_sha256


def with_another_rate(folder: Path, factor: float) -> None:
    """Writes other.tape: the run's records, and a config with another inner learning rate."""
    tape = Tape(folder / "run.tape")
    header = tape.header
    header.config["inner"]["learning_rate"] *= factor
    with TapeWriter.create(folder / "other.tape", header) as writer:
        for r in tape.records():
            writer.append(r.now, r.worker, r.event, r.effects)


def test_replay_with_weights_that_differ_stops_at_the_first_theta_that_does(tmp_path: Path) -> None:
    """A tape whose config says another inner learning rate decides alike and trains otherwise."""
    go("decoupled", tmp_path, plan=ChaosPlan())
    with_another_rate(tmp_path, 1.5)
    assert replay_run(Tape(tmp_path / "other.tape"), weights=False)[0].outer_step == 24
    with pytest.raises(ReplayDiverged, match=r"Theta of outer step 1 has digest"):
        replay_run(Tape(tmp_path / "other.tape"), weights=True)


def test_replay_to_a_tolerance_counts_thetas_that_differ_and_holds_the_last_to_it(tmp_path: Path) -> None:
    go("decoupled", tmp_path, plan=ChaosPlan())
    outcome, _, _ = replay_run(Tape(tmp_path / "run.tape"), weights=True, tolerance=0.0)
    assert (outcome.differing, outcome.distance) == (0, 0.0)
    with_another_rate(tmp_path, 1.01)
    outcome, _, _ = replay_run(Tape(tmp_path / "other.tape"), weights=True, tolerance=0.1)
    assert outcome.differing == 24 and 0 < outcome.distance < 0.1
    with pytest.raises(ReplayDiverged, match=r"of its norm away from the recorded one, more than --tolerance"):
        replay_run(Tape(tmp_path / "other.tape"), weights=True, tolerance=outcome.distance / 2)
    (tmp_path / "theta.safetensors").unlink()
    with pytest.raises(UserError, match=r"^--tolerance: compares with .*theta\.safetensors"):
        replay_run(Tape(tmp_path / "run.tape"), weights=True, tolerance=0.1)


def test_snapshots_of_a_training_run_hold_every_live_learner_and_the_syncer(tmp_path: Path) -> None:
    from atoll.executor.virtual_run import TensorExecutor
    from atoll.sim.cluster import VirtualCluster
    from atoll.tasks.task import language_task

    config = small("decoupled", **CASES["decoupled"])
    executor = TensorExecutor(language_task(config))
    VirtualCluster(config, executor_for=executor).run(until_seconds=600)
    assert sorted(executor.snapshots.kept) == [10, 20]
    for snapshot in executor.snapshots.kept.values():
        assert snapshot.sealed == (0, 1, 2)
        assert sorted(snapshot.learners) == [0, 1, 2]
        assert snapshot.syncer_state is not None and len(snapshot.versions.newest()) == 8
        assert all(state["optimizer"]["state"] for _, state in snapshot.learners.values())
