"""The syncer's executor: Theta, outer state and announced versions, fragment by fragment, on CPU in fp32.

A merge makes new tensors from those of the version it names as `previous` and changes none, so the same merge carried out
twice gives the same bytes, and a merge that the tape does not record as stored leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from atoll.codecs import Packet, codec
from atoll.config import Config
from atoll.errors import DataError
from atoll.executor.merging import FragmentMerger, Merged
from atoll.ids import FragmentId, LearnerId, OuterStep
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
from atoll.store.versions import MergeInputs, Version, VersionStore, checksum
from atoll.tensors.layout import Fragment
from atoll.tensors.norms import outlier_norm, tree_sum

NORMS_KEPT = 4
"""Versions of a fragment that learners hold at the same time, and a few more."""


class SnapshotStore(Protocol):
    """Stores the syncer's side of snapshots: `MemorySnapshots` in memory, `SyncerSnapshots` on disk."""

    def begin(self, snapshot: OuterStep, syncer_state: SyncerState) -> None: ...
    def put_in_flight(self, snapshot: OuterStep, envelope: Envelope, payload: Payload | None) -> None: ...
    def seal(
        self, snapshot: OuterStep, learners: tuple[LearnerId, ...], complete: bool, left_out: tuple[LearnerId, ...] = ()
    ) -> None: ...


class _Accepted(NamedTuple):
    """Encoded until the merge: int4 is 8 times smaller."""

    packet: Packet
    buffers: Tensor
    anchor: OuterStep
    announced: Tensor
    """The vector that it is a difference to."""


class TensorSyncer:
    def __init__(
        self, config: Config, fragments: Sequence[Fragment], disk: VersionStore, snapshots: SnapshotStore | None = None, *,
        in_blocks: bool = True, merger: FragmentMerger | None = None,
    ) -> None:  # fmt: skip
        """`in_blocks`: how the run digests its versions."""
        self._in_blocks = in_blocks
        self._config = config
        self._fragments = fragments
        self.disk = disk
        self._snapshots = snapshots
        self._up = codec(self._config.protocol.codec_up)
        self._accepted: dict[tuple[OuterStep, FragmentId], dict[LearnerId, _Accepted]] = {}
        self._norm_of: dict[FragmentId, dict[OuterStep, float]] = {}
        """The norms of the versions of each fragment to which contributions refer."""
        self._merged: dict[tuple[OuterStep, FragmentId], Version] = {}
        self._previous: dict[tuple[OuterStep, FragmentId], Version] = {}
        """What each merged version was made from, until it is stored."""
        self._jumps: dict[tuple[OuterStep, FragmentId], float] = {}
        """How far the merge moved Theta, where the kernels have measured it."""
        self._inputs: dict[tuple[OuterStep, FragmentId], MergeInputs] = {}
        """Of merges that can be repeated to the same bytes, until they are stored."""
        self.merger = FragmentMerger(config, fragments) if merger is None else merger

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        match effect:
            case Accept():
                self._accept(effect, payload)
            case AbortRound(outer_step=t):
                for by_round in (self._accepted, self._merged, self._previous, self._jumps, self._inputs):
                    for key in [k for k in by_round if k[0] == t]:
                        del by_round[key]
                self.disk.abandon(t)
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
        norm = self.merger.norm(payload.content[0])
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
        except (KeyError, OSError, DataError):
            return 0.0  # the machine refuses a difference to a version that is not kept
        norm = self.merger.norm(Packet("fp32", weights.numel(), weights, None))
        self._know_norm(p, version, norm)
        return norm

    def _know_norm(self, p: FragmentId, version: OuterStep, norm: float) -> None:
        before = sorted(self._norm_of.get(p, {}).items())[-NORMS_KEPT:]
        self._norm_of[p] = {**dict(before), version: norm}  # replaced, not changed: several threads inspect

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
        accepted[effect.learner] = _Accepted(packet, buffers, effect.anchor, announced)

    # ------------------------------------------------------------ merging

    def _merge(self, effect: Merge) -> Version:
        t, p = effect.outer_step, effect.fragment
        previous = self._previous[t, p] = self.disk.base(p, effect.previous)
        parts = [self._accepted[t, p][share.learner] for share in effect.shares]
        inputs = MergeInputs(
            effect.previous, effect.plain_average, tuple(share.weight for share in effect.shares),
            tuple(part.anchor for part in parts), tuple(part.packet for part in parts), tuple(part.buffers for part in parts),
        )  # fmt: skip
        self.disk.begin(t, p, inputs)
        merged = self.merger.merge(t, p, inputs, previous, [part.announced for part in parts])
        if merged.repeatable:
            self._inputs[t, p] = replace(inputs, met=merged.met)
        self._measured(t, p, merged)
        return merged.version

    def _measured(self, t: OuterStep, p: FragmentId, merged: Merged) -> None:
        """What the kernels have measured on the way need not be measured again."""
        if merged.moves is not None:
            self._jumps[t, p] = math.sqrt(tree_sum(merged.moves))
        if merged.sizes is not None:
            self._know_norm(p, t, math.sqrt(tree_sum(merged.sizes)))

    def _store(self, effect: Store) -> Stored | MergeRejected:
        t, fragments = effect.outer_step, effect.fragments
        versions = {p: self._merged[t, p] for p in fragments}
        jumps = tuple(self._jump(t, p) for p in fragments)
        limits = effect.jump_limits or (0.0,) * len(fragments)
        for p, jump, limit in zip(fragments, jumps, limits, strict=True):
            if not math.isfinite(jump) or (limit > 0 and jump > limit):
                return MergeRejected(t, p, jump)
        digest = self._checksum(*versions.values())
        logged = {p: self._inputs[t, p] for p in fragments if (t, p) in self._inputs}
        for p, inputs in logged.items():
            logged[p] = replace(inputs, result=digest if len(versions) == 1 else self._checksum(versions[p]))
        self.disk.put(t, versions, logged)
        for p in fragments:
            del self._merged[t, p], self._previous[t, p]
            for by_round in (self._jumps, self._accepted, self._inputs):
                by_round.pop((t, p), None)
        return Stored(t, digest, jumps)

    def _checksum(self, *versions: Version) -> str:
        vectors = [vector for version in versions for vector in (version.theta, version.buffers)]
        return checksum(vectors, in_blocks=self._in_blocks, spread=self.merger.spread)

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
