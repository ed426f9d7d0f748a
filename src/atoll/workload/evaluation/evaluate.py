"""The loss on held-out data, by which runs are compared, and the accuracy of classifiers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import DataError
from atoll.workload.models.decoder import logits_of


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """The model in evaluation mode; yields its device. The modes of all modules are restored one by one, because a user may
    keep a part of the model (a frozen batch norm) in evaluation mode while the rest trains."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def heldout_loss(model: nn.Module, batches: Sequence[Tensor]) -> float:
    """Mean cross entropy over all tokens of the batches, summed in float64.

    The mean is over tokens and not over batches, because the last batch may be smaller. NaN is returned as the result.
    """
    if not batches:
        raise DataError("there is no held-out batch to evaluate on: give at least one")
    total, tokens = 0.0, 0
    with evaluating(model) as device:
        for batch in batches:
            batch = batch.to(device)
            targets = batch[:, 1:].flatten()
            losses = F.cross_entropy(logits_of(model, batch[:, :-1]).flatten(0, 1).float(), targets, reduction="none")
            total += losses.double().sum().item()
            tokens += targets.numel()
    return total / tokens


@torch.no_grad()
def heldout_classes(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Mean cross entropy over all images of the batches, and the share of correct classes."""
    total, right, samples = 0.0, 0, 0
    with evaluating(model) as device:
        for images, labels in batches:
            labels = labels.to(device)
            logits = model(images.to(device)).float()
            total += F.cross_entropy(logits, labels, reduction="none").double().sum().item()
            right += int((logits.argmax(-1) == labels).sum())
            samples += labels.numel()
    return total / samples, right / samples
