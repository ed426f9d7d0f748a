"""Divides a model into fragments: arithmetic on names and sizes only, one function per pattern.

A *bin* is the ascending list of piece indices of one fragment. Sizes are element counts, not bytes: a fragment is sent as a
flat fp32 vector, so a bf16 tensor costs as much as an fp32 tensor of the same shape.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from atoll.errors import ConfigError

Bins = list[list[int]]


def strided(count: int, fragments: int) -> Bins:
    """Index i goes to bin i mod P."""
    return [list(range(first, count, fragments)) for first in range(fragments)]


def sequential(count: int, fragments: int) -> Bins:
    """Neighbours stay together; sizes differ by at most one, and the longer bins are first."""
    short, longer = divmod(count, fragments)
    starts = [index * short + min(index, longer) for index in range(fragments + 1)]
    return [list(range(start, stop)) for start, stop in pairwise(starts)]


def balanced(sizes: Sequence[int], fragments: int) -> Bins:
    """Largest first, each into the smallest bin so far (Graham: the largest bin is at most 4/3 of the optimum).

    The index breaks ties on both sides, so every worker computes the same bins for the same model.
    """
    bins: Bins = [[] for _ in range(fragments)]
    heap = [(0, index) for index in range(fragments)]
    for piece in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, index = heap[0]
        bins[index].append(piece)
        heapq.heapreplace(heap, (load + sizes[piece], index))
    return [sorted(members) for members in bins]


def split_rows(shape: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Row ranges along the first axis, of nearly equal size and at most `limit` elements each.

    A single row larger than the limit stays whole: a part of a row would not be a tensor.
    """
    if not shape:
        return [(0, 1)]
    rows = shape[0]
    row_numel = 1
    for size in shape[1:]:
        row_numel *= size
    if rows * row_numel <= limit:
        return [(0, rows)]
    pieces = -(-rows // max(1, limit // row_numel))
    return [(part[0], part[-1] + 1) for part in sequential(rows, pieces)]


def by_layer(
    model: nn.Module, names: Sequence[str], fragments: int | None, layers_per_fragment: int, order: str
) -> Bins:
    """Groups of transformer blocks; tensors outside the blocks (embedding, head, final norm) are the LAST fragment.

    They are last so that fragment g is group g of the blocks, with or without such tensors. Blocks without a trainable tensor
    of their own (frozen, or tied to an earlier block) do not count.
    """
    container = _block_container(model, names)
    members: dict[int, list[int]] = {}
    rest: list[int] = []
    for index, name in enumerate(names):
        block = _child_index(container, name)
        (rest if block is None else members.setdefault(block, [])).append(index)
    blocks = [members[block] for block in sorted(members)]
    own = 1 if rest else 0
    groups = -(-len(blocks) // layers_per_fragment) if fragments is None else fragments - own
    if not 1 <= groups <= len(blocks):
        raise ConfigError(
            f"fragments = {fragments} does not fit pattern 'layer' on {len(blocks)} blocks "
            f"and {own} fragment of non-block tensors: choose {1 + own} to {len(blocks) + own}"
        )
    grouping = (strided if order == "strided" else sequential)(len(blocks), groups)
    bins = [sorted(index for block in group for index in blocks[block]) for group in grouping]
    return [*bins, rest] if rest else bins


def _block_container(model: nn.Module, names: Sequence[str]) -> str:
    """The list of blocks: of the containers with numbered children of one class, the one with the most parameters.

    Containers of one class come first, because a model that is an nn.Sequential(embedding, blocks, head) has numbered children
    too, and more parameters than its blocks. Containers of several classes (attention and state-space blocks in turn) are
    considered only if there is none of one class.
    """
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    candidates: list[tuple[bool, int, str]] = []
    for path, module in model.named_modules():
        children = dict(module.named_children())
        if not children or not all(child.isdigit() for child in children):
            continue
        inside = [(child, name) for name in names if (child := _child_index(path, name)) is not None]
        if len({child for child, _ in inside}) >= 2:
            alike = len({type(child) for child in children.values()}) == 1
            candidates.append((alike, sum(sizes.get(name, 0) for _, name in inside), path))
    if not candidates:
        raise ConfigError(
            "pattern 'layer' found no nn.ModuleList or nn.Sequential with two or more trainable blocks: "
            "use 'tensor', 'balanced' or 'sub_tensor'"
        )
    best = max(candidates, key=lambda candidate: candidate[:2])  # on ties the first, which is the outermost
    return best[2]


def _child_index(container: str, name: str) -> int | None:
    prefix = f"{container}." if container else ""
    if not name.startswith(prefix):
        return None
    child, _, leaf = name[len(prefix) :].partition(".")
    return int(child) if leaf and child.isdigit() else None
