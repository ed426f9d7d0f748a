"""The held-out loss of Theta while it trains: points that change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.chaos import ChaosPlan, KillSyncer
from atoll.config import Config, load
from atoll.sim.run import Outputs, run_virtual, train_on_tape
from atoll.tape.format import Tape
from atoll.tape.heldout import HeldoutPoint, points_in


def small(preset: str = "decoupled", total_steps: int = 15, every: int = 5, **sections: Any) -> Config:
    overrides: dict[str, Any] = {
        "total_steps": total_steps, "learners": 2, "inner": {"schedule": "constant", "warmup_share": 0.0},
        "data": {"batch_size": 2, "seq_len": 16, "max_bytes": 400_000, "heldout_batches": 4, "heldout_every": every},
        "model": {"numbers": {"width": 16, "mlp": 32}},
    }  # fmt: skip
    return load(preset_name=preset, overrides=overrides | sections)


def run(config: Config, directory: Path | None = None, *faults: KillSyncer) -> Outputs:
    return run_virtual(config, ChaosPlan(faults), directory, tensors=True)


@pytest.mark.parametrize("preset", ["decoupled", "ddp"])
def test_a_look_is_what_a_run_that_ended_there_would_have_told(preset: str) -> None:
    evaluated = run(small(preset)).points
    assert [point.outer_step for point in evaluated] == [5, 10], "the last is the run's own end, and told as that"
    for point in evaluated:
        assert point.loss == run(small(preset, point.outer_step, every=0)).loss_final


def test_where_theta_changes_every_so_often_it_is_looked_at_when_it_next_does() -> None:
    evaluated = run(small("diloco", 30, every=7, protocol={"local_steps_per_round": 5})).points
    assert [point.outer_step for point in evaluated] == [10, 15, 25]
    assert [point.loss for point in evaluated[:2]] == [
        run(small("diloco", steps, every=0, protocol={"local_steps_per_round": 5})).loss_final for steps in (10, 15)
    ]


def test_looks_change_nothing_and_lie_beside_the_tape(tmp_path: Path) -> None:
    told: list[HeldoutPoint] = []
    evaluated = run_virtual(small(), ChaosPlan(), tmp_path / "evaluated", tensors=True, on_point=told.append)
    plain = run(small(every=0), tmp_path / "plain")
    assert evaluated.theta_sha256 == plain.theta_sha256 and evaluated.loss_final == plain.loss_final
    assert list(evaluated.points) == told == points_in(tmp_path / "evaluated") and len(told) == 2
    assert plain.points == () and points_in(tmp_path / "plain") == [] and not (tmp_path / "plain" / "heldout.jsonl").exists()


def test_a_syncer_that_was_killed_is_looked_at_once_a_step() -> None:
    done = run(small(total_steps=24, every=4), None, KillSyncer(at=9.0, lasts=3.0))
    assert [point.outer_step for point in done.points] == [4, 8, 12, 16, 20]


def test_training_on_a_tape_is_looked_at_too(tmp_path: Path) -> None:
    first = run(small(), tmp_path / "first")
    again = train_on_tape(Tape(tmp_path / "first" / "run.tape"), small(), tmp_path / "again")
    assert again.points == first.points and points_in(tmp_path / "again") == list(first.points)


def test_the_file_is_read_up_to_its_last_whole_line_and_a_look_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "heldout.jsonl"
    path.write_text('{"outer_step":8,"loss":3.5}\n{"outer_step":16,"loss":null}\n{"outer_step":8,"loss":3.5}\n{"outer_st')
    assert points_in(tmp_path) == [HeldoutPoint(8, 3.5), HeldoutPoint(16, None)], "a loss that is no number is null in JSON"
