"""What one learner of five can do to a robust merge: nothing beyond what the others do themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.config.merges import MERGES
from atoll.tensors.merge import mean
from atoll.tensors.robust import ROBUST

NAMES = sorted(ROBUST)


def honest(count: int = 4, size: int = 500) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [1.0 + 0.3 * torch.randn(size, generator=g) for _ in range(count)]


def test_the_table_of_config_and_the_code_name_the_same_merges() -> None:
    assert {name for name, spec in MERGES.items() if spec.robust} == set(ROBUST)


@pytest.mark.parametrize("name", NAMES)
def test_alike_contributions_merge_to_themselves_and_two_to_their_mean(name: str) -> None:
    one = honest(1)[0]
    assert torch.allclose(ROBUST[name]([one] * 5, [1.0] * 5), one, rtol=1e-6)
    pair = honest(2)
    assert torch.allclose(ROBUST[name](pair, [1.0, 3.0]), mean(pair, [1.0, 3.0]), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [1e6, -1e6, -1.0, 0.0])
def test_one_hostile_contribution_of_five_is_bounded(name: str, factor: float) -> None:
    voters = honest()
    good = mean(voters, [1.0] * 4)
    merged = ROBUST[name]([*voters, factor * good], [1.0] * 5)
    size = good.norm()
    assert (merged - good).norm() < 0.5 * size, f"{name}: it moved {float((merged - good).norm() / size):.2f} of the honest mean"
    assert torch.dot(merged, good) > 0.5 * size * size, "and the direction stays"


@pytest.mark.parametrize("name", NAMES)
def test_weights_count(name: str) -> None:
    low, high = torch.zeros(50), torch.ones(50)
    voters = [low, low + 0.1, high - 0.1, high]
    towards_high = ROBUST[name](voters, [1.0, 1.0, 4.0, 4.0]).mean()
    assert towards_high > ROBUST[name](voters, [4.0, 4.0, 1.0, 1.0]).mean() + 0.2


def test_trimmed_mean_by_hand() -> None:
    voters = [torch.tensor([1.0, -5.0]), torch.tensor([2.0, 3.0]), torch.tensor([3.0, 1.0]), torch.tensor([100.0, 2.0])]
    assert ROBUST["trimmed_mean"](voters, [1.0, 1.0, 3.0, 1.0]).tolist() == [(2 + 3 * 3) / 4, (3 * 1 + 2) / 4]
