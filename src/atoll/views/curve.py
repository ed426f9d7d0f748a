"""The held-out loss of a run over its steps, as a picture in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.views.figures import INK, OTHER, REFERENCE, empty_figure, save
from atoll.views.run import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVE = "heldout.png"
COLOURS = (OTHER, REFERENCE)


def draw_curve(path: Path, runs: Mapping[str, Summary]) -> None:
    """At most two runs by the names in the legend: a run, and its twin without faults."""
    save(path, lambda: curve_figure(runs))


def curve_figure(runs: Mapping[str, Summary]) -> Figure:
    figure = empty_figure(7.5, 4.5)
    axes = figure.subplots()
    for (name, summary), colour in zip(runs.items(), COLOURS, strict=False):
        steps, losses = _points(summary)
        label = f"{name}: {losses[-1]:.4f} at the end"
        axes.plot(steps, losses, color=colour, marker="o", markersize=3.5, linewidth=1.6, label=label)
    axes.set_xlabel("step of the run", color=INK)
    axes.set_ylabel("held-out loss of Theta", color=INK)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    first = next(iter(runs.values()))
    axes.set_title(f"{first.preset}, {first.learners} learners, {first.total_steps:,} steps", color=INK)
    return figure


def _points(s: Summary) -> tuple[list[int], list[float]]:
    """The first and the last loss too, which are measured outside the run."""
    points = [(p.outer_step, p.loss) for p in s.heldout if p.loss is not None]
    points += [(0, s.loss_first)] if s.loss_first is not None else []
    points += [(s.total_steps, s.loss_final)] if s.loss_final is not None else []
    steps, losses = zip(*sorted(points), strict=True)
    return list(steps), list(losses)
