"""Weights as a safetensors file, which others than their owner may want to load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from atoll.executor.state import PARTIAL


def save_weights(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """All or nothing, with the mode that the umask gives a new file: safetensors' own writer leaves 0600 whatever it says."""
    temporary = path.with_name(path.name + PARTIAL)
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(exist_ok=False)  # the umask can be asked in no other way that other threads do not notice
        mode = temporary.stat().st_mode
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(held, temporary, metadata=metadata)
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
