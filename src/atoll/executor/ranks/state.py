"""A learner's state in the parts that its ranks hold, and how another layout takes its own from them.

A part is plain data: the rank's own state, with the local part of every sharded tensor, and which boxes these are. Parts of one
learner make the whole state, and from it a learner of any other number of ranks takes its parts: so do recovery by a peer and
snapshots. The state of a learner of one process is a single part without boxes. One tensor, or the vector of one fragment, is
whole in memory at a time, unless the whole is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from atoll.codecs import BLOCK
from atoll.errors import DataError
from atoll.tensors.inventory import walk
from atoll.tensors.layout import Fragment
from atoll.tensors.local import is_dtensor, local_part
from atoll.tensors.pieces import Box, Boxes, Run, cut_from, held_of, numel_of, owned_of
from atoll.tensors.placements import box_of

StatePart: TypeAlias = Mapping[str, Any]
"""`state`, as `TensorLearner.state` makes it; `boxes` by tensor; `optimizer_boxes` by the optimiser's number of a parameter, and
by key. A tensor that no box is named of is whole. `align`: ranks with the same elements shared them in ranges of so many, and
what a packet did not carry is known to the rank that sent it."""
Empty: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]
Names: TypeAlias = Mapping[int, str]
"""By the optimiser's number of a parameter, the parameter's name."""


def part_of(
    state: Mapping[str, Any], boxes: Boxes, optimizer_boxes: Mapping[int, Mapping[str, Box]], align: int = BLOCK
) -> dict[str, Any]:
    return {
        "state": dict(state), "align": align,
        "boxes": {name: (tuple(box.start), tuple(box.shape)) for name, box in boxes.items()},
        "optimizer_boxes": {
            number: {key: (tuple(box.start), tuple(box.shape)) for key, box in found.items()}
            for number, found in optimizer_boxes.items()
        },
    }  # fmt: skip


def is_part(state: Any) -> bool:
    return isinstance(state, Mapping) and state.keys() == {"state", "align", "boxes", "optimizer_boxes"}


def boxes_of_moments(state: Mapping[int, Any]) -> dict[int, dict[str, Box]]:
    """Of an optimiser's state: the boxes of its sharded tensors."""
    found: dict[int, dict[str, Box]] = {}
    for number, entries in state.items():
        for key, value in entries.items() if isinstance(entries, dict) else ():
            box = box_of(f"the optimiser's {key}", value) if isinstance(value, Tensor) else None
            if box is not None:
                found.setdefault(number, {})[key] = box
    return found


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Tied parameters have one name, also where they are two objects with the same memory."""
    first = {name: entry.name for entry in walk(model) for name in entry.names}
    names = {id(parameter): first[name] for name, parameter in model.named_parameters(remove_duplicate=False)}
    numbers = [number for group in optimizer.state_dict()["param_groups"] for number in group["params"]]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {number: names[id(parameter)] for number, parameter in zip(numbers, held, strict=True)}


class StateParts:
    def __init__(self, parts: Sequence[StatePart], fragments: Sequence[Fragment]) -> None:
        """`fragments` of the whole model. DataError if the parts are not of this model."""
        self._parts = [part if is_part(part) else part_of(part, {}, {}) for part in parts]
        self._boxes = [{name: Box(*map(tuple, box)) for name, box in part["boxes"].items()} for part in self._parts]
        self._fragments = fragments
        self._empty: Empty = _in_memory
        self._into: Empty = _in_memory
        try:
            self._owned = [owned_of(fragment, self._boxes, int(self._parts[0]["align"])) for fragment in fragments]
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise DataError(f"these are not the parts of one learner's state: {error}") from None

    def whole(self, empty: Empty | None = None) -> dict[str, Any]:
        """`empty` makes the tensors that parts are put together in, where they are not to be in memory."""
        self._empty = empty or _in_memory
        return self.of({}, {})

    def of(self, boxes: Boxes, names: Names, into: Empty | None = None) -> dict[str, Any]:
        """What a rank with these boxes holds. A moment of the parameter's shape is cut as the parameter is. `into` makes the
        tensors of what is cut, where they are not to be in memory."""
        self._into = into or _in_memory
        states = [part["state"] for part in self._parts]
        first = states[0]
        state: dict[str, Any] = {
            "tensors": {name: self._tensor(name, boxes.get(name)) for name in first["tensors"]},
            "optimizer": {**first["optimizer"], "state": self._moments(boxes, names)},
            "anchors": self._flats([s["anchors"] for s in states], boxes),
            "round_start": self._flats([s["round_start"] for s in states], boxes),
            "kept": {
                p: (version, self._flat(p, [s["kept"][p][1] for s in states], boxes), buffers)
                for p, (version, _, buffers) in first["kept"].items()
            },
        }
        if "residuals" in first:  # a rank whose part of a packet held NaN has none
            left = [p for p in first["residuals"] if all(p in s["residuals"] for s in states)]
            state["residuals"] = {p: self._flat(p, [s["residuals"][p] for s in states], boxes) for p in left}
        if "eager" in first:
            state["eager"] = {
                part: {p: self._flat(p, [s["eager"][part][p] for s in states], boxes) for p in found}
                for part, found in first["eager"].items()
            }
        return state

    # ------------------------------------------------------------ tensors

    def _pieces(self, name: str) -> list[tuple[Tensor, Box | None]]:
        return [(part["state"]["tensors"][name], boxes.get(name)) for part, boxes in zip(self._parts, self._boxes, strict=True)]

    def _tensor(self, name: str, box: Box | None) -> Tensor:
        return self._cut(_put_together(self._pieces(name), self._empty), box)

    def _cut(self, whole: Tensor, box: Box | None) -> Tensor:
        if box is None:
            return whole
        part = whole[_slices(box)]
        return self._into(tuple(part.shape), part.dtype).copy_(part)

    def _moments(self, boxes: Boxes, names: Names) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for number, entries in self._parts[0]["state"]["optimizer"]["state"].items():
            if not isinstance(entries, dict):
                found[number] = entries
                continue
            name = names.get(number, "")
            whole_shape = _shape_of(self._pieces(name)) if name in boxes else None
            found[number] = {key: self._moment(number, key, whole_shape, boxes.get(name)) for key in entries}
        return found

    def _moment(self, number: int, key: str, shape: tuple[int, ...] | None, box: Box | None) -> Any:
        pieces = []
        for part in self._parts:
            value, of = part["state"]["optimizer"]["state"][number][key], part["optimizer_boxes"].get(number, {}).get(key)
            if not isinstance(value, Tensor):
                return value
            pieces.append((value, None if of is None else Box(*map(tuple, of))))
        whole = _put_together(pieces, self._empty)
        if tuple(whole.shape) == shape:
            return self._cut(whole, box)
        if shape is not None and any(of is not None for _, of in pieces):
            raise DataError(f"the optimiser's {key} of parameter {number} is sharded in another shape than the parameter")
        return whole

    # ------------------------------------------------------------ vectors of fragments

    def _flats(self, found: Sequence[Sequence[Tensor | None]], boxes: Boxes) -> list[Tensor | None]:
        return [
            None if any(own[p] is None for own in found) else self._flat(p, [own[p] for own in found], boxes)
            for p in range(len(self._fragments))
        ]

    def _flat(self, p: int, found: Sequence[Tensor | None], boxes: Boxes) -> Tensor:
        fragment, first = self._fragments[p], found[0]
        assert first is not None
        whole = first if len(found) == 1 and not self._boxes[0] else self._empty((fragment.numel,), first.dtype)
        if whole is not first:
            for runs, own in zip(self._owned[p], found, strict=True):
                assert own is not None
                _spread(whole, runs, own)
        if not boxes:
            return whole
        runs = held_of(fragment, boxes).runs
        return cut_from(whole, runs, self._into((numel_of(runs),), whole.dtype))


def _spread(whole: Tensor, runs: Sequence[Run], own: Tensor) -> None:
    for run in runs:
        whole[run.start : run.stop] = own[run.local : run.local + run.length]


def _shape_of(pieces: Sequence[tuple[Tensor, Box | None]]) -> tuple[int, ...]:
    corners = [
        tuple(value.shape) if box is None else tuple(a + n for a, n in zip(box.start, box.shape, strict=True))
        for value, box in pieces
    ]
    return tuple(map(max, *corners)) if len(corners) > 1 and corners[0] else corners[0]


def _in_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _put_together(pieces: Sequence[tuple[Tensor, Box | None]], empty: Empty) -> Tensor:
    """The whole tensor; of tensors that every rank holds whole, the first rank's."""
    for value, box in pieces:
        if box is None:
            return value
    whole = empty(_shape_of(pieces), pieces[0][0].dtype)
    for value, box in pieces:
        assert box is not None
        whole[_slices(box)] = value
    return whole


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))


# ---------------------------------------------------------------- back into sharded tensors


def like_parameters(state: Mapping[int, Any], parameters: Mapping[int, Tensor]) -> dict[int, Any]:
    """An optimiser's state with each tensor of a sharded parameter's local shape sharded as the parameter is."""
    placed = dict(state)
    for number, entries in state.items():
        if isinstance(entries, dict) and is_dtensor(parameters[number]):
            placed[number] = {key: _placed(parameters[number], key, value) for key, value in entries.items()}
    return placed


def _placed(parameter: Tensor, key: str, value: Any) -> Any:
    if key == "step" or not isinstance(value, Tensor) or value.shape != local_part(parameter).shape:
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.to(local_part(parameter).device), parameter.device_mesh, parameter.placements,  # type: ignore[attr-defined]
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
