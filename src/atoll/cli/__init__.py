"""The command line: parse, build, call. Exit codes: 0, 1 (the run failed), 2 (the user's input)."""

from __future__ import annotations

from atoll.cli.app import app, main

__all__ = ["app", "main"]
