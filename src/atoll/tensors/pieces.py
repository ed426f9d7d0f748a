"""Which elements of a fragment each rank of a learner holds, sends and receives. Arithmetic on shapes only.

A fragment is a flat vector that is the same for every learner. A rank's *box* is the part of a tensor that it holds; cut by the
fragment's slots it is a list of *runs*: ranges of the fragment's flat vector, each at a place of the rank's own flat vector. So
one learner's layout (how many ranks, sharded along which axis) is invisible to another, and to the syncer.

An element that several ranks hold is sent by one of them. They share the fragment in equal ranges that are multiples of a codec's
block, so that each rank encodes its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.tensors.layout import Fragment, Slot


class Box(NamedTuple):
    """The part of a tensor that a rank holds. A shape with a 0 is an empty part."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


Boxes: TypeAlias = Mapping[str, Box]
"""By the tensor's canonical name. A tensor that is not named is held whole."""


class Run(NamedTuple):
    start: int
    """In the fragment's flat vector."""
    length: int
    local: int
    """In the rank's own flat vector."""

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class HeldPieces:
    """What one rank holds of a fragment."""

    fragment: Fragment
    """Its slots are of the rank's own tensors, and its flat vectors are the rank's own."""
    runs: tuple[Run, ...]
    """In rising order. All buffers are held whole, by every rank."""


def held_of(fragment: Fragment, boxes: Boxes) -> HeldPieces:
    slots: list[Slot] = []
    runs: list[Run] = []
    offset = 0
    for slot in fragment.params:
        inside = _inside(slot, boxes.get(slot.name))
        if inside is None:
            continue
        own, within = inside
        numel = math.prod(own.shape)
        slots.append(replace(own, offset=offset, numel=numel))
        local = offset
        for start, length in _ranges(slot, within):
            runs.append(Run(start, length, local))
            local += length
        offset += numel
    return HeldPieces(replace(fragment, params=tuple(slots), numel=offset), tuple(sorted(runs)))


def _inside(slot: Slot, box: Box | None) -> tuple[Slot, Box] | None:
    """The slot of the rank's own tensor, and the box inside the fragment's slot. None: this rank holds nothing of it."""
    if box is None or not box.start:
        return slot, Box((0,) * len(slot.shape), slot.shape)
    low, high = max(slot.row_start, box.start[0]), min(slot.row_stop, box.start[0] + box.shape[0])
    shape = (high - low, *box.shape[1:])
    if min(shape) <= 0:
        return None
    own = replace(slot, row_start=low - box.start[0], row_stop=high - box.start[0], shape=shape)
    return own, Box((low - slot.row_start, *box.start[1:]), shape)


def _ranges(slot: Slot, box: Box) -> Iterator[tuple[int, int]]:
    """The contiguous ranges of a box, in the order of the box's own elements. Only the axes after the last one that is cut are
    contiguous: one range for a box of rows, one for every row for a box of columns."""
    cut = max((axis for axis, size in enumerate(slot.shape) if box.shape[axis] != size), default=0)
    strides = [math.prod(slot.shape[axis + 1 :]) for axis in range(len(slot.shape))]
    length = math.prod(box.shape[cut:]) if slot.shape else 1
    first = slot.offset + sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    for index in product(*(range(size) for size in box.shape[:cut])):
        yield first + sum(at * stride for at, stride in zip(index, strides, strict=False)), length


def owned_of(fragment: Fragment, world: Sequence[Boxes], align: int) -> list[tuple[Run, ...]]:
    """Of every rank the runs that it sends: each element is sent by exactly one rank. `align`: elements of a codec's block."""
    held = [held_of(fragment, boxes).runs for boxes in world]
    holders: dict[str, dict[Box | None, list[int]]] = {}
    for name in {slot.name for slot in fragment.params}:  # a fragment may have several pieces of one tensor
        for rank, boxes in enumerate(world):
            holders.setdefault(name, {}).setdefault(boxes.get(name), []).append(rank)
    if all(len(groups) == len(world) for groups in holders.values()):
        owned = held
    else:
        owned = [_shared_runs(fragment, boxes, rank, holders, align) for rank, boxes in enumerate(world)]
    _require_cover(fragment, owned)
    return owned


def _shared_runs(
    fragment: Fragment, boxes: Boxes, rank: int, holders: Mapping[str, Mapping[Box | None, list[int]]], align: int
) -> tuple[Run, ...]:
    blocks = -(-fragment.numel // align)
    kept: list[Run] = []
    runs = iter(sorted(held_of(fragment, boxes).runs))
    slots = [slot for slot in fragment.params if _inside(slot, boxes.get(slot.name)) is not None]
    run = next(runs, None)
    for slot in slots:  # slots and runs both rise
        group = holders[slot.name][boxes.get(slot.name)]
        mine, count = group.index(rank), len(group)
        low, high = (align * -(-part * blocks // count) for part in (mine, mine + 1))
        while run is not None and run.start < slot.offset + slot.numel:
            kept += clipped(run, low, high)
            run = next(runs, None)
    return tuple(kept)


def clipped(run: Run, low: int, high: int) -> list[Run]:
    """What lies in the range of a run; nothing, or one run."""
    start, stop = max(run.start, low), min(run.stop, high)
    return [Run(start, stop - start, run.local + start - run.start)] if start < stop else []


def _require_cover(fragment: Fragment, owned: Sequence[Sequence[Run]]) -> None:
    at = 0
    for run in sorted(run for runs in owned for run in runs):
        if run.start != at:
            slot = next(s for s in fragment.params if s.offset + s.numel > min(at, run.start))
            raise ConfigError(f"{slot.name}: the ranks' parts overlap or leave a gap; shard it the same way on every rank")
        at = run.stop
    if at != fragment.numel:
        raise ConfigError(f"{fragment.params[-1].name}: no rank holds its end; shard it the same way on every rank")


# ---------------------------------------------------------------- whole blocks and seams


class BlockSplit(NamedTuple):
    """A rank's owned runs, for a codec with blocks of `align` elements."""

    blocks: tuple[Run, ...]
    """Parts of blocks that this rank owns whole: it encodes them by itself."""
    seams: tuple[Run, ...]
    """Parts of blocks that it shares with another rank, and of the short block at the end: whoever assembles encodes them."""

    @property
    def block_numel(self) -> int:
        return numel_of(self.blocks)

    @property
    def seam_numel(self) -> int:
        return numel_of(self.seams)


def split_of(owned: Sequence[Run], align: int) -> BlockSplit:
    """`align` 0: the codec looks at the whole vector, so all of it is seams."""
    if align == 0:
        return BlockSplit((), tuple(owned))
    blocks: list[Run] = []
    seams: list[Run] = []
    at = 0
    while at < len(owned):
        end = at + 1
        while end < len(owned) and owned[end].start == owned[end - 1].stop:
            end += 1
        low, high = align * -(-owned[at].start // align), align * (owned[end - 1].stop // align)
        for run in owned[at:end]:
            blocks += clipped(run, low, high)
            seams += clipped(run, run.start, max(low, run.start) if low < high else run.stop)
            if low < high:
                seams += clipped(run, high, run.stop)
        at = end
    return BlockSplit(tuple(blocks), tuple(seams))


def joined_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The same elements in the same order, in as few runs as a copy of a rank's own vector needs."""
    found: list[Run] = []
    for run in runs:
        last = found[-1] if found else None
        if last is not None and (last.stop, last.local + last.length) == (run.start, run.local):
            found[-1] = last._replace(length=last.length + run.length)
        else:
            found.append(run)
    return tuple(found)


def numel_of(runs: Sequence[Run]) -> int:
    return sum(run.length for run in runs)


def take_runs(flat: Tensor, runs: Sequence[Run]) -> Tensor:
    """The runs of a rank's own flat vector, one after the other. A copy."""
    out = torch.empty(numel_of(runs), dtype=flat.dtype, device=flat.device)
    at = 0
    for run in runs:
        out[at : at + run.length] = flat[run.local : run.local + run.length]
        at += run.length
    return out


def put_runs(flat: Tensor, runs: Sequence[Run], values: Tensor) -> None:
    """The reverse, in place."""
    at = 0
    for run in runs:
        flat[run.local : run.local + run.length] = values[at : at + run.length]
        at += run.length


def cut_from(whole: Tensor, runs: Sequence[Run], into: Tensor | None = None) -> Tensor:
    """A rank's own flat vector from the fragment's. `into`: memory to use, where it is large enough."""
    numel = numel_of(runs)
    out = torch.empty(numel, dtype=whole.dtype, device=whole.device) if into is None else into[:numel]
    for run in runs:
        out[run.local : run.local + run.length] = whole[run.start : run.stop]
    return out
