"""The figure of a comparison: what it says, that it can be read, and what is refused."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from atoll.config import PRESETS
from atoll.errors import UserError
from atoll.views.figures import draw_runs, plot_comparison
from atoll.views.run import Summary, TokenCounts


def summary(preset: str, loss: float | None = 2.5, **changes: Any) -> Summary:
    usual: dict[str, Any] = {
        "preset": preset, "learners": 4, "seed": 0, "total_steps": 200, "goodput": 0.95, "uptime": 1.0, "waited_seconds": 0.0,
        "participants": {"4": 200}, "tokens": TokenCounts(1, 1, 0, 0, {}), "recoveries": [], "bytes_up": 18_600_000,
        "bytes_down": 18_600_000, "loss_first": 5.55, "loss_final": loss, "theta_sha256": None, "tape": None, "run_dir": None,
        "clock": "virtual", "seconds": 210.0, "fragments": 1,
    }  # fmt: skip
    return Summary(**(usual | changes))


FAMILY = [summary(name, 2.4 + 0.05 * row, bytes_up=10 ** (9 - row)) for row, name in enumerate(PRESETS)]
LONG = [
    summary("ddp", 2.4),
    summary("a_preset_of_a_really_unreasonably_long_name_by_a_user", None, bytes_up=0, bytes_down=0, goodput=0.0),
    summary("OneThatHasALongNameWithoutAnyUnderscoresInItAtAll", 12.6, goodput=1.0),
    summary("ddp", 2.45, seed=3),
    summary("nan_at_the_end", float("nan")),
]


def texts(summaries: list[Summary]) -> tuple[Any, list[Any]]:
    """The figure as drawn, and its pieces of text that are not empty."""
    from matplotlib.text import Text

    figure = draw_runs(summaries, "ddp")
    figure.canvas.draw()
    return figure, [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible()]


def said(summaries: list[Summary]) -> set[str]:
    return {t.get_text() for t in texts(summaries)[1]}


@pytest.mark.parametrize("runs", [FAMILY, LONG, FAMILY[:1], FAMILY[5:6]], ids=["family", "long names", "only ddp", "without ddp"])
def test_no_text_lies_on_another_or_outside_the_figure(runs: list[Summary]) -> None:
    figure, pieces = texts(runs)
    renderer = figure.canvas.get_renderer()
    boxes = []
    for axis in [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]:
        low, high = sorted(axis.get_view_interval())
        hidden = [tick for tick in axis.get_major_ticks() + axis.get_minor_ticks() if not low <= tick.get_loc() <= high]
        gone = {id(label) for tick in hidden for label in (tick.label1, tick.label2)}
        pieces = [t for t in pieces if id(t) not in gone]  # matplotlib makes ticks beyond the view and does not draw them
    for text in pieces:
        boxes.append((text.get_text(), text.get_window_extent(renderer)))
    for (one, a), (other, b) in combinations(boxes, 2):
        assert not a.overlaps(b), f"{one!r} lies on {other!r}"
    for one, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, f"{one!r} is cut"


def test_every_preset_has_its_loss_its_percentage_its_megabytes_and_its_goodput() -> None:
    words = said([summary("ddp", 2.4), summary("decoupled", 2.52, bytes_up=970_000, bytes_down=3_900_000, goodput=0.998)])
    assert {"ddp", "decoupled", "2.4000", "2.5200   +5.0%", "37.2 MB", "4.87 MB", "95.0%", "99.8%"} <= words
    assert "ddp: 2.4000, which the percentages are against" in words
    assert "4 learners, 200 steps, seed 0" in words


def test_without_the_reference_there_are_no_percentages_and_no_line() -> None:
    words = said([summary("diloco", 2.4), summary("decoupled", 2.52)])
    assert {"2.4000", "2.5200"} <= words
    assert not any("percentages" in word for word in words)


def test_runs_of_one_preset_are_told_apart_and_what_has_no_loss_says_so() -> None:
    words = said(LONG)
    assert {"ddp\nseed 0", "ddp\nseed 3", "not trained", "diverged", "nothing moved"} <= words


def test_different_sizes_are_in_the_title_and_in_the_name() -> None:
    words = said([summary("ddp", learners=2), summary("ddp", learners=8, total_steps=400)])
    assert {"2 to 8 learners, 200 to 400 steps, seed 0", "ddp\n2 learners", "ddp\n8 learners"} <= words


def test_suffix_chooses_the_format_and_equal_runs_give_equal_files(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "c.png"):
        plot_comparison([summary("ddp"), summary("costs_$5_or_$6")], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_drawing_leaves_pyplot_and_its_backend_alone() -> None:
    before = "matplotlib.pyplot" in sys.modules
    draw_runs(FAMILY, "ddp")
    assert ("matplotlib.pyplot" in sys.modules) == before


@pytest.mark.parametrize(
    ("runs", "name", "sentence"),
    [
        (FAMILY, "a.gif", r"its name must end in \.png or \.svg"),
        ([], "a.png", "there is no run to draw"),
        (FAMILY, "no/such/folder.png", r"cannot be written \(No such file"),
    ],
)
def test_what_cannot_be_drawn_is_refused(runs: list[Summary], name: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        plot_comparison(runs, tmp_path / name)
