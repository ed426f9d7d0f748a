"""The frozen part of a model: what it is, and a digest that is the same wherever the same weights lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.tensors.inventory import frozen_digest, frozen_parameters, with_frozen


class Backbone(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Conv2d(3, 4, 3).requires_grad_(False)
        self.norm = nn.BatchNorm2d(4).requires_grad_(False)
        self.table = nn.Parameter(torch.tensor([3, 200], dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1 + 2j), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0), requires_grad=False)
        self.low = nn.Parameter(torch.randn(5, 2, dtype=torch.bfloat16), requires_grad=False)
        self.head = nn.Linear(4, 2)


def test_model_whose_parameters_all_train_has_no_frozen_part_in_its_fingerprint() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert frozen_parameters(model) == {} and frozen_digest(model) == ""
    assert with_frozen("abc", "") == "abc"
    assert with_frozen("abc", "def").startswith("abc") and with_frozen("abc", "def") != with_frozen("abc", "fed")


def test_digest_is_of_values_and_not_of_how_or_with_what_they_lie() -> None:
    """Strides, heads, buffers and what trains may differ; a digest is 64 letters, for ever the same."""
    one, other = Backbone(), Backbone().to(memory_format=torch.channels_last)
    nn.init.zeros_(other.head.weight)
    other.norm.running_mean.fill_(3.0)
    assert one.body.weight.stride() != other.body.weight.stride()
    assert frozen_digest(one) == frozen_digest(other) and len(frozen_digest(one)) == 64
    assert list(frozen_parameters(one)) == sorted(frozen_parameters(one)), "whatever the order of definition"
    plain = nn.Linear(2, 1, bias=False).requires_grad_(False)
    nn.init.ones_(plain.weight)
    assert frozen_digest(plain) == "6a062f224831a1fd747ebba32225b8235432528ddf687822fba5b9e7778ec464"


@pytest.mark.parametrize("change", [
    lambda m: m.body.weight.data.view(-1)[-1].add_(1e-6), lambda m: m.table.data[0].add_(1), lambda m: m.scale.data.mul_(1j),
    lambda m: setattr(m.low, "data", m.low.data.view(2, 5)), lambda m: setattr(m.low, "data", m.low.data.view(torch.int16)),
    lambda m: setattr(m, "more", nn.Parameter(torch.empty(0), requires_grad=False)), lambda m: m.norm.requires_grad_(True),
], ids=["one weight", "an integer", "a complex number", "shape", "dtype", "a name", "less is frozen"])  # fmt: skip
def test_digest_of_anything_else_is_another(change: object) -> None:
    one, other = Backbone(), Backbone()
    change(other)  # type: ignore[operator]
    assert frozen_digest(one) != frozen_digest(other)


def test_tied_to_a_trained_parameter_is_not_frozen_and_ties_of_frozen_ones_are() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[0].weight = nn.Parameter(model[1].weight.data, requires_grad=False)
    assert frozen_parameters(model) == {}
    model[1].requires_grad_(False)
    tied = frozen_digest(model)
    model[1].weight = nn.Parameter(model[1].weight.detach().clone(), requires_grad=False)
    assert tied == frozen_digest(model) and list(frozen_parameters(model)) == ["0.weight", "1.weight"]
