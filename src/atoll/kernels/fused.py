"""Merges, outer steps and announcements by compiled loops, on all cores. The results are the bits of the torch path.

`Fused` is made if numba is there and the fragments, or the number of learners, are worth its import. What it has no loops for (a
robust or registered merge, RDA by rows, delayed Nesterov, a codec other than those in `KINDS`) it leaves to torch, part by part:
torch decodes a packet, merges a gradient or encodes an announcement, and the rest is fused all the same. `why_torch` says which.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.codecs import Packet, codec
from atoll.codecs.layout import block_count
from atoll.config import Config
from atoll.errors import UserError
from atoll.tensors import norms
from atoll.tensors.layout import Fragment, Slot
from atoll.tensors.merge import direction_factor, radial_factor, voters_of
from atoll.tensors.norms import LEAF, Array, PartSquares, may_overflow, part_ends, tree_sum
from atoll.tensors.outer import OuterRule, OuterState
from atoll.tensors.stripes import CutSlot, Meeting

Floats = np.ndarray[Any, np.dtype[np.float32]]

WORTHWHILE: Final = 1 << 20
"""Elements of the largest fragment. Below, torch takes milliseconds and the import of numba a second."""
MANY_LEARNERS: Final = 32
"""From so many on also of small fragments: torch begins a dozen operations for each contribution."""
CHUNK: Final = 64 * LEAF
"""Elements that are worth a call in another thread."""
ALL_CORES_UP_TO: Final = 8
RANGES: Final = 4
"""Calls for each thread: more would cost more of the interpreter's time, with fewer a thread may wait for the last one."""
KINDS: Final = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3, "e3m0": 4}
UNITS: Final = {"int8": 1.0, "int4": 2.0**-4, "e3m0": 2.0**-6}
RULES: Final = {"sgd": 0, "momentum": 1, "nesterov": 2}
DOWN: Final = ("int8", "bf16")
"""Codecs whose announcements have a loop."""
NOTHING: Final = np.empty(0, np.float32)
NO_LEAVES: Final = np.empty(0)


class ArrayPool:
    """Large arrays that are used again once nobody holds them: fresh pages would cost more than the arithmetic on them."""

    def __init__(self, spare_max: int = 4) -> None:
        self._lent: list[Array] = []
        self._spare_max = spare_max
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: Any) -> Tensor:
        """Uninitialised. A tensor, its views and its bytes hold the array; without any of them only this list does."""
        with self._lock:
            idle = [a for a in self._lent if sys.getrefcount(a) == _IDLE_REFERENCES]
            size = _rounded(numel)
            for array in idle:
                if array.size == size and array.dtype == dtype:
                    return torch.from_numpy(array[:numel])
            surplus = {id(array) for array in idle[self._spare_max :]}
            self._lent = [array for array in self._lent if id(array) not in surplus]
            self._lent.append(np.empty(size, dtype))
            return torch.from_numpy(self._lent[-1][:numel])


def _rounded(numel: int) -> int:
    """Up to a sixteenth of the power of two below, so that fragments of similar size share arrays."""
    step = max(1, 1 << max(0, numel.bit_length() - 5))
    return -(-numel // step) * step


def _idle_references() -> int:
    lent = [np.empty(1)]
    (found,) = [sys.getrefcount(a) for a in lent]
    return found


_IDLE_REFERENCES: Final = _idle_references()


class MergePart(NamedTuple):
    packet: Packet
    base: Tensor | None
    """Theta's drift since this version is added to it; None: nothing is."""


class FusedStep(NamedTuple):
    theta: Tensor
    outer: OuterState | None
    announced: Tensor | None
    """None: announcements of this codec are encoded by torch, or in full."""
    packet: Packet | None
    moves: Array
    """The squares of how far Theta moved, leaf by leaf."""
    sizes: Array
    """Of what is announced, likewise; zeros where torch encodes it."""


class _Source(NamedTuple):
    kind: int
    codes: Array
    factors: Floats
    numel: int
    base: Floats
    """The announced version; empty where no drift is added."""


class _Voters(NamedTuple):
    """The contributions that have a weight, and what `gathered` reads of them. They are all by the run's codec."""

    sources: Sequence[_Source]
    codes: tuple[int, Array, Array]
    """Their kind, an empty array of the type of their codes, and the table of their addresses."""
    numel: int


def _voters(sources: Sequence[_Source]) -> _Voters:
    first = sources[0]
    assert all((s.kind, s.codes.dtype, s.numel) == (first.kind, first.codes.dtype, first.numel) for s in sources)
    assert all(array.flags.c_contiguous for s in sources for array in (s.codes, s.factors, s.base)), "these arrays have gaps"
    rows = [
        (s.codes.ctypes.data, len(s.codes), s.factors.ctypes.data, len(s.factors), s.base.ctypes.data if s.base.size else 0)
        for s in sources
    ]
    return _Voters(sources, (first.kind, first.codes[:0], np.array(rows, np.int64)), first.numel)


def worthwhile(fragments: Sequence[Fragment], learners: int) -> bool:
    return _asked_for() == "numba" or max(f.numel for f in fragments) >= WORTHWHILE or learners >= MANY_LEARNERS


def has_numba() -> bool:
    asked, found = _asked_for(), importlib.util.find_spec("numba") is not None
    if asked == "numba" and not found:
        raise UserError("ATOLL_KERNELS=numba: numba is not installed; pip install numba, or unset ATOLL_KERNELS")
    return asked != "torch" and found


def _asked_for() -> str:
    """`torch`: no kernels; `numba`: for small fragments too; "" leaves it to their size and to the number of learners."""
    asked = os.environ.get("ATOLL_KERNELS", "")
    if asked not in ("", "torch", "numba"):
        raise UserError(f"ATOLL_KERNELS={asked}: is torch, numba, or not set")
    return asked


def why_torch(config: Config) -> str:
    """Which parts of this run torch computes although there are kernels; "" if none."""
    p, o = config.protocol, config.outer
    parts = [f"codec {name}" for name in {p.codec_up} if name not in KINDS]
    parts += [f"codec {p.codec_down} down"] if p.codec_down not in (*DOWN, "fp32") else []
    parts += [f"merge {p.merge}"] if not _merges(config) else []
    parts += [f"outer optimiser {o.outer_optimizer}"] if o.outer_optimizer not in RULES else []
    parts += ["the outer momentum's warm-up"] if o.momentum_warmup else []
    return ", ".join(parts)


def _merges(config: Config) -> bool:
    p = config.protocol
    return p.merge in ("mean", "rda") and p.embedding_merge in ("mean", "rda") and (p.merge_norm == "tensor" or p.merge == "mean")


def threads_for(cores: int) -> int:
    """All cores of a small machine, half of those of a large one: the connections of the learners take the other half. With eight
    learners on 16 cores a round took 285 ms with four threads and 331 with 16."""
    return max(min(cores, ALL_CORES_UP_TO), cores // 2)


class Fused:
    def __init__(self, config: Config, threads: int | None = None) -> None:
        self._loops: Any = importlib.import_module("atoll.kernels.compiled")
        self._gathered: Any = importlib.import_module("atoll.kernels.gathered")
        self._config = config
        self._threads = threads or threads_for(os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="kernels") if self._threads > 1 else None
        self._buffers, self._codes = ArrayPool(), ArrayPool()
        self.merges = _merges(config)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def warm_up(self, rule: OuterRule | None) -> float:
        """Builds every loop of this run, or loads it from the cache; returns the seconds that took. It holds the interpreter's
        lock, so it must be over before a peer waits for an answer."""
        began, numel = time.monotonic(), 2 * LEAF
        slots = tuple(Slot(str(i), "param", 0, LEAF, (LEAF,), i * LEAF, LEAF, torch.float32, bool(i)) for i in range(2))
        fragment, zeros = Fragment(0, slots, (), numel, 0), torch.zeros(numel)
        up = self._config.protocol.codec_up
        packet = codec(up if up in KINDS else "fp32").encode(torch.ones(numel))
        self.norm(packet), self.norm(Packet("fp32", numel, zeros, None))
        if self.merges:
            self.merged(fragment, zeros, [MergePart(packet, zeros), MergePart(packet, None)], [1.0, 2.0], plain=False)
        if rule is not None and self.steps(rule):
            state = OuterState(zeros, None, 1)
            self.step(fragment, zeros, np.ones(2, np.float32), zeros, zeros, state, rule)
        return time.monotonic() - began

    # ------------------------------------------------------------ inspection

    def norm(self, packet: Packet) -> float | None:
        """`packet_norm`, in one pass; None if there is no loop for its codec. In the caller's thread: several contributions are
        inspected at once."""
        if packet.codec not in KINDS or packet.numel == 0:
            return None
        leaves = self.block_leaves(packet)
        return math.sqrt(tree_sum(self.value_leaves(packet) if leaves is None else leaves))

    def block_leaves(self, packet: Packet) -> Array | None:
        """The squares by block, from the codes; None where they cannot be told so."""
        if packet.codec not in UNITS:
            return None
        source = self._source(packet, NOTHING)
        if may_overflow(torch.from_numpy(source.factors)):
            return None
        sums = np.empty(len(source.factors), np.int32)
        self._loops.block_squares(source.kind, source.codes, source.numel, sums)
        return norms.block_leaves(sums, source.factors)

    def value_leaves(self, packet: Packet) -> Array:
        """The squares by leaf of what it decodes to."""
        source, leaves = self._source(packet, NOTHING), np.empty(-(-packet.numel // LEAF))
        self._loops.gradient_leaves(source.kind, source.codes, source.factors, source.numel, 0, source.numel, NOTHING, leaves)
        return leaves

    # ------------------------------------------------------------ merging

    def merged(
        self, fragment: Fragment, theta: Tensor, parts: Sequence[MergePart], weights: Sequence[float], *, plain: bool,
        cut: Sequence[CutSlot] = (), meeting: Meeting | None = None,
    ) -> tuple[Tensor, Floats]:  # fmt: skip
        """The merged outer gradient, each slot still to be multiplied by its factor. `plain`: the mean of everything. `cut`: of a
        stripe, the slots that it has only parts of; `meeting` gives their norms."""
        config = self._config.protocol
        present = _array(theta)
        bases = {id(part.base): NOTHING if part.base is None else _array(part.base) for part in parts}
        sources, shares = voters_of([self._source(part.packet, bases[id(part.base)]) for part in parts], weights)
        voters = _voters(sources)
        out = self._buffers.take(fragment.numel, np.float32)
        factors = np.ones(len(fragment.params), np.float32)
        parts_of, shared = {part.index: part for part in cut}, list[CutSlot]()
        for index, slot in enumerate(fragment.params):
            how = "mean" if plain else config.embedding_merge if slot.embedding else config.merge
            if how == "mean" or len(sources) == 1 or not slot.numel:
                self._mean(slot, present, voters, shares, out)
            elif index in parts_of:
                shared.append(parts_of[index])
            else:
                factors[index] = self._rda(slot, present, voters, shares, out)
        if shared:
            assert meeting is not None
            self._rda_parts(fragment, shared, present, voters, shares, out, factors, meeting)
        return out, factors

    def _mean(self, slot: Slot, theta: Floats, voters: _Voters, shares: Sequence[float], out: Tensor) -> None:
        single = len(voters.sources) == 1
        self._add(theta, voters, [1.0] if single else shares, out, slot, 0.0 if single else sum(shares))

    def _rda(self, slot: Slot, theta: Floats, voters: _Voters, shares: Sequence[float], out: Tensor) -> Any:
        """The sum of directions into `out`, and the factor that gives it the mean magnitude."""
        leaves = self._measured(slot.offset, slot.numel, theta, voters)
        norms, length = [math.sqrt(tree_sum(row)) for row in leaves], np.empty(leaves.shape[1])
        directions = [direction_factor(norm, share) for norm, share in zip(norms, shares, strict=True)]
        self._add(theta, voters, directions, out, slot, 0.0, length)
        factor = radial_factor(norms, shares, math.sqrt(tree_sum(length)))
        if factor is None:
            self._mean(slot, theta, voters, shares, out)
        return np.float32(1.0 if factor is None else factor)

    def _measured(self, offset: int, numel: int, theta: Floats, voters: _Voters) -> Array:
        """The sums of squares of a range, leaf by leaf, for each voter."""
        leaves = np.empty((len(voters.sources), -(-numel // LEAF)))

        def measure(left: int, right: int) -> None:
            self._gathered.measure(*voters.codes, voters.numel, offset, left, right, theta, leaves)

        self._spread(measure, offset, numel)
        return leaves

    def _add(
        self, theta: Floats, voters: _Voters, shares: Sequence[float], out: Tensor, slot: Slot, divisor: float,
        lengths: Array = NO_LEAVES,
    ) -> None:  # fmt: skip
        """The sum of the outer gradients of a slot, each times its share."""
        total, factors = _array(out), np.array(shares, np.float32)

        def add(left: int, right: int) -> None:
            self._gathered.add(
                *voters.codes, factors, voters.numel, slot.offset, left, right, theta, total, np.float32(divisor), lengths
            )

        self._spread(add, slot.offset, slot.numel)

    def _rda_parts(
        self, fragment: Fragment, cut: Sequence[CutSlot], theta: Floats, voters: _Voters, shares: Sequence[float],
        out: Tensor, factors: Floats, meeting: Meeting,
    ) -> None:  # fmt: skip
        """As `_rda`, of slots of which this stripe has parts, with the norms of the whole slots."""
        norms = meeting.norms({part.whole: self._part_squares(fragment, part, theta, voters) for part in cut})
        for part in cut:
            slot = fragment.params[part.index]
            directions = [direction_factor(norm, share) for norm, share in zip(norms[part.whole], shares, strict=True)]
            self._add(theta, voters, directions, out, slot, 0.0)
        lengths = meeting.norms({part.whole: [self._length_squares(fragment, part, out)] for part in cut})
        for part in cut:
            factor = radial_factor(norms[part.whole], shares, lengths[part.whole][0])
            if factor is None:
                self._mean(fragment.params[part.index], theta, voters, shares, out)
            else:
                factors[part.index] = np.float32(factor)

    def _part_squares(
        self, fragment: Fragment, part: CutSlot, theta: Floats, voters: _Voters
    ) -> list[PartSquares]:
        slot = fragment.params[part.index]
        first, last = part_ends(part.at, slot.numel, ends=part.ends)
        leaves = self._measured(slot.offset + first, last - first, theta, voters)
        heads = self._gradients(slot.offset, first, theta, voters)
        tails = self._gradients(slot.offset + last, slot.numel - last, theta, voters)
        return [PartSquares(*given) for given in zip(heads, leaves, tails, strict=True)]

    def _gradients(self, left: int, count: int, theta: Floats, voters: _Voters) -> list[Floats]:
        """The numbers of each voter's outer gradient, at the end of a part."""
        found = [np.empty(count, np.float32) for _ in voters.sources]
        for (kind, codes, factors, numel, base), target in zip(voters.sources, found, strict=True):
            if count:
                drift = theta[left : left + count] - base[left : left + count] if base.size else NOTHING
                self._loops.gradient(kind, codes, factors, numel, left, drift, target)
        return found

    def _length_squares(self, fragment: Fragment, part: CutSlot, out: Tensor) -> PartSquares:
        slot = fragment.params[part.index]
        first, last = part_ends(part.at, slot.numel, ends=part.ends)
        x, leaves = _array(out)[slot.offset : slot.offset + slot.numel], np.empty(-(-(last - first) // LEAF))

        def measure(left: int, right: int) -> None:
            self._loops.square_leaves(x[left:right], leaves[(left - first) // LEAF : -(-(right - first) // LEAF)])

        self._spread(measure, first, last - first)
        return PartSquares(x[:first].copy(), leaves, x[last:].copy())

    def _source(self, packet: Packet, base: Floats) -> _Source:
        kind, unit = KINDS.get(packet.codec), UNITS.get(packet.codec)
        if kind is None:
            return _Source(0, _array(codec(packet.codec).decode(packet)), NOTHING, packet.numel, base)
        codes = packet.codes.view(torch.uint16) if packet.codec == "bf16" else packet.codes
        if unit is None:
            return _Source(kind, codes.numpy(), NOTHING, packet.numel, base)
        assert packet.scales is not None
        return _Source(kind, codes.numpy(), (packet.scales * unit).numpy(), packet.numel, base)

    # ------------------------------------------------------------ the outer step

    def steps(self, rule: OuterRule) -> bool:
        return rule.optimizer in RULES

    def step(
        self, fragment: Fragment, delta: Tensor, factors: Floats, theta: Tensor, announced: Tensor, state: OuterState,
        rule: OuterRule,
    ) -> FusedStep:  # fmt: skip
        """As `outer_step`, with the announcement of the new Theta and its distance from the old one. The caller decodes nothing
        again: what learners will hold is computed beside the codes."""
        numel, down = fragment.numel, self._config.protocol.codec_down
        new = partial(self._buffers.take, numel, np.float32)
        moves = rule.optimizer != "sgd"
        next_theta, fused_down = new(), down in DOWN
        momentum = state.momentum if moves and state.momentum is not None else None
        next_momentum = new() if moves else None
        next_announced = new() if fused_down else None
        codes = self._codes.take(numel if fused_down else 0, np.uint16 if down == "bf16" else np.int8)
        scales = torch.empty(block_count(numel) if down == "int8" else 0)
        leaves, sizes = np.zeros(max(1, -(-numel // LEAF))), np.zeros(max(1, -(-numel // LEAF)))
        bounds = np.array([*(slot.offset for slot in fragment.params), numel], np.int64)
        arguments = (
            RULES[rule.optimizer], state.count == 0, np.float32(rule.learning_rate), np.float32(rule.momentum),
            KINDS[down] if fused_down else 0, _array(delta), bounds, factors, _array(theta), _or_nothing(momentum),
            _array(announced), _array(next_theta), _or_nothing(next_momentum), _or_nothing(next_announced),
            codes.numpy(), scales.numpy(), leaves, sizes,
        )  # fmt: skip
        self._spread(lambda left, right: self._loops.step(*arguments, left, right), 0, numel)
        outer = OuterState(next_momentum if moves else None, None, state.count + 1)
        coded = codes.view(torch.bfloat16) if down == "bf16" else codes
        packet = Packet(down, numel, coded, scales if down == "int8" else None) if fused_down else None
        return FusedStep(next_theta, outer, next_announced, packet, leaves, sizes)

    # ------------------------------------------------------------ threads

    def spread(self, work: Callable[[int, int], None], count: int) -> None:
        """Calls `work` with ranges that are all of 0 to `count`, in several threads. Each thread takes the next range when it is
        done, so that one whose core has other work holds up nobody."""
        if self._pool is None or count < 2:
            work(0, count)
            return
        size = -(-count // (RANGES * self._threads))
        for done in [self._pool.submit(work, left, min(count, left + size)) for left in range(0, count, size)]:
            done.result()

    def _spread(self, work: Callable[[int, int], None], offset: int, numel: int) -> None:
        """Ranges of elements, cut at whole chunks."""
        end = offset + numel
        self.spread(lambda left, right: work(offset + left * CHUNK, min(end, offset + right * CHUNK)), -(-numel // CHUNK))


def _array(tensor: Tensor) -> Floats:
    found: Floats = tensor.contiguous().numpy()
    return found


def _or_nothing(tensor: Tensor | None) -> Floats:
    return NOTHING if tensor is None else _array(tensor)
