"""A state in the parts of any layout is the same whole, and any other layout takes its own parts from it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rank_layouts import LAYOUTS, MODEL, SHAPES

from atoll.errors import ConfigError, DataError
from atoll.executor.ranks.state import StateParts, is_part, names_of, part_of
from atoll.store.tensor_files import pack_state, unpack_state
from atoll.tensors.layout import build_layout
from atoll.tensors.pieces import Box, Boxes, cut_from, held_of

FRAGMENTS = build_layout(MODEL, "sub_tensor", 3).fragments
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())
NAMES = names_of(MODEL, OPTIMIZER)


def numbers(*shape: int) -> torch.Tensor:
    return torch.rand(shape)


def whole_state() -> dict[str, Any]:
    torch.manual_seed(3)
    moments = {
        number: {"step": torch.tensor(7.0), "exp_avg": numbers(*SHAPES[name]), "exp_avg_sq": numbers(*SHAPES[name])}
        for number, name in NAMES.items()
    }
    return {
        "tensors": {name: numbers(*shape) for name, shape in SHAPES.items()},
        "optimizer": {"state": moments, "param_groups": OPTIMIZER.state_dict()["param_groups"]},
        "anchors": [numbers(f.numel) for f in FRAGMENTS],
        "round_start": [None, *(numbers(f.numel) for f in FRAGMENTS[1:])],
        "kept": {1: (5, numbers(FRAGMENTS[1].numel), numbers(FRAGMENTS[1].buffer_numel))},
        "residuals": {0: numbers(FRAGMENTS[0].numel)},
        "eager": {"momenta": {1: numbers(FRAGMENTS[1].numel)}, "steps": {}},
    }


def held_by(rank: int, world: Sequence[Boxes], whole: dict[str, Any]) -> dict[str, Any]:
    """Written out, and not by what is tested: a rank's part of the whole."""
    boxes = world[rank]

    def own(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in boxes:
            return tensor
        at, size = boxes[name]
        return tensor[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))].clone()

    def flat(p: int, vector: torch.Tensor) -> torch.Tensor:
        return cut_from(vector, held_of(FRAGMENTS[p], boxes).runs)

    moments = {
        number: {key: own(NAMES[number], value) if key != "step" else value for key, value in entries.items()}
        for number, entries in whole["optimizer"]["state"].items()
    }
    state = {
        "tensors": {name: own(name, tensor) for name, tensor in whole["tensors"].items()},
        "optimizer": {**whole["optimizer"], "state": moments},
        "anchors": [flat(p, vector) for p, vector in enumerate(whole["anchors"])],
        "round_start": [None if v is None else flat(p, v) for p, v in enumerate(whole["round_start"])],
        "kept": {p: (version, flat(p, vector), buffers) for p, (version, vector, buffers) in whole["kept"].items()},
        "residuals": {p: flat(p, vector) for p, vector in whole["residuals"].items()},
        "eager": {part: {p: flat(p, vector) for p, vector in found.items()} for part, found in whole["eager"].items()},
    }
    of_moments = {n: dict.fromkeys(("exp_avg", "exp_avg_sq"), boxes[name]) for n, name in NAMES.items() if name in boxes}
    return part_of(state, boxes, of_moments)


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@pytest.mark.parametrize(("here", "there"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_any_layout_takes_its_parts_from_those_of_any_other(here: str, there: str) -> None:
    whole, source, target = whole_state(), LAYOUTS[here], LAYOUTS[there]
    sent = [unpack_state(b"".join(pack_state(held_by(rank, source, whole)))) for rank in range(len(source))]
    parts = StateParts(sent, FRAGMENTS)
    assert alike(parts.whole(), whole)
    for rank, boxes in enumerate(target):
        assert alike(parts.of(boxes, NAMES), held_by(rank, target, whole)["state"])


def test_state_of_one_process_is_one_part() -> None:
    whole = whole_state()
    assert not is_part(whole) and is_part(part_of(whole, {}, {}))
    assert alike(StateParts([whole], FRAGMENTS).whole(), whole)


def test_parameters_tied_by_their_memory_have_one_name() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4, bias=False), "b": torch.nn.Linear(3, 4, bias=False)})
    model["b"].weight = torch.nn.Parameter(model["a"].weight.data)
    assert set(names_of(model, torch.optim.SGD(model.parameters())).values()) == {"a.weight"}


def test_moment_sharded_in_another_shape_is_refused_by_ranks() -> None:
    whole, world = whole_state(), LAYOUTS["2 shards of rows"]
    parts = [held_by(rank, world, whole) for rank in range(2)]
    (number,) = (n for n, name in NAMES.items() if name == "a")
    for rank, part in enumerate(parts):
        part["state"]["optimizer"]["state"][number]["exp_avg"] = torch.ones(5)
        part["optimizer_boxes"][number]["exp_avg"] = ((5 * rank,), (5,))
    with pytest.raises(DataError, match=r"exp_avg of parameter .* another shape than the parameter"):
        StateParts(parts, FRAGMENTS).of(world[0], NAMES)


def test_residual_that_one_rank_has_not_is_nobodys() -> None:
    whole, world = whole_state(), LAYOUTS["2 shards of rows"]
    parts = [held_by(rank, world, whole) for rank in range(2)]
    del parts[1]["state"]["residuals"][0]
    assert StateParts(parts, FRAGMENTS).whole()["residuals"] == {}


def test_parts_that_leave_a_gap_are_refused() -> None:
    whole, world = whole_state(), [{"a": Box((0, 0), (10, 29))}, {"a": Box((12, 0), (25, 29))}]
    with pytest.raises((DataError, ConfigError), match="a"):
        StateParts([held_by(rank, world, whole) for rank in range(2)], FRAGMENTS)
