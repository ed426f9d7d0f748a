"""The executor of a learner of several ranks, on rank 0: tells the other ranks each effect, carries it out on its own pieces,
cuts announced versions into the ranks' pieces and assembles packets from their parts.

A packet is assembled on rank 0 and sent by it: one fragment at a time is here, never the model. The parts come encoded, so
that ranks could as well send them by themselves to a syncer that takes parts.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.codecs import Codec, Packet
from atoll.codecs import codec as codec_of
from atoll.codecs.layout import layout
from atoll.config import Config
from atoll.errors import NotFinite, RunFailed
from atoll.executor.cuda.learner import Key
from atoll.executor.late import LateContent
from atoll.executor.peer_state import PeerStateCheck
from atoll.executor.ranks.executor import RankExecutor
from atoll.executor.ranks.stitch import EncodedPart, assemble
from atoll.ids import FragmentId, LearnerId, OuterStep
from atoll.protocol.interface import CLEAN, Finding, Payload
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import (
    Adopt,
    Announce,
    ApplyOwnShare,
    Contribution,
    Effect,
    Event,
    Keep,
    LearnerState,
    LoadSnapshot,
    LoadState,
    LoadTheta,
    Message,
    Poisoned,
    RecordState,
    Send,
    Stage,
    StateTransfer,
    Unstage,
)
from atoll.runtime.learner.snapshots import LearnerSnapshots
from atoll.runtime.ranks.channel import parts_of, tensors_of
from atoll.runtime.ranks.lead import RankLead
from atoll.runtime.ranks.messages import (
    Arrival,
    Do,
    DropArrival,
    EncodePart,
    ReadState,
    ReadWeights,
    SeamResidual,
    StateArrival,
    WritePart,
)
from atoll.store.snapshots import FileEntry, WrittenPart
from atoll.store.tensor_files import pack_state, unpack_state
from atoll.tensors.access import named_tensors
from atoll.tensors.pieces import cut_from, put_runs

TOLD = (Stage, ApplyOwnShare, Unstage, Adopt, LoadTheta, LoadSnapshot)


class LeadExecutor:
    def __init__(self, config: Config, inner: RankExecutor, lead: RankLead, learner: LearnerId) -> None:
        self._inner = inner
        self._learner = learner
        self.snapshots: LearnerSnapshots
        """From the start of the learner's machine on."""
        self._peer_state = PeerStateCheck(config, inner.whole, named_tensors(inner.model), inner.optimizer, users_own=True)
        self._lead = lead
        self._codec = codec_of(config.protocol.codec_up)
        self._feedback = config.protocol.error_feedback
        self._sent: dict[FragmentId, GatheredSend] = {}
        self._unkept = self._unloaded = 0
        self.poisoned: list[str] = []
        """What other ranks found since the last step, as sentences that name the rank."""

    # ------------------------------------------------------------ effects

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        match effect:
            case Keep():
                assert payload is not None and isinstance(payload.content, RankShare)
                self._unkept = 0
                self._lead.tell(Do(effect, payload.content.arrival))
                return self._inner.execute(effect, Payload(payload.kind, payload.nbytes, payload.content.own))
            case LoadState():
                assert payload is not None and isinstance(payload.content, StateShare)
                self._unloaded = 0
                self._lead.tell(Do(effect, payload.content.arrival))
                return self._inner.execute(effect, Payload(payload.kind, payload.nbytes, payload.content.own))
            case RecordState(snapshot=snapshot, learner_state=learner_state):
                return self._record(snapshot, learner_state)
            case _ if isinstance(effect, TOLD):
                if isinstance(effect, Stage | Adopt):
                    self._settle(effect.fragment)
                if isinstance(effect, Stage | LoadTheta):
                    self._drop_unloaded()
                self._lead.tell(Do(effect))
                found = list(self._inner.execute(effect, payload))
                if isinstance(effect, Stage):  # as on a GPU: what was found since the last boundary is told at this one
                    found += [Poisoned(where) for where in self.poisoned]
                    self.poisoned.clear()
                return found
        return ()

    def _record(self, snapshot: OuterStep, learner_state: LearnerState) -> Sequence[Event]:
        """Every rank writes its part, beside training; the snapshot is whole once rank 0 has taken in those of all."""
        store, request = self.snapshots, self._lead.number()
        for p in list(self._sent):
            self._settle(p)
        if store.busy:
            written = store.put_learner(snapshot, self._learner, learner_state, None)
        else:
            self._lead.tell(WritePart(request, snapshot, str(store.directory.resolve())))
            own = self._inner.part(with_residuals=True)
            written = store.put_learner(snapshot, self._learner, learner_state, own, lambda: self._parts_written(request))
        return () if written is None else (written,)

    def _parts_written(self, request: int) -> dict[int, WrittenPart]:
        found = self._lead.written(request)
        for rank, note in sorted(found.items()):
            if note.flaw:
                raise RunFailed(f"rank {rank}: {note.flaw}")
        return {rank: WrittenPart(Path(note.path), FileEntry(note.nbytes, note.sha256)) for rank, note in found.items()}

    def _settle(self, p: FragmentId) -> None:
        """With error feedback the next packet of a fragment begins where its last one ended, on every rank."""
        before = self._sent.pop(p, None)
        if before is not None:
            before.resolve()

    def inspect(self, body: Message, payload: Payload) -> Finding:
        if isinstance(body, StateTransfer):
            flaw = self._peer_state.flaw(body, payload.content, {})
            return Finding(flaw if flaw is not None else self._not_announced(body, payload.content))
        return CLEAN if isinstance(payload.content, RankShare) else self._inspect_whole(body, payload)

    def _not_announced(self, body: StateTransfer, state: Mapping[str, Any]) -> Reason | None:
        """Of what the syncer announced to this learner meanwhile, rank 0 compares its own pieces."""
        for p, (version, own) in self._inner.announced.items():
            named = {body.held[p]: state["anchors"][p]}
            if p in state["kept"]:
                named[state["kept"][p][0]] = state["kept"][p][1]
            if version in named and not torch.equal(cut_from(named[version], self._inner.held[p][0].runs), own.cpu()):
                return Reason(Why.BAD_STATE, f"its version {version} of fragment {p} is not the announced one")
        return None

    def _inspect_whole(self, body: Message, payload: Payload) -> Finding:
        if isinstance(body, Announce) and isinstance(payload.content, tuple):
            sent, buffers = payload.content
            fragment = self._inner.whole[body.fragment]
            numel = sent.numel if isinstance(sent, Packet) else sent.numel()
            if (numel, buffers.numel()) != (fragment.numel, fragment.buffer_numel):
                return Finding(Reason(Why.POISONED, f"fragment {body.fragment} has {fragment.numel} parameters, not {numel}"))
        return CLEAN

    # ------------------------------------------------------------ sending

    def payload_for(self, send: Send) -> Payload | None:
        body = send.envelope.body
        if isinstance(body, StateTransfer):
            request = self._lead.number()
            self._lead.tell(ReadState(request))
            return Payload("state", 0, GatheredState(self._lead, self._inner, request, self._inner.part()))
        if not isinstance(body, Contribution):
            return None
        self._settle(body.fragment)
        key = self._inner.staged_key(body.fragment, body.outer_step)
        request = self._lead.number()
        self._lead.tell(EncodePart(request, body.fragment, body.outer_step))
        found = self._inner.encoded(key)
        rng = None if found is None else self._inner.rounding_of(key)
        sent = GatheredSend(self._lead, self._inner, self._codec, key, request, found, rng, feedback=self._feedback)
        if self._feedback:
            self._sent[body.fragment] = sent
        fragment = self._inner.whole[body.fragment]
        nbytes = layout(self._codec.name, fragment.numel).nbytes + 4 * fragment.buffer_numel
        return Payload("packet", nbytes, sent)

    # ------------------------------------------------------------ receiving, in the receiving thread

    def arriving(self, body: Message, payload: Payload) -> Payload:
        """Cuts an announced version, or a peer's state, into the ranks' pieces, and returns once every rank has its own."""
        if isinstance(body, StateTransfer):
            return self._arriving_state(payload)
        if not isinstance(body, Announce) or self._inspect_whole(body, payload).flaw is not None:
            return payload
        sent, buffers = payload.content
        difference = isinstance(sent, Packet)
        whole = codec_of(sent.codec).decode(sent) if isinstance(sent, Packet) else sent
        if self._unkept:  # the version before was older than what the learner had
            self._lead.tell(DropArrival(self._unkept))
        arrival = self._unkept = self._lead.number()
        held = self._inner.held[body.fragment]
        for rank in range(1, self._lead.ranks):
            piece = cut_from(whole, held[rank].runs)
            note = Arrival(arrival, body.fragment, difference, (piece.numel(), buffers.numel()))
            self._lead.tell_rank(rank, note, (piece, buffers), bulk=True)
        own = cut_from(whole, held[0].runs)
        del whole
        self._lead.await_taken(arrival)
        return Payload(payload.kind, payload.nbytes, RankShare(arrival, own, buffers, difference))

    def _drop_unloaded(self) -> None:
        """A state that came too late to be loaded."""
        if self._unloaded:
            self._lead.tell(DropArrival(self._unloaded))
            self._unloaded = 0

    def _arriving_state(self, payload: Payload) -> Payload:
        self._drop_unloaded()
        arrival = self._unloaded = self._lead.number()
        parts = self._inner.parts_of(payload.content)
        for rank in range(1, self._lead.ranks):
            data = tensors_of(pack_state(self._inner.cut(parts, rank)))
            self._lead.tell_rank(rank, StateArrival(arrival), data, bulk=True)
        self._lead.await_taken(arrival)
        return Payload(payload.kind, payload.nbytes, StateShare(arrival, self._inner.cut(parts, 0)))

    # ------------------------------------------------------------ the whole model, one fragment at a time

    def weights(self, p: FragmentId) -> tuple[Tensor, Tensor]:
        """A whole fragment's parameters and buffers, from what every rank owns of it."""
        request = self._lead.number()
        self._lead.tell(ReadWeights(request, p))
        mine, buffers = self._inner.weights(p)
        flat = torch.empty(self._inner.whole[p].numel)
        own = self._inner.splits[p][0]
        for run in (*own.blocks, *own.seams):
            flat[run.start : run.stop] = mine[run.local : run.local + run.length]
        for rank, (part, data) in self._lead.answers(request).items():
            split = self._inner.splits[p][rank]
            for runs, values in zip(split, parts_of(data, part.sizes, [torch.float32] * 2), strict=True):
                put_runs(flat, [run._replace(local=run.start) for run in runs], values)
        return flat, buffers


class RankShare:
    """The content of an announcement's payload once every rank has its pieces."""

    def __init__(self, arrival: int, own: Tensor, buffers: Tensor, difference: bool) -> None:
        self.arrival = arrival
        sent = Packet("fp32", own.numel(), own, None) if difference else own
        self.own = (sent, buffers)


class StateShare(NamedTuple):
    """The content of a peer's state once every rank has its part."""

    arrival: int
    own: dict[str, Any]


class GatheredState(LateContent):
    """A learner's whole state, whose parts the other ranks are sending."""

    def __init__(self, lead: RankLead, inner: RankExecutor, request: int, own: dict[str, Any]) -> None:
        self._lead, self._inner, self._request, self._own = lead, inner, request, own

    def resolve(self) -> dict[str, Any] | None:
        try:
            answers = self._lead.answers(self._request)
        except RunFailed:  # a rank is gone: the peer finds no bytes, and takes its state from another
            return None
        parts = [self._own, *(unpack_state(answers[rank][1].numpy().data) for rank in sorted(answers))]
        return self._inner.parts_of(parts).whole()


class GatheredSend(LateContent):
    """A packet whose parts the other ranks are sending."""

    def __init__(
        self, lead: RankLead, inner: RankExecutor, codec: Codec, key: Key, request: int,
        own: tuple[EncodedPart, Tensor] | None, rng: torch.Generator | None, *, feedback: bool,
    ) -> None:  # fmt: skip
        self._lead, self._inner, self._codec = lead, inner, codec
        self._key, self._request, self._own, self._rng = key, request, own, rng
        self._feedback = feedback
        self._lock = threading.Lock()
        self._resolved = False
        self._result: tuple[Packet, Tensor] | None = None

    def resolve(self) -> tuple[Packet, Tensor] | None:
        with self._lock:
            if not self._resolved:
                self._result = self._assemble()
                self._resolved, self._own = True, None
            return self._result

    def _assemble(self) -> tuple[Packet, Tensor] | None:
        try:
            answers = self._lead.answers(self._request)
        except RunFailed:  # a rank is gone: the message goes without bytes, as later ones on this channel count on it
            return None
        if self._own is None or not all(part.sizes for part, _ in answers.values()):
            return None
        p = self._key[0]
        fragment, splits = self._inner.whole[p], self._inner.splits[p]
        shape = layout(self._codec.name, 0)
        parts = [self._own[0]]
        for rank in range(1, self._lead.ranks):
            part, data = answers[rank]
            codes, scales, seams = parts_of(data, part.sizes, [shape.code_dtype, torch.float32, torch.float32])
            parts.append(EncodedPart(codes, None if shape.scales is None else scales, seams))
        try:
            packet, residuals = assemble(
                self._codec, fragment.numel, splits, parts, feedback=self._feedback, rng=self._rng
            )
        except NotFinite:
            return None
        if self._feedback:
            self._inner.seams_not_carried(p, residuals[0])
            for rank in range(1, self._lead.ranks):
                if residuals[rank].numel():
                    self._lead.tell_rank(rank, SeamResidual(p), (residuals[rank],))
        return packet, self._own[1]
