"""Weights as a safetensors file that other programs load: theta.safetensors, and model.safetensors of an export."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from atoll.errors import DataError
from atoll.store.tensor_files import PARTIAL, tensor_chunks

THETA_FILE: Final = "theta.safetensors"
"""A run's trained weights, written when it is over: in its folder, or in a live run's syncer folder."""
AVERAGE_FILE: Final = "theta_average.safetensors"
"""Their average over time, beside them, where outer.average_decay asks for it."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """DataError for a file that cannot be read."""
    try:
        path.open("rb").close()  # safetensors reports every file that it cannot open as missing
        return load_file(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def save_weights(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """All or nothing, with the mode that the umask gives a new file. The safetensors library's own writer leaves mode 0600, and
    reports a full disk as a sentence; here it is the OSError it is, with the name of the file that was asked for."""
    temporary = path.with_name(path.name + PARTIAL)
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            for chunk in tensor_chunks(dict(tensors), metadata or {}):
                file.write(chunk)
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)
