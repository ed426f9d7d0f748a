"""The figure of utilisation over bandwidth: what it says, and that it can be read."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import UserError
from atoll.views.utilisation_figure import USUAL, Line, Panel, draw_utilisation, plot_utilisation

POINTS = [(0.1 * 1.21**k, min(1.0, 0.02 * 1.21**k)) for k in range(49)]


def panels(models: int, methods: int) -> list[Panel]:
    names = [*USUAL, "another_one"][:methods]
    return [Panel(f"model {m}: 24 layers, 1e9 parameters", [Line(name, POINTS) for name in names]) for m in range(models)]


def texts(figure: Any) -> list[Any]:
    from matplotlib.text import Text

    figure.canvas.draw()
    return [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible()]


@pytest.mark.parametrize(("models", "methods"), [(1, 1), (1, 9), (2, 3), (3, 5), (4, 8)])
def test_texts_do_not_lie_on_each_other(models: int, methods: int) -> None:
    figure = draw_utilisation(panels(models, methods), "decoupled: the smaller of two shares")
    found = texts(figure)
    renderer = figure.canvas.get_renderer()
    ticks = {id(t) for axes in figure.axes for t in (*axes.get_xticklabels(which="both"), *axes.get_yticklabels())}
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in found if id(t) not in ticks]
    for (one, a), (other, b) in combinations(boxes, 2):
        assert not a.overlaps(b), f"{one!r} lies on {other!r}"
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text


def test_axes_have_units_a_log_scale_and_a_legend() -> None:
    figure = draw_utilisation(panels(2, 3), "a note")
    said = {t.get_text() for t in texts(figure)}
    assert "bandwidth between datacentres, Gbit/s (log scale)\na note" in said
    assert "compute utilisation" in said
    assert set(USUAL[:3]) <= said
    assert {axes.get_xscale() for axes in figure.axes} == {"log"}
    assert {"95%", "100%"} <= said


def test_a_method_looks_the_same_whatever_stands_beside_it() -> None:
    alone = draw_utilisation([Panel("m: x", [Line("streaming", POINTS)])]).axes[0]
    family = draw_utilisation(panels(1, 8)).axes[0]
    styles = [{line.get_label(): (line.get_color(), line.get_marker()) for line in axes.get_lines()} for axes in (alone, family)]
    assert styles[0]["streaming"] == styles[1]["streaming"]
    assert len({style for name, style in styles[1].items() if name in USUAL}) == 8


def test_nothing_to_draw_and_unknown_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no line to draw"):
        plot_utilisation([], tmp_path / "a.png")
    with pytest.raises(UserError, match=r"must end in \.png or \.svg"):
        plot_utilisation(panels(1, 1), tmp_path / "a.pdf")
    with pytest.raises(UserError, match="cannot be written"):
        plot_utilisation(panels(1, 1), tmp_path / "missing" / "a.png")


def test_the_same_lines_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot_utilisation(panels(1, 2), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
