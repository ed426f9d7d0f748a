"""`atoll simulate bandwidth`: the bandwidth that a compute utilisation needs, by method."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer
from rich.table import Table

from atoll.cli.bars import Bars
from atoll.cli.options import PluginOption
from atoll.cli.shared import err, given_options, out, print_json
from atoll.cli.simulate import bandwidth_options as o
from atoll.errors import UserError

if TYPE_CHECKING:
    from atoll.sim.estimates.bandwidth import Question, Row
    from atoll.sim.estimates.utilisation import Curve

FIELDS = ("model", "method", "interval", "utilisation", "gbit_per_s")
NOTE = (
    "decoupled: a learner never waits for its link, so a cell is the least bandwidth at which the smaller of two shares reaches "
    "the target: its time spent computing, and H over the interval at which it really adopts a fragment. Up and down links are "
    "alike unless --down-ratio says otherwise."
)  # fmt: skip
USUAL_RUN = "2H steps (data_parallel 20, async_diloco its steady state)"
FIGURE_NOTE = "decoupled: the smaller of time spent computing and H over the interval really kept"


def bandwidth(
    context: typer.Context,
    models: o.Models = None,
    layers: o.Layers = None,
    parameters: o.Parameters = None,
    step_time: o.StepTime = None,
    chips: o.Chips = None,
    flops_per_chip: o.FlopsPerChip = None,
    mfu: o.Mfu = None,
    batch_tokens: o.BatchTokens = None,
    method: o.Methods = None,
    interval: o.Interval = 100,
    overlap: o.Overlap = None,
    fragments: o.Fragments = None,
    layers_per_fragment: o.LayersPerFragment = 3,
    pattern: o.PatternName = "strided",
    codec: o.CodecOption = "bf16",
    bits: o.Bits = None,
    calibration: o.Calibration = None,
    datacentres: o.Datacentres = 2,
    latency: o.Latency = 0.0,
    run_steps: o.RunSteps = None,
    steady: o.Steady = False,
    learners: o.Learners = None,
    per_datacentre: o.PerDatacentre = 1,
    shards: o.Shards = 1,
    shard_topology: o.ShardTopology = "star",
    quorum: o.Quorum = None,
    grace: o.Grace = None,
    ramp: o.Ramp = None,
    codec_up: o.CodecUp = None,
    codec_down: o.CodecDown = None,
    down_ratio: o.DownRatio = 1.0,
    targets: o.Targets = o.USUAL_TARGETS,
    grid: o.Grid = o.USUAL_GRID,
    at: o.At = None,
    as_json: o.Json = False,
    csv_file: o.Csv = None,
    figure: o.FigureFile = None,
    allow_plugin: PluginOption = None,
) -> None:
    """Print the bandwidth between datacentres that a compute utilisation needs, for published models or any other.

    Without options it prints the published table beside ours. Examples: atoll simulate bandwidth 10B --method decoupled
    --latency 0.05; atoll simulate bandwidth --layers 32 --parameters 7e9 --step-time 0.5 --interval 50 --at 2.
    """
    from atoll.sim.estimates.bandwidth import LinkSettings, Star

    described = o.Described(layers, parameters, step_time, chips, flops_per_chip, mfu, batch_tokens)
    link = LinkSettings(
        interval, overlap, layers_per_fragment, fragments, cast(Any, pattern), codec, bits,
        o.calibration_of(calibration, described), datacentres, latency, run_steps, steady,
    )  # fmt: skip
    star = Star(
        learners, per_datacentre, shards, cast(Any, shard_topology), quorum, grace, ramp, codec_up, codec_down, down_ratio
    )  # fmt: skip
    asked = o.questions(models or [], described, method or [], link, star)
    o.refuse_ignored(given_options(context), list(dict.fromkeys(q.method for q in asked)), link, star)
    sought, axis, rates = o.targets_of(targets), o.axis_of(grid), o.rates_of(at or [])
    rows = _answered(asked, sought, axis, rates, figure)
    if csv_file is not None:
        _write_csv(csv_file, rows, sought)
    if figure is not None:
        _draw(rows, figure)
    if as_json:
        print_json(_objects(rows, sought))
        for line in _simulation_only(asked):
            err.print(line, soft_wrap=True)
    else:
        _show(rows, sought, axis)


def _answered(
    asked: Sequence[Question], sought: Sequence[float], axis: Curve, at: Sequence[float], figure: Path | None
) -> list[Row]:
    from atoll.sim.estimates.bandwidth import SYNCER_METHODS, row

    if figure is not None:
        from atoll.views.figures import check_suffix

        check_suffix(figure)  # before the long work
    rows = []
    with Bars(err) as bars:
        for number, question in enumerate(asked):
            bars.update("simulating", number, len(asked), "rows", note=f"{question.method}, {question.model}")
            if not bars.shown and question.method in SYNCER_METHODS:
                err.print(f"{question.method}, {question.model}: running the state machines in virtual time ...", soft_wrap=True)
            rows.append(row(question, sought, axis, at, curve=figure is not None))
    return rows


# ---------------------------------------------------------------- as data


def _objects(rows: Sequence[Row], sought: Sequence[float]) -> list[dict[str, Any]]:
    """First the bandwidth of each target; then, in the same form, the utilisation at each --at."""
    found = []
    for row in rows:
        q = row.question
        pairs = [*zip(sought, row.cells, strict=True), *((round(100 * r.utilisation, 4), r.gbit) for r in row.at)]
        found += [dict(zip(FIELDS, (q.model, q.method, q.interval, _whole(u), gbit), strict=True)) for u, gbit in pairs]
    return found


def _whole(per_cent: float) -> float | int:
    return int(per_cent) if per_cent == int(per_cent) else per_cent


def _write_csv(path: Path, rows: Sequence[Row], sought: Sequence[float]) -> None:
    try:
        with path.open("w", newline="", encoding="utf8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow((*FIELDS, "published_gbit_per_s"))
            for row in rows:
                published = [*(row.published or [None] * len(sought)), *[None] * len(row.at)]
                for each, beside in zip(_objects([row], sought), published, strict=True):
                    writer.writerow([*("" if v is None else v for v in each.values()), "" if beside is None else beside])
    except OSError as error:
        raise UserError(f"--csv {path}: cannot be written ({error.strerror})") from None


def _draw(rows: Sequence[Row], path: Path) -> None:
    from atoll.views.utilisation_figure import Line, Panel, plot_utilisation

    panels = []
    for model in dict.fromkeys(row.question.model for row in rows):
        mine = [row for row in rows if row.question.model == model]
        panels.append(Panel(_title(mine[0].question), [Line(row.question.method, row.curve) for row in mine]))
    plot_utilisation(panels, path, FIGURE_NOTE if _has_decoupled(rows) else "")
    err.print(f"figure: {path}", soft_wrap=True)


# ---------------------------------------------------------------- as a table


def _show(rows: Sequence[Row], sought: Sequence[float], axis: Curve) -> None:
    for model in dict.fromkeys(row.question.model for row in rows):
        out.print(_table([row for row in rows if row.question.model == model], sought, axis))
    for row in rows:
        for reached in row.at:
            if reached.remark:
                where = f"{row.question.model}, {row.question.method} at {reached.gbit:g} Gbit/s"
                out.print(f"{where}: {reached.remark}", soft_wrap=True)
    for line in _closing(rows):
        out.print(line, soft_wrap=True)


def _title(q: Question) -> str:
    c = q.compute
    parameters = f"{c.parameters:.4g}".replace("e+", "e").replace("e0", "e")
    return f"{q.model}: {c.layers} layers, {parameters} parameters, {c.step_seconds:.4g} s a step"


def _table(rows: Sequence[Row], sought: Sequence[float], axis: Curve) -> Table:
    table = Table(title=f"{_title(rows[0].question)}. Gbit/s by utilisation", title_justify="left")
    table.add_column("method", no_wrap=True)
    table.add_column("H", justify="right")
    table.add_column("")
    for target in sought:
        table.add_column(f"{target:g} %", justify="right", no_wrap=True)
    for reached in rows[0].at:
        table.add_column(f"at {reached.gbit:g} Gbit/s", justify="right")
    for row in rows:
        names = (row.question.method, str(row.question.interval))
        if row.published:
            table.add_row(*names, "published", *("" if cell is None else f"{cell:.1f}" for cell in row.published))
            names = ("", "")
        table.add_row(*names, "ours", *_cells(row, axis), *(f"{reached.utilisation:.1%}" for reached in row.at))
    return table


def _cells(row: Row, axis: Curve) -> list[str]:
    if row.published is None:
        return [f"> {axis[-1]:g}" if cell is None else f"{cell:.3g}" for cell in row.cells]
    return [
        (f"> {axis[-1]:g}" if ours is None else f"{ours:.1f}") + ("" if published in (None, ours) else "*")
        for ours, published in zip(row.cells, row.published, strict=True)
    ]  # fmt: skip


def _closing(rows: Sequence[Row]) -> list[str]:
    lines = []
    apart = _apart(rows)
    if apart:
        most = max(apart)
        others = {0: "", 1: ", the others one grid point off (*)"}.get(most, f", the others up to {most} grid points off (*)")
        lines.append(f"exact {apart.count(0)} of {len(apart)}{others}")
    lines.append(_constants(rows[0].question))
    machines = [row.question for row in rows if row.question.method.startswith("decoupled")]
    lines += dict.fromkeys(_machine_constants(question) for question in machines)
    if machines:
        lines.append(NOTE)
    return lines + _simulation_only([row.question for row in rows])


def _simulation_only(questions: Sequence[Question]) -> list[str]:
    """What the live system cannot do yet."""
    found = []
    shards = next((q.star for q in questions if q.method.startswith("decoupled") and q.star.simulation_only), None)
    if shards is not None:
        live = "live learners sum for nobody, and exchange with every shard"
        found.append(f"simulation only: a ring of {shards.shards} shards of a syncer in as many datacentres; {live}")
    late = next((q.link for q in questions if q.method == "async_diloco" and q.link.overlap not in (None, q.link.interval)), None)
    if late is not None:
        live = f"a live one applies a round {late.interval} steps later"
        found.append(f"simulation only: async_diloco with tau {late.overlap}; {live}")
    return found


def _has_decoupled(rows: Sequence[Row]) -> bool:
    return any(row.question.method.startswith("decoupled") for row in rows)


def _apart(rows: Sequence[Row]) -> list[int]:
    from atoll.sim.estimates.published import grid_points_apart

    pairs = [pair for row in rows if row.published for pair in zip(row.found, row.published, strict=True)]
    return [grid_points_apart(ours, published) for ours, published in pairs if published is not None]


def _machine_constants(q: Question) -> str:
    from atoll.sim.estimates.bandwidth import config_for

    settings = config_for(q)
    p = settings.protocol
    return (
        f"{q.method}: {settings.learners} learners, {q.star.per_datacentre} on each datacentre's link, quorum {p.quorum}, "
        f"grace {p.grace}, tau {p.overlap}, ramp {p.ramp:g}, "
        f"{p.codec_up} up, {p.codec_down} down"
    )


def _constants(q: Question) -> str:
    from atoll.sim.estimates.bandwidth import FP4, effective_bits

    link = q.link
    bits, fp4 = effective_bits("streaming", link), effective_bits(FP4, link)
    how = "as given" if link.bits is not None else f"{link.codec}, {link.calibration} calibration"
    if link.bits is None and link.calibration == "published":
        how += ": as if steps took 1.2 times as long"
    pieces = f"{link.fragments} fragments" if link.fragments else f"fragments of {link.layers_per_fragment} layers"
    run = "steady state" if link.steady else f"{link.run_steps} steps" if link.run_steps else USUAL_RUN
    tau = "1, decoupled 2, async_diloco H" if link.overlap is None else str(link.overlap)
    return (
        f"constants: {bits:.4g} effective bits a parameter ({how}), fp4 {fp4:.4g}; H = {link.interval}; {pieces}, "
        f"{link.pattern}; tau of overlapped methods {tau}; {run}; {link.datacentres} datacentres; "
        f"latency {link.latency_seconds:g} s"
    )
