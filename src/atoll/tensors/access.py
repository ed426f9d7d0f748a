"""Copies between a model's live tensors and the flat fp32 vectors of a fragment.

Reading always copies: the next inner step must not change a vector that was read. Writing is in place and in slot order, so an
optimiser's references to the parameters stay valid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from atoll.tensors.inventory import walk
from atoll.tensors.layout import Fragment, Slot


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Live parameters and persistent buffers by canonical name, tied ones once. Frozen parameters are included."""
    return {entry.name: entry.tensor for entry in walk(model)}


def read_params(model_tensors: Mapping[str, Tensor], fragment: Fragment, out: Tensor | None = None) -> Tensor:
    """A flat fp32 copy of the fragment's parameters: in `out` if given, else on the first parameter's device."""
    return _read(model_tensors, fragment.params, fragment.numel, out)


class FragmentReader:
    """Fragments' parameters on the host, for those who want one range of them after the other."""

    def __init__(self) -> None:
        self._held: tuple[int, Tensor] | None = None

    def read(self, model_tensors: Mapping[str, Tensor], fragment: Fragment, *, last: bool) -> Tensor:
        """All of it. It is copied once, and kept until its last range or another fragment is asked for."""
        held, self._held = self._held, None
        if held is None or held[0] != fragment.id:
            held = None  # first: two fragments are never here together
            held = fragment.id, read_params(model_tensors, fragment).cpu()
        if not last:
            self._held = held
        return held[1]


@torch.no_grad()
def write_params(model_tensors: Mapping[str, Tensor], fragment: Fragment, flat: Tensor) -> None:
    """Write a flat vector into the live parameters, each cast to its own dtype."""
    assert flat.numel() == fragment.numel, f"fragment {fragment.id} has {fragment.numel} elements, not {flat.numel()}"
    for slot in fragment.params:
        _piece(model_tensors, slot).copy_(_slice(flat, slot))


def read_buffers(model_tensors: Mapping[str, Tensor], fragment: Fragment) -> Tensor:
    """A flat fp32 copy of the fragment's buffers; integers and bools as numbers."""
    return _read(model_tensors, fragment.buffers, fragment.buffer_numel, None)


@torch.no_grad()
def write_buffers(model_tensors: Mapping[str, Tensor], fragment: Fragment, flat: Tensor) -> None:
    """Write a flat vector into the live buffers. Integers are rounded half to even; a bool is true above one half."""
    expected = fragment.buffer_numel
    assert flat.numel() == expected, f"fragment {fragment.id} has {expected} buffer elements, not {flat.numel()}"
    for slot in fragment.buffers:
        values = _slice(flat, slot)
        if slot.kind == "bool_buffer":
            values = values > 0.5  # one half is false, as a tie is in merge_buffers
        elif slot.kind == "other_buffer":
            values = _to_integers(values, slot.dtype)
        _piece(model_tensors, slot).copy_(values)


def is_finite(flat: Tensor) -> bool:
    """One pass without a copy: NaN and Inf propagate into a sum, and a double holds any sum of floats."""
    return not flat.numel() or math.isfinite(flat.sum(dtype=torch.float64))


def cast_like(fragment: Fragment, flat: Tensor) -> Tensor:
    """`flat` cast to the dtypes of the live parameters, and back to fp32.

    The same tensor if all slots are fp32, so do not change it. A learner's differences are taken against this cast; otherwise
    the rounding of bf16 weights would count as training.
    """
    if all(slot.dtype == torch.float32 for slot in fragment.params):
        return flat
    cast = flat.clone()
    for slot in fragment.params:
        if slot.dtype != torch.float32:
            part = cast[slot.offset : slot.offset + slot.numel]
            part.copy_(part.to(slot.dtype))
    return cast


@torch.no_grad()
def _read(model_tensors: Mapping[str, Tensor], slots: Sequence[Slot], numel: int, out: Tensor | None) -> Tensor:
    if out is None:
        if slots and all(slot.dtype == torch.float32 for slot in slots):  # their offsets follow each other: one operation
            return torch.cat([_piece(model_tensors, slot).reshape(-1) for slot in slots])
        device = model_tensors[slots[0].name].device if slots else None
        out = torch.empty(numel, dtype=torch.float32, device=device)
    assert out.shape == (numel,) and out.dtype == torch.float32, f"out must be a flat fp32 vector of {numel} elements"
    for slot in slots:
        _slice(out, slot).copy_(_piece(model_tensors, slot))
    return out


def _piece(model_tensors: Mapping[str, Tensor], slot: Slot) -> Tensor:
    tensor = model_tensors[slot.name].detach()
    if tuple(tensor.shape) == slot.shape:
        return tensor
    return tensor.narrow(0, slot.row_start, slot.row_stop - slot.row_start)


def _slice(flat: Tensor, slot: Slot) -> Tensor:
    return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)


def _to_integers(values: Tensor, dtype: torch.dtype) -> Tensor:
    # Saturate: a cast outside the target's range is undefined in C and flips the sign on some machines. A double cannot hold
    # 2^63 - 1; the largest double that fits is 2^63 - 1024.
    limits = torch.iinfo(dtype)
    highest = min(limits.max, 2**63 - 1024)
    return values.to(torch.float64).round_().clamp_(limits.min, highest).to(dtype)
