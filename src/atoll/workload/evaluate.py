"""The loss on held-out text, the one number by which runs are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import DataError


@torch.no_grad()
def heldout_loss(model: nn.Module, batches: Sequence[Tensor]) -> float:
    """Mean cross entropy over all tokens of the batches, summed in float64.

    Over tokens, not over batches: the last batch may be smaller. The modes of all modules are put back one by one,
    because a user may keep a part of the model (a frozen batch norm) in evaluation mode while the rest trains. A loss
    that is NaN is returned as NaN: it is the measurement.
    """
    if not batches:
        raise DataError("there is no held-out batch to evaluate on: give at least one")
    modes = [(module, module.training) for module in model.modules()]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    model.eval()
    try:
        total, tokens = 0.0, 0
        for batch in batches:
            batch = batch.to(device)
            targets = batch[:, 1:].flatten()
            losses = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), targets, reduction="none")
            total += losses.double().sum().item()
            tokens += targets.numel()
    finally:
        for module, training in modes:
            module.training = training
    return total / tokens
