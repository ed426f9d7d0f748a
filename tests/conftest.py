"""Bits depend on the number of threads: one, as the command line's default is. Encoded text goes to a cache of its own."""

from __future__ import annotations

import os
import tempfile

from atoll.executor.environment import use_threads

use_threads(1)

_CACHE = tempfile.TemporaryDirectory(prefix="atoll-test-cache-")  # of this process and those it starts; gone with it
os.environ["XDG_CACHE_HOME"] = _CACHE.name
