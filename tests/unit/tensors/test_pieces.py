"""Pieces of ranks: every element is held where its box says, and sent by exactly one rank; any layout assembles to one packet."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
import torch
from rank_layouts import LAYOUTS, MODEL, SHAPES
from torch import nn

from atoll.codecs import BLOCK, codec, encode_with_feedback
from atoll.errors import ConfigError
from atoll.executor.ranks.stitch import assemble, block_of, encode_part
from atoll.tensors.layout import Fragment, build_layout
from atoll.tensors.pieces import Box, Boxes, cut_from, held_of, owned_of, put_runs, split_of

CODECS = ("fp32", "bf16", "int8", "int4", "int2", "int1", "e3m0", "top_k:0.1", "random_drop:0.3", "int4 rng")


def fragments(pattern: str = "sub_tensor", count: int = 3) -> tuple[Fragment, ...]:
    return build_layout(MODEL, pattern, count).fragments


def in_whole(boxes: Boxes, fragment: Fragment) -> set[int]:
    """Positions in the flat vector that a rank holds, the slow way."""
    found = set()
    for slot in fragment.params:
        whole = SHAPES[slot.name]
        start, shape = boxes.get(slot.name, Box((0,) * len(whole), whole))
        for at, index in enumerate(product(*(range(n) for n in slot.shape))):
            there = (index[0] + slot.row_start, *index[1:]) if index else ()
            if all(low <= i < low + n for i, low, n in zip(there, start, shape, strict=True)):
                found.add(slot.offset + at)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_rank_holds_the_elements_of_its_boxes_in_the_order_of_its_own_tensors(name: str) -> None:
    world = LAYOUTS[name]
    for fragment in fragments():
        whole = torch.arange(float(fragment.numel))
        for boxes in world:
            held = held_of(fragment, boxes)
            assert {at for run in held.runs for at in range(run.start, run.stop)} == in_whole(boxes, fragment)
            flat = cut_from(whole, held.runs)
            assert flat.numel() == held.fragment.numel == sum(slot.numel for slot in held.fragment.params)
            for slot in held.fragment.params:
                part = flat[slot.offset : slot.offset + slot.numel]
                box = boxes.get(slot.name)
                row = slot.row_start + (box.start[0] if box is not None and box.start else 0)
                of_whole = next(s for s in fragment.params if s.name == slot.name and s.row_start <= row < s.row_stop)
                view = whole[of_whole.offset : of_whole.offset + of_whole.numel].view(of_whole.shape)
                if box is not None and box.start:
                    first = slot.row_start + box.start[0] - of_whole.row_start
                    view = view[first : first + slot.shape[0]]
                    for axis in range(1, len(slot.shape)):
                        view = view.narrow(axis, box.start[axis], box.shape[axis])
                assert torch.equal(part.view(slot.shape), view)


@pytest.mark.parametrize("align", [0, 1, 7, BLOCK])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_sent_by_one_rank_and_blocks_are_whole(name: str, align: int) -> None:
    world = LAYOUTS[name]
    for fragment in fragments():
        owned = owned_of(fragment, world, align or BLOCK)
        sent = sorted(at for runs in owned for run in runs for at in range(run.start, run.stop))
        assert sent == list(range(fragment.numel))
        for runs, boxes in zip(owned, world, strict=True):
            assert {at for run in runs for at in range(run.start, run.stop)} <= in_whole(boxes, fragment)
            split = split_of(runs, align)
            assert sorted([*split.blocks, *split.seams]) != [] or not runs
            assert split.block_numel + split.seam_numel == sum(run.length for run in runs)
            inside = sorted(at for run in split.blocks for at in range(run.start, run.stop))
            if align:
                assert len(inside) % align == 0
                assert all(inside[at] % align == 0 and inside[at + align - 1] - inside[at] == align - 1
                           for at in range(0, len(inside), align))  # fmt: skip
            else:
                assert not inside


def test_replicas_share_a_fragment_evenly_and_without_seams() -> None:
    (fragment,) = build_layout(nn.Linear(64, 96, bias=False), "whole").fragments
    for runs in owned_of(fragment, [{}] * 3, BLOCK):
        split = split_of(runs, BLOCK)
        assert split.block_numel == fragment.numel // 3 and not split.seams


def test_ranks_that_overlap_or_leave_a_gap_are_refused() -> None:
    (fragment,) = build_layout(nn.Linear(4, 8, bias=False), "whole").fragments
    overlap = [{"weight": Box((0, 0), (5, 4))}, {"weight": Box((4, 0), (4, 4))}]
    gap = [{"weight": Box((0, 0), (3, 4))}, {"weight": Box((4, 0), (4, 4))}]
    short = [{"weight": Box((0, 0), (3, 4))}, {"weight": Box((3, 0), (3, 4))}]
    for world in (overlap, gap, short):
        with pytest.raises(ConfigError, match=r"weight: .* shard it the same way on every rank"):
            owned_of(fragment, world, BLOCK)


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("name", CODECS)
def test_any_layout_assembles_to_the_packet_and_the_residual_of_the_whole_vector(name: str, feedback: bool) -> None:
    c, rounds = codec(name.split()[0]), name.endswith("rng") or name.startswith("random_drop")
    for fragment in fragments(count=2):
        whole = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(fragment.numel))
        expected, left = encode_with_feedback(c, whole, None, rng=torch.Generator().manual_seed(5) if rounds else None)
        align = block_of(c, rounds_randomly=rounds)
        for world in LAYOUTS.values():
            splits = [split_of(runs, align) for runs in owned_of(fragment, world, align or BLOCK)]
            helds = [held_of(fragment, boxes).runs for boxes in world]
            made = [encode_part(c, cut_from(whole, runs), s, feedback=feedback) for runs, s in zip(helds, splits, strict=True)]
            rng = torch.Generator().manual_seed(5) if rounds else None
            packet, residuals = assemble(c, fragment.numel, splits, [part for part, _ in made], feedback=feedback, rng=rng)
            assert packet.to_bytes() == expected.to_bytes()
            if feedback:
                joined = torch.full((fragment.numel,), math.nan)
                for (_, residual), seams, split in zip(made, residuals, splits, strict=True):
                    assert residual is not None
                    put_runs(residual, split.seams, seams)
                    for run in (*split.blocks, *split.seams):
                        joined[run.start : run.stop] = residual[run.local : run.local + run.length]
                assert torch.equal(joined, left)


def test_random_boxes_of_rows_cover_and_assemble_as_well() -> None:
    rng = random.Random(3)
    c = codec("int4")
    (fragment,) = build_layout(MODEL, "whole").fragments
    whole = torch.randn(fragment.numel)
    for _ in range(20):
        ranks = rng.randint(1, 6)
        world: list[dict[str, Box]] = [{} for _ in range(ranks)]
        for name, shape in SHAPES.items():
            if shape and rng.random() < 0.8:
                cuts = sorted(rng.randint(0, shape[0]) for _ in range(ranks - 1))
                for boxes, low, high in zip(world, [0, *cuts], [*cuts, shape[0]], strict=True):
                    boxes[name] = Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))
        splits = [split_of(runs, BLOCK) for runs in owned_of(fragment, world, BLOCK)]
        parts = [encode_part(c, cut_from(whole, held_of(fragment, boxes).runs), split, feedback=False)[0]
                 for boxes, split in zip(world, splits, strict=True)]  # fmt: skip
        assert assemble(c, fragment.numel, splits, parts, feedback=False)[0].to_bytes() == c.encode(whole).to_bytes()
