"""Which files a learner reads. The paths come from the syncer's recipe, over the network: a learner reads text, images and a
tokenizer, and keeps a cache, only under folders that its own user allows.

By default this is the working directory. It is what relative paths of a recipe mean, and a user who starts a learner in a folder
has put its data there. A link inside an allowed folder is followed wherever it leads: only the learner's user can have made it.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from atoll.config.sections import Data
from atoll.errors import DataError, UserError
from atoll.workload.data.documents import exists
from atoll.workload.data.images import split_source

BUILT_IN = {
    "corpus": ("stdlib", "digits", "digits_grid"),
    "heldout": ("",),
    "tokenizer": ("bytes", "bpe"),
    "cache": ("", "off"),
}
"""Values of [data] that name no file."""


def allowed_folders(given: Sequence[Path]) -> list[Path]:
    for folder in given:
        if not folder.is_dir():
            raise UserError(f"--allow-data {folder}: there is no such folder; name one that holds data for this learner")
    return [Path(os.path.abspath(folder)) for folder in given or [Path.cwd()]]


def refuse_outside(data: Data, folders: Sequence[Path]) -> None:
    for key, words in BUILT_IN.items():
        value = getattr(data, key)
        for path in _paths(value) if value not in words else ():
            if not _is_below(path, folders):
                places = " and ".join(map(str, folders))
                raise DataError(
                    f"key data.{key} = {value!r}: the syncer's recipe names a path that this learner may not use; it reads only "
                    f"under {places}: give --allow-data FOLDER to allow another folder"
                )


def _paths(value: str) -> list[str]:
    """All that the value may name: it is read as one path where there is one, and else as several, or as SOURCE:FOLDER."""
    parts = [value] if exists(value) else [part.strip() for part in value.split(",")]
    _, folder = split_source(value)
    return [*parts, folder] if folder else parts


def _is_below(path: str, folders: Sequence[Path]) -> bool:
    """By its name, or, if that climbs with "..", by where it leads: behind a link, a folder's parent is another one."""
    try:
        if os.pardir not in Path(path).parts:
            whole = Path(os.path.abspath(os.path.expanduser(path)))
            return any(whole.is_relative_to(folder) for folder in folders)
        if glob.has_magic(path):
            return False
        real = Path(path).expanduser().resolve()
        return any(real.is_relative_to(folder.resolve()) for folder in folders)
    except (OSError, ValueError, RuntimeError):  # with a NUL, too long, links in a circle, or the home of an unknown user
        return False
