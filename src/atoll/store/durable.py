"""The syncer's versions of fragments on disk: one file for each version, and only the newest in memory.

    versions/0003-000000042.safetensors    fragment 3 as of outer step 42

    theta, buffers                    always
    announced                         where it is another tensor object than theta, even an equal one: a merge compares them
    outer.momentum, outer.pending     where the outer optimiser has them
    packet.codes, packet.scales       where announcements are differences
    inner/...                         the inner optimiser's tensors, data-parallel only

Metadata `atoll` is JSON: fragment and version, counts, and the xxh3-128 of each tensor with its name; metadata `sha256` is the
SHA-256 of that JSON. So one digest covers the whole file, and a single tensor can be read and checked by itself. xxh3 finds
damage, not malice, at the speed of memory: SHA-256 of these tensors took longer than a merge.

A file never changes once it has its final name, so a snapshot is a set of hard links. Files are written under a temporary
name, synced and renamed. `retain` deletes the files that a crash left behind.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import msgspec
import torch
import xxhash
from torch import Tensor

from atoll.codecs import Packet
from atoll.errors import UNDECODABLE, DataError, UserError
from atoll.ids import FragmentId, OuterStep
from atoll.store import tensor_files as state
from atoll.store.tensor_files import PARTIAL, ByteChunk, StorageFailed, TensorEntry, free_bytes
from atoll.store.versions import Version, digest
from atoll.tensors.outer import OuterState

__all__ = [
    "DurableVersions", "StorageFailed", "check_version", "free_bytes", "newest_step", "version_files", "version_path",
    "version_sha256",
]  # fmt: skip

FORMAT: Final = "atoll-version-2"
FOLDER: Final = "versions"
PACKETS_MAX: Final = 4
"""Announced packets kept in memory: a few rounds are in flight, and reading one again would hold up the network's thread."""
_UNREAD: Final = Packet("fp32", 0, torch.empty(0), None)
_NAME: Final = re.compile(r"(\d{4,})-(\d{9,})\.safetensors")
_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    fragment: _Natural
    fragments: _Natural
    version: _Natural
    outer_count: _Natural | None
    codec: str | None
    numel: _Natural | None
    """Number of elements that the packet encodes."""
    inner: str | None
    digests: dict[str, str]


# ---------------------------------------------------------------- one file


def _encode(p: FragmentId, fragments: int, v: OuterStep, version: Version) -> tuple[list[ByteChunk], str]:
    tensors = {"theta": version.theta, "buffers": version.buffers}
    if version.announced is not version.theta:
        tensors["announced"] = version.announced
    outer, packet = version.outer, version.packet
    if outer is not None:
        tensors |= {f"outer.{n}": t for n, t in (("momentum", outer.momentum), ("pending", outer.pending)) if t is not None}
    if packet is not None:
        tensors |= {f"packet.{n}": t for n, t in (("codes", packet.codes), ("scales", packet.scales)) if t is not None}
    inner = None
    if version.inner is not None:
        structure, more = state.flatten(version.inner, "inner")
        inner = base64.b64encode(structure).decode("ascii")
        tensors |= more
    metadata = _Metadata(
        FORMAT, p, fragments, v, outer.count if outer else None, packet.codec if packet else None,
        packet.numel if packet else None, inner, {n: _tensor_xxh3(n, t) for n, t in sorted(tensors.items())},
    )  # fmt: skip
    text = msgspec.json.encode(metadata)
    root = hashlib.sha256(text).hexdigest()
    return state.tensor_chunks(tensors, {"atoll": text.decode(), "sha256": root}), root


def _tensor_xxh3(name: str, tensor: Tensor) -> str:
    xxh = xxhash.xxh3_128(_label(name, tensor.dtype, tuple(tensor.shape)))
    xxh.update(state.tensor_bytes(tensor))
    return str(xxh.hexdigest())


def is_anchor(tensor: Tensor, sha256: str) -> bool:
    """Whether these are the bytes that a syncer announced, by the digest that `announced_sha256` gave."""
    return digest([tensor]) == sha256


def _label(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{name} {dtype} {shape} ".encode()


def _read_metadata(stream: io.RawIOBase, size: int, path: Path) -> tuple[_Metadata, dict[str, TensorEntry], str]:
    entries, header = state.read_header(stream, size, str(path))
    text, root = header.get("atoll", ""), header.get("sha256", "")
    if hashlib.sha256(text.encode()).hexdigest() != root:
        raise DataError(f"{path} is damaged, or not a version of a fragment: the SHA-256 of its metadata is wrong")
    try:
        metadata = msgspec.json.decode(text, type=_Metadata)
    except UNDECODABLE as error:
        raise DataError(f"{path} was not written by this Atoll: {error}") from None
    if metadata.format != FORMAT or set(metadata.digests) != set(entries):
        raise DataError(f"{path} has format {metadata.format!r}; this Atoll reads {FORMAT!r}")
    if path.name != _file_name(metadata.fragment, metadata.version):
        raise DataError(f"{path} holds version {metadata.version} of fragment {metadata.fragment}: its name is another file's")
    return metadata, entries, root


def _load(path: Path, wanted: Callable[[str], bool]) -> tuple[_Metadata, dict[str, Tensor]]:
    """The wanted tensors, each checked."""

    def use(stream: io.RawIOBase, size: int) -> tuple[_Metadata, dict[str, Tensor]]:
        metadata, entries, _ = _read_metadata(stream, size, path)
        start = stream.tell()
        tensors = {}
        for name, entry in entries.items():
            if wanted(name):
                stream.seek(start + entry.data_offsets[0])
                tensors[name] = state.read_tensor(stream, entry, str(path))
                if _tensor_xxh3(name, tensors[name]) != metadata.digests[name]:
                    raise DataError(f"{path} is damaged: the checksum of tensor {name} is wrong")
        return metadata, tensors

    loaded: tuple[_Metadata, dict[str, Tensor]] = state.read_with(path, use)
    return loaded


def version_sha256(path: Path) -> str:
    """The digest that covers the file, read from its header alone."""
    return str(state.read_with(path, lambda stream, size: _read_metadata(stream, size, path)[2]))


def check_version(path: Path) -> str:
    """The same digest, after checking every byte through a small buffer. DataError names the file and the tensor."""

    def use(stream: io.RawIOBase, size: int) -> str:
        metadata, entries, root = _read_metadata(stream, size, path)
        buffer = memoryview(bytearray(2**20))
        for name, entry in entries.items():
            xxh = xxhash.xxh3_128(_label(name, entry.torch_dtype, entry.shape))
            left = entry.data_offsets[1] - entry.data_offsets[0]
            while left:
                part = buffer[: min(left, len(buffer))]
                state.fill(stream, part, str(path))
                xxh.update(part)
                left -= len(part)
            if xxh.hexdigest() != metadata.digests[name]:
                raise DataError(f"{path} is damaged: the checksum of tensor {name} is wrong")
        return root

    return str(state.read_with(path, use))


def _version(path: Path, metadata: _Metadata, tensors: dict[str, Tensor]) -> Version:
    try:
        theta = tensors["theta"]
        outer = inner = None
        if metadata.outer_count is not None:
            outer = OuterState(tensors.get("outer.momentum"), tensors.get("outer.pending"), metadata.outer_count)
        if metadata.inner is not None:
            inner = state.rebuild(state.from_base64(metadata.inner, str(path)), tensors, str(path))
        return Version(theta, tensors["buffers"], outer, inner, tensors.get("announced", theta), _packet(metadata, tensors))
    except KeyError as error:
        raise DataError(f"{path} was not written by this Atoll: tensor {error} is missing") from None


def _packet(metadata: _Metadata, tensors: dict[str, Tensor]) -> Packet | None:
    if metadata.codec is None or metadata.numel is None or "packet.codes" not in tensors:
        return None
    return Packet(metadata.codec, metadata.numel, tensors["packet.codes"], tensors.get("packet.scales"))


def _file_name(p: FragmentId, v: OuterStep) -> str:
    return f"{p:04d}-{v:09d}.safetensors"


# ---------------------------------------------------------------- all files


class DurableVersions:
    """A `VersionStore` that survives a killed syncer.

    In memory: the newest version of each fragment without its packet, the packets of the last few versions, which are being
    announced, and older announcements of a sixth of the fragments.
    """

    def __init__(self, directory: Path, fragments: int, *, read_only: bool = False) -> None:
        """`read_only`: for a snapshot, whose versions do not change."""
        self.directory = directory
        self._folder = directory / FOLDER
        self._read_only = read_only
        self._index: list[set[OuterStep]] = [set() for _ in range(fragments)]
        self._newest: dict[FragmentId, tuple[OuterStep, Version]] = {}
        self._older: OrderedDict[tuple[FragmentId, OuterStep], Tensor] = OrderedDict()
        self._older_max = max(1, fragments // 6)
        self._packets: OrderedDict[tuple[FragmentId, OuterStep], Packet | None] = OrderedDict()
        self._sha256: dict[tuple[FragmentId, OuterStep], str] = {}

    @staticmethod
    def create(directory: Path, initial: Sequence[Version]) -> DurableVersions:
        """Store a run's first versions. After a crash in here it may be called again; a folder that holds a run is refused.

        The versions do not stay in memory: the merging thread reads them, and so allocates and frees them itself. torch's
        allocator on ARM reclaims memory that another thread freed only when the allocating thread allocates again, and a
        thread that only starts the run never does."""
        disk = DurableVersions(directory, len(initial))
        disk._folder.mkdir(parents=True, exist_ok=True)
        if any(v > 0 for _, v in _scan(disk._folder)):
            raise UserError(f"directory {directory}: holds a run's versions already; open it, or choose another")
        disk.put(0, dict(enumerate(initial)))
        disk._newest.clear()
        return disk

    @staticmethod
    def open(directory: Path, *, read_only: bool = False) -> DurableVersions:
        """The versions found there, unread: call `retain` with those that the tape keeps. A version is checked when read."""
        found = _scan(directory / FOLDER)
        if not found:
            raise DataError(f"directory {directory} holds no versions of fragments")
        any_file = directory / FOLDER / _file_name(*found[0])
        fragments = int(state.read_with(any_file, lambda stream, size: _read_metadata(stream, size, any_file)[0].fragments))
        disk = DurableVersions(directory, fragments, read_only=read_only)
        for p, v in found:
            if p >= fragments:
                raise DataError(f"{disk.path(p, v)}: the run has {fragments} fragments")
            disk._index[p].add(v)
        for p, kept in enumerate(disk._index):
            if not kept:
                raise DataError(f"directory {directory / FOLDER} holds no version of fragment {p}")
        return disk

    # ------------------------------------------------------------ reading

    def path(self, p: FragmentId, v: OuterStep) -> Path:
        return self._folder / _file_name(p, v)

    def has(self, p: FragmentId, v: OuterStep) -> bool:
        return v in self._index[p]

    def kept(self) -> list[list[OuterStep]]:
        return [sorted(versions) for versions in self._index]

    def at(self, p: FragmentId, v: OuterStep) -> Version:
        """The whole version. The newest shares its tensors with this store and reads its packet; an older one is read from its
        file. `announced` and `packet` are cheaper where one part is enough."""
        self._require(p, v)
        if v == max(self._index[p]):
            return replace(self._newest_version(p, v), packet=self.packet(p, v))
        return _version(self.path(p, v), *_load(self.path(p, v), lambda name: True))

    def base(self, p: FragmentId, v: OuterStep) -> Version:
        self._require(p, v)
        return self._newest_version(p, v) if v == max(self._index[p]) else self.at(p, v)

    def packet(self, p: FragmentId, v: OuterStep) -> Packet | None:
        self._require(p, v)
        recent = self._packets.get((p, v), _UNREAD)  # one look: the network's thread asks while the disk's thread replaces
        if recent is not _UNREAD:
            return recent
        return _packet(*_load(self.path(p, v), lambda name: name.startswith("packet.")))

    def announced(self, p: FragmentId, v: OuterStep) -> Tensor:
        """The anchor of a contribution. Calls share one tensor while it is cached."""
        self._require(p, v)
        if v == max(self._index[p]):
            return self._newest_version(p, v).announced
        older = self._older.get((p, v))
        if older is None:
            _, tensors = _load(self.path(p, v), lambda name: name == "announced")
            if not tensors:
                _, tensors = _load(self.path(p, v), lambda name: name == "theta")
            (tensor,) = tensors.values()
            self._remember(p, v, tensor)
            return tensor
        with contextlib.suppress(KeyError):  # forgotten meanwhile by another thread
            self._older.move_to_end((p, v))
        return older

    def announced_sha256(self, p: FragmentId, v: OuterStep) -> str:
        """The digest by which a newcomer knows the anchor among what another learner sends it: that one may be an enemy, so it is
        SHA-256. Computed when first asked for, which takes as long as reading the tensor a few times."""
        self._require(p, v)
        found = self._sha256.get((p, v))
        if found is None:
            found = digest([self.announced(p, v)])
            if v in self._index[p]:  # not forgotten meanwhile by another thread
                self._sha256[p, v] = found
        return found

    def newest(self) -> list[Version]:
        """Without packets, to save memory; `at` has them."""
        return [self._newest_version(p, max(self._index[p])) for p in range(len(self._index))]

    def theta(self) -> tuple[list[Tensor], list[Tensor]]:
        """Reads nothing else: momentum and announcements are twice as much."""
        pairs = [self._theta_of(p, max(versions)) for p, versions in enumerate(self._index)]
        return [theta for theta, _ in pairs], [buffers for _, buffers in pairs]

    def _theta_of(self, p: FragmentId, v: OuterStep) -> tuple[Tensor, Tensor]:
        newest = self._newest.get(p)
        if newest is not None and newest[0] == v:
            return newest[1].theta, newest[1].buffers
        metadata, tensors = _load(self.path(p, v), lambda name: name in ("theta", "buffers"))
        self._require_own(p, v, metadata)
        return tensors["theta"], tensors["buffers"]

    def theta_sha256(self) -> str:
        params, buffers = self.theta()
        return digest(params + buffers)

    def _newest_version(self, p: FragmentId, v: OuterStep) -> Version:
        """Version v, which was the newest at the call. Another thread may put a newer one meanwhile, and that must not be
        returned as v."""
        newest = self._newest.get(p)
        if newest is None or newest[0] != v:
            metadata, tensors = _load(self.path(p, v), lambda name: not name.startswith("packet."))
            self._require_own(p, v, metadata)
            newest = (v, _version(self.path(p, v), metadata, tensors))
            if v == max(self._index[p]):
                self._newest[p] = newest
        return newest[1]

    def _require(self, p: FragmentId, v: OuterStep) -> None:
        if v not in self._index[p]:
            raise DataError(f"{self.path(p, v)} is not stored: fragment {p} has versions {sorted(self._index[p])}")

    def _require_own(self, p: FragmentId, v: OuterStep, metadata: _Metadata) -> None:
        if metadata.fragment != p or metadata.fragments != len(self._index):
            raise DataError(f"{self.path(p, v)} belongs to a run with {metadata.fragments} fragments, not {len(self._index)}")

    def _remember(self, p: FragmentId, v: OuterStep, announced: Tensor) -> None:
        self._older[p, v] = announced
        while len(self._older) > self._older_max:
            self._older.popitem(last=False)

    # ------------------------------------------------------------ writing

    def put(self, t: OuterStep, versions: Mapping[FragmentId, Version]) -> None:
        """All of them or none, durable when it returns. StorageFailed leaves everything unchanged, and the call may be
        repeated."""
        assert not self._read_only
        fresh = {p: versions[p] for p in sorted(versions)}
        with contextlib.ExitStack() as stack:
            staged: list[tuple[Path, Path]] = []
            size = 0
            for p, version in fresh.items():
                path = self.path(p, t)
                chunks, root = _encode(p, len(self._index), t, version)
                if path.exists():
                    if check_version(path) != root:
                        raise DataError(f"{path} holds another version {t} of fragment {p} than the one to be stored")
                    continue
                staged.append((state.stage(path, chunks), path))
                stack.callback(state.discard, staged[-1][0])  # after the rename this does nothing
                size += sum(map(len, chunks))
            self._publish(staged, size)
        for p, version in fresh.items():
            previous = self._newest.get(p)
            if previous is not None and previous[0] < t:
                self._remember(p, previous[0], previous[1].announced)
            self._index[p].add(t)
            self._packets[p, t] = version.packet
            while len(self._packets) > PACKETS_MAX:
                self._packets.popitem(last=False)
            if t == max(self._index[p]):
                self._newest[p] = (t, replace(version, packet=None))

    def _publish(self, staged: Sequence[tuple[Path, Path]], size: int) -> None:
        """Rename all files, then sync the directory once. If that fails, no file of the outer step may stay: a commit is whole
        or absent."""
        renamed: list[Path] = []
        try:
            for temporary, path in staged:
                os.replace(temporary, path)
                renamed.append(path)
            state.sync_directory(self._folder)
        except OSError as error:
            for path in renamed:
                state.discard(path)
            raise state.storage_failed(self._folder, size, error) from error

    def forget(self, p: FragmentId, v: OuterStep) -> None:
        """Not synced: `retain` deletes a file that reappears after a crash."""
        assert not self._read_only
        if v not in self._index[p]:
            return
        assert len(self._index[p]) > 1, f"fragment {p} would have no version left"
        self._index[p].remove(v)
        self._older.pop((p, v), None)
        self._sha256.pop((p, v), None)
        self._packets.pop((p, v), None)
        state.discard(self.path(p, v))

    def retain(self, kept: Sequence[Sequence[OuterStep]]) -> None:
        """Keep exactly the versions that the tape lists. Every listed file is checked before any other is deleted."""
        assert not self._read_only
        if len(kept) != len(self._index) or not all(kept):
            raise DataError(f"directory {self._folder} has {len(self._index)} fragments, not {len(kept)} with a version each")
        names = {_file_name(p, v) for p, versions in enumerate(kept) for v in versions}
        for name in sorted(names):
            check_version(self._folder / name)
        for path in self._folder.iterdir():
            if path.name not in names and _NAME.fullmatch(path.name.removesuffix(PARTIAL)):  # a user's own file stays
                state.discard(path)
        state.sync_directory(self._folder)
        self._index = [set(versions) for versions in kept]
        self._newest = {p: newest for p, newest in self._newest.items() if newest[0] in self._index[p]}
        self._older.clear()
        self._packets.clear()


def _scan(folder: Path) -> list[tuple[FragmentId, OuterStep]]:
    names = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name[1]), int(name[2])) for name in names if name)


def version_path(directory: Path, p: FragmentId, v: OuterStep) -> Path:
    return directory / FOLDER / _file_name(p, v)


def version_files(directory: Path) -> tuple[list[Path], list[Path]]:
    """The files of versions there, and what a killed syncer left unfinished."""
    paths = sorted((directory / FOLDER).iterdir()) if (directory / FOLDER).is_dir() else []
    whole = [path for path in paths if _NAME.fullmatch(path.name)]
    return whole, [path for path in paths if path.name.endswith(PARTIAL) and _NAME.fullmatch(path.name.removesuffix(PARTIAL))]


def newest_step(directory: Path) -> OuterStep:
    """By the files' names alone, so that it can be polled while a run goes on."""
    return max((v for _, v in _scan(directory / FOLDER)), default=0)
