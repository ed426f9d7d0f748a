"""Bits depend on the number of threads: one, as the command line's default is."""

from __future__ import annotations

from atoll.executor.environment import use_threads

use_threads(1)
