"""Merges the outer gradients of several learners into one: the mean, radial-directional averaging (RDA), and by slot the robust
ones (`robust.py`).

Every function depends only on the values and the order of its arguments; the caller sorts by LearnerId. On the CPU results are
the same for any number of threads: elementwise arithmetic multiplies and adds in separately rounded steps, and norms add up in
float64 over a tree of fixed shape (`norms.py`). A GPU may differ from a CPU in the last bit (it multiplies by a reciprocal
where a CPU divides by a number), so one run merges on one kind of device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from atoll.config.merges import MergeSpec, add_merge, merge_spec
from atoll.errors import ConfigError
from atoll.tensors.aligned import corrected, measures
from atoll.tensors.layout import Fragment, Slot
from atoll.tensors.norms import part_squares, squared_norms
from atoll.tensors.robust import ROBUST
from atoll.tensors.stripes import CutSlot, Meeting

NORMS = ("tensor", "row", "fragment")

MergeFunction = Callable[[Sequence[Tensor], Sequence[float]], Tensor]
"""Maps the learners' outer gradients of one parameter, each in its shape, in LearnerId order, with weights above 0, to one tensor
of that shape. It must be pure: a merge that is computed twice must give the same bits."""

_registered: dict[str, MergeFunction] = {}
_Any = TypeVar("_Any")


def register_merge(spec: MergeSpec, merge_parameter: MergeFunction) -> None:
    """Adds a user's merge, which works parameter by parameter. Registering the same row again replaces its function."""
    add_merge(spec)
    _registered[spec.name] = merge_parameter


def _by_registered(name: str, deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    merged = _registered[name](deltas, weights)
    if merged.shape != deltas[0].shape or merged.dtype != deltas[0].dtype:
        raise ConfigError(f"merge {name!r} returned {tuple(merged.shape)} of {merged.dtype} for {tuple(deltas[0].shape)} of fp32")
    return merged.reshape(-1)


FACTOR_MAX = torch.finfo(torch.float32).max
CANCELLED = 1e-6
"""Directions cancel if their weighted average is no longer than this (unit vectors average to a length of 0 to 1, orthogonal
ones to 1/sqrt(M)). Directions are fp32, so opposite ones leave a residue of about 1e-7, which is only rounding error. Without
this bound RDA would scale that error up to full length."""

def mean(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """`sum_i w_i*d_i / sum_i w_i`, in the given order.

    Equal weights of any size give the bits of weight 1, `((d0 + d1) + d2) / 3`; one learner gives its own bits.
    """
    voters, shares = voters_of(deltas, weights)
    if len(voters) == 1:
        return voters[0].clone()
    total = _weighted(voters[0], shares[0], None)
    scratch = torch.empty_like(total) if any(share != 1.0 for share in shares[1:]) else None
    for delta, share in zip(voters[1:], shares[1:], strict=True):
        total.add_(delta if share == 1.0 else _weighted(delta, share, scratch))
    return total.div_(sum(shares))


def rda(deltas: Sequence[Tensor], weights: Sequence[float], segments: Sequence[tuple[int, int]]) -> Tensor:
    """RDA of each segment `(offset, numel)` separately; elements outside all segments are zero."""
    voters, shares = voters_of(deltas, weights)
    out = torch.zeros_like(voters[0])
    for offset, numel in segments:
        blocks = [voter[offset : offset + numel].view(1, numel) for voter in voters]
        _rda_rows(blocks, shares, out[offset : offset + numel].view(1, numel))
    return out


def merge(
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    fragment: Fragment,
    *,
    method: str,
    embedding_method: str,
    norm: str,
    momentum: Tensor | None = None,
    cut: Sequence[CutSlot] = (),
    meeting: Meeting | None = None,
) -> Tensor:
    """One outer gradient for the fragment; embedding slots have their own method. `momentum`: the outer optimiser's, for the
    merges that compare with it. `cut`: of a stripe, the slots that it has only parts of; `meeting` gives their norms.

    `norm` selects what RDA treats as one vector: each slot ("tensor"), each row along the last axis ("row"; a slot with one
    axis is one row), or all non-embedding slots together and all embedding slots together ("fragment").
    """
    assert norm in NORMS, norm
    merge_spec(method), merge_spec(embedding_method)
    assert all(delta.shape == (fragment.numel,) for delta in deltas), "deltas are flat vectors of the whole fragment"
    if method == embedding_method == "mean":
        return mean(deltas, weights)
    voters, shares = voters_of(deltas, weights)
    out = torch.empty_like(voters[0])
    parts = {fragment.params[part.index]: part for part in cut if len(voters) > 1}
    shared = [part for slot, part in parts.items() if (embedding_method if slot.embedding else method) == "rda"]
    if shared:
        assert norm == "tensor" and meeting is not None, "stripes have parts of tensors, and the norms of whole ones"
        _rda_parts(voters, shares, fragment, shared, out, meeting)
    for embedding, how in ((False, method), (True, embedding_method)):
        slots = [slot for slot in fragment.params if slot.embedding == embedding]
        if how == "mean":
            for offset, numel in _runs(slots):
                part = slice(offset, offset + numel)
                out[part] = mean([voter[part] for voter in voters], shares)
        elif how in ROBUST:
            for slot in slots:
                part = slice(slot.offset, slot.offset + slot.numel)
                out[part] = ROBUST[how]([voter[part] for voter in voters], shares)
        elif merge_spec(how).by_momentum:
            assert momentum is not None, f"merge {how!r} needs an outer momentum"
            ranges = [slice(slot.offset, slot.offset + slot.numel) for slot in slots]
            for part, measured in zip(ranges, measures(voters, momentum, ranges), strict=True):
                turned = [corrected(voter[part], momentum[part], own) for voter, own in zip(voters, measured, strict=True)]
                out[part] = mean(turned, shares)
        elif how in _registered:
            for slot in slots:
                part = slice(slot.offset, slot.offset + slot.numel)
                out[part] = _by_registered(how, [voter[part].view(slot.shape) for voter in voters], shares)
        elif norm == "fragment":
            _rda_joint(voters, shares, _runs(slots), out)
        else:
            for slot in slots:
                if slot in parts:
                    continue
                part = slice(slot.offset, slot.offset + slot.numel)
                width = slot.shape[-1] if norm == "row" and len(slot.shape) > 1 else slot.numel
                _rda_rows([voter[part].view(-1, width) for voter in voters], shares, out[part].view(-1, width))
    return out


def merge_buffers(
    values: Sequence[Tensor], weights: Sequence[float], fragment: Fragment, *, robust: bool = False
) -> Tensor:
    """The fragment's buffers, merged with the learners' weights and without momentum, as a flat fp32 vector.

    Floats: the weighted mean. Integers: the weighted mean in float64, rounded half to even. Bools: the weighted majority; a tie
    is False, so that a flag is not set by half of the learners. `robust`: floats are merged by the trimmed mean.
    """
    voters, _ = voters_of(values, weights)
    raw = [weight for weight in weights if weight != 0.0]
    out = torch.empty_like(voters[0])
    for slot in fragment.buffers:
        part = slice(slot.offset, slot.offset + slot.numel)
        segments = [voter[part] for voter in voters]
        if slot.kind == "float_buffer":
            out[part] = ROBUST["trimmed_mean"](segments, raw) if robust else mean(segments, raw)
        elif slot.kind == "bool_buffer":
            out[part] = _sum64([segment > 0.5 for segment in segments], raw) * 2 > sum(raw)
        else:
            out[part] = _sum64(segments, raw).div_(sum(raw)).round_()
    return out


def _rda_rows(blocks: Sequence[Tensor], shares: Sequence[float], out: Tensor) -> None:
    """RDA of every row of the learners' blocks (rows x width) at once, into `out`, with one block as scratch."""
    if len(blocks) == 1:
        out.copy_(blocks[0])  # |v| * phi(phi(v)) is v
        return
    scratch = torch.empty_like(out)
    magnitude = torch.zeros(out.shape[0], dtype=torch.float64, device=out.device)
    for index, (block, share) in enumerate(zip(blocks, shares, strict=True)):
        norms = squared_norms(block).sqrt_()
        magnitude += norms * share
        torch.mul(block, _direction_factors(norms, share).to(out.dtype).unsqueeze(1), out=scratch if index else out)
        if index:
            out.add_(scratch)
    total = sum(shares)
    length = squared_norms(out).sqrt_()  # of the sum of directions, which is `total` times their average
    cancelled = length <= CANCELLED * total
    scale = (magnitude / total) / length.masked_fill(cancelled, 1.0)
    out.mul_(scale.to(out.dtype).unsqueeze(1))
    if bool(cancelled.any()):
        out[cancelled] = mean([block[cancelled] for block in blocks], shares)


def _rda_parts(
    voters: Sequence[Tensor], shares: Sequence[float], fragment: Fragment, cut: Sequence[CutSlot], out: Tensor, meeting: Meeting
) -> None:
    """`_rda_rows` of slots of which this stripe has parts, with the norms of the whole slots."""
    ranges = {part.whole: slice(slot.offset, slot.offset + slot.numel) for part in cut for slot in (fragment.params[part.index],)}
    norms = meeting.norms({
        part.whole: [part_squares(voter[ranges[part.whole]], part.at, ends=part.ends) for voter in voters] for part in cut
    })  # fmt: skip
    for part in cut:
        total = out[ranges[part.whole]]
        for index, (voter, share) in enumerate(zip(voters, shares, strict=True)):
            factor = torch.tensor(direction_factor(norms[part.whole][index], share), dtype=out.dtype)
            direction = voter[ranges[part.whole]] * factor
            total.copy_(direction) if index == 0 else total.add_(direction)
    lengths = meeting.norms({part.whole: [part_squares(out[ranges[part.whole]], part.at, ends=part.ends)] for part in cut})
    for part in cut:
        where = ranges[part.whole]
        radial = radial_factor(norms[part.whole], shares, lengths[part.whole][0])
        if radial is None:
            out[where] = mean([voter[where] for voter in voters], shares)
        else:
            out[where].mul_(torch.tensor(radial, dtype=out.dtype))


def radial_factor(norms: Sequence[float], shares: Sequence[float], length: float) -> float | None:
    """What gives a sum of directions, of this length, the mean magnitude. None: the directions cancel."""
    total = sum(shares)
    if length <= CANCELLED * total:
        return None
    magnitude = 0.0
    for norm, share in zip(norms, shares, strict=True):
        magnitude += norm * share
    return (magnitude / total) / length


def direction_factor(norm: float, share: float) -> float:
    """What makes a vector of this norm a direction times its share. phi(0) = 0: zeros times anything. A vector whose norm has no
    inverse in fp32 keeps less than its share. NaN stays NaN."""
    return min(share / norm, FACTOR_MAX) if norm != 0 else share


def _direction_factors(norms: Tensor, share: float) -> Tensor:
    return (share / norms.masked_fill(norms == 0, 1.0)).clamp_(max=FACTOR_MAX)


def _rda_joint(voters: Sequence[Tensor], shares: Sequence[float], runs: list[tuple[int, int]], out: Tensor) -> None:
    """RDA of several segments as one vector; they are copied only if embeddings are between them."""
    if not runs:
        return
    sizes = [numel for _, numel in runs]
    width = sum(sizes)
    if len(runs) == 1:
        first = runs[0][0]
        part = slice(first, first + width)
        _rda_rows([voter[part].view(1, width) for voter in voters], shares, out[part].view(1, width))
        return
    gathered = [torch.cat([voter[start : start + size] for start, size in runs]).view(1, width) for voter in voters]
    joint = torch.empty_like(gathered[0])
    _rda_rows(gathered, shares, joint)
    for (offset, numel), segment in zip(runs, torch.split(joint[0], sizes), strict=True):
        out[offset : offset + numel] = segment


def _runs(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """Neighbouring slots joined into `(offset, numel)` segments."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and sum(runs[-1]) == slot.offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + slot.numel)
        else:
            runs.append((slot.offset, slot.numel))
    return runs


def voters_of(deltas: Sequence[_Any], weights: Sequence[float]) -> tuple[list[_Any], list[float]]:
    """The deltas with a weight above 0, and their shares. Weight 0 is left out: 0*d would change a -0.0 and admit a NaN."""
    assert len(deltas) == len(weights), f"{len(deltas)} deltas and {len(weights)} weights"
    assert all(0.0 <= weight < math.inf for weight in weights), f"weights must be finite and not negative: {weights}"
    kept = [(delta, float(weight)) for delta, weight in zip(deltas, weights, strict=True) if weight > 0.0]
    assert kept, "a merge needs at least one learner with a weight above 0"
    voters = [delta for delta, _ in kept]
    shares = [weight for _, weight in kept]
    return voters, [1.0] * len(shares) if len(set(shares)) == 1 else shares


def _weighted(delta: Tensor, share: float, scratch: Tensor | None) -> Tensor:
    return torch.mul(delta, share, out=scratch)


def _sum64(segments: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = torch.zeros(segments[0].shape, dtype=torch.float64, device=segments[0].device)
    for segment, weight in zip(segments, weights, strict=True):
        total += segment.to(torch.float64) * weight
    return total
