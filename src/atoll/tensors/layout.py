"""The layout of a model in fragments: which slice of which tensor is where in which fragment.

A fragment is a flat fp32 vector of its trainable parameters and a second one of its buffers; a slot is a range of either. The
layout is a function of the model's structure and the arguments only, so the syncer and every learner compute it independently
and compare fingerprints.

Slots are in state-dict order inside a fragment. A module's buffers are in the fragment of its first parameter (of its first
piece, if that is split); its own parameters come before those of its children. For a module without parameters the smallest
enclosing module that has some decides: its nearest preceding parameter, else its first.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import astuple, dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from atoll.errors import ConfigError
from atoll.tensors import fragmentation
from atoll.tensors.fragmentation import Bins
from atoll.tensors.inventory import Entry, refuse_overlaps, slot_kind, walk

PATTERNS = ("whole", "layer", "tensor", "balanced", "sub_tensor")
ORDERS = ("sequential", "strided")
OUTER_SCOPES = ("parameters", "all_floating")


@dataclass(frozen=True, slots=True)
class Slot:
    name: str
    """The canonical state-dict name; tied tensors have one slot, under their first name."""
    kind: str
    """"param", "float_buffer", "other_buffer" (integers) or "bool_buffer"."""
    row_start: int
    row_stop: int
    """Along the first axis; the whole tensor for unsplit ones, and 0 to 1 for tensors without axes."""
    shape: tuple[int, ...]
    """Of this piece."""
    offset: int
    """Into the fragment's flat parameter vector, or its flat buffer vector."""
    numel: int
    dtype: torch.dtype
    embedding: bool


@dataclass(frozen=True, slots=True)
class Fragment:
    id: int
    params: tuple[Slot, ...]
    buffers: tuple[Slot, ...]
    numel: int
    buffer_numel: int


@dataclass(frozen=True, slots=True)
class Layout:
    fragments: tuple[Fragment, ...]
    pattern: str
    fingerprint: str
    """SHA-256 of every slot of every fragment: equal fingerprints mean equal layouts."""


@dataclass(frozen=True, slots=True)
class _Piece:
    index: int  # of the tensor, in state-dict order
    entry: Entry
    kind: str
    row_start: int
    row_stop: int
    shape: tuple[int, ...]
    embedding: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def slot(self, offset: int) -> Slot:
        name, dtype = self.entry.name, self.entry.tensor.dtype
        rows = (self.row_start, self.row_stop)
        return Slot(name, self.kind, *rows, self.shape, offset, self.numel, dtype, self.embedding)


def build_layout(
    model: nn.Module,
    pattern: str,
    fragments: int | None = None,
    *,
    layers_per_fragment: int = 3,
    order: str = "strided",
    embedding_glob: str | None = None,
    outer_scope: str = "parameters",
) -> Layout:
    """Divides the model's exchanged tensors into fragments. Raises ConfigError if that is impossible."""
    _check_arguments(pattern, fragments, layers_per_fragment, order, outer_scope)
    pieces = _whole_pieces(model, embedding_glob, outer_scope)
    params = [piece for piece in pieces if piece.kind == "param"]
    buffers = [piece for piece in pieces if piece.kind != "param"]
    if not any(piece.entry.trainable for piece in params):
        raise ConfigError("the model has no trainable floating parameter: at least one must have requires_grad=True")
    if pattern == "sub_tensor":
        assert fragments is not None
        params = _split_large(params, fragments)
    bins = _divide(model, params, pattern, fragments, layers_per_fragment, order)
    return _assemble(params, buffers, bins, pattern)


def _check_arguments(pattern: str, fragments: int | None, layers_per_fragment: int, order: str, scope: str) -> None:
    for key, value, allowed in (
        ("pattern", pattern, PATTERNS),
        ("order", order, ORDERS),
        ("outer_scope", scope, OUTER_SCOPES),
    ):
        if value not in allowed:
            raise ConfigError(f"{key} = {value!r} is unknown: choose one of {', '.join(allowed)}")
    if fragments is not None and fragments < 1:
        raise ConfigError(f"fragments = {fragments} is too small: choose 1 or more")
    if layers_per_fragment < 1:
        raise ConfigError(f"layers_per_fragment = {layers_per_fragment} is too small: choose 1 or more")
    if pattern == "whole" and fragments not in (None, 1):
        raise ConfigError(f"fragments = {fragments} contradicts pattern 'whole', which is one fragment: choose 1")
    if pattern in ("tensor", "balanced", "sub_tensor") and fragments is None:
        raise ConfigError(f"fragments is not given, and pattern {pattern!r} needs it: choose 1 or more, for example 24")


def _whole_pieces(model: nn.Module, embedding_glob: str | None, outer_scope: str) -> list[_Piece]:
    pieces: list[_Piece] = []
    for index, entry in enumerate(walk(model)):
        kind = slot_kind(entry, outer_scope)
        if kind is None:
            continue
        if embedding_glob is None:
            embedding = entry.embedding_weight
        else:
            embedding = any(fnmatchcase(name, embedding_glob) for name in entry.names)
        shape = tuple(entry.tensor.shape)
        pieces.append(_Piece(index, entry, kind, 0, shape[0] if shape else 1, shape, embedding))
    refuse_overlaps([piece.entry for piece in pieces])
    return pieces


def _split_large(params: list[_Piece], fragments: int) -> list[_Piece]:
    # Rounded down, so that a model with small enough rows always gives at least as many pieces as fragments.
    limit = max(1, sum(piece.numel for piece in params) // fragments)
    return [
        replace(whole, row_start=start, row_stop=stop, shape=_rows_shape(whole.shape, stop - start))
        for whole in params
        for start, stop in fragmentation.split_rows(whole.shape, limit)
    ]


def _rows_shape(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    return (rows, *shape[1:]) if shape else ()


def _divide(
    model: nn.Module, params: list[_Piece], pattern: str, fragments: int | None, layers_per_fragment: int, order: str
) -> Bins:
    if pattern == "whole":
        return [list(range(len(params)))]
    if pattern == "layer":
        names = [piece.entry.name for piece in params]
        return fragmentation.by_layer(model, names, fragments, layers_per_fragment, order)
    assert fragments is not None
    if fragments > len(params):
        what = "pieces along the first axis" if pattern == "sub_tensor" else "trainable tensors"
        raise ConfigError(
            f"fragments = {fragments} is more than the {len(params)} {what} of the model: choose 1 to {len(params)}"
        )
    if pattern == "tensor":
        return fragmentation.strided(len(params), fragments)
    return fragmentation.balanced([piece.numel for piece in params], fragments)


def _assemble(params: list[_Piece], buffers: list[_Piece], bins: Bins, pattern: str) -> Layout:
    fragment_of = {piece: fragment for fragment, members in enumerate(bins) for piece in members}
    buffer_fragments = _buffer_fragments(params, fragment_of, buffers)
    made: list[Fragment] = []
    for fragment, members in enumerate(bins):
        param_slots, numel = _place([params[index] for index in members])
        owned = [piece for piece, owner in zip(buffers, buffer_fragments, strict=True) if owner == fragment]
        buffer_slots, buffer_numel = _place(owned)
        assert numel > 0, "every fragmentation fills every fragment"
        made.append(Fragment(fragment, param_slots, buffer_slots, numel, buffer_numel))
    return Layout(tuple(made), pattern, fingerprint_of(made))


def _place(pieces: list[_Piece]) -> tuple[tuple[Slot, ...], int]:
    slots: list[Slot] = []
    offset = 0
    for piece in pieces:
        slots.append(piece.slot(offset))
        offset += piece.numel
    return tuple(slots), offset


def _buffer_fragments(params: list[_Piece], fragment_of: dict[int, int], buffers: list[_Piece]) -> list[int]:
    """The fragment of every buffer, by the rule at the top of this file; all buffers of a module stay together."""
    known: dict[str, int] = {}
    for buffer in buffers:
        module = buffer.entry.module
        if module in known:
            continue
        own = [at for at, piece in enumerate(params) if piece.entry.module == module]
        below = own or [at for at, piece in enumerate(params) if _within(piece.entry.name, module)]
        if below:
            known[module] = fragment_of[below[0]]
            continue
        scope, around = module, below
        while not around:  # ends at the model itself, which has at least one parameter
            scope = scope.rpartition(".")[0]
            around = [at for at, piece in enumerate(params) if _within(piece.entry.name, scope)]
        before = [at for at in around if params[at].index < buffer.index and params[at].row_start == 0]
        known[module] = fragment_of[before[-1] if before else around[0]]
    return [known[buffer.entry.module] for buffer in buffers]


def _within(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def fingerprint_of(fragments: list[Fragment]) -> str:
    table = [[astuple(slot) for slot in (*fragment.params, *fragment.buffers)] for fragment in fragments]
    return hashlib.sha256(json.dumps(table, separators=(",", ":"), default=str).encode()).hexdigest()  # str: dtypes
