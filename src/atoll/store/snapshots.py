"""Snapshots on disk: what a run is resumed from.

    run/syncer/snapshots/<outer step>/        versions/ (hard links: see durable), machine.json, manifest.json
    run/learners/<id>/snapshots/<outer step>/ state.safetensors, machine.json, manifest.json

Each worker writes its own: inner optimiser state never goes to the syncer. A snapshot grows in `<outer step>.open`, its
manifest is written last, and then the directory gets its name. One that replaces another moves that to `.old` first. So
after a crash anywhere, a directory with a bare number and a manifest is whole; the rest is finished, put back or removed
by the next one to begin.

In a manifest the `sha256` of a version file is the one its own metadata carry, which covers all of it: known without
reading the tensors, so that sealing does not keep the syncer from its rounds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from atoll.errors import DataError
from atoll.ids import LearnerId, OuterStep
from atoll.store.durable import FOLDER, DurableVersions, check_version, version_sha256
from atoll.store.tensor_files import (
    ByteChunk,
    discard,
    read_state,
    reading,
    storage_failed,
    sync_directory,
    write_file,
    write_state,
)

MACHINE_FILE: Final = "machine.json"
MANIFEST: Final = "manifest.json"
STATE: Final = "state.safetensors"
MANIFEST_BYTES_MAX: Final = 2**26
_LEFT: Final = re.compile(r"(\d+)\.(open|old)")


class FileEntry(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    snapshot: OuterStep
    run: str
    complete: bool
    learners: tuple[LearnerId, ...]
    files: dict[str, FileEntry]
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot of a run, looked at cheaply: sizes, no checksums."""

    outer_step: OuterStep
    complete: bool
    """Sealed by the syncer, and every file of the syncer's part is there with its size."""
    learners: tuple[LearnerId, ...]
    """Whose state belongs to it."""
    present: tuple[LearnerId, ...]
    """Whose state is there, every file with its size."""
    bytes: int
    """Of the files that are there. Versions shared by hard links count each time."""

    @property
    def missing(self) -> tuple[LearnerId, ...]:
        return tuple(m for m in self.learners if m not in self.present)


@dataclass(frozen=True, slots=True)
class SyncerPart:
    disk: DurableVersions
    """Read-only, and reads from the snapshot's own files when asked."""
    syncer_state: bytes
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class LearnerPart:
    state: Any
    syncer_state: bytes
    manifest: Manifest


def syncer_root(run_dir: Path) -> Path:
    return run_dir / "syncer"


def learner_root(run_dir: Path, learner: LearnerId) -> Path:
    return run_dir / "learners" / str(learner)


def snapshot_dir(root: Path, snapshot: OuterStep) -> Path:
    return root / "snapshots" / str(snapshot)


# ---------------------------------------------------------------- the syncer writes


def begin_syncer(root: Path, snapshot: OuterStep, disk: DurableVersions, syncer_state: bytes) -> None:
    """All kept versions and the books, as they are now. Whatever was begun before and not sealed is abandoned."""
    target = _open_dir(root, snapshot)
    with _removed_on_failure(target):
        _clear(root)
        target.mkdir(parents=True)
        link_versions(disk, target)
        write_file(target / MACHINE_FILE, [syncer_state])


def add_syncer_file(root: Path, snapshot: OuterStep, name: str, chunks: Sequence[ByteChunk]) -> bool:
    """More for an open snapshot: what was in flight when it began. False where it is over, or was never begun."""
    target = _open_dir(root, snapshot)
    if not target.is_dir():
        return False
    write_file(target / name, chunks)
    return True


def seal_syncer(
    root: Path, snapshot: OuterStep, learners: Sequence[LearnerId], complete: bool, keep: int,
    *, run: str = "", config: Mapping[str, Any] | None = None,
) -> bool:  # fmt: skip
    """Name it, or remove it where it is not complete; True where it stands. Not begun (or begun by a syncer that was killed,
    and cleared since): nothing to seal."""
    target = _open_dir(root, snapshot)
    if not target.is_dir():
        return False
    if not complete:
        _remove(target)
        return False
    with _removed_on_failure(target):
        _publish(root, Manifest(snapshot, run, True, tuple(sorted(learners)), _entries(target), dict(config or {})))
    _prune(root, keep, {snapshot})
    return True


def link_versions(disk: DurableVersions, directory: Path) -> None:
    """All kept files of `disk` in `directory/versions` too: no bytes are copied where the file system has hard links.
    A run is restored in the same way, from `load_syncer(...).disk` into its own directory."""
    target = directory / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    for p, versions in enumerate(disk.kept()):
        for v in versions:
            source = disk.path(p, v)
            _link_or_copy(source, target / source.name)
    sync_directory(target)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        raise DataError(f"{target} is there already: versions are linked into an empty directory") from None
    except OSError:  # another file system, or one without links
        try:
            shutil.copyfile(source, target)
            with target.open("rb") as copy:
                os.fsync(copy.fileno())
        except OSError as error:
            discard(target)
            raise storage_failed(target, source.stat().st_size, error) from error


# ---------------------------------------------------------------- a learner writes


def write_learner(
    root: Path, snapshot: OuterStep, state: Any, syncer_state: bytes, keep: int,
    *, run: str = "", config: Mapping[str, Any] | None = None, protect: Iterable[OuterStep] = (),
) -> None:  # fmt: skip
    """A learner's part, whole when it returns. A learner is not told which snapshots the syncer sealed: name those it must
    not drop in `protect`, or a row of abandoned ones would push out the last that can be resumed from."""
    target = _open_dir(root, snapshot)
    with _removed_on_failure(target):
        _clear(root)
        target.mkdir(parents=True)
        sha256 = write_state(target / STATE, state)
        write_file(target / MACHINE_FILE, [syncer_state])
        files = {
            STATE: FileEntry((target / STATE).stat().st_size, sha256),
            MACHINE_FILE: FileEntry(len(syncer_state), hashlib.sha256(syncer_state).hexdigest()),
        }
        _publish(root, Manifest(snapshot, run, True, (), files, dict(config or {})))
    _prune(root, keep, {snapshot, *protect})


# ---------------------------------------------------------------- reading


def found(run_dir: Path) -> list[SnapshotInfo]:
    """Oldest first; the open one too, as incomplete."""
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
        infos.append(SnapshotInfo(step, complete, manifest.learners if manifest else (), tuple(present), size))
    return infos


def newest_usable(run_dir: Path, *, need_learners: bool = True) -> SnapshotInfo | None:
    """The newest complete one with every learner's state; without `need_learners` the syncer's part is enough, and a
    learner that has none recovers as a newcomer."""
    usable = [info for info in found(run_dir) if info.complete and not (need_learners and info.missing)]
    return usable[-1] if usable else None


def verify(run_dir: Path, snapshot: OuterStep) -> list[str]:
    """Every checksum of every part; each problem names its file. Empty: sound."""
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
    return SyncerPart(DurableVersions.open(directory, read_only=True), _read_machine_state(directory, manifest), manifest)


def load_learner_part(directory: Path) -> LearnerPart:
    manifest = read_manifest(directory)
    state = read_state(directory / STATE, _entry(directory, manifest, STATE).sha256)
    return LearnerPart(state, _read_machine_state(directory, manifest), manifest)


def read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    text = reading(path, lambda stream, size: stream.read(min(size, MANIFEST_BYTES_MAX)))
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path} is damaged: {error}") from None
    for name in manifest.files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"{path} names {name!r}, which is not inside its directory")
    return manifest


def _read_machine_state(directory: Path, manifest: Manifest) -> bytes:
    path = directory / MACHINE_FILE
    syncer_state: bytes = reading(path, lambda stream, size: stream.read())
    if hashlib.sha256(syncer_state).hexdigest() != _entry(directory, manifest, MACHINE_FILE).sha256:
        raise DataError(f"{path} is damaged: it does not have its SHA-256")
    return syncer_state


def _entry(directory: Path, manifest: Manifest, name: str) -> FileEntry:
    if name not in manifest.files:
        raise DataError(f"{directory / MANIFEST} does not list {name}")
    return manifest.files[name]


def _sizes(directory: Path) -> tuple[Manifest | None, int, list[str]]:
    """The manifest, bytes that are there, and problems that sizes alone show."""
    if not directory.is_dir():
        return None, 0, [f"{directory} is missing"]
    try:
        manifest = read_manifest(directory)
    except DataError as error:
        return None, 0, [str(error)]
    size, problems = 0, []
    for name, entry in manifest.files.items():
        path = directory / name
        there = path.stat().st_size if path.is_file() else -1
        size += max(there, 0)
        if there < 0:
            problems.append(f"{path} is missing")
        elif there != entry.bytes:
            problems.append(f"{path} has {there} bytes, not {entry.bytes}")
    return manifest, size, problems


def _checksum_problems(directory: Path, name: str, entry: FileEntry) -> list[str]:
    path = directory / name
    try:
        if Path(name).parts[0] == FOLDER:
            actual = check_version(path)
        else:
            actual = reading(path, lambda stream, size: hashlib.file_digest(stream, "sha256").hexdigest())
    except DataError as error:
        return [str(error)]
    return [] if actual == entry.sha256 else [f"{path} is damaged: it does not have its SHA-256"]


# ---------------------------------------------------------------- directories


def _children(snapshots: Path) -> list[str]:
    return [path.name for path in snapshots.iterdir()] if snapshots.is_dir() else []


def _named(root: Path) -> list[OuterStep]:
    names = [name for name in _children(root / "snapshots") if name.isdecimal()]
    return sorted(int(name) for name in names if (root / "snapshots" / name / MANIFEST).is_file())


def _open_dir(root: Path, snapshot: OuterStep) -> Path:
    return root / "snapshots" / f"{snapshot}.open"


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
            sha256 = reading(path, lambda stream, size: hashlib.file_digest(stream, "sha256").hexdigest())
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
    """What a crash left: sealed and not named yet, replaced and not removed yet, or just begun."""
    snapshots = root / "snapshots"
    # "open" before "old": a finished newcomer takes the name; only if there is none the replaced one gets it back.
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


def _prune(root: Path, keep: int, protect: Iterable[OuterStep]) -> None:
    """`protect` holds the one just written, so the last is never removed, whatever `keep` says."""
    steps = _named(root)
    for step in steps[: max(0, len(steps) - keep)]:
        if step not in protect:
            _remove(snapshot_dir(root, step))


def _remove(directory: Path) -> None:
    """The manifest goes first: a crash amid the files must not leave a directory that looks whole."""
    discard(directory / MANIFEST)
    shutil.rmtree(directory, ignore_errors=True)
