"""A user's model, whose code only learners have: its fragments and initial weights as a learner uploads them to the syncer.

The syncer needs no code of the model. A fragment is a list of slots (names, shapes, dtypes, offsets), and merges are
arithmetic on flat vectors. The syncer does not trust an upload and checks all of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from atoll.config import Config
from atoll.errors import DataError
from atoll.ids import FragmentId
from atoll.store.tensor_files import ByteChunk, read_state, state_header, tensor_bytes, unpack_state
from atoll.tensors.inventory import FROZEN_SEPARATOR, with_frozen
from atoll.tensors.layout import Fragment, Layout, Slot, fingerprint_of

_KINDS = ("param", "float_buffer", "other_buffer", "bool_buffer")
_DTYPES = {str(d): d for d in (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool,
)}  # fmt: skip
_SLOT = tuple(f.name for f in fields(Slot))
PIECE_NUMEL: Final = 1 << 20
"""Numbers of a model that are in memory at a time while it is uploaded."""


class ModelWeights(Protocol):
    """fp32 on the host. What is returned may be used again for the next piece."""

    def params(self, p: FragmentId, start: int, stop: int) -> Tensor:
        """Ranges of a fragment are asked for in rising order, up to its end."""
        ...

    def buffers(self, p: FragmentId) -> Tensor: ...


class PackedModel(NamedTuple):
    nbytes: int
    pieces: Callable[[], Iterator[ByteChunk]]
    """Anew from the first byte with every call. A piece is read when it is asked for, and is valid until the next one is."""


def pack_model(layout: Layout, weights: ModelWeights) -> PackedModel:
    """Never whole in memory. Of a frozen part, which the layout's fingerprint may name, only the digest is uploaded."""
    slots = [[_plain(slot) for slot in (*f.params, *f.buffers)] for f in layout.fragments]
    frozen = layout.fingerprint.partition(FROZEN_SEPARATOR)[2]
    sizes = [f.numel for f in layout.fragments], [f.buffer_numel for f in layout.fragments]
    params, buffers = ([torch.empty(1)[:numel].expand(numel) for numel in each] for each in sizes)
    uploaded = {"pattern": layout.pattern, "slots": slots, "params": params, "buffers": buffers, "frozen": frozen}
    header, _ = state_header(uploaded)  # its tensors have one dtype, so their bytes follow in this order

    def pieces() -> Iterator[ByteChunk]:
        yield header
        for fragment in layout.fragments:
            for start in range(0, fragment.numel, PIECE_NUMEL):
                yield tensor_bytes(weights.params(fragment.id, start, min(start + PIECE_NUMEL, fragment.numel)))
        for fragment in layout.fragments:
            if fragment.buffer_numel:
                yield tensor_bytes(weights.buffers(fragment.id))

    return PackedModel(len(header) + 4 * sum(map(sum, sizes)), pieces)


def _plain(slot: Slot) -> list[Any]:
    return [str(v) if isinstance(v, torch.dtype) else list(v) if isinstance(v, tuple) else v for v in astuple(slot)]


def unpack_model(config: Config, data: memoryview) -> tuple[Layout, list[Tensor], list[Tensor]]:
    """DataError names what is wrong with the upload."""
    return _checked(config, unpack_state(data, "uploaded model"))


def read_model(config: Config, path: Path) -> tuple[Layout, list[Tensor], list[Tensor]]:
    """The same from a file, whose bytes are never all in memory beside the tensors."""
    return _checked(config, read_state(path))


def _checked(config: Config, found: Any) -> tuple[Layout, list[Tensor], list[Tensor]]:
    try:
        pattern, slots, params, buffers = (found[key] for key in ("pattern", "slots", "params", "buffers"))
        fragments = [_fragment(p, [_slot(row) for row in rows]) for p, rows in enumerate(slots)]
        frozen = _frozen(found.get("frozen", ""))  # older learners do not send it
        if not (isinstance(params, list) and isinstance(buffers, list)):
            raise TypeError("params and buffers are lists")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"uploaded model: not understood ({error})") from None
    if len(fragments) != config.protocol.fragments or not len(params) == len(buffers) == len(fragments):
        raise DataError(f"uploaded model: {len(fragments)} fragments, and the run has {config.protocol.fragments}")
    for fragment, theta, extra in zip(fragments, params, buffers, strict=True):
        _check_vector(fragment.id, theta, fragment.numel)
        _check_vector(fragment.id, extra, fragment.buffer_numel)
    fingerprint = with_frozen(fingerprint_of(fragments), frozen)
    return Layout(tuple(fragments), str(pattern), fingerprint), list(params), list(buffers)


def _frozen(digest: Any) -> str:
    if not isinstance(digest, str) or not re.fullmatch("([0-9a-f]{64})?", digest):
        raise ValueError("the frozen part's digest")
    return digest


def _slot(row: list[Any]) -> Slot:
    values = dict(zip(_SLOT, row, strict=True))
    values["shape"], values["dtype"] = tuple(int(n) for n in values["shape"]), _DTYPES[values["dtype"]]
    slot = Slot(**values)
    if slot.kind not in _KINDS or slot.numel != math.prod(slot.shape) or slot.numel < 1 or min(slot.shape, default=1) < 1:
        raise ValueError(f"slot {slot.name!r}")
    return slot


def _fragment(p: int, slots: list[Slot]) -> Fragment:
    params = tuple(s for s in slots if s.kind == "param")
    buffers = tuple(s for s in slots if s.kind != "param")
    for group in (params, buffers):
        offset = 0
        for slot in group:
            if slot.offset != offset:
                raise ValueError(f"slot {slot.name!r} at {slot.offset}, not {offset}")
            offset += slot.numel
    if not params:
        raise ValueError(f"fragment {p} is empty")
    return Fragment(p, params, buffers, sum(s.numel for s in params), sum(s.numel for s in buffers))


def _check_vector(p: int, vector: Any, numel: int) -> None:
    if not isinstance(vector, Tensor) or vector.dtype != torch.float32 or vector.shape != (numel,):
        raise DataError(f"uploaded model: fragment {p} must have {numel} fp32 numbers")
    if not bool(torch.isfinite(vector).all()):
        raise DataError(f"uploaded model: fragment {p} holds NaN or Inf")


def named_tensors_of(layout: Layout, params: Sequence[Tensor], buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    """The model's tensors by name, each in its dtype, from flat fragments: to write a file without the model's code."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for fragment, flat, extra in zip(layout.fragments, params, buffers, strict=True):
        for slots, vector in ((fragment.params, flat), (fragment.buffers, extra)):
            for slot in slots:
                piece = vector[slot.offset : slot.offset + slot.numel].view(slot.shape)
                value = piece > 0.5 if slot.kind == "bool_buffer" else piece.round() if slot.kind == "other_buffer" else piece
                pieces.setdefault(slot.name, []).append((slot.row_start, value.to(slot.dtype)))
    ordered = {name: sorted(parts, key=lambda part: part[0]) for name, parts in pieces.items()}
    return {name: parts[0][1].clone() if len(parts) == 1 else torch.cat([t for _, t in parts]) for name, parts in ordered.items()}
