"""The versions of a syncer of several shards, read from their folders and put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from atoll.codecs import Packet
from atoll.codecs.parts import joined, packet_part
from atoll.errors import DataError
from atoll.ids import FragmentId, OuterStep
from atoll.store.durable import DurableVersions, Remerge
from atoll.store.version_file import FOLDER
from atoll.store.version_folder import elsewhere, shard_folders
from atoll.store.versions import Version, digest
from atoll.tensors.outer import OuterState
from atoll.tensors.stripes import Stripe

RemergeOf: TypeAlias = Callable[[int, int], Remerge]
"""What merges again: of a shard, by its number and that of all shards. (0, 1): whole fragments."""


def joined_version(parts: Sequence[Version]) -> Version:
    theta = torch.cat([part.theta for part in parts])
    same = all(part.announced is part.theta for part in parts)
    announced = theta if same else torch.cat([part.announced for part in parts])
    states = [part.outer for part in parts if part.outer is not None]
    outer = None
    if states:
        momentum, pending, average = (_cat([getattr(s, name) for s in states]) for name in ("momentum", "pending", "average"))
        outer = OuterState(momentum, pending, states[0].count, average)
    return Version(theta, parts[0].buffers, outer, None, announced, joined_packet([part.packet for part in parts]))


def joined_packet(parts: Sequence[Packet | None]) -> Packet | None:
    given = [part for part in parts if part is not None]
    return joined(given) if given else None


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def stripe_of_version(version: Version, stripe: Stripe) -> Version:
    """What a shard stores of a version; `joined_version` of all of them gives it back."""

    def own(vector: Tensor | None) -> Tensor | None:
        return vector[stripe.first : stripe.last].clone() if vector is not None else None

    theta, state = version.theta[stripe.first : stripe.last].clone(), version.outer
    buffers = version.buffers if stripe.fragment.buffer_numel else version.buffers[:0]
    announced = theta if version.announced is version.theta else own(version.announced)
    assert announced is not None
    outer = OuterState(own(state.momentum), own(state.pending), state.count, own(state.average)) if state is not None else None
    packet = packet_part(version.packet, stripe.first, stripe.last) if version.packet is not None else None
    return Version(theta, buffers, outer, None, announced, packet)


class StripedVersions:
    """Read-only. While shards store, one may be ahead of another: what not all of them have is not there."""

    def __init__(self, directory: Path, shards: Sequence[DurableVersions]) -> None:
        self.directory = directory
        self.shards = shards

    def kept(self) -> list[list[OuterStep]]:
        lists = [shard.kept() for shard in self.shards]
        found = [sorted(set.intersection(*(set(kept[p]) for kept in lists))) for p in range(len(lists[0]))]
        for p, versions in enumerate(found):
            if not versions:
                raise DataError(f"directory {self.directory / FOLDER}: its shards have no version of fragment {p} in common")
        return found

    def at(self, p: FragmentId, v: OuterStep) -> Version:
        return joined_version([shard.at(p, v) for shard in self.shards])

    def newest(self) -> list[Version]:
        return [self.at(p, versions[-1]) for p, versions in enumerate(self.kept())]

    def theta(self) -> tuple[list[Tensor], list[Tensor]]:
        parts = [[shard.theta_at(p, versions[-1]) for shard in self.shards] for p, versions in enumerate(self.kept())]
        return [torch.cat([theta for theta, _ in each]) for each in parts], [each[0][1] for each in parts]

    def theta_sha256(self) -> str:
        params, buffers = self.theta()
        return digest(params + buffers)

    def link_into(self, directory: Path) -> None:
        for shard in self.shards:
            shard.link_into(directory / FOLDER / shard.directory.name)


def open_versions(directory: Path, remerge_of: RemergeOf | None = None) -> DurableVersions | StripedVersions:
    """Read-only, of a run or a snapshot, with shards or without. Without `remerge_of` a version that is stored by its inputs
    cannot be read."""
    folders = shard_folders(directory)
    if not folders:
        return DurableVersions.open(directory, read_only=True, remerge=remerge_of(0, 1) if remerge_of else None)
    for folder in folders:
        if (address := elsewhere(folder)) is not None:
            raise DataError(
                f"{folder}: these stripes are on the machine of the shard {address}; to read them here, copy them from its --dir "
                f"(DIR/{FOLDER}, or DIR/snapshots/STEP/{FOLDER} of a snapshot) to {folder / FOLDER}"
            )
    count = len(folders)
    remerges = [remerge_of(shard, count) if remerge_of else None for shard in range(count)]
    stores = [DurableVersions.open(f, read_only=True, remerge=again) for f, again in zip(folders, remerges, strict=True)]
    return StripedVersions(directory, stores)
