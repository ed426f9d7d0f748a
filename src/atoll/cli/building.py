"""Builds what is trained, and reports what takes long or was left out."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.cli.bars import Bars
    from atoll.config import Config
    from atoll.tasks.task import Task


SAY_EVERY_SECONDS = 5.0


def log_to_stderr(verbose: bool = False) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, stream=sys.stderr, force=True,
        format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S",
    )  # fmt: skip


def built(settings: Config, allowed: Collection[str], say: Callable[[str], None], bars: Bars | None = None) -> Task:
    """Builds the task and prints its notes, such as what was left out of the data, before any process is started. Reading and
    encoding text have a bar each where `bars` are shown, otherwise lines at a bounded rate."""
    task = _build_task(settings, allowed, say, bars)
    for note in task.notes:
        say(f"warning: {note}")
    return task


def _build_task(
    settings: Config, allowed: Collection[str], say: Callable[[str], None], bars: Bars | None = None
) -> Task:
    from atoll.tasks.registry import task_for

    said_at, begun = time.monotonic(), set[str]()

    def progress(what: str, done: int, total: int) -> None:
        nonlocal said_at
        if bars is not None and bars.shown:
            begun.add(what)
            bars.update(what, done, total, "MB", scale=1e6)
        elif time.monotonic() - said_at > SAY_EVERY_SECONDS:
            said_at = time.monotonic()
            say(f"{what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    try:
        return task_for(settings, allowed, progress)
    finally:
        if bars is not None:
            for what in begun:
                bars.end(what)


def check_buildable(each: Sequence[Config], allowed: Collection[str], say: Callable[[str], None], bars: Bars) -> None:
    """Refuses what cannot be built of several presets on one recipe, before the first is trained. Model and data are mostly the
    same, and loaded once; each preset has fragments of its own."""
    from atoll.tasks.task import layout_for

    known: list[Task] = []
    for settings in each:
        like = next((b for b in known if _same_task(b.config, settings)), None)
        if like is None:
            known.append(_build_task(settings, allowed, say, bars))
        else:
            layout_for(settings, like.build())


def _same_task(one: Config, other: Config) -> bool:
    return (one.model, one.data, one.seed, one.learners) == (other.model, other.data, other.seed, other.learners)
