"""Weights in the checkpoint format of `torch.distributed.checkpoint`, which trainers such as torchtitan write and load, and the
weights that a run begins with.

The entries of a checkpoint are the model's tensors by name. One with more in it (optimiser, steps), or with all names below a
prefix such as `model.`, is read too: what a model needs is found by its names.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from atoll.errors import ConfigError, DataError
from atoll.store.tensor_files import discard
from atoll.store.weights import read_weights

DCP: Final = "dcp:"
PREFIXES: Final = ("", "model.", "module.", "state.", "model.module.", "state.model.")
"""Under which trainers keep a model in their checkpoint."""
METADATA: Final = ".metadata"


def write_dcp(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Into a new or empty folder."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"--dcp {directory}: exists and is not an empty folder; choose another")
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with warnings.catch_warnings(action="ignore"):  # that no process group is there
            save({name: tensor.contiguous() for name, tensor in tensors.items()}, checkpoint_id=directory, no_dist=True)
    except CheckpointException as error:
        for path in directory.iterdir():
            discard(path)
        raise ConfigError(f"--dcp {directory}: cannot be written ({_causes(error)})") from None


def read_dcp(directory: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that `like` names, in its shapes, as they are stored."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    entries = _entries(directory)
    prefix = _prefix_of(entries, like, str(directory))
    found = {}
    for name, wanted in like.items():
        entry = entries[prefix + name]
        _refuse_shape(str(directory), name, tuple(entry.size), wanted)
        found[prefix + name] = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
    try:
        with warnings.catch_warnings(action="ignore"):
            load(found, checkpoint_id=directory, no_dist=True)
    except CheckpointException as error:  # not an Exception; with a traceback of every rank
        raise DataError(f"{directory}: the checkpoint cannot be read: {_causes(error)}") from None
    return {name: found[prefix + name] for name in like}


def _causes(error: Any) -> str:
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())


def _entries(directory: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not (directory / METADATA).is_file():
        raise DataError(f"{directory}: is no checkpoint of torch.distributed.checkpoint: it has no file {METADATA}")
    try:
        metadata = FileSystemReader(directory).read_metadata()
    except Exception as error:  # a pickle: what is damaged raises anything
        raise DataError(f"{directory / METADATA} cannot be read: {type(error).__name__}: {error}") from None
    return {name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}


def _prefix_of(names: Iterable[str], like: Mapping[str, Tensor], where: str) -> str:
    there = set(names)
    for prefix in PREFIXES:
        if all(prefix + name in there for name in like):
            return prefix
    best = max(PREFIXES, key=lambda prefix: sum(prefix + name in there for name in like))
    missing = [name for name in like if best + name not in there]
    raise DataError(
        f"{where}: {len(missing)} of the model's {len(like)} tensors are not in it, the first is {missing[0]}; it has "
        f"{len(there)} tensors, such as {min(there, default='none')}"
    )


def _refuse_shape(where: str, name: str, shape: tuple[int, ...], wanted: Tensor) -> None:
    if shape != tuple(wanted.shape):
        raise DataError(f"{where}: {name} has the shape {shape}, and the model's is {tuple(wanted.shape)}")


# ---------------------------------------------------------------- the weights that a run begins with


@torch.no_grad()
def load_initial(tensors: Mapping[str, Tensor], init: str) -> None:
    """Copies the weights at `init` into the model's, each cast to the model's dtype."""
    found = read_dcp(Path(init[len(DCP) :]), tensors) if init.startswith(DCP) else _read_safetensors(Path(init), tensors)
    for name, tensor in tensors.items():
        if found[name].is_floating_point() and not bool(torch.isfinite(found[name].float()).all()):
            raise DataError(f"{init}: {name} holds NaN or Inf")
        tensor.copy_(found[name])


def _read_safetensors(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    there = read_weights(path)
    prefix = _prefix_of(there, like, str(path))
    for name, wanted in like.items():
        _refuse_shape(str(path), name, tuple(there[prefix + name].shape), wanted)
    return {name: there[prefix + name] for name in like}
