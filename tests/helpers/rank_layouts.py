"""Layouts of a learner's ranks as boxes, without processes: rows, columns and replicas of a model with odd shapes."""

from __future__ import annotations

import torch
from torch import nn

from atoll.tensors.pieces import Box, Boxes


class Odd(nn.Module):
    """Rows that no number of ranks divides, a scalar, a tensor of one row, and one of three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(37, 29))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, 300))
        self.cube = nn.Parameter(torch.randn(6, 5, 44))
        self.bias = nn.Parameter(torch.randn(3))


MODEL = Odd()
SHAPES = {name: tuple(parameter.shape) for name, parameter in MODEL.named_parameters()}


def chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """As torch cuts a tensor: the last ranks may have fewer rows, or none."""
    step = -(-size // ranks)
    start = min(size, rank * step)
    return start, min(size, start + step) - start


def sharded(ranks: int, axis: int = 0) -> list[Boxes]:
    world: list[Boxes] = []
    for rank in range(ranks):
        boxes = {}
        for name, shape in SHAPES.items():
            if len(shape) > axis:
                start, length = chunk(shape[axis], ranks, rank)
                boxes[name] = Box(
                    tuple(start if at == axis else 0 for at in range(len(shape))),
                    tuple(length if at == axis else size for at, size in enumerate(shape)),
                )
        world.append(boxes)
    return world


LAYOUTS = {
    "one rank": [{}],
    "3 replicas": [{}, {}, {}],
    **{f"{n} shards of rows": sharded(n) for n in (2, 3, 4, 5)},
    "2 shards of columns": sharded(2, axis=1),
    "3 shards of the last axis": sharded(3, axis=2),
    "2 shards of 2 replicas": [boxes for boxes in sharded(2) for _ in range(2)],
}
