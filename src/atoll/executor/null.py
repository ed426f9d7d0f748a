"""Executors that train nothing: they move sizes, and digests in place of weights.

A digest identifies a fragment's value by its history, so a learner whose anchor differs from what the syncer announced is
caught here without a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.config import Config
from atoll.config.codecs import wire_bits
from atoll.errors import InvariantViolated
from atoll.ids import FragmentId, LearnerId, OuterStep
from atoll.protocol.interface import CLEAN, Finding, Payload
from atoll.protocol.vocabulary import (
    NO_VERSION,
    AbortRound,
    Accept,
    Adopt,
    Announce,
    Contribution,
    CopyVersions,
    Discard,
    Effect,
    Event,
    ForgetVersion,
    InnerStep,
    Keep,
    LoadState,
    Merge,
    Message,
    RecordState,
    Send,
    Stage,
    StateTransfer,
    StateWritten,
    StepDone,
    Store,
    Stored,
    Unstage,
)  # fmt: skip
from atoll.rules import samples_of, shrunk


class NullLearner:
    def __init__(self, config: Config, learner: LearnerId) -> None:
        p = config.protocol
        self._config, self._learner = config, learner
        self._whole_batch = batch_size(config, learner)
        size = config.cluster.parameters / p.fragments
        self._up_bytes = int(size * wire_bits(p.codec_up) / 8)
        self._state_bytes = config.cluster.parameters * 12
        self.anchors: list[tuple[OuterStep, int]] = [(NO_VERSION, 0)] * p.fragments
        self._kept: dict[FragmentId, tuple[OuterStep, int]] = {}
        self._staged: dict[tuple[FragmentId, OuterStep], tuple[OuterStep, int]] = {}

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        if type(effect) is Stage:  # the most frequent by far
            self._staged[effect.fragment, effect.slot] = self.anchors[effect.fragment]
            return ()
        match effect:
            case Unstage(fragment=fragment, slot=slot):
                del self._staged[fragment, slot]
            case InnerStep(batch=batch, share=share):
                whole = share >= 1.0
                size = self._whole_batch if whole else batch_size(self._config, self._learner, batch, share)
                return (StepDone(*size, 0, None),)
            case Keep(fragment=fragment, version=version, previous=previous):
                assert payload is not None
                base, digest = payload.content
                if previous != NO_VERSION and base != self.anchors[fragment][1]:
                    raise InvariantViolated(f"a difference to version {previous} of fragment {fragment} was applied to another")
                self._kept[fragment] = (version, digest)
            case Adopt(fragment=fragment, version=version):
                kept = self._kept.pop(fragment)
                if kept[0] != version:
                    raise InvariantViolated(f"fragment {fragment}: version {version} is adopted, {kept[0]} is kept")
                self.anchors[fragment] = kept
            case LoadState(held=held):
                assert payload is not None
                anchors, kept = payload.content
                if tuple(v for v, _ in anchors) != held:
                    raise InvariantViolated("a peer's state differs from the versions that it names")
                self.anchors = list(anchors)
                newer = {p: k for p, k in self._kept.items() if k[0] > anchors[p][0]}
                self._kept = dict(kept) | {p: k for p, k in newer.items() if p not in kept or kept[p][0] < k[0]}
            case RecordState(snapshot=snapshot):
                return (StateWritten(snapshot),)
            case _:
                pass
        return ()

    def inspect(self, body: Message, payload: Payload) -> Finding:
        return CLEAN

    def payload_for(self, send: Send) -> Payload | None:
        body = send.envelope.body
        if isinstance(body, Contribution):
            slot = body.outer_step if (body.fragment, body.outer_step) in self._staged else NO_VERSION
            return Payload("packet", self._up_bytes, self._staged[body.fragment, slot])
        if isinstance(body, StateTransfer):
            return Payload("state", self._state_bytes, (list(self.anchors), dict(self._kept)))
        return None


class NullDisk:
    """The stored versions of each fragment, which survive a killed syncer."""

    def __init__(self, fragments: int) -> None:
        self.versions: list[dict[OuterStep, int]] = [{0: hash((p, 0))} for p in range(fragments)]


class NullSyncer:
    def __init__(self, config: Config, disk: NullDisk) -> None:
        p = config.protocol
        size = config.cluster.parameters / p.fragments
        self._down_bytes = int(size * wire_bits(p.codec_down) / 8)
        self._full_bytes = int(size * 4)
        self._disk = disk
        self._accepted: dict[tuple[OuterStep, FragmentId], dict[LearnerId, int]] = {}
        self._merged: dict[tuple[OuterStep, FragmentId], int] = {}

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        match effect:
            case Accept(outer_step=t, fragment=p, learner=m, anchor=anchor):
                assert payload is not None
                version, digest = payload.content
                if version != anchor or self._disk.versions[p].get(anchor) != digest:
                    raise InvariantViolated(f"learner {m}'s anchor of fragment {p} is not the announced version {anchor}")
                self._accepted.setdefault((t, p), {})[m] = digest
            case AbortRound(outer_step=t):
                for by_round in (self._accepted, self._merged):
                    for key in [k for k in by_round if k[0] == t]:
                        del by_round[key]
            case Discard(outer_step=t, learner=m):
                for (step, _), contributions in self._accepted.items():
                    if step == t:
                        contributions.pop(m, None)
            case Merge(outer_step=t, fragment=p, shares=shares, previous=previous):
                have = self._accepted.get((t, p), {})
                if {s.learner for s in shares} != have.keys():
                    raise InvariantViolated(f"outer step {t} merges {shares}, but {sorted(have)} were accepted")
                self._merged[t, p] = hash((self._disk.versions[p][previous], t, tuple((s.learner, s.local_step) for s in shares)))
            case CopyVersions(outer_step=t, versions=versions):
                self._merged |= {(t, p): self._disk.versions[p][version] for p, version in enumerate(versions)}
            case Store(outer_step=t, fragments=fragments):
                for p in fragments:
                    self._disk.versions[p][t] = self._merged.pop((t, p))
                    self._accepted.pop((t, p), None)
                return (Stored(t, f"{hash(tuple(self._disk.versions[p][t] for p in fragments)) & (2**64 - 1):016x}"),)
            case ForgetVersion(fragment=p, version=v):
                del self._disk.versions[p][v]
            case _:
                pass
        return ()

    def inspect(self, body: Message, payload: Payload) -> Finding:
        return CLEAN

    def payload_for(self, send: Send) -> Payload | None:
        body = send.envelope.body
        if not isinstance(body, Announce):
            return None
        versions = self._disk.versions[body.fragment]
        full = body.previous == NO_VERSION
        base = 0 if full else versions[body.previous]
        return Payload("fragment", self._full_bytes if full else self._down_bytes, (base, versions[body.outer_step]))


def batch_size(config: Config, learner: LearnerId, batch: int = 0, share: float = 1.0) -> tuple[int, int]:
    """(tokens, samples) of one inner step, at this batch of its stream."""
    whole = samples_of(config, learner)
    count = config.inner.accumulate
    samples = sum(shrunk(whole, share, batch * count + micro) for micro in range(count)) if share < 1.0 else whole * count
    return samples * config.data.seq_len, samples
