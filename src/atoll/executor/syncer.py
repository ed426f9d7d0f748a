"""The syncer's executor: Theta, outer state and announced versions, fragment by fragment, on CPU in fp32.

A merge makes new tensors from those of the version it names as `previous` and changes none, so the same merge carried out
twice gives the same bytes, and a merge that the tape does not record as stored leaves no trace.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from atoll.codecs import Packet, codec
from atoll.config import Config
from atoll.executor.optim.build import build_optimizer, optimizer_step
from atoll.ids import FragmentId, LearnerId, OuterStep
from atoll.kernels.fused import Fused, MergePart, has_numba, why_torch, worthwhile
from atoll.protocol.interface import CLEAN, Finding, Payload
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import (
    NO_VERSION,
    AbortRound,
    Accept,
    Announce,
    Contribution,
    CopyVersions,
    Discard,
    Effect,
    Envelope,
    Event,
    ForgetVersion,
    Measure,
    Merge,
    MergeRejected,
    Message,
    RecordInFlight,
    RecordSyncer,
    SealSnapshot,
    Send,
    Store,
    Stored,
    SyncerState,
)  # fmt: skip
from atoll.store.versions import Version, VersionStore, checksum
from atoll.tensors.access import cast_like
from atoll.tensors.layout import Fragment
from atoll.tensors.merge import mean, merge, merge_buffers
from atoll.tensors.norms import outlier_norm
from atoll.tensors.outer import OuterRule, OuterState, outer_rule, outer_step
from atoll.tensors.robust import ROBUST

PLAIN = OuterRule(optimizer="sgd", learning_rate=1.0)
NORMS_KEPT = 4
"""Versions of a fragment that learners hold at the same time, and a few more."""


class SnapshotStore(Protocol):
    """Stores the syncer's side of snapshots: `MemorySnapshots` in memory, `SyncerSnapshots` on disk."""

    def begin(self, snapshot: OuterStep, syncer_state: SyncerState) -> None: ...
    def put_in_flight(self, snapshot: OuterStep, envelope: Envelope, payload: Payload | None) -> None: ...
    def seal(
        self, snapshot: OuterStep, learners: tuple[LearnerId, ...], complete: bool, left_out: tuple[LearnerId, ...] = ()
    ) -> None: ...


class TensorSyncer:
    def __init__(
        self, config: Config, fragments: Sequence[Fragment], disk: VersionStore, snapshots: SnapshotStore | None = None
    ) -> None:
        self._config = config
        self._fragments = fragments
        self.disk = disk
        self._snapshots = snapshots
        self._rule = outer_rule(config)
        self._up = codec(self._config.protocol.codec_up)
        self._down = codec(self._config.protocol.codec_down)
        self._accepted: dict[tuple[OuterStep, FragmentId], dict[LearnerId, tuple[Packet, Tensor, Tensor]]] = {}
        """(packet, buffers, the announced vector it is a difference to). Encoded until the merge: int4 is 8 times smaller."""
        self._norm_of: dict[FragmentId, dict[OuterStep, float]] = {}
        """The norms of the versions of each fragment to which contributions refer."""
        self._merged: dict[tuple[OuterStep, FragmentId], Version] = {}
        self._previous: dict[tuple[OuterStep, FragmentId], Version] = {}
        """What each merged version was made from, until it is stored."""
        self._jumps: dict[tuple[OuterStep, FragmentId], float] = {}
        """How far the merge moved Theta, where the kernels have measured it."""
        self._fused = Fused(config) if worthwhile(fragments) and has_numba() else None
        self._warm_seconds = self._fused.warm_up(self._rule) if self._fused is not None else 0.0

    @property
    def kernels(self) -> str:
        """What merges, for people."""
        if self._fused is None:
            return "torch"
        rest = why_torch(self._config)
        return f"numba (ready after {self._warm_seconds:.1f} s)" + (f", and torch for {rest}" if rest else "")

    def use_torch(self) -> None:
        """The oracle of the kernels: the same bytes by torch's operations."""
        self._fused = None

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        match effect:
            case Accept():
                self._accept(effect, payload)
            case AbortRound(outer_step=t):
                for by_round in (self._accepted, self._merged, self._previous, self._jumps):
                    for key in [k for k in by_round if k[0] == t]:
                        del by_round[key]
                for norms in self._norm_of.values():
                    norms.pop(t, None)  # a rollback may take its number
            case RecordInFlight(snapshot=snapshot, envelope=envelope):
                if self._snapshots is not None:
                    self._snapshots.put_in_flight(snapshot, envelope, payload)
            case Discard(outer_step=t, learner=m):
                for (step, _), contributions in self._accepted.items():
                    if step == t:
                        contributions.pop(m, None)
            case Merge():
                self._merged[effect.outer_step, effect.fragment] = self._merge(effect)
            case CopyVersions(outer_step=t, versions=versions):
                for p, version in enumerate(versions):
                    self._previous[t, p] = self._merged[t, p] = replace(self.disk.at(p, version), packet=None)
            case Store():
                return (self._store(effect),)
            case ForgetVersion(fragment=p, version=v):
                self.disk.forget(p, v)
            case RecordSyncer(snapshot=snapshot, syncer_state=syncer_state):
                if self._snapshots is not None:
                    self._snapshots.begin(snapshot, syncer_state)
            case SealSnapshot(snapshot=snapshot, learners=learners, complete=complete, left_out=left_out):
                if self._snapshots is not None:
                    self._snapshots.seal(snapshot, learners, complete, left_out)
            case _:
                pass
        return ()

    def inspect(self, body: Message, payload: Payload) -> Finding:
        """Checks a contribution before the machine sees it: no NaN, Inf or wrong size reaches a merge."""
        if not isinstance(body, Contribution):
            return CLEAN
        flaw = self._flaw(body, payload)
        if flaw is not None:
            return Finding(flaw)
        norm = self._norm(payload.content[0])
        if not math.isfinite(norm):
            return Finding(Reason(Why.POISONED, f"fragment {body.fragment} holds NaN or Inf"))
        return Finding(None, Measure(norm, self._weights_norm(body.fragment, body.anchor)))

    def _weights_norm(self, p: FragmentId, version: OuterStep) -> float:
        """Of the version that a difference refers to, or of the newest if the learner names one that is gone."""
        known = self._norm_of.get(p, {}).get(version)
        if known is not None:
            return known
        try:
            weights = self.disk.announced(p, version)
        except (KeyError, OSError):
            return 0.0  # the machine refuses a difference to a version that is not kept
        norm = self._norm(Packet("fp32", weights.numel(), weights, None))
        self._know_norm(p, version, norm)
        return norm

    def _know_norm(self, p: FragmentId, version: OuterStep, norm: float) -> None:
        before = sorted(self._norm_of.get(p, {}).items())[-NORMS_KEPT:]
        self._norm_of[p] = {**dict(before), version: norm}  # replaced, not changed: several threads inspect

    def _norm(self, packet: Packet) -> float:
        norm = self._fused.norm(packet) if self._fused is not None and not packet.codes.is_cuda else None
        return outlier_norm(codec(packet.codec).decode(packet)) if norm is None else norm

    def _flaw(self, body: Contribution, payload: Payload) -> Reason | None:
        if payload.content is None:
            return Reason(Why.POISONED, "it came without bytes")
        packet, buffers = payload.content
        if packet.codec != self._up.name or packet.numel != self._fragments[body.fragment].numel:
            words = f"{packet.numel} numbers by {packet.codec} are not fragment {body.fragment} by {self._up.name}"
            return Reason(Why.POISONED, words)
        if buffers.numel() != self._fragments[body.fragment].buffer_numel:
            return Reason(Why.POISONED, f"{buffers.numel()} buffer elements are not those of fragment {body.fragment}")
        if not bool(torch.isfinite(buffers).all()):
            return Reason(Why.POISONED, f"fragment {body.fragment} holds NaN or Inf")
        return None

    def _accept(self, effect: Accept, payload: Payload | None) -> None:
        assert payload is not None
        packet, buffers = payload.content
        announced = self.disk.announced(effect.fragment, effect.anchor)
        accepted = self._accepted.setdefault((effect.outer_step, effect.fragment), {})
        accepted[effect.learner] = (packet, buffers, announced)

    # ------------------------------------------------------------ merging

    def _merge(self, effect: Merge) -> Version:
        p = effect.fragment
        fragment, previous = self._fragments[p], self.disk.base(p, effect.previous)
        self._previous[effect.outer_step, p] = previous
        contributions = self._accepted[effect.outer_step, p]
        weights = [share.weight for share in effect.shares]
        parts = [contributions[share.learner] for share in effect.shares]
        if self._fused is not None and self._rule is not None and not previous.theta.is_cuda:
            rule = PLAIN if effect.plain_average else self._rule
            if self._fused.steps(rule):
                return self._merge_fused(self._fused, effect, previous, parts, rule)
        deltas = self._outer_gradients(fragment, previous, parts)
        robust = self._config.protocol.merge in ROBUST
        buffers = merge_buffers([part[1] for part in parts], weights, fragment, robust=robust)
        plain = effect.plain_average or self._rule is None
        delta = mean(deltas, weights) if plain and not robust else self._merged_delta(fragment, deltas, weights)
        if self._rule is None:
            theta, inner = self._inner_step(fragment, previous, delta, effect.outer_step)
            return self._announced(previous, theta, buffers, None, inner)
        if effect.plain_average:
            theta, _ = outer_step(previous.theta, delta, OuterState(None, None, 0), PLAIN)
            return self._announced(previous, theta, buffers, previous.outer, None)
        assert previous.outer is not None
        theta, outer = outer_step(previous.theta, delta, previous.outer, self._rule)
        return self._announced(previous, theta, buffers, outer, None)

    def _merge_fused(
        self, fused: Fused, effect: Merge, previous: Version, parts: Sequence[tuple[Packet, Tensor, Tensor]], rule: OuterRule
    ) -> Version:
        """The same as above in two passes over memory."""
        p, weights = effect.fragment, [share.weight for share in effect.shares]
        fragment, robust = self._fragments[p], self._config.protocol.merge in ROBUST
        if fused.merges or (effect.plain_average and not robust):
            given = [MergePart(packet, self._drifts_from(fragment, previous, announced)) for packet, _, announced in parts]
            delta, factors = fused.merged(fragment, previous.theta, given, weights, plain=effect.plain_average)
        else:
            delta = self._merged_delta(fragment, self._outer_gradients(fragment, previous, parts), weights)
            factors = np.ones(len(fragment.params), np.float32)
        before = OuterState(None, None, 0) if effect.plain_average else previous.outer
        assert before is not None
        stepped = fused.step(fragment, delta, factors, previous.theta, previous.announced, before, rule)
        self._jumps[effect.outer_step, p] = stepped.jump
        buffers = merge_buffers([part[1] for part in parts], weights, fragment, robust=robust)
        outer = previous.outer if effect.plain_average else stepped.outer
        if stepped.announced is None:
            return self._announced(previous, stepped.theta, buffers, outer, None)
        self._know_norm(p, effect.outer_step, stepped.size)
        return Version(stepped.theta, buffers, outer, None, stepped.announced, stepped.packet)

    def _drifts_from(self, fragment: Fragment, present: Version, announced: Tensor) -> Tensor | None:
        if self._config.protocol.anchor != "present":
            return None
        base = cast_like(fragment, announced)
        return None if base is present.theta else base

    def _merged_delta(self, fragment: Fragment, deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        c = self._config.protocol
        return merge(deltas, weights, fragment, method=c.merge, embedding_method=c.embedding_merge, norm=c.merge_norm)

    def _outer_gradients(
        self, fragment: Fragment, present: Version, parts: Sequence[tuple[Packet, Tensor, Tensor]]
    ) -> list[Tensor]:
        """With anchor "present": Theta - theta_m, where theta_m is rebuilt from the version that the difference refers to. The
        drift of Theta since a version is the same for all learners at that version and is computed once."""
        deltas = [self._up.decode(packet) for packet, _, _ in parts]  # new tensors, ours to add to
        if self._config.protocol.anchor != "present":
            return deltas
        moved: dict[int, Tensor | None] = {}
        for delta, (_, _, announced) in zip(deltas, parts, strict=True):
            if id(announced) not in moved:
                base = cast_like(fragment, announced)
                moved[id(announced)] = None if present.theta is base else present.theta - base
            drift = moved[id(announced)]
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

    def _store(self, effect: Store) -> Stored | MergeRejected:
        t, fragments = effect.outer_step, effect.fragments
        versions = {p: self._merged[t, p] for p in fragments}
        jumps = tuple(self._jump(t, p) for p in fragments)
        limits = effect.jump_limits or (0.0,) * len(fragments)
        for p, jump, limit in zip(fragments, jumps, limits, strict=True):
            if not math.isfinite(jump) or (limit > 0 and jump > limit):
                return MergeRejected(t, p, jump)
        self.disk.put(t, versions)
        for p in fragments:
            del self._merged[t, p], self._previous[t, p]
            self._jumps.pop((t, p), None)
            self._accepted.pop((t, p), None)
        return Stored(t, checksum([tensor for v in versions.values() for tensor in (v.theta, v.buffers)]), jumps)

    def _jump(self, t: OuterStep, p: FragmentId) -> float:
        found = self._jumps.get((t, p))
        return outlier_norm(self._merged[t, p].theta - self._previous[t, p].theta) if found is None else found

    def payload_for(self, send: Send) -> Payload | None:
        body = send.envelope.body
        if not isinstance(body, Announce):
            return None
        version = self.disk.at(body.fragment, body.outer_step)
        bytes_of_buffers = 4 * version.buffers.numel()
        packet = None if body.previous == NO_VERSION else version.packet
        if packet is None:
            return Payload("fragment", 4 * version.announced.numel() + bytes_of_buffers, (version.announced, version.buffers))
        return Payload("fragment", packet.nbytes + bytes_of_buffers, (packet, version.buffers))


def _slot(flat: Tensor, offset: int, shape: tuple[int, ...], numel: int) -> Tensor:
    return flat[offset : offset + numel].view(shape)
