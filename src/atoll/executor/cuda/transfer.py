"""Batches and states between host and device: nested tuples, lists and dicts of tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from atoll.rules import shrunk


def to_device(batch: Any, device: torch.device) -> Any:
    """Copies from pinned memory: from pageable memory, a copy would wait for the previous step. Other leaves stay as they are."""

    def move(tensor: Tensor) -> Tensor:
        here = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
        return here.to(device, non_blocking=True)

    return each_tensor(batch, move, lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf)


def first_samples(batch: Any, share: float, position: int) -> Any:
    """The first samples of a batch, as many as the running slices can hold."""
    return each_tensor(batch, lambda tensor: tensor[: shrunk(tensor.shape[0], share, position)] if tensor.dim() else tensor)


def on_host(value: Any) -> Any:
    """A copy with all tensors on the host. It waits for the device: recoveries and snapshots are rare."""
    return each_tensor(value, lambda tensor: tensor.detach().cpu() if tensor.is_cuda else tensor.detach().clone(), copy.deepcopy)


def each_tensor(value: Any, change: Any, other: Any = lambda leaf: leaf) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: each_tensor(item, change, other) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(each_tensor(item, change, other) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(each_tensor(item, change, other) for item in value)
    return other(value)
