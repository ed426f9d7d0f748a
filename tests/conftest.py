"""Bits depend on the number of threads: one, as the command line's default is. Encoded text goes to a cache of its own."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from atoll.executor.environment import use_threads

use_threads(1)

_CACHE = tempfile.TemporaryDirectory(prefix="atoll-test-cache-")  # of this process and those it starts; gone with it
os.environ["XDG_CACHE_HOME"] = _CACHE.name

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="session")
def bench_script() -> Callable[[str], ModuleType]:
    """Loads a script below bench/ by its path without the ending; scripts find each other beside themselves."""
    def load(path: str) -> ModuleType:
        folder = str((BENCH / path).parent)
        sys.path.insert(0, folder)
        try:
            return importlib.import_module(Path(path).name)
        finally:
            sys.path.remove(folder)

    return load
