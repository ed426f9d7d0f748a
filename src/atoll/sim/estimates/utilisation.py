"""Compute utilisation against bandwidth: a graph of one learner's compute nodes and of the reductions between datacentres.

A step of L layers is 3L-1 equal nodes: forward 1..L, then from L down to 1 backward-to-activations (layer 1 has none) and
backward-to-parameters. A layer's reduction is issued when its backward-to-parameters ends, and crosses one serial link
first in, first out. The forward of layer l in step t+1+tau waits for the reduction of layer l issued in step t. This is the
simulator of Streaming DiLoCo (arXiv 2501.18512, section 3.1), read as docs/planning/simulators.md says.

Every time is an array over bandwidths, so that one walk through the graph gives a whole curve.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.rules import offsets

Curve: TypeAlias = NDArray[np.float64]
Method = Literal["data_parallel", "diloco", "async_diloco", "streaming"]
Pattern = Literal["strided", "sequential", "balanced"]

ROUNDING = 1e-9
"""Tolerance for the rounding error of summed step times."""
DATA_PARALLEL_STEPS = 20
"""Length of the run that measures data-parallel, whose steps are all alike."""


@dataclass(frozen=True)
class Compute:
    """The model of each datacentre. Layers are alike: each has parameters/layers, with the embeddings spread over them."""

    layers: int
    parameters: float
    step_seconds: float

    @property
    def node_seconds(self) -> float:
        return self.step_seconds / (3 * self.layers - 1)


@dataclass(frozen=True)
class Exchange:
    """A method's all-reduce between datacentres. `overlap` is tau; 0 blocks."""

    method: Method
    interval: int = 100
    overlap: int = 0
    layers_per_fragment: int = 3
    fragments: int | None = None
    """Replaces `layers_per_fragment`."""
    pattern: Pattern = "strided"
    bits: float = 16.0
    """Effective bits per parameter on the wire."""
    datacentres: int = 2
    latency_seconds: float = 0.0
    """One way, between neighbours of the ring."""

    @property
    def every(self) -> int:
        return 1 if self.method == "data_parallel" else self.interval

    @property
    def delay(self) -> int:
        """Whole steps between the step that issues a reduction and the step whose forward needs it. Async DiLoCo applies a
        result when the next round ends, or after `overlap` steps if that is given; rounds then overlap."""
        return {"data_parallel": 0, "async_diloco": self.overlap or self.interval}.get(self.method, self.overlap)

    @property
    def ring_factor(self) -> float:
        """A member of a ring sends (D-1)/D of its bytes to scatter and as many to gather."""
        return 2 * (self.datacentres - 1) / self.datacentres

    @property
    def hops(self) -> int:
        """A ring passes each piece on D-1 times to scatter and D-1 times to gather. A result is usable after that many
        latencies, but the link is free for the next reduction meanwhile."""
        return 2 * (self.datacentres - 1)


def fragments_of(layers: int, exchange: Exchange) -> list[list[int]]:
    """The layers (from 0) of each fragment. Whole-model methods have one fragment.

    `strided` assigns layers to fragments in turn. `sequential` cuts consecutive layers, `layers_per_fragment` each (the last
    may be smaller), or with a number of fragments the larger ones first. `balanced` cuts consecutive layers too, but spreads
    the larger fragments evenly; layers are alike here, so no two sizes differ by more than one layer.
    """
    if exchange.method != "streaming":
        return [list(range(layers))]
    size = exchange.layers_per_fragment
    count = exchange.fragments or math.ceil(layers / size)
    if exchange.pattern == "strided":
        return [list(range(q, layers, count)) for q in range(count)]
    if exchange.pattern == "balanced":
        cuts = [q * layers // count for q in range(count + 1)]
    elif exchange.fragments is None:
        cuts = [min(q * size, layers) for q in range(count + 1)]
    else:
        each, more = divmod(layers, count)
        cuts = [q * each + min(q, more) for q in range(count + 1)]
    return [list(range(a, b)) for a, b in pairwise(cuts)]


def usual_steps(exchange: Exchange) -> int:
    """The published run: two intervals, or 20 steps of data-parallel."""
    return DATA_PARALLEL_STEPS if exchange.method == "data_parallel" else 2 * exchange.interval


def is_steady(exchange: Exchange, steady: bool, run_steps: int | None = None) -> bool:
    """Async DiLoCo is measured steady, unless a length is given: in a run of two intervals its first result would be due after
    the last step."""
    return steady or (exchange.method == "async_diloco" and run_steps is None)


def utilisation(
    compute: Compute, exchange: Exchange, gbit: Curve | Sequence[float], run_steps: int | None = None, *, steady: bool = False
) -> Curve:
    """Compute time over makespan, trailing reductions included. With `steady` start and end do not count: the measurement
    runs over whole intervals, from the end of one step to the end of another, once the link's queue has filled."""
    rates = np.asarray(gbit, dtype=np.float64)
    steps = run_steps or usual_steps(exchange)
    walk = _Walk(compute, exchange, rates)
    if not is_steady(exchange, steady, run_steps):
        walk.steps(1, steps)
        return np.asarray(steps * compute.step_seconds / walk.makespan())
    steps = math.ceil(steps / exchange.every) * exchange.every
    warm_up = steps + exchange.delay + exchange.every
    walk.steps(1, warm_up)
    begun = walk.clock
    walk.steps(warm_up + 1, warm_up + steps)
    return np.asarray(steps * compute.step_seconds / (walk.clock - begun))


def needed_gbit(
    compute: Compute, exchange: Exchange, targets: Sequence[float], grid: Curve | Sequence[float],
    run_steps: int | None = None, *, steady: bool = False,
) -> list[float | None]:  # fmt: skip
    """For each target (a share, such as 0.95) the first value of the grid that reaches it; None: no value does."""
    return first_reaching(utilisation(compute, exchange, grid, run_steps, steady=steady), targets, grid)


def first_reaching(curve: Curve, targets: Sequence[float], grid: Curve | Sequence[float]) -> list[float | None]:
    reached = [np.flatnonzero(curve >= target - ROUNDING) for target in targets]
    return [float(grid[found[0]]) if found.size else None for found in reached]


class _Walk:
    """Walks the graph step by step. `clock`: when the learner's next node may start; `link`: when the link is free."""

    def __init__(self, compute: Compute, exchange: Exchange, rates: Curve) -> None:
        self._layers, self._node = compute.layers, compute.node_seconds
        self._step_seconds = compute.step_seconds
        self._delay, self._every = exchange.delay, exchange.every
        bits = exchange.bits * exchange.ring_factor * compute.parameters / compute.layers
        self._transfer: Curve = bits / (rates * 1e9)
        self._latency = exchange.hops * exchange.latency_seconds
        self._due = _due(compute.layers, exchange)
        self._offsets = sorted(self._due)
        self._awaited: dict[int, list[tuple[int, Curve]]] = {}
        self.clock: Curve = np.zeros_like(rates)
        self.link: Curve = np.zeros_like(rates)

    def steps(self, first: int, last: int) -> None:
        """A stretch in which no reduction is issued or awaited is one addition, whatever its length."""
        step = first
        while step <= last:
            busy = min(self._next_due(step), min(self._awaited, default=last), last + 1)
            if busy > step:
                self.clock = self.clock + (busy - step) * self._step_seconds
                step = busy
            else:
                self._step(step, self._due.get(step % self._every, ()))
                step += 1

    def _next_due(self, step: int) -> int:
        later = bisect_left(self._offsets, step % self._every)
        offset = self._offsets[later] if later < len(self._offsets) else self._offsets[0] + self._every
        return step - step % self._every + offset

    def makespan(self) -> Curve:
        """The last reduction counts, although no step waits for it."""
        return np.maximum(self.clock, self.link + self._latency * (self.link > 0))

    def _step(self, step: int, due: Sequence[int]) -> None:
        self._forward(self._awaited.pop(step, ()))
        for layer in due:  # from the last layer down: the order in which they are issued
            released = self.clock + self._node * _backward_nodes(self._layers, layer)
            self.link = np.maximum(self.link, released) + self._transfer
            self._awaited.setdefault(step + 1 + self._delay, []).append((layer, self.link + self._latency))
        self.clock = self.clock + self._node * (2 * self._layers - 1)

    def _forward(self, awaited: Sequence[tuple[int, Curve]]) -> None:
        at = 0
        for layer, ready in sorted(awaited, key=lambda each: each[0]):
            self.clock = np.maximum(self.clock + self._node * (layer - at), ready)
            at = layer
        self.clock = self.clock + self._node * (self._layers - at)


def _backward_nodes(layers: int, layer: int) -> int:
    """Nodes from the end of the forward to the end of this layer's (from 0) backward-to-parameters."""
    return 2 * (layers - layer) - (layer == 0)


def _due(layers: int, exchange: Exchange) -> dict[int, list[int]]:
    """By step modulo the interval: the layers to reduce, last first. Fragment q is due at offset floor(q*H/P)."""
    fragments = fragments_of(layers, exchange)
    due: dict[int, list[int]] = {}
    for fragment, offset in zip(fragments, offsets(len(fragments), exchange.every), strict=True):
        due.setdefault(offset, []).extend(fragment)
    return {offset: sorted(found, reverse=True) for offset, found in due.items()}
