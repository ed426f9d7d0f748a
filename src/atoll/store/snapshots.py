"""Snapshots on disk, from which a run resumes.

    run/syncer/snapshots/<outer step>/        versions/ (hard links: see durable), machine.json, manifest.json
    run/learners/<id>/snapshots/<outer step>/ state.safetensors, machine.json, manifest.json; of several ranks rank 0's part, and
                                              state-<rank>.safetensors of each other one

Each worker writes its own part: inner optimiser state never goes to the syncer. A snapshot grows in `<outer step>.open`; its
manifest is written last, and then the directory gets its final name. A snapshot that replaces another first moves that to
`.old`. So after any crash, a directory with a bare number and a manifest is whole; the next snapshot to begin finishes,
restores or removes the others.

In a manifest the `sha256` of a version file is the one in the file's own metadata, which covers the whole file. It is known
without reading the tensors, so sealing does not delay the syncer's rounds.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from atoll.errors import UNDECODABLE, DataError
from atoll.ids import LearnerId, OuterStep
from atoll.store.durable import DurableVersions
from atoll.store.striped import StripedVersions, open_versions
from atoll.store.tensor_files import (
    PARTIAL,
    ByteChunk,
    discard,
    drop_cached,
    read_state,
    read_with,
    storage_failed,
    sync_directory,
    write_file,
    write_state,
)
from atoll.store.version_file import FOLDER, check_version, version_sha256

MACHINE_FILE: Final = "machine.json"
MANIFEST: Final = "manifest.json"
STATE: Final = "state.safetensors"
MANIFEST_BYTES_MAX: Final = 2**26
NAME_MAX: Final = 200
"""Characters of a file's name in a manifest. Longer ones no file system has."""
_RANK_PART: Final = re.compile(rf"\d+\.rank-(\d+)(?:{re.escape(PARTIAL)})?")
_LEFT: Final = re.compile(r"(\d+)\.(open|old)")


class FileEntry(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class WrittenPart(NamedTuple):
    """What a rank other than 0 wrote of its learner's state."""

    path: Path
    entry: FileEntry


class Manifest(msgspec.Struct, frozen=True):
    snapshot: OuterStep
    run: str
    complete: bool
    learners: tuple[LearnerId, ...]
    files: dict[str, FileEntry]
    config: dict[str, Any]
    left_out: tuple[LearnerId, ...] = ()
    """Learners that were in sync when it began and whose part is not written. On resume they join like new ones."""


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot of a run, checked by sizes and not by checksums."""

    outer_step: OuterStep
    complete: bool
    """The syncer sealed it, and every file of the syncer's part exists with its size."""
    learners: tuple[LearnerId, ...]
    """Learners whose state belongs to it."""
    present: tuple[LearnerId, ...]
    """Learners whose state exists, every file with its size."""
    bytes: int
    """Total size of the existing files. Versions shared by hard links count each time."""
    left_out: tuple[LearnerId, ...] = ()
    """Learners that were in sync when it began and whose part was never written."""

    @property
    def missing(self) -> tuple[LearnerId, ...]:
        return tuple(m for m in self.learners if m not in self.present)


@dataclass(frozen=True, slots=True)
class SnapshotProblem:
    """What is wrong with one worker's part of a snapshot."""

    part: Path
    """The part's directory."""
    missing: bool
    """There is no such directory at all."""
    sentence: str

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True, slots=True)
class SyncerPart:
    disk: DurableVersions | StripedVersions
    """Read-only; reads the snapshot's own files on demand."""
    machine_state: bytes
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class LearnerPart:
    state: Any
    """A list of its ranks' parts, where it had several."""
    machine_state: bytes
    manifest: Manifest


def syncer_root(run_dir: Path) -> Path:
    """Of a run's folder, or of a syncer's that was started alone."""
    alone = (run_dir / "snapshots").is_dir() and not (run_dir / "syncer").is_dir()
    return run_dir if alone else run_dir / "syncer"


def learner_root(run_dir: Path, learner: LearnerId) -> Path:
    return run_dir / "learners" / str(learner)


OPEN: Final = ".open"
"""Ends the name of a folder that is not sealed yet."""


def snapshot_dir(root: Path, snapshot: OuterStep) -> Path:
    return root / "snapshots" / str(snapshot)


# ---------------------------------------------------------------- the syncer writes


def begin_syncer(root: Path, snapshot: OuterStep, disk: Linkable, machine_state: bytes) -> None:
    """Record all kept versions and the machine's state. Snapshots that were begun before and not sealed are abandoned."""
    target = _open_dir(root, snapshot)
    with _removed_on_failure(target):
        _clear(root)
        target.mkdir(parents=True)
        disk.link_into(target)
        write_file(target / MACHINE_FILE, [machine_state])


def add_syncer_file(root: Path, snapshot: OuterStep, name: str, chunks: Sequence[ByteChunk]) -> bool:
    """Add a file to an open snapshot: messages that were in flight when it began. False if it is sealed or was never begun."""
    target = _open_dir(root, snapshot)
    if not target.is_dir():
        return False
    write_file(target / name, chunks)
    return True


def seal_syncer(
    root: Path, snapshot: OuterStep, learners: Sequence[LearnerId], complete: bool, keep: int,
    *, run: str = "", config: Mapping[str, Any] | None = None, left_out: Sequence[LearnerId] = (),
) -> bool:  # fmt: skip
    """Give a complete snapshot its name, and remove an incomplete one; True if it is sealed. A snapshot that was not begun (or
    was begun by a killed syncer and removed since) cannot be sealed. The newest snapshot that left nobody out is never removed,
    however many partial ones follow it."""
    target = _open_dir(root, snapshot)
    if not target.is_dir():
        return False
    if not complete:
        _remove(target)
        return False
    with _removed_on_failure(target):
        who, files = tuple(sorted(learners)), _entries(target)
        _publish(root, Manifest(snapshot, run, True, who, files, dict(config or {}), tuple(sorted(left_out))))
    _prune(root, keep, {snapshot, *_last_whole(root)})
    return True


class Linkable(Protocol):
    def link_into(self, directory: Path) -> None:
        """Link all files that the kept versions need, so that `open_versions(directory)` has them."""
        ...


# ---------------------------------------------------------------- a learner writes


def write_learner(
    root: Path, snapshot: OuterStep, state: Any, machine_state: bytes, keep: int,
    *, run: str = "", config: Mapping[str, Any] | None = None, protect: Iterable[OuterStep] = (),
    of_ranks: Callable[[], Mapping[int, WrittenPart]] = dict,
) -> None:  # fmt: skip
    """Write a learner's part and read it back; it is whole when this returns. `protect` names the snapshots that
    the syncer keeps: otherwise abandoned ones would displace the last usable one. `of_ranks` waits for what its other ranks
    wrote, and returns it by rank."""
    target = _open_dir(root, snapshot)
    with _removed_on_failure(target):
        _clear(root)
        target.mkdir(parents=True)
        sha256 = write_state(target / STATE, state)
        write_file(target / MACHINE_FILE, [machine_state])
        files = {
            STATE: FileEntry((target / STATE).stat().st_size, sha256),
            MACHINE_FILE: FileEntry(len(machine_state), hashlib.sha256(machine_state).hexdigest()),
        }
        for rank, (path, entry) in of_ranks().items():
            if not path.is_file():
                raise DataError(f"{path} of rank {rank} is not seen by rank 0: the ranks' folder must be on shared storage")
            os.replace(path, target / _rank_file(rank))
            files[_rank_file(rank)] = entry
        for name, entry in files.items():
            _read_back(target / name, entry)
        _publish(root, Manifest(snapshot, run, True, (), files, dict(config or {})))
    _prune(root, keep, {snapshot, *protect})


def write_rank_part(root: Path, snapshot: OuterStep, rank: int, state: Any) -> WrittenPart:
    """A rank other than 0 writes its part beside the snapshots, where rank 0 takes it into one. What is left of one that was
    given up is removed."""
    folder = root / "snapshots"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"*.rank-{rank}"):
        discard(left)
    path = folder / f"{snapshot}.rank-{rank}"
    sha256 = write_state(path, state)
    return WrittenPart(path, FileEntry(path.stat().st_size, sha256))


def remove_rank_parts(root: Path, ranks: Collection[int] | None = None) -> None:
    """Parts that no snapshot has taken in: of these ranks, which are gone, or of all, before any rank writes."""
    for left in (root / "snapshots").glob("*.rank-*"):
        found = _RANK_PART.fullmatch(left.name)
        if found is not None and (ranks is None or int(found[1]) in ranks):
            discard(left)


def _rank_file(rank: int) -> str:
    return f"state-{rank}.safetensors"


def _read_back(path: Path, entry: FileEntry) -> None:
    def digest(stream: io.RawIOBase, size: int) -> str:
        drop_cached(stream)
        return hashlib.file_digest(stream, "sha256").hexdigest()

    if read_with(path, digest) != entry.sha256:
        raise DataError(f"{path} was written, and the disk returns other bytes")


# ---------------------------------------------------------------- reading


def list_snapshots(run_dir: Path) -> list[SnapshotInfo]:
    """Oldest first; an open one counts as incomplete."""
    infos = []
    snapshots = syncer_root(run_dir) / "snapshots"
    left = [int(name[1]) for name in map(_LEFT.fullmatch, _children(snapshots)) if name]
    for step in sorted({*_named(syncer_root(run_dir)), *left}):
        manifest, size, problems = _sizes(snapshot_dir(syncer_root(run_dir), step))
        complete = manifest is not None and manifest.complete and not problems
        present = []
        for learner in manifest.learners if manifest else ():
            theirs, more, flaws = _sizes(snapshot_dir(learner_root(run_dir, learner), step))
            size += more
            if theirs is not None and not flaws:
                present.append(learner)
        learners, left_out = (manifest.learners, manifest.left_out) if manifest else ((), ())
        infos.append(SnapshotInfo(step, complete, learners, tuple(present), size, left_out))
    return infos


def sealed_steps(root: Path) -> tuple[OuterStep, ...]:
    """By the names of a syncer's folders, oldest first."""
    return tuple(_named(root))


def newest_usable(run_dir: Path, *, need_learners: bool = True) -> SnapshotInfo | None:
    """The newest complete one with every learner's state. Without `need_learners` the syncer's part is enough, and a learner
    without state recovers like a new one."""
    usable = [info for info in list_snapshots(run_dir) if info.complete and not (need_learners and info.missing)]
    return usable[-1] if usable else None


def verify(run_dir: Path, snapshot: OuterStep) -> list[SnapshotProblem]:
    """Checks every checksum of every part; each problem names its file. Empty: sound."""
    root = syncer_root(run_dir)
    manifest, _, problems = _sizes(snapshot_dir(root, snapshot))
    parts = [(snapshot_dir(root, snapshot), manifest)]
    for learner in manifest.learners if manifest else ():
        theirs, _, flaws = _sizes(snapshot_dir(learner_root(run_dir, learner), snapshot))
        problems += flaws
        parts.append((snapshot_dir(learner_root(run_dir, learner), snapshot), theirs))
    for directory, each in parts:
        for name, entry in each.files.items() if each else ():
            if (directory / name).is_file() and (directory / name).stat().st_size == entry.bytes:
                problems += _checksum_problems(directory, name, entry)
    return problems


def load_syncer(directory: Path) -> SyncerPart:
    manifest = read_manifest(directory)
    return SyncerPart(open_versions(directory), _read_machine_state(directory, manifest), manifest)


def load_learner_part(directory: Path, *, mapped: bool = False) -> LearnerPart:
    """`mapped`: see `read_state`."""
    manifest = read_manifest(directory)
    ranks = 1
    while _rank_file(ranks) in manifest.files:
        ranks += 1
    names = [STATE, *map(_rank_file, range(1, ranks))]
    parts = [read_state(directory / name, _entry(directory, manifest, name).sha256, mapped=mapped) for name in names]
    state = parts if ranks > 1 else parts[0]
    return LearnerPart(state, _read_machine_state(directory, manifest), manifest)


def load_machine_state(directory: Path) -> tuple[bytes, Manifest]:
    """Of a learner, without its tensors."""
    manifest = read_manifest(directory)
    return _read_machine_state(directory, manifest), manifest


def read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    text = read_with(path, lambda stream, size: stream.read(min(size, MANIFEST_BYTES_MAX)))
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except UNDECODABLE as error:
        raise DataError(f"{path} is damaged: {error}") from None
    for name in manifest.files:
        if not 0 < len(name) <= NAME_MAX or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"{path} names {name[:NAME_MAX]!r}, which is not a file inside its directory")
    return manifest


def _read_machine_state(directory: Path, manifest: Manifest) -> bytes:
    path = directory / MACHINE_FILE
    entry = _entry(directory, manifest, MACHINE_FILE)
    machine_state: bytes = read_with(path, lambda stream, size: stream.read(entry.bytes) if size == entry.bytes else b"")
    if hashlib.sha256(machine_state).hexdigest() != entry.sha256:
        raise DataError(f"{path} is damaged: its SHA-256 is wrong")
    return machine_state


def _entry(directory: Path, manifest: Manifest, name: str) -> FileEntry:
    if name not in manifest.files:
        raise DataError(f"{directory / MANIFEST} does not list {name}")
    return manifest.files[name]


def _sizes(directory: Path) -> tuple[Manifest | None, int, list[SnapshotProblem]]:
    """The manifest, bytes that are there, and problems that sizes alone show."""
    if not directory.is_dir():
        return None, 0, [SnapshotProblem(directory, True, f"{directory} is missing")]
    try:
        manifest = read_manifest(directory)
    except DataError as error:
        return None, 0, [SnapshotProblem(directory, False, str(error))]
    size, problems = 0, []
    for name, entry in manifest.files.items():
        path = directory / name
        there = path.stat().st_size if path.is_file() else -1
        size += max(there, 0)
        if there < 0:
            problems.append(SnapshotProblem(directory, False, f"{path} is missing"))
        elif there != entry.bytes:
            problems.append(SnapshotProblem(directory, False, f"{path} has {there} bytes, not {entry.bytes}"))
    return manifest, size, problems


def _checksum_problems(directory: Path, name: str, entry: FileEntry) -> list[SnapshotProblem]:
    path = directory / name
    try:
        if path.parent.name == FOLDER:
            actual = check_version(path)
        else:
            actual = read_with(path, lambda stream, size: hashlib.file_digest(stream, "sha256").hexdigest())
    except DataError as error:
        return [SnapshotProblem(directory, False, str(error))]
    if actual == entry.sha256:
        return []
    return [SnapshotProblem(directory, False, f"{path} is damaged: its SHA-256 is wrong")]


# ---------------------------------------------------------------- directories


def _children(snapshots: Path) -> list[str]:
    return [path.name for path in snapshots.iterdir()] if snapshots.is_dir() else []


def _named(root: Path) -> list[OuterStep]:
    names = [name for name in _children(root / "snapshots") if name.isdecimal()]
    return sorted(int(name) for name in names if (root / "snapshots" / name / MANIFEST).is_file())


def _open_dir(root: Path, snapshot: OuterStep) -> Path:
    return root / "snapshots" / f"{snapshot}{OPEN}"


@contextlib.contextmanager
def _removed_on_failure(target: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, target)
        try:
            yield
        except OSError as error:
            raise storage_failed(target, 0, error) from error
        stack.pop_all()


def _entries(directory: Path) -> dict[str, FileEntry]:
    entries = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        if path.parent.name == FOLDER:
            sha256 = version_sha256(path)
        else:
            sha256 = read_with(path, lambda stream, size: hashlib.file_digest(stream, "sha256").hexdigest())
        entries[str(path.relative_to(directory))] = FileEntry(path.stat().st_size, sha256)
    return entries


def _publish(root: Path, manifest: Manifest) -> None:
    source, target = _open_dir(root, manifest.snapshot), snapshot_dir(root, manifest.snapshot)
    write_file(source / MANIFEST, [msgspec.json.format(msgspec.json.encode(manifest), indent=1)])
    old = target.with_name(f"{target.name}.old")
    if target.exists():
        os.replace(target, old)
    os.replace(source, target)
    sync_directory(target.parent)
    _remove(old)


def _clear(root: Path) -> None:
    """Finish, restore or remove what a crash left: complete but not renamed, replaced but not removed, or just begun."""
    snapshots = root / "snapshots"
    # "open" before "old": a complete new snapshot takes the name; the replaced one gets it back only if there is none.
    for name in sorted((n for n in _children(snapshots) if _LEFT.fullmatch(n)), key=lambda n: n.endswith(".old")):
        left, target = snapshots / name, snapshots / name.partition(".")[0]
        whole = _sizes(left)
        if not target.exists() and whole[0] is not None and not whole[2]:
            os.replace(left, target)
        else:
            _remove(left)
    for name in _children(snapshots):
        if name.isdecimal() and not (snapshots / name / MANIFEST).is_file():
            _remove(snapshots / name)


def _last_whole(root: Path) -> list[OuterStep]:
    """The newest snapshot with the state of every learner that was in sync, if there is one."""
    for step in reversed(_named(root)):
        manifest, _, problems = _sizes(snapshot_dir(root, step))
        if manifest is not None and manifest.learners and not manifest.left_out and not problems:
            return [step]
    return []


def _prune(root: Path, keep: int, protect: Iterable[OuterStep]) -> None:
    """`protect` holds the snapshot just written, so at least one always stays, even with `keep = 0`."""
    steps = _named(root)
    for step in steps[: max(0, len(steps) - keep)]:
        if step not in protect:
            _remove(snapshot_dir(root, step))


def _remove(directory: Path) -> None:
    """The manifest is deleted first, so that a crash in between does not leave a directory that looks whole."""
    discard(directory / MANIFEST)
    shutil.rmtree(directory, ignore_errors=True)
