"""Merging against deliberately dumb float64 references."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.tensors.layout import Fragment, Slot, build_layout
from atoll.tensors.merge import mean, merge, merge_buffers, rda
from atoll.tensors.norms import outlier_norm, squared_norms


def vectors(count: int, numel: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def dumb_mean(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [
        math.fsum(w * x for w, x in zip(weights, column, strict=True)) / total for column in zip(*rows, strict=True)
    ]


def dumb_phi(row: Sequence[float]) -> list[float]:
    norm = math.sqrt(math.fsum(x * x for x in row))
    return [x / norm if norm else 0.0 for x in row]


def dumb_rda(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """docs/reference/arithmetic.md, "Merge": RDA as printed there."""
    length = math.fsum(w * math.sqrt(math.fsum(x * x for x in row)) for w, row in zip(weights, rows, strict=True))
    direction = dumb_phi(dumb_mean([dumb_phi(row) for row in rows], weights))
    return [length / math.fsum(weights) * x for x in direction]


def slot(name: str, shape: tuple[int, ...], offset: int, *, embedding: bool = False, kind: str = "param") -> Slot:
    numel = math.prod(shape)
    return Slot(name, kind, 0, shape[0] if shape else 1, shape, offset, numel, torch.float32, embedding)


# Embeddings on both sides of other slots, so that neither group is one stretch.
FRAGMENT = Fragment(
    0,
    (
        slot("a", (3, 4), 0),
        slot("b", (5, 2), 12, embedding=True),
        slot("c", (3,), 22),
        slot("d", (2, 2, 3), 25),
        slot("e", (), 37),
        slot("f", (4, 2), 38, embedding=True),
    ),
    (),
    46,
    0,
)


def dumb_merge(deltas: list[Tensor], weights: list[float], method: str, embedding_method: str, norm: str) -> Tensor:
    groups: list[tuple[str, list[int]]] = []  # what is one vector, and how it is merged
    for embedding, how in ((False, method), (True, embedding_method)):
        slots = [s for s in FRAGMENT.params if s.embedding == embedding]
        indices = [list(range(s.offset, s.offset + s.numel)) for s in slots]
        if norm == "fragment":
            indices = [[index for stretch in indices for index in stretch]]
        elif norm == "row":
            widths = [s.shape[-1] if len(s.shape) > 1 else s.numel for s in slots]
            indices = [i[at : at + w] for i, w in zip(indices, widths, strict=True) for at in range(0, len(i), w)]
        groups += [(how, i) for i in indices]
    out = torch.full((FRAGMENT.numel,), math.nan)
    for how, index in groups:
        rows = [[float(delta[i]) for i in index] for delta in deltas]
        out[index] = torch.tensor((dumb_rda if how == "rda" else dumb_mean)(rows, weights))
    return out


def close(ours: Tensor, reference: Tensor | Sequence[float], tolerance: float = 2e-6) -> bool:
    return torch.allclose(ours.double(), torch.as_tensor(reference).double(), rtol=tolerance, atol=tolerance)


CHOICES = list(product(("mean", "rda"), ("mean", "rda"), ("tensor", "row", "fragment")))


@pytest.mark.parametrize(("method", "embedding_method", "norm"), CHOICES)
def test_merge_agrees_with_the_dumb_reference(method: str, embedding_method: str, norm: str) -> None:
    for seed, weights in enumerate([[1.0, 1.0, 1.0], [3.0, 0.25, 700.0], [1e9, 2e9, 5e8]]):
        deltas = vectors(3, FRAGMENT.numel, seed)
        kept = [delta.clone() for delta in deltas]
        merged = merge(deltas, weights, FRAGMENT, method=method, embedding_method=embedding_method, norm=norm)
        assert close(merged, dumb_merge(deltas, weights, method, embedding_method, norm))
        assert all(torch.equal(delta, before) for delta, before in zip(deltas, kept, strict=True))


@pytest.mark.parametrize(("method", "embedding_method", "norm"), CHOICES)
def test_one_learner_gets_its_own_delta_back(method: str, embedding_method: str, norm: str) -> None:
    (delta,) = vectors(1, FRAGMENT.numel)
    merged = merge([delta], [0.3], FRAGMENT, method=method, embedding_method=embedding_method, norm=norm)
    assert torch.equal(merged, delta) and merged.data_ptr() != delta.data_ptr()


@pytest.mark.parametrize(("method", "embedding_method", "norm"), CHOICES)
def test_a_learner_of_weight_zero_changes_no_bit_even_if_it_holds_nan(
    method: str, embedding_method: str, norm: str
) -> None:
    first, second = vectors(2, FRAGMENT.numel)
    poisoned = torch.full_like(first, math.nan)
    options = {"method": method, "embedding_method": embedding_method, "norm": norm}
    alone = merge([first, second], [2.0, 3.0], FRAGMENT, **options)
    assert torch.equal(merge([poisoned, first, poisoned, second], [0.0, 2.0, 0.0, 3.0], FRAGMENT, **options), alone)


def test_mean_with_unit_weights_is_bitwise_the_sum_in_order_over_the_count() -> None:
    a, b, c = vectors(3, 1001)
    assert torch.equal(mean([a, b, c], [1.0, 1.0, 1.0]), ((a + b) + c) / 3)
    assert torch.equal(mean([a, b, c], [0.1, 0.1, 0.1]), ((a + b) + c) / 3)
    assert torch.equal(mean([a, b], [2.0, 3.0]), (a * 2.0 + b * 3.0) / 5.0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-50, 50)), min_size=1, max_size=6))
def test_mean_is_the_weighted_mean(pairs: list[tuple[int, int]]) -> None:
    pairs.append((1, 7))
    weights = [float(weight) for weight, _ in pairs]
    deltas = [torch.tensor([float(value)]) for _, value in pairs]
    assert close(mean(deltas, weights), dumb_mean([[float(value)] for _, value in pairs], weights))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 999), st.data())
def test_rda_agrees_with_the_dumb_reference(count: int, numel: int, seed: int, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.125, 64.0), min_size=count, max_size=count))
    scales = data.draw(st.lists(st.sampled_from([0.0, 1e-6, 1.0, 1e4]), min_size=count, max_size=count))
    deltas = [d.abs() * s for d, s in zip(vectors(count, numel, seed), scales, strict=True)]  # abs: never cancels
    assert close(rda(deltas, weights, [(0, numel)]), dumb_rda([d.tolist() for d in deltas], weights), 1e-5)


@pytest.mark.parametrize("count", [2, 4, 9])
def test_orthogonal_deltas_keep_their_norm_under_rda_and_not_under_the_mean(count: int) -> None:
    deltas = [3.0 * torch.eye(count)[index] for index in range(count)]
    ones = [1.0] * count
    assert outlier_norm(rda(deltas, ones, [(0, count)])) == pytest.approx(3.0, rel=1e-6)
    assert outlier_norm(mean(deltas, ones)) == pytest.approx(3.0 / math.sqrt(count), rel=1e-6)


def test_rda_scales_with_the_deltas_and_ignores_the_scale_of_the_weights() -> None:
    deltas, weights, segments = vectors(3, 100), [1.0, 2.0, 5.0], [(0, 60), (60, 40)]
    base = rda(deltas, weights, segments)
    assert close(rda([delta * 8.0 for delta in deltas], weights, segments), base * 8.0)
    assert close(rda(deltas, [weight * 1e6 for weight in weights], segments), base)
    assert close(rda([-delta for delta in deltas], weights, segments), -base)


def test_the_direction_of_rda_does_not_depend_on_how_long_one_learner_is() -> None:
    a, b = vectors(2, 50)
    one, other = rda([a, b], [1.0, 1.0], [(0, 50)]), rda([a * 100.0, b], [1.0, 1.0], [(0, 50)])
    assert close(one / one.norm(), other / other.norm())


def test_rda_treats_each_segment_on_its_own_and_leaves_zero_outside() -> None:
    a, b = vectors(2, 30)
    merged = rda([a, b], [1.0, 2.0], [(0, 10), (20, 10)])
    assert torch.equal(merged[20:], rda([a[20:], b[20:]], [1.0, 2.0], [(0, 10)]))
    assert torch.equal(merged[10:20], torch.zeros(10))


@pytest.mark.parametrize("factor", [1.0, 3.0, 1e-3])
def test_where_directions_cancel_rda_falls_back_to_the_mean(factor: float) -> None:
    (a,) = vectors(1, 1000)
    opposite = a * -factor
    assert torch.equal(rda([a, opposite], [1.0, 1.0], [(0, 1000)]), mean([a, opposite], [1.0, 1.0]))


def test_directions_that_nearly_cancel_do_not_fall_back() -> None:
    deltas = [torch.tensor([1.0, 1e-3]), torch.tensor([-1.0, 1e-3])]
    assert close(rda(deltas, [1.0, 1.0], [(0, 2)]), [0.0, 1.0], 1e-5)


def test_cancellation_in_one_row_leaves_the_other_rows_to_rda() -> None:
    fragment = Fragment(0, (slot("w", (3, 4), 0),), (), 12, 0)
    a, b = vectors(2, 12)
    b[4:8] = -2.0 * a[4:8]
    merged = merge([a, b], [1.0, 1.0], fragment, method="rda", embedding_method="mean", norm="row")
    assert torch.equal(merged[4:8], mean([a, b], [1.0, 1.0])[4:8])
    for row in (0, 8):
        rows = [a[row : row + 4].tolist(), b[row : row + 4].tolist()]
        assert close(merged[row : row + 4], dumb_rda(rows, [1.0, 1.0]))


def test_zero_deltas_merge_to_zero_and_a_zero_delta_still_counts_in_the_length() -> None:
    zero, a = torch.zeros(3), torch.tensor([0.0, 2.0, 0.0])
    assert torch.equal(rda([zero, zero], [1.0, 2.0], [(0, 3)]), zero)
    assert close(rda([zero, a], [1.0, 1.0], [(0, 3)]), [0.0, 1.0, 0.0])


def test_a_nan_in_a_delta_that_counts_is_not_hidden() -> None:
    a, b = vectors(2, 4)
    a[1] = math.nan
    assert rda([a, b], [1.0, 1.0], [(0, 4)]).isnan().all() and mean([a, b], [1.0, 1.0])[1].isnan()


@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False))
def test_arrival_order_does_not_matter_once_sorted_by_learner(rng: random.Random) -> None:
    learners = {3: 1.0, 0: 2.5, 7: 0.3, 4: 9.0}
    deltas = dict(zip(sorted(learners), vectors(4, FRAGMENT.numel), strict=True))
    arrived = list(learners)
    rng.shuffle(arrived)

    def merged(order: Sequence[int]) -> Tensor:
        sent, weights = [deltas[m] for m in order], [learners[m] for m in order]
        return merge(sent, weights, FRAGMENT, method="rda", embedding_method="mean", norm="tensor")

    assert torch.equal(merged(sorted(arrived)), merged(sorted(learners)))


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    numel = (1 << 21) + 12345
    deltas, weights = vectors(2, numel), [1.0, 2.7]
    wide = Fragment(0, (slot("w", (3, numel // 3), 0), slot("b", (numel % 3,), numel - numel % 3)), (), numel, 0)
    sums = vectors(6, 400_000)  # torch's own sum of their squares does depend on it, for each of them
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            by_row = merge(deltas, weights, wide, method="rda", embedding_method="rda", norm="row")
            norms = torch.cat([squared_norms(vector.view(1, -1)) for vector in sums])
            results.append((rda(deltas, weights, [(0, numel)]), by_row, norms))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for other in results[1:] for one, two in zip(results[0], other, strict=True))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(1, 1), (1, 1024), (1, 1025), (5, 3), (2000, 2), (3, 5000), (700, 1600)]))
def test_squared_norms_agree_with_float64(shape: tuple[int, int]) -> None:
    rows = vectors(1, math.prod(shape))[0].view(shape)
    assert torch.allclose(squared_norms(rows), rows.double().square().sum(1), rtol=1e-13)


def test_squared_norms_of_rows_longer_than_a_batch() -> None:
    rows = torch.ones(2, (1 << 20) + 3)
    assert squared_norms(rows).tolist() == [(1 << 20) + 3.0] * 2


def test_outlier_norm_neither_overflows_nor_hides_nan() -> None:
    assert outlier_norm(torch.tensor([3.0, 4.0])) == 5.0
    assert outlier_norm(torch.full((4,), 1e30)) == pytest.approx(2e30, rel=1e-6)
    assert math.isnan(outlier_norm(torch.tensor([1.0, math.nan])))
    assert math.isinf(outlier_norm(torch.tensor([1.0, math.inf])))


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0], [-1.0, 1.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_weights_that_mean_nothing_are_a_bug(weights: list[float]) -> None:
    for call in (
        lambda: mean(vectors(2, 3), weights),
        lambda: rda(vectors(2, 3), weights, [(0, 3)]),
        lambda: merge_buffers(vectors(2, 0), weights, FRAGMENT),
    ):
        with pytest.raises(AssertionError):
            call()
    with pytest.raises(AssertionError, match="at least one learner"):
        mean([], [])


def buffers(kind: str, numel: int) -> Fragment:
    return Fragment(0, (), (slot("x", (numel,), 0, kind=kind),), 0, numel)


def test_float_buffers_are_averaged_with_the_weights() -> None:
    values = [torch.tensor([1.0, 5.0]), torch.tensor([3.0, 9.0])]
    assert merge_buffers(values, [3.0, 1.0], buffers("float_buffer", 2)).tolist() == [1.5, 6.0]


def test_integer_buffers_are_rounded_half_to_even() -> None:
    values = [torch.tensor([0.0, 1.0, 2.0, -1.0, 7.0]), torch.tensor([1.0, 2.0, 3.0, -2.0, 7.0])]
    assert merge_buffers(values, [1.0, 1.0], buffers("other_buffer", 5)).tolist() == [0.0, 2.0, 2.0, -2.0, 7.0]
    # Weights are not normalised first: 1/6 and the like are no doubles, and the tie at 4.5 would be lost.
    uneven = [torch.tensor([3.0]), torch.tensor([3.0]), torch.tensor([6.0])]
    assert merge_buffers(uneven, [1.0, 2.0, 3.0], buffers("other_buffer", 1)).item() == 4.0


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6))
def test_bool_buffers_follow_the_weighted_majority_and_a_tie_is_false(votes: list[tuple[int, bool]]) -> None:
    votes.append((1, True))
    yes = sum(weight for weight, vote in votes if vote)
    no = sum(weight for weight, vote in votes if not vote)
    values = [torch.tensor([float(vote)]) for _, vote in votes]
    merged = merge_buffers(values, [float(weight) for weight, _ in votes], buffers("bool_buffer", 1))
    assert merged.item() == float(yes > no)


def test_buffers_of_a_real_model_merge_slot_by_slot() -> None:
    (fragment,) = build_layout(nn.BatchNorm1d(2), "whole").fragments
    assert [s.kind for s in fragment.buffers] == ["float_buffer", "float_buffer", "other_buffer"]
    values = [torch.tensor([0.0, 0.0, 1.0, 1.0, 10.0]), torch.tensor([1.0, 2.0, 3.0, 4.0, 13.0])]
    assert merge_buffers(values, [1.0, 1.0], fragment).tolist() == [0.5, 1.0, 2.0, 2.5, 12.0]
