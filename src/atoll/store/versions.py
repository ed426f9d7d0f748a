"""Versions of fragments, and where they lie: in memory here, for virtual runs and replays; on disk in `durable.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.codecs import Packet
from atoll.ids import FragmentId, OuterStep
from atoll.tensors.outer import OuterState


@dataclass(frozen=True, slots=True)
class Version:
    """A fragment as of one outer step. `announced` is what learners hold; it differs from Theta by the down codec's residual."""

    theta: Tensor
    buffers: Tensor
    outer: OuterState | None
    inner: dict[str, Any] | None
    announced: Tensor
    packet: Packet | None
    """The announced difference to the version before; None where announcements are in full."""


class VersionStore(Protocol):
    """Where the versions of fragments lie: `Disk` in memory, `durable.DurableDisk` on disk."""

    def at(self, p: FragmentId, v: OuterStep) -> Version: ...
    def announced(self, p: FragmentId, v: OuterStep) -> Tensor: ...
    def packet(self, p: FragmentId, v: OuterStep) -> Packet | None: ...
    def newest(self) -> list[Version]: ...
    def put(self, t: OuterStep, versions: Mapping[FragmentId, Version]) -> None:
        """Durable when it returns."""
        ...

    def forget(self, p: FragmentId, v: OuterStep) -> None: ...


class MemoryVersions:
    """What survives a killed syncer. This one is memory, for virtual runs and replays; `durable.py` holds the real one."""

    def __init__(self, initial: Sequence[Version]) -> None:
        self.versions: list[dict[OuterStep, Version]] = [{0: version} for version in initial]

    def at(self, p: FragmentId, v: OuterStep) -> Version:
        return self.versions[p][v]

    def announced(self, p: FragmentId, v: OuterStep) -> Tensor:
        return self.versions[p][v].announced

    def packet(self, p: FragmentId, v: OuterStep) -> Packet | None:
        return self.versions[p][v].packet

    def put(self, t: OuterStep, versions: Mapping[FragmentId, Version]) -> None:
        for p, version in versions.items():
            self.versions[p][t] = version

    def forget(self, p: FragmentId, v: OuterStep) -> None:
        self.versions[p].pop(v, None)

    def kept(self) -> list[list[OuterStep]]:
        return [sorted(versions) for versions in self.versions]

    def newest(self) -> list[Version]:
        return [versions[max(versions)] for versions in self.versions]

    def copy(self) -> MemoryVersions:
        """As it is now: versions are values, so this costs no tensor."""
        copy = MemoryVersions(())
        copy.versions = [dict(versions) for versions in self.versions]
        return copy

    def theta(self) -> tuple[list[Tensor], list[Tensor]]:
        newest = self.newest()
        return [v.theta for v in newest], [v.buffers for v in newest]

    def theta_sha256(self) -> str:
        return digest([v.theta.cpu() for v in self.newest()] + [v.buffers.cpu() for v in self.newest()])


def digest(tensors: Sequence[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        if tensor.is_cuda:  # a copy to the host each round would cost more than the round
            sha.update(_folded(tensor).to_bytes(8, "little", signed=True))
        else:
            sha.update(tensor.contiguous().numpy().data)
    return sha.hexdigest()


def _folded(tensor: Tensor) -> int:
    """All bits of a tensor in one number, worked out where it lies: each element times its own odd factor, modulo 2^64."""
    bits = tensor.contiguous().view(torch.int32).to(torch.int64)
    factors = torch.arange(bits.numel(), device=tensor.device) * 2654435761 * 2 + 1
    return int((bits.reshape(-1) * factors).sum())
