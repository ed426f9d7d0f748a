"""The tensors of a model: every parameter and persistent buffer once, in state-dict order, with all its tied names.

Two names are tied if they refer to the same memory with the same shape and strides: a weight shared by assignment, by a shared
module or by `Parameter(other.data)`. The first name in state-dict order is the canonical one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from atoll.errors import ConfigError
from atoll.tensors.local import is_dtensor, local_part

OUTER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

FROZEN_SEPARATOR = "+"
"""Between the fingerprint of the exchanged tensors and the digest of the frozen ones."""

_WIDEST = 1 << 24


@dataclass(slots=True)
class Entry:
    """One tensor of the model with all its names."""

    name: str
    module: str
    """The dotted name of the module that owns the canonical name; "" is the model itself."""
    tensor: Tensor
    parameter: bool = False
    trainable: bool = False
    embedding_weight: bool = False
    names: list[str] = field(default_factory=list)


def walk(model: nn.Module) -> list[Entry]:
    """Every parameter and persistent buffer, tied ones once, in state-dict order."""
    entries: dict[Hashable, Entry] = {}
    # Shared modules are visited under each of their names: a glob may match a tensor's second name.
    for module_name, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor, parameter in _own_tensors(module):
            name = f"{module_name}.{leaf}" if module_name else leaf
            _refuse_untouchable(name, tensor)
            entry = entries.setdefault(_memory(tensor), Entry(name, module_name, tensor))
            entry.names.append(name)
            # One trainable name makes the shared memory trainable: the inner optimiser changes it in any case.
            entry.parameter |= parameter
            entry.trainable |= parameter and tensor.requires_grad
            entry.embedding_weight |= isinstance(module, nn.Embedding | nn.EmbeddingBag) and leaf == "weight"
    return list(entries.values())


def frozen_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that do not train, by all their names, sorted. They are in no fragment."""
    entries = [entry for entry in walk(model) if entry.parameter and not entry.trainable]
    return dict(sorted((name, entry.tensor) for entry in entries for name in entry.names))


def frozen_digest(model: nn.Module) -> str:
    """SHA-256 of the frozen parameters' names, dtypes, shapes and bytes, on any device and in any layout; "" if all train. They
    are not exchanged, so without this check, learners with different frozen weights would be averaged silently. Every name
    counts, so that tied and untied copies of frozen weights give the same digest: neither can change. Ranks that hold parts of a
    frozen parameter call this together."""
    whole, known = hashlib.sha256(), dict[int, str]()
    frozen = frozen_parameters(model)
    for name, tensor in frozen.items():
        if id(tensor) not in known:
            flat = _whole(tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
            known[id(tensor)] = hashlib.sha256(flat.numpy().data).hexdigest()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {known[id(tensor)]}\n".encode())
    return whole.hexdigest() if frozen else ""


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.detach()
    return whole.full_tensor() if is_dtensor(whole) else whole  # type: ignore[attr-defined]


def with_frozen(fingerprint: str, frozen: str) -> str:
    """The fingerprint of the whole model, in one word: the layout's own if nothing is frozen."""
    return f"{fingerprint}{FROZEN_SEPARATOR}{frozen}" if frozen else fingerprint


def slot_kind(entry: Entry, outer_scope: str) -> str | None:
    """How a tensor is exchanged. None: not at all (frozen parameters, and tensors without elements)."""
    if entry.tensor.numel() == 0 or (entry.parameter and not entry.trainable):
        return None
    dtype = entry.tensor.dtype
    if dtype.is_complex:
        raise ConfigError(f"{entry.name} is {dtype}: complex tensors are not supported; keep its two parts as real tensors")
    if entry.parameter or (dtype.is_floating_point and outer_scope == "all_floating"):
        if dtype not in OUTER_DTYPES:
            raise ConfigError(
                f"{entry.name} is {dtype}: the outer state is fp32, so its dtype must be float32, bfloat16 or float16"
            )
        return "param"
    if dtype.is_floating_point:
        return "float_buffer"
    if dtype == torch.bool:
        return "bool_buffer"
    _refuse_wide_integers(entry)
    return "other_buffer"


def refuse_overlaps(entries: list[Entry]) -> None:
    """Two different views of one memory (a transposed tie, a slice) would be stepped twice per round, silently."""
    own = [entry for entry in entries if not entry.tensor.is_meta and not is_dtensor(entry.tensor)]
    spans = sorted((*_byte_span(entry.tensor), entry.name) for entry in own)
    for (device, _, stop, name), (next_device, next_start, _, next_name) in pairwise(spans):
        if device == next_device and next_start < stop:
            raise ConfigError(
                f"{name} and {next_name} overlap in memory but differ in shape or strides: tie whole tensors"
            )


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield leaf, parameter, True
    # torch has no public way to ask whether a buffer is persistent, except a state dict of the whole model.
    transient = module._non_persistent_buffers_set
    for leaf, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if leaf not in transient:
            yield leaf, buffer, False


def _memory(tensor: Tensor) -> Hashable:
    # Tensors without memory (meta device, no elements) all have address 0: only identity distinguishes them. A rank's part of a
    # DTensor may be empty on some ranks and not on others, and all ranks must find the same ties.
    if tensor.is_meta or tensor.numel() == 0 or is_dtensor(tensor):
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _byte_span(tensor: Tensor) -> tuple[str, int, int]:
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), start, start + (last + 1) * tensor.element_size()


def _refuse_untouchable(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ConfigError(f"{name} is not initialised: run one forward pass through lazy modules before training")


def _refuse_wide_integers(entry: Entry) -> None:
    # Buffers are sent in fp32. A counter that grows past 2^24 only loses its last bits; a hash or a bit mask, which is large
    # from the start, would be destroyed, and can be found here.
    if entry.tensor.is_meta:
        return
    values = local_part(entry.tensor.detach()).to(torch.int64)
    if bool(((values > _WIDEST) | (values < -_WIDEST)).any()):
        raise ConfigError(
            f"buffer {entry.name} has integers beyond 2^24, which fp32 cannot represent: register it with persistent=False"
        )
