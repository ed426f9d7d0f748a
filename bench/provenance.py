"""Which commit a line under bench/results/ is of."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
