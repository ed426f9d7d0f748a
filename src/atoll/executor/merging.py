"""Merging one fragment: a pure function of the version before, the contributions, their shares and what they are differences to.

It makes new tensors and changes none. So the same merge carried out again gives the same bytes: in a replay, and where a syncer
that was killed merges again what its log of inputs holds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from atoll.codecs import Packet, codec
from atoll.codecs.scaled import Scaled
from atoll.config import Config
from atoll.executor.optim.build import build_optimizer, optimizer_step
from atoll.ids import FragmentId, OuterStep
from atoll.kernels.fused import KINDS, Fused, MergePart, has_numba, why_torch, worthwhile
from atoll.store.durable import Remerge
from atoll.store.striped import RemergeOf
from atoll.store.versions import MergeInputs, Met, Version, in_one_thread
from atoll.tensors.access import cast_like
from atoll.tensors.layout import Fragment
from atoll.tensors.merge import mean, merge, merge_buffers
from atoll.tensors.norms import Array, PartSquares, block_leaves, leaf_squares_of, may_overflow, outlier_norm, tree_sum
from atoll.tensors.outer import OuterRule, OuterState, averaged, outer_rule, outer_step
from atoll.tensors.robust import ROBUST
from atoll.tensors.stripes import CutSlot, Meeting, stripes_of

PLAIN = OuterRule(optimizer="sgd", learning_rate=1.0)


def packet_norm(packet: Packet) -> float:
    """The norm of what a packet decodes to. With a scale for each block the codes' squares add up to exact integers, so that the
    packet need not be decoded; unless a product could exceed the largest float, which decodes to Inf."""
    leaves = _packet_leaves(packet)
    return outlier_norm(codec(packet.codec).decode(packet)) if leaves is None else math.sqrt(tree_sum(leaves))


def _packet_leaves(packet: Packet) -> Array | None:
    by = codec(packet.codec)
    squares = by.block_squares(packet) if isinstance(by, Scaled) else None
    if squares is None or may_overflow(squares[1]):
        return None
    sums, factors = (tensor.cpu().numpy() for tensor in squares)
    return block_leaves(sums, factors)


class Merged(NamedTuple):
    version: Version
    repeatable: bool = False
    """Whether `FragmentMerger.again` gives the same bytes on any machine: by the kernels, or by torch in their place."""
    moves: Array | None = None
    """The squares of how far it moved Theta, leaf by leaf, where the kernels have measured it."""
    sizes: Array | None = None
    """Of the announced vector, likewise."""
    met: Met = ()
    """Of a stripe: the norms that it learnt of slots which it has parts of. They are inputs of the merge."""


class Attended:
    """Norms of slots that several shards have parts of: learnt from the others and kept, or those of a merge that is repeated."""

    def __init__(self, meeting: Meeting | None, before: Met = ()) -> None:
        self._meeting = meeting
        self._before = list(before)
        self.met: list[tuple[tuple[int, tuple[float, ...]], ...]] = []

    def norms(self, parts: Mapping[int, Sequence[PartSquares]]) -> Mapping[int, Sequence[float]]:
        if self._before:
            given = self._before.pop(0)
        else:
            assert self._meeting is not None, "a stripe is merged where the other shards are"
            given = tuple((slot, tuple(norms)) for slot, norms in sorted(self._meeting.norms(parts).items()))
        self.met.append(given)
        return dict(given)


def remerge_for(config: Config, fragments: Sequence[Fragment]) -> RemergeOf:
    """For a reader of stored versions, which may have none to merge again: the kernels are built when the first comes."""

    def of(shard: int, shards: int) -> Remerge:
        mergers: list[FragmentMerger] = []

        def again(p: FragmentId, inputs: MergeInputs, previous: Version, announced: Sequence[Tensor]) -> Version:
            if not mergers:
                mergers.append(stripe_merger(config, fragments, shard, shards, warm_up=False))
            return mergers[0].again(p, inputs, previous, announced)

        return again

    return of


def stripe_merger(
    config: Config, fragments: Sequence[Fragment], shard: int, shards: int, *, warm_up: bool = True, threads: int | None = None
) -> FragmentMerger:
    """Of a shard's stripe of every fragment; (0, 1) is of whole fragments."""
    own = [stripes_of(fragment, shards)[shard] for fragment in fragments]
    cut = [stripe.cut for stripe in own]
    return FragmentMerger(config, [stripe.fragment for stripe in own], warm_up=warm_up, threads=threads, cut=cut)


class FragmentMerger:
    meeting: Meeting | None = None
    """Of a shard: where it learns what its stripes cannot tell it."""

    def __init__(
        self, config: Config, fragments: Sequence[Fragment], *, warm_up: bool = True, threads: int | None = None,
        cut: Sequence[Sequence[CutSlot]] | None = None,
    ) -> None:  # fmt: skip
        """`warm_up`: build the kernels now, which takes seconds, and not in the first round. `threads`: of the kernels; by
        default `threads_for` the cores. `cut`: where the fragments are stripes, which slots of each are parts."""
        self._cut = cut or [()] * len(fragments)
        self._config = config
        self._fragments = fragments
        self._rule = outer_rule(config)
        self._up = codec(config.protocol.codec_up)
        self._down = codec(config.protocol.codec_down)
        self._fused = Fused(config, threads) if worthwhile(fragments, config.learners) and has_numba() else None
        self._warm_seconds = self._fused.warm_up(self._rule) if self._fused is not None and warm_up else 0.0

    @property
    def kernels(self) -> str:
        """What merges, for people."""
        rest = why_torch(self._config)
        return "torch" if self._fused is None else f"numba, and torch for {rest}" if rest else "numba"

    @property
    def warm_seconds(self) -> float:
        """How long it took to build the kernels."""
        return self._warm_seconds

    def use_torch(self) -> None:
        """The oracle of the kernels: the same bytes by torch's operations."""
        self._fused = None

    def spread(self, work: Callable[[int, int], None], count: int) -> None:
        """Over the threads of the kernels, where there are any."""
        (in_one_thread if self._fused is None else self._fused.spread)(work, count)

    def norm(self, packet: Packet) -> float:
        norm = self._fused.norm(packet) if self._fused is not None and not packet.codes.is_cuda else None
        return packet_norm(packet) if norm is None else norm

    def norm_leaves(self, packet: Packet, *, by_value: bool) -> Array | None:
        """Of a part of a packet: what `norm` of the whole adds up. None: only the values tell, and then of all parts."""
        by_value = by_value or not isinstance(codec(packet.codec), Scaled)
        fused = self._fused if packet.numel and packet.codec in KINDS else None
        if by_value:
            return leaf_squares_of(codec(packet.codec).decode(packet)) if fused is None else fused.value_leaves(packet)
        if not packet.numel:
            return np.empty(0)
        return _packet_leaves(packet) if fused is None else fused.block_leaves(packet)

    def again(self, p: FragmentId, inputs: MergeInputs, previous: Version, announced: Sequence[Tensor]) -> Version:
        """A merge that was `repeatable`."""
        return self.merge(0, p, inputs, previous, announced).version

    def merge(
        self, t: OuterStep, p: FragmentId, inputs: MergeInputs, previous: Version, announced: Sequence[Tensor]
    ) -> Merged:
        """`announced`: the vector that each contribution is a difference to. `t` counts for the inner schedule, which only
        data-parallel has here."""
        attended = Attended(self.meeting, inputs.met)
        merged, decay = self._stepped(t, p, inputs, previous, announced, attended), self._config.outer.average_decay
        outer, merged = merged.version.outer, merged._replace(met=tuple(attended.met))
        if not decay or outer is None:
            return merged
        before = None if previous.outer is None else previous.outer.average
        outer = replace(outer, average=averaged(before, merged.version.theta, decay))
        return merged._replace(version=replace(merged.version, outer=outer))

    def _stepped(
        self, t: OuterStep, p: FragmentId, inputs: MergeInputs, previous: Version, announced: Sequence[Tensor], meeting: Meeting
    ) -> Merged:
        fragment, weights = self._fragments[p], list(inputs.weights)
        own = self._rule.at(previous.outer.count) if self._rule is not None and previous.outer is not None else None
        if self._fused is not None and own is not None and not previous.theta.is_cuda:
            rule = PLAIN if inputs.plain_average else own
            if self._fused.steps(rule):
                return self._merge_fused(self._fused, fragment, inputs, previous, announced, rule, meeting)
        deltas = self._outer_gradients(fragment, previous, inputs.packets, announced)
        robust = self._config.protocol.merge in ROBUST
        buffers = merge_buffers(list(inputs.buffers), weights, fragment, robust=robust)
        plain = inputs.plain_average or own is None
        averages = plain and not robust
        delta = mean(deltas, weights) if averages else self._merged_delta(fragment, deltas, weights, previous, meeting)
        if own is None:
            theta, inner = self._inner_step(fragment, previous, delta, t)
            return Merged(self._announced(previous, theta, buffers, None, inner))
        if inputs.plain_average:
            theta, _ = outer_step(previous.theta, delta, OuterState(None, None, 0), PLAIN)
            return Merged(self._announced(previous, theta, buffers, previous.outer, None))
        assert previous.outer is not None
        counted = sum(weight > 0 for weight in weights) if self._config.protocol.dynamic_steps else 1
        theta, outer = outer_step(previous.theta, delta, previous.outer, own, max(1, counted))
        return Merged(self._announced(previous, theta, buffers, outer, None))

    def _merge_fused(
        self, fused: Fused, fragment: Fragment, inputs: MergeInputs, previous: Version, announced: Sequence[Tensor],
        rule: OuterRule, meeting: Meeting,
    ) -> Merged:  # fmt: skip
        """The same as above in two passes over memory."""
        weights, robust = list(inputs.weights), self._config.protocol.merge in ROBUST
        if fused.merges or (inputs.plain_average and not robust):
            given = [
                MergePart(packet, self._drifts_from(fragment, previous, vector))
                for packet, vector in zip(inputs.packets, announced, strict=True)
            ]
            delta, factors = fused.merged(
                fragment, previous.theta, given, weights, plain=inputs.plain_average, cut=self._cut[fragment.id], meeting=meeting
            )
        else:
            deltas = self._outer_gradients(fragment, previous, inputs.packets, announced)
            delta = self._merged_delta(fragment, deltas, weights, previous, meeting)
            factors = np.ones(len(fragment.params), np.float32)
        before = OuterState(None, None, 0) if inputs.plain_average else previous.outer
        assert before is not None
        stepped = fused.step(fragment, delta, factors, previous.theta, previous.announced, before, rule)
        buffers = merge_buffers(list(inputs.buffers), weights, fragment, robust=robust)
        outer = previous.outer if inputs.plain_average else stepped.outer
        repeatable = not why_torch(self._config)
        if stepped.announced is None:
            version = self._announced(previous, stepped.theta, buffers, outer, None)
            return Merged(version, repeatable, stepped.moves)
        version = Version(stepped.theta, buffers, outer, None, stepped.announced, stepped.packet)
        return Merged(version, repeatable, stepped.moves, stepped.sizes)

    def _drifts_from(self, fragment: Fragment, present: Version, announced: Tensor) -> Tensor | None:
        if self._config.protocol.anchor != "present":
            return None
        base = cast_like(fragment, announced)
        return None if base is present.theta else base

    def _merged_delta(
        self, fragment: Fragment, deltas: Sequence[Tensor], weights: Sequence[float], previous: Version, meeting: Meeting
    ) -> Tensor:
        c, momentum = self._config.protocol, None if previous.outer is None else previous.outer.momentum
        return merge(
            deltas, weights, fragment, method=c.merge, embedding_method=c.embedding_merge, norm=c.merge_norm, momentum=momentum,
            cut=self._cut[fragment.id], meeting=meeting,
        )  # fmt: skip

    def _outer_gradients(
        self, fragment: Fragment, present: Version, packets: Sequence[Packet], announced: Sequence[Tensor]
    ) -> list[Tensor]:
        """With anchor "present": Theta - theta_m, where theta_m is rebuilt from the version that the difference refers to. The
        drift of Theta since a version is the same for all learners at that version and is computed once."""
        deltas = [self._up.decode(packet) for packet in packets]  # new tensors, ours to add to
        if self._config.protocol.anchor != "present":
            return deltas
        moved: dict[int, Tensor | None] = {}
        for delta, vector in zip(deltas, announced, strict=True):
            if id(vector) not in moved:
                base = cast_like(fragment, vector)
                moved[id(vector)] = None if present.theta is base else present.theta - base
            drift = moved[id(vector)]
            if drift is not None:
                delta.add_(drift)
        return deltas

    def _inner_step(
        self, fragment: Fragment, previous: Version, gradient: Tensor, outer_step_: OuterStep
    ) -> tuple[Tensor, dict[str, Any]]:
        """Data-parallel: the inner optimiser steps on Theta, tensor by tensor, as on each rank."""
        params = [nn.Parameter(_slot(previous.theta, s.offset, s.shape, s.numel).clone()) for s in fragment.params]
        optimizer = build_optimizer(self._config, {s.name: p for s, p in zip(fragment.params, params, strict=True)}, (fragment,))
        if previous.inner is not None:
            optimizer.load_state_dict(copy.deepcopy(previous.inner))
        for param, s in zip(params, fragment.params, strict=True):
            param.grad = _slot(gradient, s.offset, s.shape, s.numel).clone()
        optimizer_step(self._config, optimizer, outer_step_ - 1)
        return torch.cat([param.detach().reshape(-1) for param in params]), optimizer.state_dict()

    def _announced(
        self, previous: Version, theta: Tensor, buffers: Tensor, outer: OuterState | None, inner: dict[str, Any] | None
    ) -> Version:
        """With a lossy codec down, a version is announced as the difference to the previous announcement. The syncer keeps the
        codec's error, and the next difference contains it."""
        if self._down.lossless:
            return Version(theta, buffers, outer, inner, theta, None)
        packet = self._down.encode(theta - previous.announced)
        return Version(theta, buffers, outer, inner, previous.announced + self._down.decode(packet), packet)


def _slot(flat: Tensor, offset: int, shape: tuple[int, ...], numel: int) -> Tensor:
    return flat[offset : offset + numel].view(shape)
