"""The coordinator's executor in a syncer of several shards: it cuts what arrives, has every shard merge and store its stripe, and
puts together what learners are sent. It holds no version itself.

The decisions are those of a syncer without shards, to the bit: a norm is summed over the leaves that the shards send, and the
checksum of an outer step over their blocks.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from atoll.codecs import Packet
from atoll.codecs.parts import packet_part
from atoll.config import Config
from atoll.errors import DataError
from atoll.executor.shard import StripeResult
from atoll.executor.syncer import SnapshotStore, TensorSyncer
from atoll.ids import FragmentId, OuterStep
from atoll.protocol.interface import Finding, Payload
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
    Event,
    ForgetVersion,
    Measure,
    Merge,
    MergeRejected,
    Send,
    Store,
    Stored,
)
from atoll.store.striped import joined_packet, joined_version
from atoll.store.versions import Version, checksum_of_parts, digest
from atoll.tensors.layout import Fragment
from atoll.tensors.norms import Array, PartSquares, norm_of_parts, tree_sum
from atoll.tensors.stripes import Meeting, Stripe, stripes_of

ANNOUNCED_KEPT: Final = 2
"""Announcements that are kept in memory beside those of rounds in flight."""
_Any = TypeVar("_Any")


class Announcement(NamedTuple):
    """What a shard has stored and learners are sent; buffers are shard 0's."""

    packet: Packet | None
    buffers: Tensor


class OwnParts:
    """In the place of a contribution's packet: the shards have it, each its own part, and keep it until this is gone."""

    def __init__(self, session: bytes, number: int) -> None:
        self.session, self.number = session, number


class PartFound(NamedTuple):
    """What a shard says of its part of a contribution."""

    flaw: str
    """"": none."""
    leaves: Array | None
    """What its norm adds up. None: the shards must be asked for the squares of its values."""


class ShardHandle(Protocol):
    """A shard, from the coordinator's side. `read_*` may be called from any thread while it works."""

    def accept(self, effect: Accept, packet: Packet, buffers: Tensor) -> None: ...
    def accept_own(self, effect: Accept, session: bytes, number: int) -> None:
        """A contribution whose part it has itself."""
        ...

    def merge(self, effect: Merge, meeting: Meeting) -> StripeResult: ...
    def copy(self, effect: CopyVersions) -> list[StripeResult]: ...
    def store(self, effect: Store) -> list[Announcement]: ...
    def store_quietly(self, effect: Store) -> tuple[str, ...]:
        """Where the shard sends what is announced itself: only by fragment the codec of its packet, or ""."""
        ...

    def tell(self, effect: AbortRound | Discard | ForgetVersion) -> None: ...
    def read_announced(self, p: FragmentId, v: OuterStep) -> Tensor: ...
    def read_announcement(self, p: FragmentId, v: OuterStep) -> Announcement: ...
    def read_version(self, p: FragmentId, v: OuterStep) -> Version: ...
    def read_theta(self, p: FragmentId, v: OuterStep) -> tuple[Tensor, Tensor]: ...
    def link_into(self, directory: str) -> None:
        """As every shard's part of a snapshot."""
        ...

    def keep_snapshots(self, names: Sequence[str]) -> None:
        """The others may be removed, where the shard has parts of its own."""
        ...


class ShardLost(Exception):
    """A shard's process ended or does not answer."""


class SlotNorms:
    """One merge's meeting of the shards that have parts of the same slots: each call waits until all have called."""

    def __init__(self, shards: Sequence[int]) -> None:
        self._expected = frozenset(shards)
        self._given: dict[int, Mapping[int, Sequence[PartSquares]]] = {}
        self._found: list[dict[int, list[float]]] = []
        self._condition = threading.Condition()
        self._ended = False

    def of(self, shard: int) -> Meeting:
        return _Seat(self, shard)

    def end(self) -> None:
        """A shard failed: the others must not wait for it."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def norms(self, shard: int, parts: Mapping[int, Sequence[PartSquares]]) -> Mapping[int, Sequence[float]]:
        with self._condition:
            turn = len(self._found)
            assert shard in self._expected and shard not in self._given, f"shard {shard} has no part of a slot to tell of"
            self._given[shard] = parts
            if self._given.keys() == self._expected:
                self._found.append(_norms(self._given))
                self._given = {}
                self._condition.notify_all()
            self._condition.wait_for(lambda: len(self._found) > turn or self._ended)
            if len(self._found) <= turn:
                raise ShardLost("another shard failed")
            return {slot: self._found[turn][slot] for slot in parts}


class _Seat:
    def __init__(self, meeting: SlotNorms, shard: int) -> None:
        self._meeting, self._shard = meeting, shard

    def norms(self, parts: Mapping[int, Sequence[PartSquares]]) -> Mapping[int, Sequence[float]]:
        return self._meeting.norms(self._shard, parts)


def _norms(given: Mapping[int, Mapping[int, Sequence[PartSquares]]]) -> dict[int, list[float]]:
    by_slot: dict[int, list[Sequence[PartSquares]]] = {}
    for shard in sorted(given):
        for slot, parts in given[shard].items():
            by_slot.setdefault(slot, []).append(parts)
    return {slot: [norm_of_parts(parts) for parts in zip(*held, strict=True)] for slot, held in by_slot.items()}


class ShardedVersions:
    """The versions of all shards, put together as they are asked for."""

    def __init__(self, shards: Sequence[ShardHandle], kept: Sequence[Sequence[OuterStep]]) -> None:
        self._shards = shards
        self._index = [set(versions) for versions in kept]
        self._sha256: dict[tuple[FragmentId, OuterStep], str] = {}
        self._pool = ThreadPoolExecutor(len(shards), "shards")

    def each(self, work: Callable[[ShardHandle], _Any]) -> list[_Any]:
        return list(self._pool.map(work, self._shards))

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def kept(self) -> list[list[OuterStep]]:
        return [sorted(versions) for versions in self._index]

    def note(self, t: OuterStep, fragments: Sequence[FragmentId]) -> None:
        for p in fragments:
            self._index[p].add(t)

    def announced(self, p: FragmentId, v: OuterStep) -> Tensor:
        self._require(p, v)
        return torch.cat(self.each(lambda shard: shard.read_announced(p, v)))

    def announcement(self, p: FragmentId, v: OuterStep) -> Announcement:
        self._require(p, v)
        return announcement_of(self.each(lambda shard: shard.read_announcement(p, v)))

    def packet(self, p: FragmentId, v: OuterStep) -> Packet | None:
        return self.announcement(p, v).packet

    def at(self, p: FragmentId, v: OuterStep) -> Version:
        self._require(p, v)
        return joined_version(self.each(lambda shard: shard.read_version(p, v)))

    def base(self, p: FragmentId, v: OuterStep) -> Version:
        return self.at(p, v)

    def newest(self) -> list[Version]:
        return [self.at(p, max(versions)) for p, versions in enumerate(self._index)]

    def load(self) -> Sequence[Version]:
        """The shards have theirs in memory."""
        return ()

    def theta(self) -> tuple[list[Tensor], list[Tensor]]:
        pairs = []
        for p, versions in enumerate(self._index):
            newest = max(versions)
            parts = self.each(lambda shard, p=p, newest=newest: shard.read_theta(p, newest))  # type: ignore[misc]
            pairs.append((torch.cat([theta for theta, _ in parts]), parts[0][1]))
        return [theta for theta, _ in pairs], [buffers for _, buffers in pairs]

    def theta_sha256(self) -> str:
        params, buffers = self.theta()
        return digest(params + buffers)

    def announced_sha256(self, p: FragmentId, v: OuterStep) -> str:
        found = self._sha256.get((p, v))
        if found is None:
            found = digest([self.announced(p, v)])
            if v in self._index[p]:
                self._sha256[p, v] = found
        return found

    def begin(self, t: OuterStep, p: FragmentId, inputs: object) -> None:
        raise AssertionError("the shards merge")

    def abandon(self, t: OuterStep) -> None:
        """They are told of an aborted round."""

    def put(self, t: OuterStep, versions: object, inputs: object = None) -> None:
        raise AssertionError("the shards store what they merged")

    def forget(self, p: FragmentId, v: OuterStep) -> None:
        self._index[p].discard(v)
        self._sha256.pop((p, v), None)
        self.each(lambda shard: shard.tell(ForgetVersion(p, v)))

    def link_into(self, directory: Path) -> None:
        self.each(lambda shard: shard.link_into(str(directory)))

    def keep_snapshots(self, names: Sequence[str]) -> None:
        self.each(lambda shard: shard.keep_snapshots(names))

    def _require(self, p: FragmentId, v: OuterStep) -> None:
        if v not in self._index[p]:
            raise DataError(f"version {v} of fragment {p} is not stored: there are {sorted(self._index[p])}")


def announcement_of(parts: Sequence[Announcement]) -> Announcement:
    return Announcement(joined_packet([part.packet for part in parts]), parts[0].buffers)


class ShardedSyncer(TensorSyncer):
    disk: ShardedVersions

    def __init__(
        self, config: Config, fragments: Sequence[Fragment], shards: Sequence[ShardHandle], disk: ShardedVersions,
        snapshots: SnapshotStore | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, fragments, disk, snapshots)
        self._shards = shards
        self._stripes = [stripes_of(fragment, len(shards)) for fragment in fragments]
        self._meets = [self._who_meets(stripes) for stripes in self._stripes]
        self._results: dict[tuple[OuterStep, FragmentId], list[StripeResult]] = {}
        self._announcements: OrderedDict[tuple[FragmentId, OuterStep], Announcement] = OrderedDict()
        self._pool = ThreadPoolExecutor(len(shards), "shards")
        self.feeds = False
        """The shards send learners what is announced."""
        self._codecs: dict[tuple[FragmentId, OuterStep], str] = {}
        """Of announced packets; "" where there is none."""

    def _who_meets(self, stripes: Sequence[Stripe]) -> list[int]:
        protocol = self._config.protocol
        return [
            shard
            for shard, stripe in enumerate(stripes)
            for slots in ([stripe.fragment.params[part.index] for part in stripe.cut],)
            if any((protocol.embedding_merge if slot.embedding else protocol.merge) == "rda" for slot in slots)
        ]

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        match effect:
            case Accept():
                self._accept(effect, payload)
            case AbortRound(outer_step=t):
                self._results = {key: result for key, result in self._results.items() if key[0] != t}
                for norms in self._norm_of.values():
                    norms.pop(t, None)
                self._all(lambda shard: self._shards[shard].tell(effect))
            case Discard():
                self._all(lambda shard: self._shards[shard].tell(effect))
            case Merge(outer_step=t, fragment=p):
                meeting = SlotNorms(self._meets[p])
                self._results[t, p] = self._all(lambda shard: self._merge_stripe(shard, effect, meeting), meeting.end)
            case CopyVersions(outer_step=t, versions=versions):
                copied = self._all(lambda shard: self._shards[shard].copy(effect))
                self._results |= {(t, p): [results[p] for results in copied] for p in range(len(versions))}
            case Store():
                return (self._store(effect),)
            case ForgetVersion(fragment=p, version=v):
                self.disk.forget(p, v)
                self._announcements.pop((p, v), None)
                self._codecs.pop((p, v), None)
            case _:
                return super().execute(effect, payload)
        return ()

    def _all(self, work: Callable[[int], _Any], failed: Callable[[], None] = lambda: None) -> list[_Any]:
        """In every shard at once. The first failure is raised when all have ended."""

        def guarded(shard: int) -> _Any:
            try:
                return work(shard)
            except BaseException:
                failed()
                raise

        futures = [self._pool.submit(guarded, shard) for shard in range(len(self._shards))]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, ShardLost)):  # the cause, before those who waited for it
            raise error
        return [future.result() for future in futures]

    def _accept(self, effect: Accept, payload: Payload | None) -> None:
        assert payload is not None
        content = payload.content
        if isinstance(content, OwnParts):
            self._all(lambda shard: self._shards[shard].accept_own(effect, content.session, content.number))
        else:
            packet, buffers = content
            self._all(lambda shard: self._accept_stripe(shard, effect, packet, buffers))

    def judge(self, body: Contribution, parts: Sequence[PartFound]) -> Finding | None:
        """`inspect` of a contribution that the shards have. None: they must be asked again, for the squares of its values."""
        flaw = next((part.flaw for part in parts if part.flaw), None)
        if flaw is not None:
            return Finding(Reason(Why.POISONED, flaw))
        leaves = [part.leaves for part in parts if part.leaves is not None]
        if len(leaves) < len(parts):
            return None
        norm = _norm(leaves)
        if not math.isfinite(norm):
            return Finding(Reason(Why.POISONED, f"fragment {body.fragment} holds NaN or Inf"))
        return Finding(None, Measure(norm, self._weights_norm(body.fragment, body.anchor)))

    def _accept_stripe(self, shard: int, effect: Accept, packet: Packet, buffers: Tensor) -> None:
        stripe = self._stripes[effect.fragment][shard]
        own = buffers if stripe.fragment.buffer_numel else buffers[:0]
        self._shards[shard].accept(effect, packet_part(packet, stripe.first, stripe.last), own)

    def _merge_stripe(self, shard: int, effect: Merge, meeting: SlotNorms) -> StripeResult:
        return self._shards[shard].merge(effect, meeting.of(shard))

    def _store(self, effect: Store) -> Stored | MergeRejected:
        t, fragments = effect.outer_step, effect.fragments
        results = [self._results[t, p] for p in fragments]
        jumps = tuple(_norm([result.moves for result in parts]) for parts in results)
        limits = effect.jump_limits or (0.0,) * len(fragments)
        for p, jump, limit in zip(fragments, jumps, limits, strict=True):
            if not math.isfinite(jump) or (limit > 0 and jump > limit):
                return MergeRejected(t, p, jump)
        if self.feeds:
            codecs = self._all(lambda shard: self._shards[shard].store_quietly(effect))[0]
            self._codecs |= {(p, t): codec for p, codec in zip(fragments, codecs, strict=True)}
        else:
            stored = self._all(lambda shard: self._shards[shard].store(effect))
            for index, p in enumerate(fragments):
                self._announcements[p, t] = announcement_of([announced[index] for announced in stored])
        for index, p in enumerate(fragments):
            self._know_norm(p, t, _norm([result.sizes for result in results[index]]))
            del self._results[t, p]
        while len(self._announcements) > ANNOUNCED_KEPT + self._config.protocol.overlap:
            self._announcements.popitem(last=False)
        self.disk.note(t, fragments)
        vectors = [[getattr(r, name) for r in parts] for parts in results for name in ("theta", "buffers")]
        return Stored(t, checksum_of_parts(vectors), jumps)

    def announced_as(self, body: Announce) -> str:
        """The codec of the packet that this announcement is; "": the announced vector."""
        p, v = body.fragment, body.outer_step
        if body.previous == NO_VERSION:
            return ""
        if (p, v) not in self._codecs:  # of before a restart
            packet = self._shards[0].read_announcement(p, v).packet
            self._codecs[p, v] = packet.codec if packet is not None else ""
        return self._codecs[p, v]

    def payload_for(self, send: Send) -> Payload | None:
        body = send.envelope.body
        if not isinstance(body, Announce):
            return None
        p, v = body.fragment, body.outer_step
        found = self._announcements.get((p, v))
        packet, buffers = found if found is not None else self.disk.announcement(p, v)
        if body.previous != NO_VERSION and packet is not None:
            return Payload("fragment", packet.nbytes + 4 * buffers.numel(), (packet, buffers))
        announced = self.disk.announced(p, v)
        return Payload("fragment", 4 * announced.numel() + 4 * buffers.numel(), (announced, buffers))


def _norm(leaves: Sequence[Array]) -> float:
    return math.sqrt(tree_sum(np.concatenate(leaves)))
