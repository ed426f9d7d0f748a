"""Weights as a safetensors file that other users of the machine can read too."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from atoll.store.tensor_files import PARTIAL


def save_weights(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """All or nothing, with the mode that the umask gives a new file; safetensors' own writer always leaves 0600."""
    temporary = path.with_name(path.name + PARTIAL)
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(exist_ok=False)  # os.umask would change the mask for other threads meanwhile
        mode = temporary.stat().st_mode
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(held, temporary, metadata=metadata)
        temporary.chmod(mode)
        os.replace(temporary, path)
    except SafetensorError as error:
        raise _as_os_error(error, path) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # name the file that the caller knows
    finally:
        temporary.unlink(missing_ok=True)


def _as_os_error(error: SafetensorError, path: Path) -> Exception:
    """safetensors has one exception class; a system error shows only by its number in the text: "... (os error 28)"."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else error
