"""Bars for long work, on a terminal only: how much is done, how fast, and how long it will take. In a pipe nothing is drawn."""

from __future__ import annotations

import time
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

UPDATE_SECONDS: Final = 0.1
"""Between two updates of a bar: work that is reported a thousand times a second must not pay for its picture."""


class _CountColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        scale, unit = task.fields["scale"], task.fields["unit"]
        done = f"{task.completed / scale:,.0f}"
        return Text(f"{done} of {task.total / scale:,.0f} {unit}" if task.total is not None else "")


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if speed is None or task.total is None:
            return Text("")
        rate = speed / task.fields["scale"]
        return Text(f"{rate:,.0f} {task.fields['unit']}/s" if rate >= 10 else f"{rate:.2g} {task.fields['unit']}/s")


class Bars:
    """One display, in a `with` statement, with a bar for each piece of work."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._display: Progress | None = None
        self._bars: dict[str, TaskID] = {}
        self._updated: dict[str, float] = {}

    def __enter__(self) -> Bars:
        if self._console.is_terminal:
            self._display = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=30), _CountColumn(), _RateColumn(),
                TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"),
                TextColumn("{task.fields[note]}"), console=self._console, get_time=lambda: time.monotonic(),
            )  # fmt: skip
            self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.stop()

    @property
    def shown(self) -> bool:
        """Elsewhere whoever works prints lines, at a bounded rate."""
        return self._display is not None

    def update(self, what: str, done: float, total: float | None, unit: str = "", *, scale: float = 1.0, note: str = "") -> None:
        """`total` None: nobody knows how much there is. `scale`: of the numbers shown, 1e6 for bytes as MB."""
        if self._display is None:
            return
        now = time.monotonic()
        if what not in self._bars:
            self._bars[what] = self._display.add_task(what, total=total, unit=unit, scale=scale, note=note)
        elif now - self._updated[what] < UPDATE_SECONDS and done != total:
            return
        self._updated[what] = now
        self._display.update(self._bars[what], completed=done, total=total, note=note)

    def end(self, what: str) -> None:
        """The work is over, or was never begun."""
        bar = self._bars.pop(what, None)
        if bar is not None and self._display is not None:
            self._display.remove_task(bar)
