"""Summaries as a figure. Matplotlib takes a second to import, so it is imported only when a figure is drawn."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.errors import UserError
from atoll.views.run import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
NAME_WIDTH = 22
"""Characters of a preset's name before a line break: more would push the panels together."""
INK, FAINT = "#1a1a1a", "#9a9a9a"
REFERENCE, OTHER, MOVED, GOOD = "#4d4d4d", "#0072b2", "#56b4e9", "#d55e00"
"""Okabe and Ito's colours: colour-blind readers can tell them apart, also in grey."""


def check_suffix(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"figure {path}: its name must end in {' or '.join(SUFFIXES)}")


def save(path: Path, drawn: Callable[[], Figure]) -> None:
    """Draws and writes the figure; a failure is a UserError of one sentence."""
    check_suffix(path)
    import matplotlib

    undated = {"Date": None} if path.suffix.lower() == ".svg" else None
    try:
        # Equal runs give equal files; a dollar in a name is a dollar.
        with matplotlib.rc_context({"svg.hashsalt": "atoll", "text.parse_math": False, "text.usetex": False}):
            drawn().savefig(path, dpi=160, metadata=undated)
    except OSError as error:
        raise UserError(f"figure {path}: cannot be written ({error.strerror})") from None


def empty_figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    FigureCanvasAgg(figure)  # a canvas of its own: pyplot's global state and the user's backend stay as they are
    return figure


def plot_comparison(summaries: Sequence[Summary], path: Path, reference: str = "ddp") -> None:
    """Left: the final held-out loss of each preset. Right: megabytes moved, and goodput."""
    check_suffix(path)
    if not summaries:
        raise UserError(f"figure {path}: there is no run to draw")
    save(path, lambda: draw_runs(summaries, reference))


def draw_runs(summaries: Sequence[Summary], reference: str) -> Figure:
    names = [_name(s, summaries) for s in summaries]
    lines = sum(max(name.count("\n") + 1, 2) for name in names)
    figure = empty_figure(12.0, 2.3 + 0.27 * lines)
    losses, costs = figure.subplots(1, 2, sharey=True, width_ratios=(1.2, 1.0))
    _losses(losses, summaries, reference)
    _costs(costs, summaries)
    losses.set_yticks(range(len(names)), names)
    losses.set_ylim(len(names) - 0.45, -0.55)  # the first preset on top, as in the table
    costs.tick_params(axis="y", labelleft=False)
    figure.suptitle(_title(summaries), fontsize=12, color=INK)
    return figure


def _title(summaries: Sequence[Summary]) -> str:
    def span(values: set[int], word: str) -> str:
        low, high = min(values), max(values)
        return f"{low:,} {word}" if low == high else f"{low:,} to {high:,} {word}"

    learners, steps = span({s.learners for s in summaries}, "learners"), span({s.total_steps for s in summaries}, "steps")
    seeds = sorted({s.seed for s in summaries})
    return f"{learners}, {steps}, seed {', '.join(map(str, seeds))}"


def _name(s: Summary, summaries: Sequence[Summary]) -> str:
    """The preset, with learners and seed where several runs of it differ in them. Long names break at underscores."""
    twins = [other for other in summaries if other.preset == s.preset]
    more = [f"{n} learners" for n in [s.learners] if len({t.learners for t in twins}) > 1]
    more += [f"seed {n}" for n in [s.seed] if len({t.seed for t in twins}) > 1]
    words = textwrap.wrap(s.preset.replace("_", "_ "), NAME_WIDTH, break_long_words=True)
    return "\n".join([line.replace("_ ", "_") for line in words] + more)


def _losses(axes: Axes, summaries: Sequence[Summary], reference: str) -> None:
    def known(loss: float | None) -> bool:
        return loss is not None and math.isfinite(loss)

    base = next((s.loss_final for s in summaries if s.preset == reference and known(s.loss_final)), None)
    top = max((s.loss_final or 0.0 for s in summaries if known(s.loss_final)), default=1.0)
    for row, s in enumerate(summaries):
        if s.loss_final is None or not known(s.loss_final):
            _label(axes, base or 0.0, row, "not trained" if s.loss_final is None else "diverged", color=FAINT)
            continue
        axes.barh(row, s.loss_final, height=0.6, color=REFERENCE if s.preset == reference else OTHER)
        over = f"   {s.loss_final / base - 1:+.1%}" if base and s.loss_final is not base else ""
        _label(axes, max(s.loss_final, base or 0.0), row, f"{s.loss_final:.4f}{over}")
    if base:
        label = f"{reference}: {base:.4f}, which the percentages are against"
        axes.axvline(base, color=INK, linestyle=(0, (4, 3)), linewidth=1.2, label=label)
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False, fontsize=9, borderpad=0.0)
    axes.set_xlim(0, 1.36 * (top or 1.0))  # room for the longest label
    axes.set_xlabel("held-out loss at the end, nats per token (shorter is better)")
    _bare(axes)


def _costs(axes: Axes, summaries: Sequence[Summary]) -> None:
    """Megabytes as dots, because the length of a bar means nothing on a log axis; goodput as bars on an axis of its own.
    The labels of the axes, each with its mark and colour, are the legend."""
    moved = [(s.bytes_up + s.bytes_down) / 1e6 for s in summaries]
    shown = [m for m in moved if m > 0] or [1.0]
    decades = max(1.5, math.log10(max(shown) / min(shown)))
    left = min(shown) / 10 ** (0.15 * decades)
    axes.set_xscale("log")
    axes.set_xlim(left, max(shown) * 10 ** (0.4 * decades))  # room for a label, however many decades there are
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")  # within one decade matplotlib would label these too
    goodput = axes.twiny()
    goodput.set_xlim(0, 1.2)
    goodput.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    goodput.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    for row, (s, m) in enumerate(zip(summaries, moved, strict=True)):
        goodput.barh(row + 0.17, s.goodput, height=0.26, color=GOOD)
        _label(goodput, s.goodput, row + 0.17, f"{s.goodput:.1%}")
        if m > 0:
            axes.plot([left, m], [row - 0.17] * 2, color=MOVED, linewidth=1.6, zorder=1)
            axes.plot(m, row - 0.17, "o", color=OTHER, markersize=7, zorder=2)
            _label(axes, m, row - 0.17, f"{m:,.0f} MB" if m >= 100 else f"{m:,.3g} MB", gap=8)
        else:
            _label(axes, left, row - 0.17, "nothing moved", color=FAINT)
    axes.set_xlabel("● megabytes moved, up and down, all learners (log scale)", color=OTHER)
    goodput.set_xlabel("■ goodput: share of the learners' time in steps that count", color=GOOD)
    _bare(axes)
    _bare(goodput)


def _label(axes: Axes, x: float, y: float, text: str, *, color: str = INK, gap: int = 5) -> None:
    axes.annotate(
        text, (x, y), xytext=(gap, 0), textcoords="offset points", va="center", ha="left", fontsize=9, color=color, zorder=5
    )


def _bare(axes: Any) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
