"""Patterns: who shares a fragment with whom, and how large the largest one is."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.errors import ConfigError
from atoll.tensors import fragmentation
from atoll.tensors.layout import Layout, build_layout


class Block(nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class OtherBlock(Block):
    pass


class Decoder(nn.Module):
    def __init__(self, blocks: int, width: int = 2, vocabulary: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)


def block_groups(layout: Layout) -> list[list[int]]:
    """Block numbers per fragment; [] stands for a fragment of non-block tensors."""
    return [
        sorted({int(slot.name.split(".")[1]) for slot in fragment.params if slot.name.startswith("blocks.")})
        for fragment in layout.fragments
    ]


@pytest.mark.parametrize(
    ("blocks", "order", "expected"),
    [
        (6, "strided", [[0, 2, 4], [1, 3, 5], []]),
        (6, "sequential", [[0, 1, 2], [3, 4, 5], []]),
        (7, "strided", [[0, 3, 6], [1, 4], [2, 5], []]),
        (7, "sequential", [[0, 1, 2], [3, 4], [5, 6], []]),
    ],
)
def test_layer_pattern_groups_three_blocks_and_puts_the_rest_last(
    blocks: int, order: str, expected: list[list[int]]
) -> None:
    layout = build_layout(Decoder(blocks), "layer", order=order)
    assert block_groups(layout) == expected
    assert {slot.name for slot in layout.fragments[-1].params} == {
        "embedding.weight",
        "norm.weight",
        "norm.bias",
        "head.weight",
    }


def test_layer_pattern_with_fragments_given_keeps_one_for_non_block_tensors() -> None:
    assert block_groups(build_layout(Decoder(7), "layer", 3, order="sequential")) == [[0, 1, 2, 3], [4, 5, 6], []]
    assert block_groups(build_layout(Decoder(7), "layer", 8)) == [[0], [1], [2], [3], [4], [5], [6], []]


def test_layer_pattern_without_non_block_tensors_gives_every_fragment_to_blocks() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(4))})
    assert block_groups(build_layout(model, "layer", 2)) == [[0, 2], [1, 3]]


def test_layer_pattern_in_a_sequential_of_unlike_children_finds_the_blocks_inside() -> None:
    model = nn.Sequential(nn.Embedding(50, 2), nn.Sequential(*(Block() for _ in range(4))), nn.Linear(2, 50))
    layout = build_layout(model, "layer", 3)
    assert {slot.name.split(".")[1] for slot in layout.fragments[0].params} == {"0", "2"}
    assert {slot.name for slot in layout.fragments[2].params} == {"0.weight", "2.weight", "2.bias"}


def test_layer_pattern_with_hybrid_blocks_finds_them_in_the_second_place() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 2)

    blocks = nn.ModuleList([Plain(), nn.LayerNorm(2), Plain(), nn.LayerNorm(2)])
    layout = build_layout(nn.ModuleDict({"blocks": blocks}), "layer", 2)
    assert block_groups(layout) == [[0, 2], [1, 3]]


def test_layer_pattern_does_not_count_frozen_blocks() -> None:
    model = Decoder(6)
    model.blocks[0].requires_grad_(False)
    assert block_groups(build_layout(model, "layer")) == [[1, 3, 5], [2, 4], []]


def test_layer_pattern_orders_block_ten_after_block_nine() -> None:
    assert block_groups(build_layout(Decoder(11), "layer", 3, order="sequential"))[0] == [0, 1, 2, 3, 4, 5]


def test_tensor_pattern_is_strided_by_index() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(5)))
    layout = build_layout(model, "tensor", 2)
    names = [[slot.name for slot in fragment.params] for fragment in layout.fragments]
    assert names == [["0.weight", "2.weight", "4.weight"], ["1.weight", "3.weight"]]


def test_whole_pattern_is_one_fragment_in_state_dict_order() -> None:
    model = Decoder(2)
    (fragment,) = build_layout(model, "whole").fragments
    assert [slot.name for slot in fragment.params] == list(model.state_dict())
    assert fragment.numel == sum(parameter.numel() for parameter in model.parameters())


def test_balanced_breaks_ties_by_model_order_and_lowest_bin() -> None:
    assert fragmentation.balanced([3, 3, 3, 3], 2) == [[0, 2], [1, 3]]
    assert fragmentation.balanced([1, 5, 4, 2], 3) == [[1], [2], [0, 3]]


def best_largest_bin(sizes: list[int], fragments: int) -> int:
    choices = product(range(fragments), repeat=len(sizes))
    return min(max(sum(s for s, b in zip(sizes, c, strict=True) if b == f) for f in range(fragments)) for c in choices)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
def test_balanced_largest_bin_is_within_four_thirds_of_the_optimum(sizes: list[int], fragments: int) -> None:
    fragments = min(fragments, len(sizes))
    bins = fragmentation.balanced(sizes, fragments)
    assert sorted(index for members in bins for index in members) == list(range(len(sizes)))
    assert all(bins)
    largest = max(sum(sizes[index] for index in members) for members in bins)
    assert 3 * largest <= 4 * best_largest_bin(sizes, fragments)


@given(st.lists(st.integers(1, 40), max_size=3), st.integers(1, 500))
def test_split_rows_covers_all_rows_and_respects_the_limit(shape: list[int], limit: int) -> None:
    ranges = fragmentation.split_rows(shape, limit)
    row = int(torch.tensor(shape[1:]).prod()) if len(shape) > 1 else 1
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(shape[0] if shape else 1))
    assert all(stop > start for start, stop in ranges)
    assert all((stop - start) * row <= max(limit, row) for start, stop in ranges) or not shape


def test_sub_tensor_pattern_shrinks_the_peak_that_the_embedding_makes() -> None:
    model = Decoder(4, width=8, vocabulary=1000)
    total = sum(parameter.numel() for parameter in model.parameters())
    peak = {
        pattern: max(fragment.numel for fragment in build_layout(model, pattern, 6).fragments)
        for pattern in ("balanced", "sub_tensor")
    }
    assert peak["balanced"] == 8000
    assert peak["sub_tensor"] <= 4 / 3 * total / 6


def test_sub_tensor_pattern_splits_one_matrix_into_row_ranges() -> None:
    layout = build_layout(nn.Linear(4, 10, bias=False), "sub_tensor", 3)
    slots = sorted((slot.row_start, slot.row_stop, slot.shape) for part in layout.fragments for slot in part.params)
    assert slots == [(0, 3, (3, 4)), (3, 6, (3, 4)), (6, 8, (2, 4)), (8, 10, (2, 4))]


def test_a_fragment_count_above_the_number_of_tensors_or_pieces_is_refused() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(ConfigError, match=r"fragments = 3 is more than the 2 trainable tensors .*: choose 1 to 2"):
        build_layout(model, "tensor", 3)
    with pytest.raises(ConfigError, match=r"fragments = 3 is more than the 2 trainable tensors .*: choose 1 to 2"):
        build_layout(model, "balanced", 3)
    with pytest.raises(ConfigError, match=r"fragments = 9 is more than the 4 pieces along the first axis"):
        build_layout(model, "sub_tensor", 9)


@pytest.mark.parametrize("fragments", [1, 9])
def test_layer_pattern_with_an_impossible_fragment_count_is_refused(fragments: int) -> None:
    sentence = rf"fragments = {fragments} does not fit pattern 'layer' on 7 blocks .*: choose 2 to 8"
    with pytest.raises(ConfigError, match=sentence):
        build_layout(Decoder(7), "layer", fragments)


def test_layer_pattern_on_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'layer' found no nn.ModuleList .* use 'tensor', 'balanced'"):
        build_layout(nn.Linear(2, 2), "layer")


def test_arguments_out_of_range_are_refused_with_what_would_be_right() -> None:
    model = nn.Linear(2, 2)
    for arguments, sentence in [
        (
            {"pattern": "random"},
            r"pattern = 'random' is unknown: choose one of whole, layer, tensor, balanced, sub_tensor",
        ),
        (
            {"pattern": "layer", "order": "shuffled"},
            r"order = 'shuffled' is unknown: choose one of sequential, strided",
        ),
        (
            {"pattern": "whole", "outer_scope": "all"},
            r"outer_scope = 'all' is unknown: choose one of parameters, all_fl",
        ),
        ({"pattern": "tensor", "fragments": 0}, r"fragments = 0 is too small: choose 1 or more"),
        ({"pattern": "layer", "layers_per_fragment": 0}, r"layers_per_fragment = 0 is too small: choose 1 or more"),
        ({"pattern": "whole", "fragments": 2}, r"fragments = 2 contradicts pattern 'whole', .*: choose 1"),
        ({"pattern": "balanced"}, r"fragments is not given, and pattern 'balanced' needs it"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            build_layout(model, **arguments)
