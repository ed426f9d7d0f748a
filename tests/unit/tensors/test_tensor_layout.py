"""Policy: what travels, under which name, with which fragment; and that every pattern covers all of it once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from atoll.errors import ConfigError
from atoll.tensors.access import named_tensors
from atoll.tensors.layout import Layout, Slot, build_layout

PATTERNS = ("whole", "layer", "tensor", "balanced", "sub_tensor")


class Flags(nn.Module):
    """Buffers of every kind and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor([True, False]))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("scratch", torch.zeros(9), persistent=False)


class Net(nn.Module):
    def __init__(self, widths: list[int], tied: bool, frozen: set[int], half: set[int], normed: set[int]) -> None:
        super().__init__()
        width = 3
        self.embedding = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(self._block(width, inner, index in normed) for index, inner in enumerate(widths))
        for index in frozen:
            self.blocks[index].requires_grad_(False)
        for index in half:
            self.blocks[index].to(torch.bfloat16)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(width, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    @staticmethod
    def _block(width: int, inner: int, normed: bool) -> nn.Module:
        extra = (nn.BatchNorm1d(inner), Flags()) if normed else ()
        return nn.Sequential(nn.Linear(width, inner), *extra, nn.Linear(inner, width))


@st.composite
def nets(draw: st.DrawFn) -> Net:
    widths = draw(st.lists(st.integers(1, 5), min_size=3, max_size=6))
    some = st.sets(st.integers(0, len(widths) - 1), max_size=len(widths) - 2)
    return Net(widths, draw(st.booleans()), draw(some), draw(some), draw(some))


def all_slots(layout: Layout) -> list[Slot]:
    return [slot for fragment in layout.fragments for slot in (*fragment.params, *fragment.buffers)]


def covered(layout: Layout, *kinds: str) -> Counter[tuple[str, int]]:
    return Counter(
        (s.name, row) for s in all_slots(layout) if s.kind in kinds for row in range(s.row_start, s.row_stop)
    )


def expected(tensors: dict[str, torch.Tensor]) -> Counter[tuple[str, int]]:
    return Counter((name, row) for name, t in tensors.items() for row in range(t.shape[0] if t.dim() else 1))


@settings(max_examples=60, deadline=None)
@given(nets(), st.sampled_from(PATTERNS), st.integers(2, 4))
def test_every_pattern_covers_every_travelling_row_exactly_once(net: Net, pattern: str, fragments: int) -> None:
    layout = build_layout(net, pattern, None if pattern == "whole" else min(fragments, 3))
    trainable = {name: p for name, p in net.named_parameters() if p.requires_grad}
    # torch's own word on which buffers are persistent: they are in the state dict.
    buffers = {name: b for name, b in net.named_buffers() if name in net.state_dict()}
    assert covered(layout, "param") == expected(trainable)
    assert covered(layout, "float_buffer", "other_buffer", "bool_buffer") == expected(buffers)
    for fragment in layout.fragments:
        assert fragment.numel > 0
        for slots, numel in ((fragment.params, fragment.numel), (fragment.buffers, fragment.buffer_numel)):
            ends = [0, *(slot.offset + slot.numel for slot in slots)]
            assert [slot.offset for slot in slots] == ends[:-1] and ends[-1] == numel
            assert all(slot.numel == torch.Size(slot.shape).numel() for slot in slots)
            assert all(slot.dtype == named_tensors(net)[slot.name].dtype for slot in slots)


@settings(max_examples=20, deadline=None)
@given(nets(), st.sampled_from(PATTERNS))
def test_a_module_keeps_its_buffers_in_the_fragment_of_its_first_parameter(net: Net, pattern: str) -> None:
    layout = build_layout(net, pattern, None if pattern == "whole" else 3)
    for fragment in layout.fragments:
        for buffer in fragment.buffers:
            module = buffer.name.rpartition(".")[0]
            first = next((s for f in layout.fragments for s in f.params if s.name == f"{module}.weight"), None)
            if first is not None:
                assert f"{module}.weight" in {s.name for s in fragment.params if s.row_start == 0}


def test_layer_pattern_keeps_buffers_of_a_parameterless_module_in_their_block() -> None:
    blocks = nn.ModuleList(nn.Sequential(Flags(), nn.Linear(2, 2)) for _ in range(4))
    layout = build_layout(nn.ModuleDict({"a": nn.Linear(2, 2), "blocks": blocks}), "layer", 3)
    for fragment in layout.fragments[:2]:
        assert {s.name.split(".")[1] for s in fragment.buffers} == {s.name.split(".")[1] for s in fragment.params}
    assert layout.fragments[2].buffers == ()


def test_buffers_of_a_parameterless_module_go_with_the_nearest_preceding_parameter() -> None:
    model = nn.Sequential(Flags(), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), Flags())
    layout = build_layout(model, "tensor", 2)
    homes = {s.name.split(".")[0]: f.id for f in layout.fragments for s in f.buffers}
    assert homes == {"0": 0, "3": 1}


def test_buffers_of_a_module_without_parameters_go_with_those_of_its_children() -> None:
    child = Flags()
    child.add_module("linear", nn.Linear(2, 2, bias=False))
    layout = build_layout(nn.Sequential(nn.Linear(2, 2, bias=False), child), "tensor", 2)
    assert {s.name.split(".")[0] for s in layout.fragments[1].buffers} == {"1"}


def test_kinds_follow_dtype_and_frozen_or_transient_tensors_stay_at_home() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Flags())
    model[0].bias.requires_grad_(False)
    kinds = {slot.name: slot.kind for slot in all_slots(build_layout(model, "whole"))}
    assert kinds == {
        "0.weight": "param",
        "1.weight": "param",
        "1.bias": "param",
        "1.running_mean": "float_buffer",
        "1.running_var": "float_buffer",
        "1.num_batches_tracked": "other_buffer",
        "2.seen": "bool_buffer",
        "2.steps": "other_buffer",
        "2.scale": "float_buffer",
    }


def test_scope_all_floating_turns_float_buffers_into_params() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    (fragment,) = build_layout(model, "whole", outer_scope="all_floating").fragments
    assert "1.running_mean" in {slot.name for slot in fragment.params}
    assert [slot.name for slot in fragment.buffers] == ["1.num_batches_tracked"]


def test_tied_tensors_are_handled_once_under_their_first_name() -> None:
    shared = nn.Linear(3, 3, bias=False)
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 3), "head": nn.Linear(3, 7, bias=False), "a": shared})
    model["b"] = shared
    model["head"].weight = nn.Parameter(model["embedding"].weight.data)  # another Parameter over the same memory
    layout = build_layout(model, "whole")
    assert [slot.name for slot in all_slots(layout)] == ["embedding.weight", "a.weight"]
    assert list(named_tensors(model)) == ["embedding.weight", "a.weight"]


def test_memory_tied_to_a_trainable_parameter_is_trainable_under_a_frozen_name_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[0].weight = nn.Parameter(model[1].weight.data, requires_grad=False)
    assert [slot.name for slot in all_slots(build_layout(model, "whole"))] == ["0.weight"]


def test_embedding_flag_marks_embedding_weights_and_what_is_tied_to_them() -> None:
    model = nn.ModuleDict({"head": nn.Linear(3, 7), "embedding": nn.Embedding(7, 3), "bag": nn.EmbeddingBag(4, 3)})
    model["head"].weight = model["embedding"].weight
    flags = {slot.name: slot.embedding for slot in all_slots(build_layout(model, "sub_tensor", 4))}
    assert flags == {"head.weight": True, "head.bias": False, "bag.weight": True}


def test_embedding_glob_replaces_the_rule_and_knows_every_tied_name() -> None:
    model = nn.ModuleDict({"in": nn.Embedding(7, 3), "out": nn.Linear(3, 7), "other": nn.Embedding(2, 2)})
    model["out"].weight = model["in"].weight
    flags = {slot.name: slot.embedding for slot in all_slots(build_layout(model, "whole", embedding_glob="out.*"))}
    assert flags == {"in.weight": True, "out.bias": True, "other.weight": False}


def test_zero_dimensional_and_empty_parameters() -> None:
    model = nn.ParameterDict({"scalar": nn.Parameter(torch.tensor(2.0)), "none": nn.Parameter(torch.empty(0, 3))})
    (slot,) = all_slots(build_layout(model, "sub_tensor", 1))
    assert (slot.name, slot.row_start, slot.row_stop, slot.shape, slot.numel) == ("scalar", 0, 1, (), 1)


def test_fingerprint_agrees_for_equal_structure_and_differs_for_any_other() -> None:
    def print_of(model: nn.Module, pattern: str = "tensor", fragments: int = 2) -> str:
        return build_layout(model, pattern, fragments).fingerprint

    base = print_of(nn.Linear(3, 3))
    assert len(base) == 64 and base == print_of(nn.Linear(3, 3))
    others = [
        print_of(nn.Linear(3, 4)),
        print_of(nn.Linear(3, 3).to(torch.bfloat16)),
        print_of(nn.Sequential(nn.Linear(3, 3))),
        print_of(nn.Linear(3, 3), fragments=1),
        print_of(nn.Linear(3, 3), "sub_tensor"),
    ]
    assert len({base, *others}) == 6


def test_layout_of_a_model_on_the_meta_device_equals_that_of_the_real_one() -> None:
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    real = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert build_layout(meta, "balanced", 2) == build_layout(real, "balanced", 2)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable floating parameter: at least one must have requires_grad=True"):
        build_layout(nn.Linear(2, 2).requires_grad_(False), "whole")
    with pytest.raises(ConfigError, match="no trainable floating parameter"):
        build_layout(Flags(), "whole", outer_scope="all_floating")


def test_dtypes_that_fp32_cannot_stand_for_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight is torch.float64: the outer state is fp32, .* float32, bfloat16 or"):
        build_layout(nn.Linear(2, 2).double(), "whole")
    with pytest.raises(ConfigError, match=r"weight is torch.complex64: complex tensors are not supported"):
        build_layout(nn.Linear(2, 2, dtype=torch.complex64), "whole")
    assert all_slots(build_layout(nn.Linear(2, 2).half(), "whole"))[0].dtype == torch.float16


def test_integer_buffers_that_fp32_cannot_carry_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([-(2**40) - 1]))
    with pytest.raises(ConfigError, match=r"buffer mask has integers beyond 2\^24, .* persistent=False"):
        build_layout(model, "whole")


def test_partly_shared_memory_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data.t())
    with pytest.raises(ConfigError, match=r"0.weight and 1.weight overlap in memory but differ .*: tie whole tensors"):
        build_layout(model, "whole")


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="weight is not initialised: run one forward pass"):
        build_layout(nn.LazyLinear(3), "whole")


def test_sharded_parameters_have_the_layout_of_the_whole_model() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        plain = build_layout(model, "whole").fingerprint
        model.weight = nn.Parameter(distribute_tensor(model.weight.data, DeviceMesh("cpu", [0]), [Shard(0)]))
        assert build_layout(model, "whole").fingerprint == plain
    finally:
        dist.destroy_process_group()
