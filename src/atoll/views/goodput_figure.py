"""Figures: goodput and uptime over the size of a cluster; and when each group of chips steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import UserError
from atoll.views.figures import FAINT, INK, check_suffix, empty_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#000000", "#d55e00", "#e69f00", "#009e73", "#56b4e9", "#0072b2", "#cc79a7", "#7f5a2a")
MARKS = ("o", "s", "v", "^", "D", "X", "P", "*")
STATE_COLOURS = {"steps": "#56b4e9", "is stopped": "#d9d9d9", "recovers": "#d55e00"}
"""Okabe and Ito's colours. Blue, light grey and orange differ in lightness too."""


@dataclass(frozen=True)
class Series:
    """One number of learners."""

    name: str
    chips: Sequence[int]
    goodput: Sequence[float]
    """Per cent."""
    uptime: Sequence[float]
    published_goodput: Sequence[float | None]
    published_uptime: Sequence[float | None]


def plot_goodput(series: Sequence[Series], path: Path) -> None:
    check_suffix(path)
    if not series:
        raise UserError(f"figure {path}: there is nothing to draw")
    save(path, lambda: draw_goodput(series))


def draw_goodput(series: Sequence[Series]) -> Figure:
    figure = empty_figure(11.5, 4.8)
    left, right = figure.subplots(1, 2, sharey=True)
    for number, s in enumerate(series):
        colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
        for axes, ours, published in ((left, s.goodput, s.published_goodput), (right, s.uptime, s.published_uptime)):
            axes.plot(s.chips, ours, color=colour, marker=mark, markersize=4.5, linewidth=1.8, label=s.name)
            known = [(chips, value) for chips, value in zip(s.chips, published, strict=True) if value is not None]
            if known:
                at, values = zip(*known, strict=True)
                axes.plot(at, values, linestyle="", marker=mark, markersize=9, markerfacecolor="none", color=colour)
    _size_axis(left, series)
    _size_axis(right, series)
    left.set_ylabel("per cent")
    left.set_title("goodput: share of chip time in steps that count", fontsize=10.5, color=INK)
    right.set_title("uptime: time in which at least one learner steps", fontsize=10.5, color=INK)
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=min(6, len(names)), frameon=False, fontsize=9)
    note = "lines and small marks: simulated" + (
        "; large open marks: published" if any(v is not None for s in series for v in s.published_goodput) else ""
    )
    figure.supxlabel(f"chips (log scale)        {note}", fontsize=9.5, color=INK)
    return figure


def _size_axis(axes: Axes, series: Sequence[Series]) -> None:
    axes.set_xscale("log")
    chips = sorted({n for s in series for n in s.chips})
    shown = chips if len(chips) <= 8 else chips[:: -(-len(chips) // 8)]
    axes.set_xticks(shown, [_size(n) for n in shown])
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_ylim(0, 103)
    axes.grid(axis="y", color=FAINT, linewidth=0.4)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _size(chips: int) -> str:
    for unit, word in ((10**6, "M"), (10**3, "k")):
        if chips >= unit:
            return f"{chips / unit:g}{word}"
    return str(chips)


# ---------------------------------------------------------------- stepping patterns


@dataclass(frozen=True)
class Half:
    title: str
    rows: Sequence[Sequence[tuple[float, float, str]]]
    """For each group of chips, from the top: (start, end, state) in seconds."""
    names: Sequence[str]


def plot_pattern(above: Half, below: Half, title: str, path: Path) -> None:
    check_suffix(path)
    save(path, lambda: draw_pattern(above, below, title))


def draw_pattern(above: Half, below: Half, title: str) -> Figure:
    figure = empty_figure(11.5, 2.2 + 0.26 * (len(above.rows) + len(below.rows)))
    for axes, half in zip(figure.subplots(2, 1, sharex=True), (above, below), strict=True):
        _half(axes, half)
    figure.axes[-1].set_xlabel("seconds")
    figure.suptitle(title, fontsize=11, color=INK)
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=state) for state, colour in STATE_COLOURS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9.5)
    return figure


def _half(axes: Axes, half: Half) -> None:
    for row, bands in enumerate(half.rows):
        for state, colour in STATE_COLOURS.items():
            spans = [(start, end - start) for start, end, kind in bands if kind == state]
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour)
    axes.set_yticks(range(len(half.names)), half.names, fontsize=8.5)
    axes.set_ylim(len(half.rows) - 0.4, -0.6)
    axes.set_title(half.title, fontsize=10, loc="left", color=INK)
    axes.margins(x=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
