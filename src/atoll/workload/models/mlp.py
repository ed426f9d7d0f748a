"""Two small models for tests, and the Linear layer of all models here."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.workload.data.seeds import generator


def uninitialised_linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    """A Linear without initial values, which the owning model fills: torch's own initialisation would advance the global
    generator. (`torch.nn.utils.skip_init` would import sympy where a model is built without its numbers.)"""
    linear, there = nn.Linear(inputs, outputs, bias=bias, device="meta"), torch.get_default_device()
    return linear if there.type == "meta" else linear.to_empty(device=there)


class Mlp(nn.Module):
    """x [batch, inputs] -> [batch, outputs]: the smallest model that trains."""

    def __init__(self, seed: int, *, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first = uninitialised_linear(inputs, hidden, bias=True)
        self.second = uninitialised_linear(hidden, outputs, bias=True)
        _initialise(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.second(F.relu(self.first(x))))


class BatchNormMlp(nn.Module):
    """A classifier with batch normalisation: float buffers (mean, variance) and an integer one (batches seen)."""

    def __init__(self, seed: int, *, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first = uninitialised_linear(inputs, hidden, bias=True)
        self.norm = nn.BatchNorm1d(hidden)
        self.second = uninitialised_linear(hidden, outputs, bias=True)
        _initialise(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.second(F.relu(self.norm(self.first(x)))))


@torch.no_grad()
def _initialise(model: nn.Module, seed: int) -> None:
    rng = generator("mlp", seed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0.0, module.in_features**-0.5, generator=rng)
            module.bias.zero_()
