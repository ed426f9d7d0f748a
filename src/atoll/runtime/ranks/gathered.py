"""What rank 0 sends once the other ranks have sent their parts of it: a packet, or the learner's state for a peer."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.codecs import Codec, Packet
from atoll.codecs.layout import layout
from atoll.errors import NotFinite, RunFailed
from atoll.executor.cuda.learner import Key
from atoll.executor.late import LateContent
from atoll.executor.ranks.executor import OwnPart, RankExecutor, part_of_packet
from atoll.executor.ranks.stitch import EncodedPart, assemble
from atoll.ids import FragmentId
from atoll.runtime.ranks.channel import SPOOLED_BYTES, parts_of
from atoll.runtime.ranks.lead import RankLead, RankLost
from atoll.runtime.ranks.messages import Assembled, Part, ReadWeights, SeamResidual
from atoll.store.model_upload import PIECE_NUMEL
from atoll.store.tensor_files import unpack_state
from atoll.tensors.pieces import BlockSplit, put_runs
from atoll.transport import spooled


def empty_in_file(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A small one is in memory."""
    size = math.prod(shape) * dtype.itemsize
    if size <= SPOOLED_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(spooled(size, folder), dtype=dtype).view(shape)


class Asked(NamedTuple):
    """What the ranks were asked for of one packet, and how they had divided it."""

    key: Key
    request: int
    members: tuple[int, ...]
    own: OwnPart | None
    splits: Mapping[int, BlockSplit]
    generation: int
    rng: torch.Generator | None


class WeightsOfRanks:
    """The whole model's weights on rank 0, of which one piece is here at a time: each rank sends what it owns of it."""

    def __init__(self, lead: RankLead, inner: RankExecutor) -> None:
        self._lead, self._inner = lead, inner
        self._piece = torch.empty(min(PIECE_NUMEL, max(fragment.numel for fragment in inner.whole)))

    def params(self, p: FragmentId, start: int, stop: int) -> Tensor:
        """In memory that the next call uses again."""
        request, lead = self._lead.number(), self._lead
        lead.tell(ReadWeights(request, p, start, stop))
        found = self._piece[: stop - start]
        self._put(found, 0, p, start, self._inner.owned_weights(p, start, stop))
        for rank, (_, data) in lead.answers(request, lead.members).items():
            self._put(found, rank, p, start, data.view(torch.float32))
        return found

    def _put(self, found: Tensor, rank: int, p: FragmentId, start: int, values: Tensor) -> None:
        runs = self._inner.owned_between(rank, p, start, start + found.numel())
        put_runs(found, [run._replace(local=run.start - start) for run in runs], values)

    def buffers(self, p: FragmentId) -> Tensor:
        return self._inner.own_buffers(p)


class GatheredState(LateContent):
    """A learner's whole state, whose parts the other ranks are sending."""

    def __init__(self, lead: RankLead, inner: RankExecutor, request: int, own: dict[str, Any], spool: Path) -> None:
        self._lead, self._inner, self._request, self._own, self._spool = lead, inner, request, own, spool
        self._members = inner.others

    def resolve(self) -> dict[str, Any] | None:
        try:
            found = self._lead.state_parts(self._request, self._members)
        except RunFailed:  # a rank is gone: the peer finds no bytes, and takes its state from another
            return None
        parts = [self._own, *(unpack_state(data.numpy().data, shared=True) for data in found)]
        return self._inner.parts_of(parts).whole(lambda shape, dtype: empty_in_file(self._spool, shape, dtype))


class GatheredSend(LateContent):
    """A packet whose parts the other ranks are sending. Where one of them is lost, those that are left send theirs anew."""

    def __init__(
        self, lead: RankLead, inner: RankExecutor, codec: Codec, fragment: FragmentId, asked: Asked, *, feedback: bool
    ) -> None:  # fmt: skip
        self._lead, self._inner, self._codec, self._fragment = lead, inner, codec, fragment
        self._asked = asked
        self._feedback = feedback
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._resolved = False
        self.is_done = False
        """It will not be asked for anew."""
        self._result: tuple[Packet, Tensor] | None = None

    def ask_again(self, ask: Callable[[Asked], Asked]) -> None:
        with self._asking:
            if not self.is_done:
                self._asked = ask(self._asked)

    def settle(self) -> None:
        """For a step boundary. What waits for a smaller group is left for `resolve`: the training thread forms that group."""
        with contextlib.suppress(RankLost):
            self._gather()

    def resolve(self) -> tuple[Packet, Tensor] | None:
        while True:
            asked = self._asked
            try:
                return self._gather()
            except RankLost:
                if not self._lead.await_change(lambda asked=asked: self._asked is not asked):  # type: ignore[misc]
                    return None

    def _gather(self) -> tuple[Packet, Tensor] | None:
        with self._lock:
            if not self._resolved:
                asked = self._asked
                try:
                    answers = self._lead.answers(asked.request, asked.members)
                    with self._asking:
                        if self._asked is not asked:
                            raise RankLost("the packet was asked for anew")
                        self.is_done = True
                    self._result = self._assemble(asked, answers)
                    self._asked = asked._replace(own=None)  # a device's memory goes back
                except RankLost:
                    raise
                except RunFailed:  # the message goes without bytes, as later ones on this channel count on it
                    self._result = None
                self._resolved = self.is_done = True
            return self._result

    def _assemble(self, asked: Asked, answers: Mapping[int, tuple[Part, Tensor]]) -> tuple[Packet, Tensor] | None:
        if self._inner.may_shrink:
            self._lead.tell(Assembled(asked.request))
            self._inner.assembled(asked.request)
        own = None if asked.own is None else part_of_packet(asked.own)
        if own is None or not all(part.sizes for part, _ in answers.values()):
            return None
        p = self._fragment
        fragment, order = self._inner.whole[p], (0, *asked.members)
        shape = layout(self._codec.name, 0)
        parts = [own[0]]
        for rank in asked.members:
            part, data = answers[rank]
            codes, scales, seams = parts_of(data, part.sizes, [shape.code_dtype, torch.float32, torch.float32])
            parts.append(EncodedPart(codes, None if shape.scales is None else scales, seams))
        try:
            packet, residuals = assemble(
                self._codec, fragment.numel, [asked.splits[rank] for rank in order], parts, feedback=self._feedback, rng=asked.rng
            )
        except NotFinite:
            return None
        if self._feedback:
            self._inner.seams_not_carried(p, residuals[0], asked.generation)
            for rank, residual in zip(asked.members, residuals[1:], strict=True):
                if residual.numel():
                    self._lead.tell_rank(rank, SeamResidual(p, asked.generation), (residual,))
        return packet, own[1]
