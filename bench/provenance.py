"""Which commit a line under bench/results/ is of."""

from __future__ import annotations

import subprocess
from pathlib import Path

CODE = ("src", "bench", ":!bench/results", ":!bench/quality/results")
"""What decides a figure. Lines are added while a bench runs, and do not."""


def commit(folder: Path = Path(__file__).parent) -> str:
    """Of the working tree that this folder is in; by default the bench's own. `-dirty` after it: the code that ran is not that of
    the commit."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    name = _git(folder, "rev-parse", "--short", "HEAD")
    changed = top and _git(Path(top), "status", "--porcelain", "--", *CODE)
    return f"{name}-dirty" if changed else name


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True).stdout.strip()
