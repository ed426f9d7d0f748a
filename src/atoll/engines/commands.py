"""Runs an engine's own commands. What they refuse becomes one sentence, with the engine's words behind it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from typing import Final

from atoll.errors import RunFailed, UserError

SECONDS: Final = 60.0
WORDS_MAX: Final = 600


def run_command(words: Sequence[str], what: str, content: str | None = None, *, seconds: float = SECONDS) -> str:
    """What it prints. `what` it is for, as the sentence begins; `content` is its standard input."""
    try:
        ended = subprocess.run(words, input=content, capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError:
        raise UserError(f"{what}: this machine has no {words[0]}; run it where the engine's commands are installed") from None
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{what}: {words[0]} has not answered for {seconds:.0f} s") from None
    if ended.returncode:
        said = in_one_line(ended.stderr or ended.stdout)
        raise RunFailed(f"{what}: {words[0]} ended with exit code {ended.returncode}: {said}")
    return ended.stdout


def in_one_line(said: object) -> str:
    """The engine's words, at the end of a sentence."""
    return " ".join(str(said).split())[:WORDS_MAX]


def follow_command(words: Sequence[str], what: str) -> Iterator[str]:
    """Its lines as they come. It is ended with the iterator."""
    try:
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise UserError(f"{what}: this machine has no {words[0]}; run it where the engine's commands are installed") from None
    with child:
        try:
            assert child.stdout is not None and child.stderr is not None
            for line in child.stdout:
                yield line.rstrip("\n")
            said = in_one_line(child.stderr.read())
            if child.wait():
                raise RunFailed(f"{what}: {words[0]} ended with exit code {child.returncode}: {said}")
        finally:
            child.kill()
