"""Figure: compute utilisation over bandwidth, one line per method and one panel per model."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import UserError
from atoll.views.figures import FAINT, INK, check_suffix, empty_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

USUAL = (
    "data_parallel", "diloco", "async_diloco", "streaming", "streaming_overlap", "streaming_overlap_fp4", "decoupled",
    "decoupled_ramp",
)  # fmt: skip
"""Methods that look the same in every figure; others take the remaining styles."""
COLOURS = ("#000000", "#d55e00", "#cc79a7", "#56b4e9", "#0072b2", "#009e73", "#e69f00", "#7f5a2a")
DASHES = ("-", (0, (6, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), "-", (0, (4, 1.5)), "-", (0, (2, 1.5)))
MARKS = ("o", "s", "v", "^", "D", "X", "P", "*")
"""Okabe and Ito's colours; a dash and a mark each for grey print."""
GUIDES = (0.5, 0.8, 0.95)


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    """(Gbit/s, utilisation from 0 to 1)."""


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]


def plot_utilisation(panels: Sequence[Panel], path: Path, note: str = "") -> None:
    """`note` goes below the axis: it explains a line that is not plain utilisation."""
    check_suffix(path)
    if not any(line.points for panel in panels for line in panel.lines):
        raise UserError(f"figure {path}: there is no line to draw")
    save(path, lambda: draw_utilisation(panels, note))


def draw_utilisation(panels: Sequence[Panel], note: str = "") -> Figure:
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = empty_figure(max(7.5, 4.6 * columns), 1.3 + 3.6 * rows)
    places = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for place, panel in zip(places, panels, strict=False):
        _panel(place, panel, names)
    for spare in places[len(panels) :]:
        spare.set_visible(False)
    below = "\n" + textwrap.fill(note, 32 * columns + 60) if note else ""
    figure.supxlabel(f"bandwidth between datacentres, Gbit/s (log scale){below}", fontsize=10, color=INK)
    figure.supylabel("compute utilisation", fontsize=10, color=INK)
    shown = {line.get_label(): line for place in figure.axes for line in place.get_lines() if line.get_label() in names}
    figure.legend(
        [shown[name] for name in names], names, loc="outside upper center", ncols=min(len(names), 3 * columns), frameon=False,
        fontsize=9, handlelength=3.2,
    )  # fmt: skip
    return figure


def _panel(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    for guide in GUIDES:
        axes.axhline(guide, color=FAINT, linewidth=0.6, zorder=0)
    for line in panel.lines:
        style = (USUAL.index(line.name) if line.name in USUAL else names.index(line.name)) % len(COLOURS)
        xs, ys = zip(*line.points, strict=True) if line.points else ((), ())
        axes.plot(
            xs, ys, color=COLOURS[style], linestyle=DASHES[style], linewidth=1.8, label=line.name, marker=MARKS[style],
            markersize=4.5, markevery=max(1, len(line.points) // 8),
        )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_ylim(0.0, 1.03)
    axes.set_yticks([0.0, 0.25, *GUIDES, 1.0])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title(panel.title.replace(": ", "\n", 1), fontsize=9.5, color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
