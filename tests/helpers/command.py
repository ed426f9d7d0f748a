"""The command line in this process: exit code and streams as `python -m atoll` has them, without its 2 s of imports."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import typer.main

from atoll.cli import main

_commands = patch.object(typer.main, "get_command", cache(typer.main.get_command))
"""A process has one command line, and it takes longer to build than most commands that are refused."""


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


@contextmanager
def _log_of_its_own() -> Iterator[None]:
    """Commands configure the root logger anew. Pytest's handlers wait meanwhile."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []
    try:
        yield
    finally:
        root.handlers, root.level = handlers, level


def atoll(*words: object, cwd: Path) -> Ended:
    out, err = io.StringIO(), io.StringIO()
    here = (chdir(cwd), patch.object(sys, "argv", ["atoll", *map(str, words)]), patch.dict(os.environ), _commands)
    with ExitStack() as stack:
        for each in (*here, _log_of_its_own(), redirect_stdout(out), redirect_stderr(err)):
            stack.enter_context(each)
        code = _exit_code()
    return Ended(code, out.getvalue(), err.getvalue())


def _exit_code() -> int:
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
