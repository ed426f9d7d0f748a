"""Which commit a line under bench/results/ is of."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit(folder: Path = Path(__file__).parent) -> str:
    """Of the working tree that this folder is in; by default the bench's own."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True).stdout.strip()
