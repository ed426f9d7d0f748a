"""The folder of a syncer's versions by the names of its files: which there are, and which of them a version needs.

    versions/                        of a syncer without shards
    versions/shard0of2/versions/     of a shard: its stripe of every version
    versions/shard0of2/at            of a shard on another machine: its address; its stripes are below its own folder there
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from atoll.errors import DataError
from atoll.ids import FragmentId, OuterStep
from atoll.store.tensor_files import PARTIAL, discard, storage_failed, sync_directory, write_file
from atoll.store.version_file import FILE_NAME, FOLDER, INPUTS, WHOLE, file_name, refers_to

ELSEWHERE: Final = "at"
_SHARD: Final = re.compile(r"shard(\d+)of(\d+)")


@dataclass(slots=True)
class StoredFiles:
    """Of one fragment: which versions have which file."""

    whole: set[OuterStep] = field(default_factory=set)
    logged: dict[OuterStep, tuple[OuterStep, tuple[OuterStep, ...]]] = field(default_factory=dict)
    """By inputs: the version before, and the anchors."""

    def since_whole(self) -> int:
        """Versions after the newest whole one."""
        newest = max(self.whole, default=-1)
        return sum(v > newest for v in self.logged)

    def needed(self, kept: set[OuterStep]) -> set[OuterStep]:
        """The versions whose files are needed to have those in `kept`."""
        found: set[OuterStep] = set()
        ahead = list(kept)
        while ahead:
            v = ahead.pop()
            if v not in found:
                found.add(v)
                if v not in self.whole and v in self.logged:
                    previous, anchors = self.logged[v]
                    ahead += [previous, *anchors]
        return found

    def all(self) -> set[OuterStep]:
        return self.whole | set(self.logged)


def shard_folder(home: Path, shard: int, shards: int) -> Path:
    return home / FOLDER / f"shard{shard}of{shards}"


def shard_folders(home: Path) -> list[Path]:
    """In the order of the shards; none where the run has no shards. DataError: some are missing."""
    parts = (home / FOLDER).iterdir() if (home / FOLDER).is_dir() else ()
    found = {int(name[1]): (int(name[2]), path) for path in parts if (name := _SHARD.fullmatch(path.name))}
    if not found:
        return []
    counts = {count for count, _ in found.values()}
    if len(counts) > 1 or set(found) != set(range(max(counts))):
        there = ", ".join(sorted(path.name for _, path in found.values()))
        raise DataError(f"directory {home / FOLDER}: has {there}, which are not all shards of one syncer")
    return [found[shard][1] for shard in sorted(found)]


def mark_elsewhere(home: Path, shard: int, shards: int, address: str) -> None:
    folder = shard_folder(home, shard, shards)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / ELSEWHERE, [address.encode()])


def elsewhere(folder: Path) -> str | None:
    """The address of a shard whose stripes are not here. Whoever has copied them has them here."""
    if (folder / FOLDER).is_dir() or not (folder / ELSEWHERE).is_file():
        return None
    return (folder / ELSEWHERE).read_text("utf8").strip()


def _homes(directory: Path) -> list[Path]:
    """Where files of versions are, on this machine."""
    return [folder for folder in shard_folders(directory) or [directory] if elsewhere(folder) is None]


def link_files(sources: Sequence[Path], directory: Path) -> None:
    """Into `directory/versions`. No bytes are copied where the file system has hard links."""
    target = directory / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    for source in sources:
        _link_or_copy(source, target / source.name)
    sync_directory(target)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        raise DataError(f"{target} exists already: versions are linked into an empty directory") from None
    except OSError:  # another file system, or one without links
        try:
            shutil.copyfile(source, target)
            with target.open("rb") as copy:
                os.fsync(copy.fileno())
        except OSError as error:
            discard(target)
            raise storage_failed(target, source.stat().st_size, error) from error


def scan(folder: Path) -> list[tuple[FragmentId, OuterStep, str]]:
    names = [FILE_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name[1]), int(name[2]), name[3]) for name in names if name)


def missing_files(directory: Path, kept: Sequence[Sequence[OuterStep]]) -> list[Path]:
    """Files of a run without which it does not have these versions, whole or by their inputs."""
    return [path for home in _homes(directory) for path in _missing(home, kept)]


def _missing(directory: Path, kept: Sequence[Sequence[OuterStep]]) -> list[Path]:
    stored = [StoredFiles() for _ in kept]
    for p, v, kind in scan(directory / FOLDER):
        if p < len(stored) and kind == WHOLE:
            stored[p].whole.add(v)
        elif p < len(stored):
            with contextlib.suppress(DataError):  # damaged: as good as missing
                stored[p].logged[v] = refers_to(directory / FOLDER / file_name(p, v, INPUTS))
    lost = [(p, v) for p, each in enumerate(stored) for v in sorted(each.needed(set(kept[p])) - each.all())]
    return [directory / FOLDER / file_name(p, v) for p, v in lost]


def version_files(directory: Path) -> tuple[list[Path], list[Path]]:
    """The files of versions there, and what a killed syncer left unfinished."""
    folders = [home / FOLDER for home in _homes(directory) if (home / FOLDER).is_dir()]
    paths = [path for folder in folders for path in sorted(folder.iterdir())]
    whole = [path for path in paths if FILE_NAME.fullmatch(path.name)]
    unfinished = [path for path in paths if path.name.endswith(PARTIAL)]
    return whole, [path for path in unfinished if FILE_NAME.fullmatch(path.name.removesuffix(PARTIAL))]


def newest_step(directory: Path) -> OuterStep:
    """By the files' names alone, so that it can be polled while a run goes on."""
    return min((max((v for _, v, _ in scan(home / FOLDER)), default=0) for home in _homes(directory)), default=0)
