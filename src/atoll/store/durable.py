"""The syncer's versions of fragments on disk, and the newest in memory.

A version is stored whole, or by the inputs that it was merged from (`version_file.py` has both forms). Inputs of a few bits a
parameter are a tenth of the version in fp32, so a round writes the inputs. A merge is a pure function, so they say as much: what
is lost with the process is merged again, to the same bytes, from the newest whole version before it. Whole versions are written
in the background often enough (`arrears.py`) that this takes seconds and old inputs can go.

A version is stored whole at once where the executor gives no inputs, where they would be larger, where they refer to a version
before the newest whole one (else old inputs could never go), and where the background has fallen far behind.

Inputs are written while they are merged (`inputs_ahead.py`), where there is a thread for it.

A file never changes once it has its final name, so a snapshot is a set of hard links. Files are written under a temporary
name, synced and renamed. `retain` deletes the files that a crash left behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import torch
from torch import Tensor

from atoll.codecs import Packet
from atoll.errors import DataError, UserError
from atoll.ids import FragmentId, OuterStep
from atoll.store import tensor_files as state
from atoll.store import version_file as files
from atoll.store.arrears import Arrears
from atoll.store.inputs_ahead import Ahead, InputsAhead
from atoll.store.spare_files import SpareFiles
from atoll.store.tensor_files import PARTIAL, StorageFailed
from atoll.store.version_file import FILE_NAME, FOLDER, INPUTS, WHOLE, check_version, file_name
from atoll.store.version_folder import StoredFiles, link_files, scan
from atoll.store.versions import MergeInputs, Version, checksum, digest

log = logging.getLogger("atoll.store")

PACKETS_MAX: Final = 2
"""Announced packets kept in memory although a file has them: of rounds in flight. Reading holds up the network's thread."""
LOGGED_MAX: Final = 32
"""Versions in a row that may be stored by their inputs where the background does not keep up."""
CHECKS_AT_ONCE: Final = min(4, os.cpu_count() or 1)
"""Files that are read and checked at once after a restart."""
_UNREAD: Final = Packet("fp32", 0, torch.empty(0), None)

Remerge: TypeAlias = Callable[[FragmentId, MergeInputs, Version, Sequence[Tensor]], Version]
"""Merges inputs again. It is given the version before, and the announced vector that each contribution is a difference to."""
Background: TypeAlias = Callable[[Callable[[], None]], object]
"""Runs a call later in another thread, one after the other."""


def is_anchor(tensor: Tensor, sha256: str) -> bool:
    """Whether these are the bytes that a syncer announced, by the digest that `announced_sha256` gave."""
    return digest([tensor]) == sha256


class DurableVersions:
    """A `VersionStore` that survives a killed syncer.

    In memory: the newest version of each fragment without its packet, the packets of the last few versions, which are being
    announced, and older announcements of a sixth of the fragments. Of a newest version that is stored by its inputs also the
    packet: to read it would be to merge again, as it is for an older version whose announcement is no longer in memory.
    """

    remerge: Remerge | None = None
    """Without it every version is stored whole, and one that is not cannot be read."""
    background: Background | None = None
    """Without it nothing is written whole in the background."""
    ahead: InputsAhead | None = None
    """Without it nothing is written before `put`."""

    def __init__(self, directory: Path, fragments: int, *, read_only: bool = False) -> None:
        """`read_only`: for a snapshot, whose versions do not change."""
        self.directory = directory
        self._folder = directory / FOLDER
        self._read_only = read_only
        self._index: list[set[OuterStep]] = [set() for _ in range(fragments)]
        """Versions that are kept. There may be files of others, from which these are merged again."""
        self._stored = [StoredFiles() for _ in range(fragments)]
        self.arrears = Arrears(self._stored)
        self.spare = SpareFiles()
        self._newest: dict[FragmentId, tuple[OuterStep, Version]] = {}
        self._older: OrderedDict[tuple[FragmentId, OuterStep], Tensor] = OrderedDict()
        self._older_max = max(1, fragments // 6)
        self._packets: OrderedDict[tuple[FragmentId, OuterStep], Packet | None] = OrderedDict()
        self._sha256: dict[tuple[FragmentId, OuterStep], str] = {}
        self._due: deque[FragmentId] = deque()
        self._being_written: FragmentId | None = None
        self._written: deque[tuple[FragmentId, OuterStep]] = deque()
        """Whole versions that the background has written, until this store's own thread takes note of them."""

    @staticmethod
    def create(directory: Path, initial: Sequence[Version]) -> DurableVersions:
        """Store a run's first versions. After a crash in here it may be called again; a folder that holds a run is refused.

        The versions do not stay in memory: the merging thread reads them, and so allocates and frees them itself. torch's
        allocator on ARM reclaims memory that another thread freed only when the allocating thread allocates again, and a
        thread that only starts the run never does."""
        disk = DurableVersions(directory, len(initial))
        disk._folder.mkdir(parents=True, exist_ok=True)
        if any(v > 0 for _, v, _ in scan(disk._folder)):
            raise UserError(f"directory {directory}: holds a run's versions already; open it, or choose another")
        disk.put(0, dict(enumerate(initial)))
        disk._newest.clear()
        return disk

    @staticmethod
    def open(directory: Path, *, read_only: bool = False, remerge: Remerge | None = None) -> DurableVersions:
        """The versions found there, unread: call `retain` with those that the tape keeps. A version is checked when read."""
        found = scan(directory / FOLDER)
        if not found:
            raise DataError(f"directory {directory} holds no versions of fragments")
        fragments = files.read_metadata(directory / FOLDER / file_name(*found[0])).fragments
        disk = DurableVersions(directory, fragments, read_only=read_only)
        disk.remerge = remerge
        for p, v, kind in found:
            if p >= fragments:
                raise DataError(f"{disk._folder / file_name(p, v, kind)}: the run has {fragments} fragments")
            disk._index[p].add(v)
            if kind == WHOLE:
                disk._stored[p].whole.add(v)
            else:
                disk._stored[p].logged[v] = files.refers_to(disk.inputs_path(p, v))
        for p, kept in enumerate(disk._index):
            if not kept:
                raise DataError(f"directory {directory / FOLDER} holds no version of fragment {p}")
        return disk

    # ------------------------------------------------------------ reading

    def path(self, p: FragmentId, v: OuterStep) -> Path:
        return self._folder / file_name(p, v)

    def inputs_path(self, p: FragmentId, v: OuterStep) -> Path:
        return self._folder / file_name(p, v, INPUTS)

    def paths(self) -> list[Path]:
        """Every file that is needed to have the kept versions."""
        return [path for p, kept in enumerate(self._index) for path in self._paths(p, self._stored[p].needed(kept))]

    def _paths(self, p: FragmentId, versions: set[OuterStep]) -> list[Path]:
        """Of each the whole version, or else its inputs."""
        stored = self._stored[p]
        by_inputs = stored.logged.keys() - stored.whole
        return [self.inputs_path(p, v) if v in by_inputs else self.path(p, v) for v in sorted(versions)]

    def link_into(self, directory: Path) -> None:
        link_files(self.paths(), directory)

    def has(self, p: FragmentId, v: OuterStep) -> bool:
        return v in self._index[p]

    def kept(self) -> list[list[OuterStep]]:
        return [sorted(versions) for versions in self._index]

    def at(self, p: FragmentId, v: OuterStep) -> Version:
        """The whole version. The newest shares its tensors with this store and reads its packet; an older one is read from its
        file or merged again. `announced` and `packet` are cheaper where one part is enough."""
        self._require(p, v)
        if v == max(self._index[p]):
            return replace(self._newest_version(p, v), packet=self.packet(p, v))
        return files.read_version(self.path(p, v)) if v in self._stored[p].whole else self._merge_again(p, v)

    def base(self, p: FragmentId, v: OuterStep) -> Version:
        self._require(p, v)
        return self._newest_version(p, v) if v == max(self._index[p]) else self.at(p, v)

    def packet(self, p: FragmentId, v: OuterStep) -> Packet | None:
        self._require(p, v)
        recent = self._packets.get((p, v), _UNREAD)  # one look: the network's thread asks while the disk's thread replaces
        if recent is not _UNREAD:
            return recent
        return files.read_packet(self.path(p, v)) if v in self._stored[p].whole else self._merge_again(p, v).packet

    def announced(self, p: FragmentId, v: OuterStep) -> Tensor:
        """The anchor of a contribution. Calls share one tensor while it is cached."""
        self._require(p, v)
        if v == max(self._index[p]):
            return self._newest_version(p, v).announced
        return self._announced(p, v)

    def _announced(self, p: FragmentId, v: OuterStep) -> Tensor:
        found = self._older.get((p, v))
        if found is None:
            whole = v in self._stored[p].whole
            found = files.read_announced(self.path(p, v)) if whole else self._merge_again(p, v).announced
            self._remember(p, v, found)
            return found
        with contextlib.suppress(KeyError):  # forgotten meanwhile by another thread
            self._older.move_to_end((p, v))
        return found

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

    def load(self) -> Sequence[Version]:
        """Into memory, in the thread that will replace and free them."""
        return self.newest()

    def theta(self) -> tuple[list[Tensor], list[Tensor]]:
        """Reads nothing else: momentum and announcements are twice as much."""
        pairs = [self.theta_at(p, max(versions)) for p, versions in enumerate(self._index)]
        return [theta for theta, _ in pairs], [buffers for _, buffers in pairs]

    def theta_at(self, p: FragmentId, v: OuterStep) -> tuple[Tensor, Tensor]:
        newest = self._newest.get(p)
        if newest is not None and newest[0] == v:
            return newest[1].theta, newest[1].buffers
        if v in self._stored[p].whole:
            self._require_own(p, v)
            return files.read_theta(self.path(p, v))
        version = self._merge_again(p, v)
        return version.theta, version.buffers

    def theta_sha256(self) -> str:
        params, buffers = self.theta()
        return digest(params + buffers)

    def _newest_version(self, p: FragmentId, v: OuterStep) -> Version:
        """Version v, which was the newest at the call. Another thread may put a newer one meanwhile, and that must not be
        returned as v."""
        newest = self._newest.get(p)
        if newest is None or newest[0] != v:
            if v in self._stored[p].whole:
                self._require_own(p, v)
                newest = (v, files.read_version(self.path(p, v), packet=False))
            else:
                newest = (v, replace(self._merge_again(p, v), packet=None))
            if v == max(self._index[p]):
                self._newest[p] = newest
        return newest[1]

    def _merge_again(self, p: FragmentId, v: OuterStep) -> Version:
        """A version that is stored by its inputs, from the newest whole one before it."""
        stored, remerge, ahead, at = self._stored[p], self.remerge, list[OuterStep](), v
        while at not in stored.whole:
            if at not in stored.logged or remerge is None:
                raise DataError(f"{self.inputs_path(p, at)} is missing, or nothing here can merge it again")
            ahead.append(at)
            at, _ = stored.logged[at]
        self._require_own(p, at)
        version = files.read_version(self.path(p, at), packet=False)
        announced = {at: version.announced}
        while ahead:
            step = ahead.pop()
            inputs = files.read_inputs(self.inputs_path(p, step))
            anchors = [announced[a] if a in announced else self._announced(p, a) for a in inputs.anchors]
            assert remerge is not None
            self.arrears.begin(step, p)
            version = remerge(p, inputs, version, anchors)
            self.arrears.ended(step, p)
            # Of the last only: it is made of all before it, and a checksum takes as long as half a merge.
            if not ahead and not _is_result(version, inputs.result):
                raise DataError(f"{self.inputs_path(p, step)}: merged again it gives other bytes than this run announced")
            later = {anchor for s in ahead for anchor in stored.logged[s][1]}
            announced = {a: vector for a, vector in (*announced.items(), (step, version.announced)) if a in later}
        if v == max(self._index[p]) and not self._read_only:
            self._packets[p, v] = version.packet
        return version

    def _require(self, p: FragmentId, v: OuterStep) -> None:
        if v not in self._index[p]:
            raise DataError(f"{self.path(p, v)} is not stored: fragment {p} has versions {sorted(self._index[p])}")

    def _require_own(self, p: FragmentId, v: OuterStep) -> None:
        fragments = files.read_metadata(self.path(p, v)).fragments
        if fragments != len(self._index):
            raise DataError(f"{self.path(p, v)} belongs to a run with {fragments} fragments, not {len(self._index)}")

    def _remember(self, p: FragmentId, v: OuterStep, announced: Tensor) -> None:
        self._older[p, v] = announced
        while len(self._older) > self._older_max:
            self._older.popitem(last=False)

    # ------------------------------------------------------------ writing

    def begin(self, t: OuterStep, p: FragmentId, inputs: MergeInputs) -> None:
        """A merge begins: if `put` is to store its inputs, they are written meanwhile."""
        self.arrears.begin(t, p)
        previous = self._newest.get(p)
        if self.ahead is not None and previous is not None and self._may_log(p, inputs, previous[1]):
            self.ahead.over = self.spare
            self.ahead.begin(self.inputs_path(p, t), p, len(self._index), t, inputs)

    def abandon(self, t: OuterStep) -> None:
        """What was begun for this outer step will not be put."""
        self.arrears.drop(t)
        if self.ahead is not None:
            self.ahead.drop(t)

    def put(
        self, t: OuterStep, versions: Mapping[FragmentId, Version], inputs: Mapping[FragmentId, MergeInputs] | None = None
    ) -> None:
        """All of them or none, durable when it returns. StorageFailed leaves everything unchanged but for old files, whose room
        the next try has, and the call may be repeated."""
        assert not self._read_only
        try:
            self._put(t, versions, inputs or {})
        except StorageFailed:
            self.spare.close()
            raise

    def _put(
        self, t: OuterStep, versions: Mapping[FragmentId, Version], given: Mapping[FragmentId, MergeInputs]
    ) -> None:
        self._take_note()
        fresh = {p: versions[p] for p in sorted(versions)}
        for p in fresh:
            self.arrears.ended(t, p)
        logged = {p: given[p] for p in fresh if p in given and self._may_log(p, given[p], fresh[p])}
        with contextlib.ExitStack() as stack:
            staged: list[tuple[Path, Path]] = []
            size = 0
            for p, version in fresh.items():
                written = self.ahead.take(t, p) if self.ahead is not None else None
                path, chunks, root = self._encoded(p, t, version, logged.get(p), written)
                if written is not None:
                    stack.callback(state.discard, written.temporary)  # after the rename this does nothing
                if path.exists():
                    if check_version(path) != root:
                        raise DataError(f"{path} holds another version {t} of fragment {p} than the one to be stored")
                    continue
                done = written.finish(chunks[0]) if written is not None and p in logged else None
                staged.append((done or state.stage(path, chunks, over=self.spare), path))
                stack.callback(state.discard, staged[-1][0])
                size += sum(map(len, chunks))
            self._publish(staged, size)
        for p, version in fresh.items():
            self._note(p, t, version, logged.get(p))
        self._write_one_whole()

    def _may_log(self, p: FragmentId, inputs: MergeInputs, version: Version) -> bool:
        stored = self._stored[p]
        if self.remerge is None or not stored.whole:
            return False
        if min((inputs.previous, *inputs.anchors)) < max(stored.whole) or stored.since_whole() >= LOGGED_MAX:
            return False
        return inputs.nbytes < _bytes_whole(version)

    def _encoded(
        self, p: FragmentId, t: OuterStep, version: Version, inputs: MergeInputs | None, written: Ahead | None
    ) -> tuple[Path, list[state.ByteChunk], str]:
        if inputs is None:
            return (self.path(p, t), *files.encode_version(p, len(self._index), t, version))
        digests = written.digests if written is not None else None
        return (self.inputs_path(p, t), *files.encode_inputs(p, len(self._index), t, inputs, digests))

    def _note(self, p: FragmentId, t: OuterStep, version: Version, inputs: MergeInputs | None) -> None:
        stored, previous = self._stored[p], self._newest.get(p)
        if previous is not None and previous[0] < t:
            self._remember(p, previous[0], previous[1].announced)
        if inputs is None:
            stored.whole.add(t)
        else:
            stored.logged[t] = (inputs.previous, inputs.anchors)
        self._index[p].add(t)
        self._packets[p, t] = version.packet
        self._let_packets_go()
        if t == max(self._index[p]):
            self._newest[p] = (t, replace(version, packet=None))
        waiting = {*self._due, self._being_written} - {None}
        self._due.extend(self.arrears.due(p, waiting))

    def _let_packets_go(self) -> None:
        """Not those of newest versions that are in no file: whoever comes back needs them, of every fragment."""
        read_again = [(p, v) for p, v in list(self._packets) if v in self._stored[p].whole or v != max(self._index[p])]
        for key in read_again[:-PACKETS_MAX]:
            self._packets.pop(key, None)

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

    def _write_one_whole(self) -> None:
        """In the background, one at a time: the newest version of a fragment whose turn it is."""
        while self.background is not None and self._due and self._being_written is None:
            p = self._due.popleft()
            v, version = self._newest[p]
            if v not in self._stored[p].whole:
                self._being_written = p
                whole = replace(version, packet=self._packets.get((p, v)))
                self.background(partial(self._write_whole, p, v, whole))

    def _write_whole(self, p: FragmentId, v: OuterStep, version: Version) -> None:
        try:
            chunks, _ = files.encode_version(p, len(self._index), v, version)
            state.publish_file(state.stage(self.path(p, v), chunks, gently=True, over=self.spare), self.path(p, v))
            self._written.append((p, v))
        except StorageFailed as error:  # the inputs are durable; a later version is tried
            log.warning("fragment %d could not be written whole, which the run can do without for a while: %s", p, error)
        finally:
            self._being_written = None

    def _take_note(self) -> None:
        """In this store's own thread: of what the background has written."""
        while self._written:
            p, v = self._written.popleft()
            self._stored[p].whole.add(v)
            self._let_packets_go()
            self._sweep(p)

    def _sweep(self, p: FragmentId) -> None:
        """Delete the files that no kept version needs."""
        stored, needed = self._stored[p], self._stored[p].needed(self._index[p])
        for v in sorted(stored.all() - needed):
            for path in (self.path(p, v), self.inputs_path(p, v)):
                self._discard(path)
            stored.whole.discard(v)
            stored.logged.pop(v, None)
        for v in sorted(stored.whole & set(stored.logged)):
            del stored.logged[v]
            self._discard(self.inputs_path(p, v))

    def _discard(self, path: Path) -> None:
        """A large file takes the file system a while, if it is not kept to be written over."""
        if self.spare.keep(path):
            return
        if self.background is None:
            state.discard(path)
        else:
            self.background(partial(state.discard, path))

    def forget(self, p: FragmentId, v: OuterStep) -> None:
        """Not synced: `retain` deletes a file that reappears after a crash."""
        assert not self._read_only
        if v not in self._index[p]:
            return
        assert len(self._index[p]) > 1, f"fragment {p} would have no version left"
        self._index[p].remove(v)
        for cache in (self._older, self._sha256, self._packets):
            cache.pop((p, v), None)
        self._take_note()
        self._sweep(p)

    def close(self) -> None:
        """When nothing more will be written, or there is no room for it. From any thread."""
        self.spare.close()

    def retain(self, kept: Sequence[Sequence[OuterStep]]) -> None:
        """Keep exactly the versions that the tape lists. Every file that they need is checked before any other is deleted."""
        assert not self._read_only
        if len(kept) != len(self._index) or not all(kept):
            raise DataError(f"directory {self._folder} has {len(self._index)} fragments, not {len(kept)} with a version each")
        self.spare.close()
        needed = [stored.needed(set(versions)) for stored, versions in zip(self._stored, kept, strict=True)]
        names = {path.name for p, versions in enumerate(needed) for path in self._paths(p, versions)}
        with ThreadPoolExecutor(CHECKS_AT_ONCE, "checks") as pool:
            list(pool.map(check_version, (self._folder / name for name in sorted(names))))  # raises what a check raises
        for path in self._folder.iterdir():
            if path.name not in names and FILE_NAME.fullmatch(path.name.removesuffix(PARTIAL)):  # a user's own file stays
                state.discard(path)
        state.sync_directory(self._folder)
        self._index = [set(versions) for versions in kept]
        for stored, versions in zip(self._stored, needed, strict=True):
            stored.whole &= versions
            stored.logged = {v: edges for v, edges in stored.logged.items() if v in versions and v not in stored.whole}
        self._newest = {p: newest for p, newest in self._newest.items() if newest[0] in self._index[p]}
        self._older.clear()
        self._packets.clear()


def _is_result(version: Version, stored: str) -> bool:
    vectors = [version.theta, version.buffers]
    return stored in (checksum(vectors), checksum(vectors, in_blocks=False))


def _bytes_whole(version: Version) -> int:
    vectors = [version.theta, version.buffers]
    if version.announced is not version.theta:
        vectors.append(version.announced)
    if version.outer is not None:
        outer = version.outer
        vectors += [vector for vector in (outer.momentum, outer.pending, outer.average) if vector is not None]
    packet = version.packet.nbytes if version.packet is not None else 0
    return packet + sum(vector.numel() * vector.element_size() for vector in vectors)
