"""Streaming DiLoCo (arXiv 2501.18512), Table 4: Gbit/s needed for a compute utilisation, next to ours."""

from __future__ import annotations

from time import process_time

import numpy as np
import pytest

from atoll.cli.simulate import bandwidth_options
from atoll.config.codecs import wire_bits
from atoll.sim.estimates.bandwidth import (
    METHODS,
    PUBLISHED_METHODS,
    LinkSettings,
    Question,
    Row,
    effective_bits,
    exchange_for,
    row,
)
from atoll.sim.estimates.published import BANDWIDTH, GOODPUT, MODELS, TARGETS, UPTIME, bandwidth_grid, grid_points_apart, printed
from atoll.sim.estimates.utilisation import Compute, utilisation


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row(Question(model, MODELS[model], method), TARGETS, bandwidth_grid()) for model, method in BANDWIDTH]


def test_at_least_71_of_75_cells_are_exact_and_none_is_more_than_one_grid_point_off(rows: list[Row]) -> None:
    pairs = [(ours, raw, cell) for r in rows for ours, raw, cell in zip(r.cells, r.found, r.published or (), strict=True)]
    assert len(pairs) == 75
    assert sum(ours == cell for ours, _, cell in pairs) >= 71
    assert max(grid_points_apart(raw, cell) for _, raw, cell in pairs if cell is not None) == 1


def test_cells_that_differ_are_these(rows: list[Row]) -> None:
    """So that a change of the reading shows here."""
    differing = {
        (r.question.model, r.question.method, target): (ours, cell)
        for r in rows for target, ours, cell in zip(TARGETS, r.cells, r.published or (), strict=True) if ours != cell
    }  # fmt: skip
    assert differing == {
        ("1B", "streaming_overlap_fp4", 50): (0.3, 0.4), ("10B", "streaming_overlap", 50): (1.4, 1.7),
        ("100B", "streaming", 99): (23.3, 19.3), ("100B", "streaming_overlap", 50): (2.0, 1.7),
    }  # fmt: skip


def test_the_table_takes_less_than_five_seconds() -> None:
    """Of this process: what others take of the machine meanwhile is not the table's."""
    begun = process_time()
    for model, method in BANDWIDTH:
        row(Question(model, MODELS[model], method), TARGETS, bandwidth_grid())
    assert process_time() - begun < 5


def test_every_published_cell_is_a_printed_value_of_the_grid() -> None:
    values = {printed(value) for value in bandwidth_grid()}
    assert {cell for cells in BANDWIDTH.values() for cell in cells} <= values


def test_the_published_table_is_whole() -> None:
    assert len(BANDWIDTH) == 15
    assert {method for _, method in BANDWIDTH} == set(PUBLISHED_METHODS)
    for table in (GOODPUT, UPTIME):
        assert len(table) == 6
        assert {len(row) for row in table.values()} == {5}
    assert GOODPUT[16, True][2_400_000] == 86
    assert UPTIME[2, True][2_400_000] == 80


def test_a_row_under_other_settings_has_nothing_published_beside_it() -> None:
    model = MODELS["1B"]
    for question, axis in (
        (Question("1B", model, "diloco", LinkSettings(interval=99)), bandwidth_grid()),
        (Question("1B", model, "diloco", LinkSettings(calibration="plain")), bandwidth_grid()),
        (Question("1B", Compute(24, 1e9, 0.2), "diloco"), bandwidth_grid()),
        (Question("1B", model, "async_diloco"), bandwidth_grid()),
        (Question("1B", model, "diloco"), np.geomspace(1, 10, 50)),
    ):  # fmt: skip
        assert row(question, TARGETS, axis).published is None


def test_strided_needs_no_more_bandwidth_than_sequential() -> None:
    """Section 3.3.1 and Figure 7: strided has slightly better compute utilisation, at 100B."""
    model, curves = MODELS["100B"], {}
    for pattern in ("strided", "sequential", "balanced"):
        exchange = exchange_for(Question("100B", model, "streaming", LinkSettings(pattern=pattern)))
        curves[pattern] = utilisation(model, exchange, bandwidth_grid())
    assert curves["strided"].mean() >= curves["sequential"].mean() >= 0.9 * curves["strided"].mean()
    assert curves["balanced"] == pytest.approx(curves["sequential"])  # 108 layers in 36 fragments: the same cut


def test_only_overlap_reaches_the_whole_of_compute() -> None:
    """Section 3.1: in the steady state; a run's last reduction has nothing left to hide behind."""
    curve = {
        method: utilisation(MODELS["10B"], exchange_for(Question("10B", MODELS["10B"], method)), [50.0], steady=True)[0]
        for method in ("diloco", "streaming", "streaming_overlap", "async_diloco")
    }  # fmt: skip
    assert curve["streaming_overlap"] == pytest.approx(1.0)
    assert curve["async_diloco"] == pytest.approx(1.0)
    assert curve["diloco"] < curve["streaming"] < 1


def test_bits_by_calibration() -> None:
    assert effective_bits("diloco", LinkSettings()) == pytest.approx(13.333, abs=1e-3)
    assert effective_bits("streaming_overlap_fp4", LinkSettings()) == pytest.approx(13.333 / 4, abs=1e-3)
    assert effective_bits("diloco", LinkSettings(codec="int4", calibration="plain")) == wire_bits("int4")
    assert effective_bits("streaming_overlap_fp4", LinkSettings(calibration="plain")) == wire_bits("e3m0")
    assert effective_bits("diloco", LinkSettings(bits=8.0)) == 8.0
    assert effective_bits("streaming_overlap_fp4", LinkSettings(bits=8.0)) == 2.0


def test_the_command_line_names_the_same_methods() -> None:
    assert bandwidth_options.METHOD_NAMES == METHODS


@pytest.mark.parametrize(("calibration", "exact", "near"), [("published", 71, 75), ("plain", 6, 71)])
def test_calibrations_fit_the_published_table_as_the_docs_say(calibration: str, exact: int, near: int) -> None:
    apart = []
    for (model, method), cells in BANDWIDTH.items():
        link = LinkSettings(calibration=calibration)  # type: ignore[arg-type]
        found = row(Question(model, MODELS[model], method, link), TARGETS, bandwidth_grid()).found
        apart += [grid_points_apart(ours, published) for ours, published in zip(found, cells, strict=True)]
    assert (apart.count(0), sum(d <= 1 for d in apart)) == (exact, near)
