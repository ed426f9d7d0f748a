"""The picture of a run's held-out losses."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_figures import summary

from atoll.errors import UserError
from atoll.tape.heldout import HeldoutPoint
from atoll.views.curve import curve_figure, draw_curve

POINTS = [HeldoutPoint(50, 3.0), HeldoutPoint(100, None), HeldoutPoint(150, 2.75)]


def test_curve_has_the_first_and_last_loss_and_leaves_out_what_is_not_finite() -> None:
    (axes,) = curve_figure({"this run": summary("decoupled", 2.5, heldout=POINTS)}).axes
    (line,) = axes.lines
    assert list(zip(*map(list, line.get_data()), strict=True)) == [(0, 5.55), (50, 3.0), (150, 2.75), (200, 2.5)]


def test_curve_of_a_run_and_its_twin_names_both() -> None:
    runs = {name: summary("decoupled", loss, heldout=POINTS) for name, loss in (("with faults", 2.5), ("its twin without", 2.4))}
    (axes,) = curve_figure(runs).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "with faults: 2.5000 at the end", "its twin without: 2.4000 at the end",
    ]  # fmt: skip


def test_curve_is_a_png_file_and_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    draw_curve(tmp_path / "heldout.png", {"this run": summary("decoupled", heldout=POINTS)})
    assert (tmp_path / "heldout.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot be written"):
        draw_curve(tmp_path / "none" / "heldout.png", {"this run": summary("decoupled", heldout=POINTS)})
