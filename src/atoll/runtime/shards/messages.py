"""What the coordinator of a syncer and its shards say to each other. A shard does what it is asked, one request after the other,
and answers each; only in a merge it asks back, for the norms of slots that it has parts of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from atoll.codecs import Packet
from atoll.executor.shard import StripeResult
from atoll.ids import FragmentId, OuterStep
from atoll.protocol.vocabulary import AbortRound, Accept, CopyVersions, Discard, ForgetVersion, Merge, Store
from atoll.runtime.ranks.channel import parts_of
from atoll.runtime.ranks.messages import Note
from atoll.store.versions import DigestPart, Version
from atoll.tensors.layout import Fragment, Slot
from atoll.tensors.norms import PartSquares
from atoll.tensors.outer import OuterState

Named: TypeAlias = tuple[tuple[str, str, int], ...]
"""Of the tensors beside a message: name, dtype, number of elements."""
ShardEffect: TypeAlias = Accept | AbortRound | Discard | ForgetVersion | Merge | CopyVersions | Store


class ShardHello(Note, frozen=True):
    """The first message of every connection to a shard."""

    session: str
    """The same for all connections of a coordinator."""
    reads: bool
    key: str = ""
    feeds: bool = False
    """The third connection, after the others: what the shard sends to learners itself."""


class SlotRow(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    dtype: str
    embedding: bool


class FragmentRow(msgspec.Struct, frozen=True, array_like=True):
    params: tuple[SlotRow, ...]
    buffers: tuple[SlotRow, ...]
    numel: int
    buffer_numel: int


class OpenShard(Note, frozen=True):
    run: str
    config: dict[str, Any]
    fragments: tuple[FragmentRow, ...]
    """The whole ones: a shard cuts them itself."""
    shard: int
    shards: int
    threads: int
    """Of its kernels; 0: its share of the machine's cores."""
    fresh: bool
    """Versions follow; what its folder holds is of a start that failed."""
    in_blocks: bool
    keys: str | None = None
    """Of a shard on the syncer's machine: the folder with the syncer's certificate, for its connections with learners."""


class PutStripe(Note, frozen=True):
    fragment: FragmentId
    version: OuterStep
    tensors: Named
    count: int | None
    codec: str


class RetainVersions(Note, frozen=True):
    """The last of the beginning: the shard is ready when it answers."""

    kept: tuple[tuple[OuterStep, ...], ...]


class ShardReady(Note, frozen=True):
    kernels: str
    seconds: float
    door: str = ""
    """Where the coordinator hands it connections of learners: a Unix socket."""


class DoEffect(Note, frozen=True):
    effect: ShardEffect
    tensors: Named = ()
    codec: str = ""
    quietly: bool = False
    """Nobody here sends what is stored: the bytes stay in the shard."""
    session: bytes = b""
    """Of a contribution to accept that the shard has itself: the link it came on, and the number of its bulk message there."""
    number: int = 0


class EffectDone(Note, frozen=True):
    tensors: Named = ()
    codecs: tuple[str, ...] = ()
    """Of an announcement for each stored fragment."""


class TellParts(Note, frozen=True):
    """A shard's parts of slots, for which it wants the norms of the whole: by slot how many vectors there are."""

    slots: tuple[tuple[int, int], ...]
    tensors: Named


class SlotNormsFound(Note, frozen=True):
    norms: tuple[tuple[int, tuple[float, ...]], ...]


class ReadStripe(Note, frozen=True):
    fragment: FragmentId
    version: OuterStep
    what: str
    """"announced", "announcement", "theta" or "version"."""


class StripeRead(Note, frozen=True):
    tensors: Named
    count: int | None = None
    codec: str = ""


class LinkInto(Note, frozen=True):
    directory: str
    """On the machine of the syncer the folder itself; elsewhere a folder below the shard's own."""


class KeepSnapshots(Note, frozen=True):
    """Of those that are below the shard's own folder; the others are removed."""

    names: tuple[str, ...]


class ExpectLink(Note, frozen=True):
    """A learner's link has begun, and a connection of its will come that shows this session and key."""

    session: bytes
    key: bytes
    certificate: str | None


class ForgetLink(Note, frozen=True):
    session: bytes


class FeedLink(Note, frozen=True):
    """Send the stripe of an announcement, as a part of a bulk message of that link."""

    session: bytes
    number: int
    fragment: FragmentId
    version: OuterStep
    whole: bool
    """The announced vector, not the packet."""


class PartCame(Note, frozen=True):
    """The shard has its whole part of a contribution: so many bytes."""

    session: bytes
    number: int
    """Of its bulk message."""
    nbytes: int


class JudgePart(Note, frozen=True):
    """Look at this shard's part of a contribution that came on that link, and keep it until it is accepted or dropped."""

    session: bytes
    number: int
    """Of its bulk message."""
    fragment: FragmentId
    wanted: bool = True
    """Else nobody needs it."""
    by_value: bool = False
    """Asked again, for squares of what the codes decode to."""


class DropPart(Note, frozen=True):
    """It was accepted or refused, or its link is over."""

    session: bytes
    number: int


class PartJudged(Note, frozen=True):
    session: bytes
    number: int
    flaw: str = ""
    """Why it cannot be used; "": it can."""
    gone: bool = False
    """The link is over, and its parts were let go."""
    tensors: Named = ()
    """`leaves`: what its norm adds up; none where only its values tell."""


class LinkHere(Note, frozen=True):
    session: bytes


class LinkFed(Note, frozen=True):
    session: bytes
    nbytes: int


class LinkGone(Note, frozen=True):
    session: bytes
    reason: str


class ShardFailed(Note, frozen=True):
    kind: str
    """"storage": it may be asked again; "data": what it was asked for is not there; "bug"."""
    sentence: str


ToShard: TypeAlias = (
    ShardHello | OpenShard | PutStripe | RetainVersions | DoEffect | SlotNormsFound | ReadStripe | LinkInto | KeepSnapshots
    | ExpectLink | ForgetLink | FeedLink | JudgePart | DropPart
)  # fmt: skip
ToCoordinator: TypeAlias = (
    ShardReady | EffectDone | TellParts | StripeRead | ShardFailed | LinkHere | LinkFed | LinkGone | PartCame | PartJudged
)


# ---------------------------------------------------------------- tensors beside messages


def named(tensors: Mapping[str, Tensor]) -> tuple[Named, list[Tensor]]:
    """Wide ones first: what is read from odd addresses is copied."""
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    given = [tensors[name] for name in order]
    return tuple((n, str(t.dtype).removeprefix("torch."), t.numel()) for n, t in zip(order, given, strict=True)), given


def tensors_of_note(rows: Named, data: Tensor) -> dict[str, Tensor]:
    dtypes = [getattr(torch, dtype) for _, dtype, _ in rows]
    sizes = [count * dtype.itemsize for (_, _, count), dtype in zip(rows, dtypes, strict=True)]
    found = parts_of(data, sizes, dtypes)
    return {name: tensor for (name, _, _), tensor in zip(rows, found, strict=True)}


def tensors_of_packet(packet: Packet | None, prefix: str = "packet") -> dict[str, Tensor]:
    if packet is None:
        return {}
    parts = {f"{prefix}.codes": packet.codes} | ({} if packet.scales is None else {f"{prefix}.scales": packet.scales})
    return parts


def packet_of(tensors: Mapping[str, Tensor], codec: str, numel: int, prefix: str = "packet") -> Packet | None:
    if not codec:
        return None
    return Packet(codec, numel, tensors[f"{prefix}.codes"], tensors.get(f"{prefix}.scales"))


def tensors_of_version(version: Version) -> tuple[dict[str, Tensor], int | None, str]:
    tensors = {"theta": version.theta, "buffers": version.buffers} | tensors_of_packet(version.packet)
    if version.announced is not version.theta:
        tensors["announced"] = version.announced
    outer = version.outer
    if outer is not None:
        kept = (("momentum", outer.momentum), ("pending", outer.pending), ("average", outer.average))
        tensors |= {name: tensor for name, tensor in kept if tensor is not None}
    return tensors, outer.count if outer is not None else None, version.packet.codec if version.packet is not None else ""


def version_of(tensors: Mapping[str, Tensor], count: int | None, codec: str) -> Version:
    theta = tensors["theta"]
    outer = None
    if count is not None:
        outer = OuterState(tensors.get("momentum"), tensors.get("pending"), count, tensors.get("average"))
    packet = packet_of(tensors, codec, theta.numel())
    return Version(theta, tensors["buffers"], outer, None, tensors.get("announced", theta), packet)


def tensors_of_results(results: Sequence[StripeResult]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for index, result in enumerate(results):
        found |= {f"{index}.moves": _of(result.moves), f"{index}.sizes": _of(result.sizes)}
        for name, part in (("theta", result.theta), ("buffers", result.buffers)):
            found |= {f"{index}.{name}.{end}": _bytes(getattr(part, end)) for end in part._fields}
    return found


def results_of(tensors: Mapping[str, Tensor]) -> list[StripeResult]:
    count = sum(name.endswith(".moves") for name in tensors)

    def part(index: int, name: str) -> DigestPart:
        return DigestPart(*(tensors[f"{index}.{name}.{end}"].numpy().tobytes() for end in DigestPart._fields))

    return [
        StripeResult(tensors[f"{i}.moves"].numpy(), tensors[f"{i}.sizes"].numpy(), part(i, "theta"), part(i, "buffers"))
        for i in range(count)
    ]


def tensors_of_parts(parts: Mapping[int, Sequence[PartSquares]]) -> dict[str, Tensor]:
    return {
        f"{slot}.{index}.{end}": _of(getattr(each, end))
        for slot, given in parts.items()
        for index, each in enumerate(given)
        for end in PartSquares._fields
    }


def parts_told(note: TellParts, data: Tensor) -> dict[int, list[PartSquares]]:
    tensors = tensors_of_note(note.tensors, data)
    return {
        slot: [PartSquares(*(tensors[f"{slot}.{index}.{end}"].numpy() for end in PartSquares._fields)) for index in range(count)]
        for slot, count in note.slots
    }


def _of(array: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


# ---------------------------------------------------------------- fragments


def rows_of(fragments: Sequence[Fragment]) -> tuple[FragmentRow, ...]:
    def rows(slots: Sequence[Slot]) -> tuple[SlotRow, ...]:
        return tuple(
            SlotRow(s.name, s.kind, s.shape, s.offset, s.numel, str(s.dtype).removeprefix("torch."), s.embedding) for s in slots
        )

    return tuple(FragmentRow(rows(f.params), rows(f.buffers), f.numel, f.buffer_numel) for f in fragments)


def fragments_from(rows: Sequence[FragmentRow]) -> tuple[Fragment, ...]:
    def slots(given: Sequence[SlotRow]) -> tuple[Slot, ...]:
        return tuple(
            Slot(s.name, s.kind, 0, rows_, s.shape, s.offset, s.numel, getattr(torch, s.dtype), s.embedding)
            for s in given
            for rows_ in (s.shape[0] if s.shape else 1,)
        )

    return tuple(Fragment(p, slots(r.params), slots(r.buffers), r.numel, r.buffer_numel) for p, r in enumerate(rows))
