"""A fragment cut into stripes, one for each shard of a syncer.

A stripe is a range of the fragment's flat vector, so every shard has about as much of every fragment: only a few fragments are
in flight, and shards that held whole ones would idle. It is a fragment of its own, of the slots in its range, of which the first
and the last may be parts of slots. Cuts fall on multiples of 1,024 elements: no block of a codec and no leaf of a norm over the
whole fragment is cut. A fragment of fewer leaves than shards is on some of them only. Buffers stay together, on shard 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from atoll.config import Config
from atoll.config.codecs import codec_spec
from atoll.errors import UserError
from atoll.tensors.layout import Fragment, Slot
from atoll.tensors.norms import LEAF, PartSquares


@dataclass(frozen=True, slots=True)
class CutSlot:
    """A part of a slot that other stripes have parts of too."""

    index: int
    """Among the slots of the stripe."""
    whole: int
    """Among the slots of the fragment."""
    at: int
    """Where the part begins in its slot."""
    ends: bool
    """The slot ends with it."""


@dataclass(frozen=True, slots=True)
class Stripe:
    fragment: Fragment
    """The slots in its range; offsets count from its own first element."""
    first: int
    cut: tuple[CutSlot, ...]

    @property
    def last(self) -> int:
        return self.first + self.fragment.numel


class Meeting(Protocol):
    """Where shards that hold parts of the same slots learn the norms of the whole slots."""

    def norms(self, parts: Mapping[int, Sequence[PartSquares]]) -> Mapping[int, Sequence[float]]:
        """By slot of the fragment: this shard's part of each vector, and the norm of each."""
        ...


def stripe_bounds(numel: int, shards: int) -> tuple[int, ...]:
    leaves = -(-numel // LEAF)
    return (*(LEAF * (leaves * shard // shards) for shard in range(shards)), numel)


def stripes_of(fragment: Fragment, shards: int) -> tuple[Stripe, ...]:
    bounds = stripe_bounds(fragment.numel, shards)
    return tuple(_stripe(fragment, *bounds[shard : shard + 2], buffers=shard == 0) for shard in range(shards))


def _stripe(fragment: Fragment, first: int, last: int, *, buffers: bool) -> Stripe:
    slots: list[Slot] = []
    cut: list[CutSlot] = []
    for index, slot in enumerate(fragment.params):
        left, right = max(first, slot.offset), min(last, slot.offset + slot.numel)
        if left >= right:
            continue
        if right - left < slot.numel:
            cut.append(CutSlot(len(slots), index, left - slot.offset, right == slot.offset + slot.numel))
            slot = replace(slot, row_start=0, row_stop=right - left, shape=(right - left,), numel=right - left)
        slots.append(replace(slot, offset=left - first))
    kept = (fragment.buffers, fragment.buffer_numel) if buffers else ((), 0)
    return Stripe(Fragment(fragment.id, tuple(slots), kept[0], last - first, kept[1]), first, tuple(cut))


def refuse_unsharded(config: Config, what: str) -> None:
    """UserError where a run cannot have shards: what one of them would compute needs more than its stripe. `what`: the option."""
    p = config.protocol
    if config.outer.outer_optimizer == "inner":
        raise UserError(f"{what}: a data-parallel run steps its inner optimiser on whole tensors; leave the option out")
    for key, merge in (("merge", p.merge), ("embedding_merge", p.embedding_merge)):
        if merge not in ("mean", "rda"):
            raise UserError(f"{what}: protocol.{key} = {merge!r} needs whole tensors; shards merge by 'mean' and 'rda'")
    if "rda" in (p.merge, p.embedding_merge) and p.merge_norm != "tensor":
        raise UserError(f"{what}: protocol.merge_norm = {p.merge_norm!r} needs more than a stripe; shards have 'tensor'")
    for key, name in (("codec_up", p.codec_up), ("codec_down", p.codec_down)):
        if codec_spec(name).kind not in ("plain", "blocks"):
            raise UserError(f"{what}: packets of protocol.{key} = {name!r} cannot be cut; choose fp32, bf16, int8, int4 or e3m0")
