"""Versions of fragments and their store: in memory here, for virtual runs and replays; on disk in `durable.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch
import xxhash
from torch import Tensor

from atoll.codecs import Packet
from atoll.ids import FragmentId, OuterStep
from atoll.tensors.outer import OuterState

Met: TypeAlias = tuple[tuple[tuple[int, tuple[float, ...]], ...], ...]
"""What a shard learnt from the others while it merged a stripe, in order: by slot of the fragment the norms of the whole slot."""


@dataclass(frozen=True, slots=True)
class Version:
    """A fragment after one outer step. `announced` is what learners hold: Theta without the down codec's residual."""

    theta: Tensor
    buffers: Tensor
    outer: OuterState | None
    inner: dict[str, Any] | None
    announced: Tensor
    packet: Packet | None
    """The announced difference to the previous version; None where announcements are in full."""


@dataclass(frozen=True, slots=True)
class MergeInputs:
    """What a version was merged from: with the version before it, enough to merge it again to the same bytes. Contributions are
    in the order of the merge."""

    previous: OuterStep
    plain_average: bool
    weights: tuple[float, ...]
    anchors: tuple[OuterStep, ...]
    """The version that each contribution is a difference to."""
    packets: tuple[Packet, ...]
    buffers: tuple[Tensor, ...]
    result: str = ""
    """Checksum of the merged Theta and buffers, where they are stored: what is merged again must have it."""
    met: Met = ()
    """Of a stripe: without the other shards it cannot be merged again otherwise."""

    @property
    def nbytes(self) -> int:
        return sum(packet.nbytes for packet in self.packets) + sum(4 * buffers.numel() for buffers in self.buffers)


class VersionStore(Protocol):
    """A store of versions: `MemoryVersions`, or `durable.DurableVersions` on disk."""

    def at(self, p: FragmentId, v: OuterStep) -> Version: ...
    def base(self, p: FragmentId, v: OuterStep) -> Version:
        """What a merge starts from: the version, with or without its packet."""
        ...

    def announced(self, p: FragmentId, v: OuterStep) -> Tensor: ...
    def packet(self, p: FragmentId, v: OuterStep) -> Packet | None: ...
    def newest(self) -> list[Version]: ...
    def begin(self, t: OuterStep, p: FragmentId, inputs: MergeInputs) -> None:
        """A merge of these begins, which `put` may store by them; `abandon` if it comes to nothing."""
        ...

    def abandon(self, t: OuterStep) -> None: ...
    def put(
        self, t: OuterStep, versions: Mapping[FragmentId, Version], inputs: Mapping[FragmentId, MergeInputs] | None = None
    ) -> None:
        """Durable when it returns. `inputs` of a fragment may be stored instead of its version: it can be merged again."""
        ...

    def forget(self, p: FragmentId, v: OuterStep) -> None: ...


class MemoryVersions:
    """For virtual runs and replays: it survives a syncer that is killed in virtual time."""

    def __init__(self, initial: Sequence[Version]) -> None:
        self.versions: list[dict[OuterStep, Version]] = [{0: version} for version in initial]

    def at(self, p: FragmentId, v: OuterStep) -> Version:
        return self.versions[p][v]

    def base(self, p: FragmentId, v: OuterStep) -> Version:
        return self.at(p, v)

    def announced(self, p: FragmentId, v: OuterStep) -> Tensor:
        return self.versions[p][v].announced

    def packet(self, p: FragmentId, v: OuterStep) -> Packet | None:
        return self.versions[p][v].packet

    def begin(self, t: OuterStep, p: FragmentId, inputs: MergeInputs) -> None:
        pass

    def abandon(self, t: OuterStep) -> None:
        pass

    def put(
        self, t: OuterStep, versions: Mapping[FragmentId, Version], inputs: Mapping[FragmentId, MergeInputs] | None = None
    ) -> None:
        for p, version in versions.items():
            self.versions[p][t] = version

    def forget(self, p: FragmentId, v: OuterStep) -> None:
        self.versions[p].pop(v, None)

    def kept(self) -> list[list[OuterStep]]:
        return [sorted(versions) for versions in self.versions]

    def newest(self) -> list[Version]:
        return [versions[max(versions)] for versions in self.versions]

    def copy(self) -> MemoryVersions:
        """The present versions. Versions are immutable, so no tensor is copied."""
        copy = MemoryVersions(())
        copy.versions = [dict(versions) for versions in self.versions]
        return copy

    def theta(self) -> tuple[list[Tensor], list[Tensor]]:
        newest = self.newest()
        return [v.theta for v in newest], [v.buffers for v in newest]

    def theta_sha256(self) -> str:
        return digest([v.theta.cpu() for v in self.newest()] + [v.buffers.cpu() for v in self.newest()])


def average_of(newest: Sequence[Version]) -> tuple[list[Tensor], list[Tensor]] | None:
    """The average of Theta over time, and its buffers; None where the run keeps none. A fragment that was never merged has its
    Theta."""
    averages = [None if version.outer is None else version.outer.average for version in newest]
    if all(average is None for average in averages):
        return None
    pairs = zip(averages, newest, strict=True)
    return [v.theta if average is None else average for average, v in pairs], [v.buffers for v in newest]


def digest(tensors: Sequence[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.contiguous().cpu().numpy().data)
    return sha.hexdigest()


IN_BLOCKS: Final = "blocks"
"""In a tape's header: the run's checksums are of blocks."""
DIGEST_BLOCK: Final = 1 << 18
"""Elements that have a digest of their own in the checksum of a longer vector, so that shards can compute it in parts."""


class DigestPart(NamedTuple):
    """Of a part of a vector: the digests of its whole blocks, and the bytes at its ends, of blocks that other parts complete."""

    head: bytes
    blocks: bytes
    tail: bytes


Spread: TypeAlias = Callable[[Callable[[int, int], None], int], None]
"""Calls work with ranges that are all of 0 to a count, perhaps in several threads."""


def in_one_thread(work: Callable[[int, int], None], count: int) -> None:
    work(0, count)


def checksum(tensors: Sequence[Tensor], *, in_blocks: bool = True, spread: Spread = in_one_thread) -> str:
    """For every outer step, where SHA-256 would take longer than the merge. It finds damage, not malice. `in_blocks`: False for
    runs that began before long vectors were digested in blocks."""
    xxh = xxhash.xxh3_128()
    for tensor in tensors:
        if tensor.is_cuda:  # copying it to the host would cost more than the round
            xxh.update(_device_digest(tensor).to_bytes(8, "little", signed=True))
        elif in_blocks and tensor.numel() > DIGEST_BLOCK:
            xxh.update(digest_part(tensor, 0, tensor.numel(), spread).blocks)
        else:
            xxh.update(tensor.contiguous().numpy().data)
    return str(xxh.hexdigest())


def digest_part(part: Tensor, at: int, whole: int, spread: Spread = in_one_thread) -> DigestPart:
    """Of a part that begins `at` in a vector of `whole` elements."""
    data = memoryview(part.contiguous().view(-1).view(torch.uint8).numpy().data) if part.numel() else memoryview(b"")
    if whole <= DIGEST_BLOCK:
        return DigestPart(bytes(data), b"", b"")
    size = DIGEST_BLOCK * part.element_size()
    first = min(len(data), -at * part.element_size() % size)
    last = len(data) if at + part.numel() == whole else first + (len(data) - first) // size * size
    found = [b""] * -(-(last - first) // size)

    def hash_blocks(begin: int, end: int) -> None:
        for index in range(begin, end):
            left = first + index * size
            found[index] = xxhash.xxh3_128_digest(data[left : min(last, left + size)])

    spread(hash_blocks, len(found))
    return DigestPart(bytes(data[:first]), b"".join(found), bytes(data[last:]))


def checksum_of_parts(vectors: Sequence[Sequence[DigestPart]], itemsize: int = 4) -> str:
    """`checksum` of the vectors that the parts make."""
    xxh = xxhash.xxh3_128()
    for parts in vectors:
        if not any(part.blocks or part.tail for part in parts) and sum(len(p.head) for p in parts) <= DIGEST_BLOCK * itemsize:
            xxh.update(b"".join(part.head for part in parts))
        else:
            xxh.update(_joined_blocks(parts, DIGEST_BLOCK * itemsize))
    return str(xxh.hexdigest())


def _joined_blocks(parts: Sequence[DigestPart], size: int) -> bytes:
    found, open_block = bytearray(), bytearray()
    for part in parts:
        open_block += part.head
        if len(open_block) == size:
            found += xxhash.xxh3_128_digest(bytes(open_block))
            open_block.clear()
        assert not (part.blocks and open_block), "a part of the vector is missing"
        found += part.blocks
        open_block += part.tail
    return bytes(found + xxhash.xxh3_128_digest(bytes(open_block))) if open_block else bytes(found)


def _device_digest(tensor: Tensor) -> int:
    """A digest of all bits of a tensor, computed on its device: the sum of each element times its own odd factor, mod 2^64."""
    bits = tensor.contiguous().view(torch.int32).to(torch.int64)
    factors = torch.arange(bits.numel(), device=tensor.device) * 2654435761 * 2 + 1
    return int((bits.reshape(-1) * factors).sum())
