"""The executor of a learner of several ranks, on rank 0: tells the other ranks each effect, carries it out on its own pieces,
cuts announced versions into the ranks' pieces and assembles packets from their parts.

A packet is assembled on rank 0 and sent by it: one fragment at a time is here, never the model. The parts come encoded, so
that ranks could as well send them by themselves to a syncer that takes parts.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.codecs import Packet
from atoll.codecs import codec as codec_of
from atoll.codecs.layout import layout
from atoll.config import Config
from atoll.errors import RunFailed
from atoll.executor.cuda.learner import Key
from atoll.executor.cuda.transfer import each_tensor
from atoll.executor.peer_state import PeerStateCheck
from atoll.executor.ranks.executor import OwnPart, RankExecutor
from atoll.executor.ranks.state import StateParts
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
from atoll.runtime.ranks.channel import tensors_of
from atoll.runtime.ranks.gathered import Asked, GatheredSend, GatheredState, empty_in_file
from atoll.runtime.ranks.lead import RankLead
from atoll.runtime.ranks.messages import (
    Arrival,
    Do,
    DropArrival,
    EncodeAgain,
    EncodePart,
    ReadState,
    Reform,
    StateArrival,
    WritePart,
)
from atoll.store.snapshots import FileEntry, WrittenPart, remove_rank_parts
from atoll.store.tensor_files import pack_state
from atoll.tensors.access import named_tensors
from atoll.tensors.pieces import cut_from

TOLD = (Stage, ApplyOwnShare, Unstage, Adopt, LoadTheta, LoadSnapshot)


class LeadExecutor:
    def __init__(self, config: Config, inner: RankExecutor, lead: RankLead, learner: LearnerId) -> None:
        self._inner = inner
        self._learner = learner
        self.snapshots: LearnerSnapshots
        self.spool: Path
        """Where whole states are kept on their way. Both from the start of the learner's machine on."""
        self._config = config
        self._peer_state = PeerStateCheck(config, inner.whole, named_tensors(inner.model), inner.optimizer, users_own=True)
        self._lead = lead
        self._codec = codec_of(config.protocol.codec_up)
        self._feedback = config.protocol.error_feedback
        self._sent: dict[FragmentId, GatheredSend] = {}
        self._open: list[GatheredSend] = []
        """Packets that may still be asked for anew."""
        self._turn = threading.RLock()
        """What a rank is told to encode is told before or after a loss of ranks, on all."""
        self._unkept = self._unloaded = 0
        self._piece = torch.empty(max(held.fragment.numel for each in inner.held for held in each.values()))
        """A rank's pieces of an announced fragment, while they are sent to it."""
        self.poisoned: list[str] = []
        """What other ranks found since the last step, as sentences that name the rank."""

    # ------------------------------------------------------------ effects

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        if isinstance(effect, Stage | Adopt):
            self._settle(effect.fragment)
        elif isinstance(effect, RecordState):
            for p in list(self._sent):
                self._settle(p)
        with self._turn:
            return self._carry_out(effect, payload)

    def _carry_out(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
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
        if store.busy:
            written = store.put_learner(snapshot, self._learner, learner_state, None)
        else:
            self._lead.tell(WritePart(request, snapshot, str(store.directory.resolve())))
            own, asked = self._inner.part(with_residuals=True), self._inner.others
            written = store.put_learner(snapshot, self._learner, learner_state, own, lambda: self._parts_written(request, asked))
        return () if written is None else (written,)

    def _parts_written(self, request: int, asked: Sequence[int]) -> dict[int, WrittenPart]:
        """By place in torch's group: the parts of a learner that lost ranks are numbered without gaps."""
        found = self._lead.written(request, asked)
        for rank, note in sorted(found.items()):
            if note.flaw:
                raise RunFailed(f"rank {rank}: {note.flaw}")
        notes = [found[rank] for rank in asked]
        return {at: WrittenPart(Path(note.path), FileEntry(note.nbytes, note.sha256)) for at, note in enumerate(notes, 1)}

    def _settle(self, p: FragmentId) -> None:
        """With error feedback the next packet of a fragment begins where its last one ended, on every rank."""
        before = self._sent.pop(p, None)
        if before is not None:
            before.settle()

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
        if isinstance(send.envelope.body, Contribution):
            self._settle(send.envelope.body.fragment)
        with self._turn:
            return self._payload_for(send)

    def _payload_for(self, send: Send) -> Payload | None:
        body = send.envelope.body
        if isinstance(body, StateTransfer):
            request = self._lead.number()
            self._lead.tell(ReadState(request))
            return Payload("state", 0, GatheredState(self._lead, self._inner, request, self._inner.part(), self.spool))
        if not isinstance(body, Contribution):
            return None
        key = self._inner.staged_key(body.fragment, body.outer_step)
        self._inner.answers(body.fragment, body.outer_step)
        request = self._lead.number()
        self._lead.tell(EncodePart(request, body.fragment, body.outer_step))
        found = self._inner.encoded(key, request)
        sent = GatheredSend(
            self._lead, self._inner, self._codec, body.fragment, self._asked(key, request, found), feedback=self._feedback
        )
        self._open = [*(other for other in self._open if not other.is_done), sent]
        if self._feedback:
            self._sent[body.fragment] = sent
        fragment = self._inner.whole[body.fragment]
        nbytes = layout(self._codec.name, fragment.numel).nbytes + 4 * fragment.buffer_numel
        return Payload("packet", nbytes, sent)

    def _asked(self, key: Key, request: int, own: OwnPart | None) -> Asked:
        inner = self._inner
        rng = None if own is None else inner.rounding_of(key, request)
        return Asked(key, request, inner.others, own, inner.splits[key[0]], inner.generation, rng)

    def shrink(self, note: Reform) -> None:
        """The ranks in `note.order` are left: they go on with what was staged, and divide it anew. Parts that a lost rank did not
        send are sent by them."""
        with self._turn:
            self._inner.shrink(note.order)
            self._lead.tell_reform(note)
            for sent in self._open:
                sent.ask_again(self._ask_again)

    def _ask_again(self, before: Asked) -> Asked:
        again = self._lead.number()
        self._lead.tell(EncodeAgain(before.request, again))
        return self._asked(before.key, again, self._inner.encoded_again(before.request, again))

    def went_on_without(self, lost: Collection[int]) -> None:
        """The ranks that are left may hold their weights in other tensors now."""
        remove_rank_parts(self.snapshots.directory, lost)
        inner = self._inner
        self._peer_state = PeerStateCheck(
            self._config, inner.whole, named_tensors(inner.model), inner.optimizer, users_own=True
        )  # fmt: skip

    # ------------------------------------------------------------ receiving, in the receiving thread

    def arriving(self, body: Message, payload: Payload) -> Payload:
        """Cuts an announced version, or a peer's state, into the ranks' pieces, and returns once every rank has its own."""
        if isinstance(body, StateTransfer):
            return self._arriving_state(payload)
        if not isinstance(body, Announce) or self._inspect_whole(body, payload).flaw is not None:
            return payload
        sent, buffers = payload.content
        if self._inner.is_whole_on_device:
            return Payload(payload.kind, payload.nbytes, RankShare(0, self._inner.pinned_payload(payload).content))
        difference = isinstance(sent, Packet)
        whole = codec_of(sent.codec).decode(sent) if isinstance(sent, Packet) else sent
        if self._unkept:  # the version before was older than what the learner had
            self._lead.tell(DropArrival(self._unkept))
        arrival = self._unkept = self._lead.number()
        held = self._inner.held[body.fragment]
        for rank in self._lead.members:
            piece = cut_from(whole, held[rank].runs, self._piece)
            note = Arrival(arrival, body.fragment, difference, (piece.numel(), buffers.numel()))
            self._lead.tell_rank(rank, note, (piece, buffers), bulk=True)
        own = cut_from(whole, held[0].runs)
        del whole
        self._lead.await_taken(arrival)
        mine = Packet("fp32", own.numel(), own, None) if difference else own
        share = self._inner.pinned_payload(Payload(payload.kind, payload.nbytes, (mine, buffers)))
        return Payload(payload.kind, payload.nbytes, RankShare(arrival, share.content))

    def _drop_unloaded(self) -> None:
        """A state that came too late to be loaded."""
        if self._unloaded:
            self._lead.tell(DropArrival(self._unloaded))
            self._unloaded = 0

    def _arriving_state(self, payload: Payload) -> Payload:
        self._drop_unloaded()
        arrival = self._unloaded = self._lead.number()
        parts = self._inner.parts_of(payload.content)
        for rank in self._lead.members:
            self._deal(parts, rank, arrival)
        self._lead.await_taken(arrival)
        pages: set[int] = set()
        each_tensor(payload.content, lambda tensor: pages.add(tensor.data_ptr()))
        # What is not cut would keep the pages of the whole, and be written to in them.
        own = each_tensor(self._inner.cut(parts, 0), lambda tensor: tensor.clone() if tensor.data_ptr() in pages else tensor)
        return Payload(payload.kind, payload.nbytes, StateShare(arrival, own))

    def _deal(self, parts: StateParts, rank: int, arrival: int) -> None:
        """A function of its own, so that one rank's part is dropped before the next is cut. The part is in files: beside this
        rank's own share there is none of another's in memory."""
        cut = self._inner.cut(parts, rank, lambda shape, dtype: empty_in_file(self.spool, shape, dtype))
        data = tensors_of(pack_state(cut))
        self._lead.tell_rank(rank, StateArrival(arrival), data, bulk=True)


class RankShare:
    """The content of an announcement's payload once every rank has its pieces."""

    def __init__(self, arrival: int, own: tuple[Packet | Tensor, Tensor]) -> None:
        self.arrival = arrival
        self.own = own


class StateShare(NamedTuple):
    """The content of a peer's state once every rank has its part."""

    arrival: int
    own: dict[str, Any]
