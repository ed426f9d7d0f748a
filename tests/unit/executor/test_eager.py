"""What a learner adds to an announced version of its own newest work."""

from __future__ import annotations

import torch

from atoll.config import load
from atoll.executor.eager import EagerShares

CPU = torch.device("cpu")


def shares(**outer: object) -> EagerShares:
    return EagerShares(load(preset_name="eager", overrides={"learners": 4, "outer": outer}))


def test_own_share_is_an_outer_step_of_a_learners_part_and_is_taken_once() -> None:
    found = shares(outer_optimizer="sgd", outer_learning_rate=0.5)
    found.staged(0, torch.tensor([8.0, -4.0]))
    step = found.take(0)
    assert step is not None and step.tolist() == [-1.0, 0.5]
    assert found.take(0) is None


def test_second_copy_of_the_same_boundary_is_not_another_outer_gradient() -> None:
    found, once = shares(), shares()
    for s in (found, once):
        s.staged(0, torch.tensor([8.0]))
    found.staged(0, torch.tensor([0.0]))
    for s in (found, once):
        s.take(0)
        s.staged(0, torch.tensor([4.0]))
    assert torch.equal(found.take(0), once.take(0))  # type: ignore[arg-type]


def test_state_of_a_snapshot_goes_on_and_a_recovery_starts_at_zero() -> None:
    before, after, fresh = shares(), shares(), shares()
    before.staged(0, torch.tensor([8.0, 1.0]))
    after.staged(0, torch.tensor([5.0, 5.0]))
    after.restore(before.record(), CPU)
    assert torch.equal(before.take(0), after.take(0))  # type: ignore[arg-type]
    for s in (before, after):
        s.staged(0, torch.tensor([1.0, 3.0]))
    assert torch.equal(before.take(0), after.take(0))  # type: ignore[arg-type]
    before.clear()
    for s in (before, fresh):
        s.staged(0, torch.tensor([1.0, 3.0]))
    assert torch.equal(before.take(0), fresh.take(0))  # type: ignore[arg-type]
