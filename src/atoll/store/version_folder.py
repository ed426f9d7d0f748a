"""The folder of a syncer's versions by the names of its files: which there are, and which of them a version needs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.errors import DataError
from atoll.ids import FragmentId, OuterStep
from atoll.store.tensor_files import PARTIAL
from atoll.store.version_file import FILE_NAME, FOLDER, INPUTS, WHOLE, file_name, refers_to


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



def scan(folder: Path) -> list[tuple[FragmentId, OuterStep, str]]:
    names = [FILE_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name[1]), int(name[2]), name[3]) for name in names if name)


def missing_files(directory: Path, kept: Sequence[Sequence[OuterStep]]) -> list[Path]:
    """Files of a run without which it does not have these versions, whole or by their inputs."""
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
    paths = sorted((directory / FOLDER).iterdir()) if (directory / FOLDER).is_dir() else []
    whole = [path for path in paths if FILE_NAME.fullmatch(path.name)]
    unfinished = [path for path in paths if path.name.endswith(PARTIAL)]
    return whole, [path for path in unfinished if FILE_NAME.fullmatch(path.name.removesuffix(PARTIAL))]


def newest_step(directory: Path) -> OuterStep:
    """By the files' names alone, so that it can be polled while a run goes on."""
    return max((v for _, v, _ in scan(directory / FOLDER)), default=0)
