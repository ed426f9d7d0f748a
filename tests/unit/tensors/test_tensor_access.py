"""Reading and writing a fragment of a live model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.tensors.access import cast_like, named_tensors, read_buffers, read_params, write_buffers, write_params
from atoll.tensors.layout import build_layout


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.body = nn.Linear(4, 4).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("small", torch.tensor([1, 2], dtype=torch.int8))
        self.register_buffer("scratch", torch.randn(2), persistent=False)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["whole", "tensor", "balanced", "sub_tensor"]), st.integers(1, 5), st.integers(0, 99))
def test_reading_and_writing_back_into_another_model_copies_it(pattern: str, fragments: int, seed: int) -> None:
    torch.manual_seed(seed)
    source, target = Mixed(), Mixed()
    source.norm.running_mean.normal_()
    source.norm.num_batches_tracked.fill_(12345)
    source.flag.logical_not_()
    layout = build_layout(source, pattern, None if pattern == "whole" else fragments)
    kept = {name: target.get_parameter(name).clone() for name in ("frozen",)} | {"scratch": target.scratch.clone()}
    for fragment in layout.fragments:
        write_params(named_tensors(target), fragment, read_params(named_tensors(source), fragment))
        write_buffers(named_tensors(target), fragment, read_buffers(named_tensors(source), fragment))
    ours, theirs = snapshot(target), snapshot(source)
    assert all(torch.equal(ours[name], kept.get(name, theirs[name])) for name in theirs)
    assert target.head.weight is target.embedding.weight and target.scale.requires_grad


def test_read_params_lays_slots_out_as_the_layout_says_and_copies() -> None:
    model = nn.Linear(2, 2)
    (fragment,) = build_layout(model, "whole").fragments
    flat = read_params(named_tensors(model), fragment)
    assert flat.dtype == torch.float32 and not flat.requires_grad
    assert torch.equal(flat, torch.cat([model.weight.detach().flatten(), model.bias.detach()]))
    before = flat.clone()
    model.weight.data.add_(1.0)
    assert torch.equal(flat, before)


def test_read_params_fills_and_returns_the_vector_it_is_given() -> None:
    model = nn.Linear(2, 2)
    (fragment,) = build_layout(model, "whole").fragments
    out = torch.full((6,), float("nan"))
    assert read_params(named_tensors(model), fragment, out) is out
    assert torch.equal(out, read_params(named_tensors(model), fragment))
    with pytest.raises(AssertionError, match="flat fp32 vector of 6 elements"):
        read_params(named_tensors(model), fragment, torch.empty(5))


def test_writing_a_vector_of_the_wrong_length_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    (fragment,) = build_layout(model, "whole").fragments
    before = snapshot(model)
    with pytest.raises(AssertionError, match="fragment 0 has 10 elements, not 11"):
        write_params(named_tensors(model), fragment, torch.zeros(11))
    with pytest.raises(AssertionError, match="fragment 0 has 5 buffer elements, not 1"):
        write_buffers(named_tensors(model), fragment, torch.zeros(1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(model).items())


def test_non_contiguous_parameters_round_trip() -> None:
    model = nn.Linear(3, 2, bias=False)
    model.weight = nn.Parameter(torch.arange(6.0).view(3, 2).t())
    layout = build_layout(model, "sub_tensor", 2)
    assert [read_params(named_tensors(model), f).tolist() for f in layout.fragments] == [[0, 2, 4], [1, 3, 5]]
    write_params(named_tensors(model), layout.fragments[1], torch.tensor([7.0, 8.0, 9.0]))
    assert model.weight.tolist() == [[0, 2, 4], [7, 8, 9]]


def test_cast_like_is_what_a_write_and_a_read_make_of_a_vector() -> None:
    model = Mixed()
    (fragment,) = build_layout(model, "whole").fragments
    flat = torch.randn(fragment.numel)
    before = flat.clone()
    cast = cast_like(fragment, flat)
    write_params(named_tensors(model), fragment, flat)
    assert torch.equal(cast, read_params(named_tensors(model), fragment))
    assert torch.equal(flat, before) and not torch.equal(cast, flat)
    for slot in fragment.params:
        part = slice(slot.offset, slot.offset + slot.numel)
        assert torch.equal(cast[part], flat[part]) == (slot.dtype == torch.float32)


def test_cast_like_of_an_all_fp32_fragment_is_the_vector_itself() -> None:
    (fragment,) = build_layout(nn.Linear(2, 2), "whole").fragments
    flat = torch.randn(6)
    assert cast_like(fragment, flat) is flat


def test_integer_buffers_round_half_to_even_and_saturate_and_bools_need_a_majority() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("small", torch.zeros(6, dtype=torch.int8))
    model.register_buffer("long", torch.zeros(1, dtype=torch.int64))
    model.register_buffer("flag", torch.zeros(3, dtype=torch.bool))
    (fragment,) = build_layout(model, "whole").fragments
    write_buffers(
        named_tensors(model), fragment, torch.tensor([0.5, 1.5, 2.5, -0.5, 300.0, -300.0, 1e30, 0.5, 0.51, 1.0])
    )
    assert model.small.tolist() == [0, 2, 2, 0, 127, -128]
    assert model.long.item() > 2**62
    assert model.flag.tolist() == [False, True, True]


def test_a_fragment_without_buffers_reads_as_an_empty_vector() -> None:
    model = nn.Linear(2, 2)
    (fragment,) = build_layout(model, "whole").fragments
    values = read_buffers(named_tensors(model), fragment)
    assert values.shape == (0,) and values.dtype == torch.float32
    write_buffers(named_tensors(model), fragment, values)


def test_an_optimiser_goes_on_with_the_parameters_it_holds_after_a_write() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (fragment,) = build_layout(model, "whole").fragments
    write_params(named_tensors(model), fragment, torch.tensor([1.0, 2.0]))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[0.0, 1.0]]
