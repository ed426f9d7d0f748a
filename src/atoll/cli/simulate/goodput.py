"""`atoll simulate goodput`: goodput and uptime under failures, by cluster size and number of learners."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from atoll.cli.bars import Bars
from atoll.cli.shared import err, given_options, out, print_json
from atoll.cli.simulate import failure_options as o
from atoll.errors import UserError

if TYPE_CHECKING:
    from atoll.sim.estimates.failures import FailureModel
    from atoll.sim.estimates.goodput import GoodputEstimate

FIELDS = ("learners", "elastic", "chips", "goodput", "uptime", "standard_error")
MORE_FIELDS = ("effective_batch", "live_1", "live_10", "live_50", "live_90", "days", "published_goodput", "published_uptime")

Chips = Annotated[
    list[int] | None, typer.Option("--chips", help="Chips of the cluster. Repeatable. Default: the published sizes.")
]
Learners = Annotated[
    list[int] | None, typer.Option("--learners", help="Number of learners (M). Repeatable. Default: 1, 2, 4, 8, 16.")
]
Elastic = Annotated[
    bool | None,
    typer.Option("--elastic/--no-elastic", help="After a failure shrink, or restart on a spare. Default: both for one learner."),
]
Days = Annotated[float | None, typer.Option("--days", help="Virtual days to simulate. Default: as many as --precision needs.")]
Precision = Annotated[float, typer.Option("--precision", help="Standard error of each cell, in percentage points.")]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON list: per cent, and standard errors in points.")]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write every column to this CSV file.")]
FigureFile = Annotated[Path | None, typer.Option("--figure", help="File for a figure over chips, .png or .svg.")]
PatternFile = Annotated[
    Path | None,
    typer.Option("--pattern", help="File for a figure of stepping and recovery, for the last --chips and --learners."),
]
PatternMinutes = Annotated[float, typer.Option("--pattern-minutes", help="Minutes that --pattern shows.")]


IGNORED = {
    "restart": (True, "--restart: is for runs that are not elastic, and none is simulated"),
    "down": (False, "--resize-down: is for elastic runs, and none is simulated"),
    "up": (False, "--resize-up: is for elastic runs, and none is simulated"),
    "returns": (False, "--return: is for elastic runs, and none is simulated; a spare takes a failed slice's place"),
    "return_shape": (False, "--return-shape: is for elastic runs, and none is simulated"),
    "return_exponent": (False, "--return-exponent: is for elastic runs, and none is simulated"),
}
"""By parameter: whether it is ignored where all runs are elastic (or where none is), and the refusal."""


def goodput(
    context: typer.Context,
    chips: Chips = None,
    learners: Learners = None,
    elastic: Elastic = None,
    days: Days = None,
    precision: Precision = 0.1,
    mtbi: o.Mtbi = o.MTBI,
    slice_chips: o.SliceChips = o.SLICE,
    step: o.Step = o.STEP,
    step_noise: o.StepNoise = o.NOISE,
    down: o.Down = o.DOWN,
    up: o.Up = o.UP,
    restart: o.Restart = o.RESTART,
    returns: o.Return = o.RETURN,
    return_shape: o.ReturnShape = o.SHAPE,
    return_exponent: o.ReturnExponent = o.EXPONENT,
    seed: o.Seed = 0,
    as_json: Json = False,
    csv_file: Csv = None,
    figure: FigureFile = None,
    pattern: PatternFile = None,
    pattern_minutes: PatternMinutes = 10.0,
) -> None:
    """Print goodput and uptime of a cluster under failures, by simulating each failure: published sizes, or any other.

    Without options it prints the published table beside ours. Examples: atoll simulate goodput --chips 100000 --learners 1
    --learners 8 --mtbi 90; atoll simulate goodput --chips 2400000 --learners 16 --days 30.
    """
    model = o.model_from_options(
        mtbi, slice_chips, step, step_noise, down, up, restart, returns, return_shape, return_exponent
    )  # fmt: skip
    _refuse_ignored(given_options(context), {elastic for _, elastic, _ in _cells(chips, learners, elastic)})
    _check_figures(figure, pattern)
    answers = _answers(_cells(chips, learners, elastic), model, days, precision, seed)
    if csv_file is not None:
        _write_csv(csv_file, answers)
    if figure is not None:
        _draw(answers, figure)
    if pattern is not None:
        _draw_pattern(answers[-1].chips, answers[-1].learners, model, pattern_minutes, seed, pattern)
    if as_json:
        print_json([{name: getattr(a, name) for name in FIELDS} for a in answers])
        return
    _show(answers, model, published=chips is None and learners is None and elastic is None)


def _check_figures(*paths: Path | None) -> None:
    """Before the long work."""
    from atoll.views.figures import check_suffix

    for path in paths:
        if path is not None:
            check_suffix(path)


def _refuse_ignored(given: set[str], elastic: set[bool]) -> None:
    for name, (where, sentence) in IGNORED.items():
        if name in given and elastic == {where}:
            raise UserError(f"{sentence}; leave it out")
    if "precision" in given and "days" in given:
        raise UserError("--precision: goes without --days, which says how long to simulate")
    if "pattern_minutes" in given and "pattern" not in given:
        raise UserError("--pattern-minutes: is for --pattern, which is not given")


def _cells(chips: list[int] | None, learners: list[int] | None, elastic: bool | None) -> list[tuple[int, bool, int]]:
    from atoll.sim.estimates.published import GOODPUT

    sizes = list(dict.fromkeys(chips or next(iter(GOODPUT.values()))))
    kinds = list(GOODPUT)
    if learners is not None:
        kinds = [(m, e) for m in dict.fromkeys(learners) for e in ((False, True) if m == 1 else (True,))]
    if elastic is not None:
        kinds = list(dict.fromkeys((m, elastic) for m, _ in kinds))
    return [(m, e, n) for m, e in kinds for n in sizes]


def _answers(
    cells: Sequence[tuple[int, bool, int]], model: FailureModel, days: float | None, precision: float, seed: int
) -> list[GoodputEstimate]:
    from atoll.sim.estimates.goodput import check_sizes, simulate

    for m, _, n in cells:
        check_sizes(n, m, model)  # all of them, before any is simulated
    found = []
    with Bars(err) as bars:
        for number, (m, e, n) in enumerate(cells, 1):
            bars.update("simulating", number - 1, len(cells), "clusters")
            found.append(simulate(n, m, model, elastic=e, days=days, precision=precision, seed=seed))
            if not bars.shown and number % 5 == 0 and number < len(cells):
                err.print(f"{number} of {len(cells)} clusters simulated", soft_wrap=True)
    return found


# ---------------------------------------------------------------- as data


def _published(a: GoodputEstimate) -> tuple[float | None, float | None]:
    from atoll.sim.estimates.published import GOODPUT, UPTIME

    return GOODPUT.get((a.learners, a.elastic), {}).get(a.chips), UPTIME.get((a.learners, a.elastic), {}).get(a.chips)


def _write_csv(path: Path, answers: Sequence[GoodputEstimate]) -> None:
    try:
        with path.open("w", newline="", encoding="utf8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow((*FIELDS, *MORE_FIELDS))
            for a in answers:
                known = ["" if value is None else value for value in _published(a)]
                writer.writerow((*(getattr(a, name) for name in FIELDS), a.effective_batch, *a.live, a.days, *known))
    except OSError as error:
        raise UserError(f"--csv {path}: cannot be written ({error.strerror})") from None


def _draw(answers: Sequence[GoodputEstimate], path: Path) -> None:
    from atoll.views.goodput_figure import Series, plot_goodput

    series = []
    for m, e in dict.fromkeys((a.learners, a.elastic) for a in answers):
        mine = [a for a in answers if (a.learners, a.elastic) == (m, e)]
        known = [_published(a) for a in mine]
        name = _name(m, e) if m > 1 or e else "1 learner, not elastic"
        series.append(Series(
            name, [a.chips for a in mine], [a.goodput for a in mine], [a.uptime for a in mine],
            [g for g, _ in known], [u for _, u in known],
        ))  # fmt: skip
    plot_goodput(series, path)
    err.print(f"figure: {path}", soft_wrap=True)


def _draw_pattern(chips: int, groups: int, model: FailureModel, minutes: float, seed: int, path: Path) -> None:
    from atoll.sim.estimates.pattern import Rows, patterns
    from atoll.views.goodput_figure import Half, plot_pattern

    def half(title: str, rows: Rows, word: str) -> Half:
        bands = [[(b.start, b.end, b.state) for b in row] for row in rows]
        return Half(title, bands, [f"{word} {number}" for number in range(groups)])

    above, below = patterns(chips, groups, model, 60 * minutes, seed)
    plot_pattern(
        half("elastic data-parallel: one learner of all chips, in groups", above, "group"),
        half(f"decoupled: {groups} learners", below, "learner"),
        f"{chips:,} chips, one of which fails every {model.mtbi_seconds / chips:.3g} s of execution", path,
    )  # fmt: skip
    err.print(f"figure: {path}", soft_wrap=True)


# ---------------------------------------------------------------- as a table


def _name(learners: int, elastic: bool) -> str:
    return f"{learners} learner{'s' if learners > 1 else ''}, {'elastic' if elastic else 'not elastic'}"


def _show(answers: Sequence[GoodputEstimate], model: FailureModel, *, published: bool) -> None:
    if published:
        out.print(_beside(answers, 0, "Goodput, per cent: ours (published, difference)"))
        out.print(_beside(answers, 1, "Uptime, per cent: ours (published, difference)"))
        out.print(_closing(answers), soft_wrap=True)
    else:
        out.print(_details(answers, model))
        out.print("live slices: in 1, 10, 50 and 90 % of its time a learner has at most so many per cent", soft_wrap=True)
    out.print(f"constants: {model.describe()}", soft_wrap=True)


def _beside(answers: Sequence[GoodputEstimate], which: int, title: str) -> Table:
    sizes = list(dict.fromkeys(a.chips for a in answers))
    table = Table(title=title, title_justify="left")
    table.add_column("learners", no_wrap=True)
    for n in sizes:
        table.add_column(f"{n:,}", justify="right", no_wrap=True)
    for m, e in dict.fromkeys((a.learners, a.elastic) for a in answers):
        mine = [a for a in answers if (a.learners, a.elastic) == (m, e)]
        table.add_row(_name(m, e), *(_cell((a.goodput, a.uptime)[which], _published(a)[which]) for a in mine))
    return table


def _cell(ours: float, published: float | None) -> str:
    return f"{ours:.1f}" if published is None else f"{ours:.1f} ({published:g}, {ours - published:+.1f})"


def _closing(answers: Sequence[GoodputEstimate]) -> str:
    pairs = [pair for a in answers for pair in zip((a.goodput, a.uptime), _published(a), strict=True)]
    apart = [abs(ours - known) for ours, known in pairs if known is not None]
    near, nearly = sum(d <= 3.0 for d in apart), sum(d <= 3.5 for d in apart)
    return (
        f"within 3 points of the published value: {near} of {len(apart)} cells; within 3.5: {nearly}; at most "
        f"{max(apart):.1f} apart, {sum(apart) / len(apart):.1f} on average; standard error at most "
        f"{max(a.standard_error for a in answers):.2f} points"
    )


def _details(answers: Sequence[GoodputEstimate], model: FailureModel) -> Table:
    from atoll.sim.estimates.goodput import closed_form

    table = Table(title="Per cent, with the standard error in points", title_justify="left")
    table.add_column("learners", no_wrap=True)
    for name in ("chips", "goodput", "uptime", "±", "effective batch", "live slices", "closed form", "days", "stops"):
        table.add_column(name, justify="right")
    for a in answers:
        form = closed_form(a.chips, a.learners, model, elastic=a.elastic)
        table.add_row(
            _name(a.learners, a.elastic), f"{a.chips:,}", f"{a.goodput:.2f}", f"{a.uptime:.2f}", f"{a.standard_error:.2f}",
            f"{a.effective_batch:.2f}", " ".join(f"{share:.1f}" for share in a.live), f"{form:.1f}", f"{a.days:.1f}",
            f"{a.stops:,}",
        )  # fmt: skip
    return table
