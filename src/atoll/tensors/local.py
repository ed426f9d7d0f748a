"""DTensors, recognised by their class's name, so that a learner of one rank never imports torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def is_dtensor(value: object) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def local_part(tensor: Tensor) -> Tensor:
    """The part that is in this rank's memory, never a copy; a plain tensor itself. Not to be kept: FSDP replaces the storage."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def local_value(value: Any) -> Any:
    """A nested value with the local part of every DTensor in it."""
    if isinstance(value, dict):
        return {key: local_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(local_value(inner) for inner in value)
    return local_part(value) if isinstance(value, Tensor) else value


class LocalTensors(Mapping[str, Tensor]):
    """A model's tensors by name, as this rank holds them now."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return local_part(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
