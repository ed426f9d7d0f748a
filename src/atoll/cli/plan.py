"""`atoll plan`: from a description of a cluster to a recipe, with reasons."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from atoll.cli.bars import Bars
from atoll.cli.options import PluginOption
from atoll.cli.shared import JsonOption, err, out, print_json
from atoll.errors import UserError
from atoll.planner import recipe, site
from atoll.planner.candidate import Candidate
from atoll.planner.changes import WHAT_IF
from atoll.planner.costs import Costs
from atoll.planner.plan import Plan, Runner
from atoll.planner.plan import plan as make_plan
from atoll.planner.quality import SUPPORT
from atoll.planner.score import Judge
from atoll.planner.search import SEARCHING

BY_MACHINES = " (by the protocol's machines in virtual time)"


def plan(
    cluster_file: Annotated[
        Path, typer.Argument(metavar="CLUSTER.toml", readable=False, help="Model, sites and links (docs/planning/planner.md).")
    ],
    recipe_file: Annotated[Path | None, typer.Option("--out", help="File for the plan as a recipe for `atoll train`.")] = None,
    candidates: Annotated[int, typer.Option("--candidates", min=0, max=1000, help="Number of runners-up to show.")] = 0,
    what_if: Annotated[
        bool, typer.Option("--what-if/--no-what-if", help="Also find what would change the answer, by searching again.")
    ] = True,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show runners-up and the constants of the quality model.")] = False,
    as_json: JsonOption = False,
    allow_plugin: PluginOption = None,
) -> None:
    """Recommend preset, learners, H, P, tau, K and codecs for a cluster, with what to expect and why."""
    cluster = site.load_cluster(cluster_file)
    if recipe_file is not None:
        _refuse_unwritable(recipe_file)
    answer = _answer(cluster, what_if, candidates or (8 if verbose else 3))
    if as_json:
        print_json(as_builtins(answer))
    else:
        out.print(report(answer, cluster, runners=candidates > 0 or verbose, constants=verbose))
    if recipe_file is not None:  # last, so that the answer is printed even if the file cannot be written
        try:
            recipe_file.write_text(recipe.recipe_toml(answer.scored, Judge(cluster), cluster_file.name), encoding="utf8")
        except OSError as error:
            raise UserError(f"--out {recipe_file}: cannot be written ({error.strerror})") from None
        if not as_json:
            out.print(f"recipe: {recipe_file} (try it: atoll sim {recipe_file})", soft_wrap=True)


def _refuse_unwritable(path: Path) -> None:
    """Before the search, which takes seconds."""
    if not path.parent.is_dir():
        raise UserError(f"--out {path}: {path.parent} is not a folder")
    if path.is_dir():
        raise UserError(f"--out {path}: is a folder; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--out {path}: is not writable; choose another")


def _answer(cluster: site.ClusterDescription, what_if: bool, runners: int) -> Plan:
    """With a bar on a terminal; elsewhere silent, for it takes seconds."""
    with Bars(err) as bars:
        answer = make_plan(
            cluster, what_if=what_if, runners=runners, progress=lambda what, done, of: bars.update(what, done, of, "parts")
        )
        for what in (SEARCHING, WHAT_IF):
            bars.end(what)
    return answer


def as_builtins(answer: Plan) -> dict[str, object]:
    """One object: the recommendation, then what to expect."""
    c, s = answer.candidate, answer.scored
    return {
        "preset": c.preset, "learners": c.learners, "interval": c.interval, "fragments": c.fragments, "overlap": c.overlap,
        "quorum": c.quorum or "all", "codec_up": c.codec_up, "codec_down": c.codec_down, "division": answer.division,
        "chips_per_learner": answer.chips_per_learner, "score": s.score, "utilisation": s.utilisation, "inside": s.inside,
        "goodput": s.goodput, "startup_seconds": s.startup_seconds,
        "startup_if_away_seconds": answer.startup_if_away, "price": s.price, "link_load": answer.costs.link_load,
        "pace": s.pace, "token_efficiency": s.tokens, "loss_percent": s.loss_percent, "interval_kept": s.interval_kept,
        "staleness_steps": s.staleness, "staleness_seconds": answer.costs.staleness_seconds,
        "traffic": answer.costs.traffic, "memory": answer.costs.memory, "syncer": answer.costs.syncer,
        "steps_per_day": answer.costs.steps_day, "choices": answer.choices,
        "changes": [{"sentence": _capital(x.sentence()), "change": x} for x in answer.changes], "warnings": answer.warnings,
        "runners_up": answer.runners_up, "quality": answer.quality, "quality_support": SUPPORT,
        "loss_band": answer.loss_band, "token_band": answer.token_band, "runs_simulated": answer.simulated,
    }  # fmt: skip


# ---------------------------------------------------------------- what is printed


def report(answer: Plan, cluster: site.ClusterDescription, *, runners: bool, constants: bool) -> Group:
    parts: list[object] = [_headline(answer), "", _expectations(answer), "", _site_table(answer.costs)]
    for title, sentences in (
        ("why", answer.choices),
        ("what would change the answer", [_capital(x.sentence()) for x in answer.changes]),
        ("caution", [_capital(w) + "." for w in answer.warnings]),
    ):
        if sentences:
            parts += ["", Text(title, style="bold"), _bullets(sentences)]
    if runners:
        parts += ["", _runner_table(answer)]
    if constants:
        parts += ["", Text("quality model", style="bold"), _constants(answer)]
    return Group(*parts)  # type: ignore[arg-type]


def _constants(answer: Plan) -> Table:
    """Every constant with what it rests on, and how far the fit is from the published rows."""
    from atoll.planner.evidence import residuals

    q, table = answer.quality, Table.grid(padding=(0, 2, 0, 0))
    for name in q.__struct_fields__:
        given = "" if getattr(q, name) == getattr(site.Quality(), name) else " (given; the default is "
        given += f"{getattr(site.Quality(), name):g})" if given else ""
        table.add_row(name, f"{getattr(q, name):g}", f"{SUPPORT[name]}{given}")
    rows = residuals(q.base_percent, q.size_exponent, q.interval_exponent, q.learners_doubling)
    worst = max(rows, key=lambda pair: abs(pair[1]))
    far = sum(r * r for _, r in rows) / len(rows)
    which = f"{worst[1]:+.2f}, of {worst[0].source} with {worst[0].parameters / 1e6:,.0f}M parameters and M {worst[0].learners}"
    text = f"points of loss, root mean square of {len(rows)} published rows; the largest is {which}"
    table.add_row("residuals", f"{far**0.5:.2f}", text)
    return table


def _bullets(sentences: Sequence[str]) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    for sentence in sentences:
        table.add_row("-", Text(sentence))
    return table


def _headline(answer: Plan) -> Text:
    return Text(f"{answer.candidate.preset}: {_knobs(answer.candidate, answer.chips_per_learner)}", style="bold")


def _knobs(c: Candidate, chips: int) -> str:
    if c.preset == "ddp":
        return f"all {chips} chips data-parallel"
    wire = f"{c.codec_up} up, {c.codec_down} down"
    return f"M {c.learners} of {chips} chips, H {c.interval}, P {c.fragments}, tau {c.overlap}, K {c.quorum or 'all'}, {wire}"


def _expectations(answer: Plan) -> Table:
    s, costs = answer.scored, answer.costs
    m, need = costs.memory, costs.syncer
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    rows = [
        ("speed at equal quality", f"{100 * s.score:.1f} % of all chips always at work"),
        ("= utilisation", f"{100 * s.utilisation:.1f} %" + ("" if answer.candidate.preset == "ddp" else BY_MACHINES)),
        *([] if s.inside > 0.9995 else [("x exchange inside a learner", f"{100 * s.inside:.1f} %")]),
        ("x goodput", f"{100 * s.goodput:.1f} %"),
        ("x pace", f"{100 * s.pace:.1f} %" + ("" if s.pace > 0.999 else " (learners of uneven speed)")),
        ("x token efficiency", _tokens(answer)),
        *([] if s.price == 1 else [("x price", f"{100 * s.price:.1f} % of the money pays for chips, the rest for bytes")]),
        *_start(s.startup_seconds, answer.startup_if_away), *_slack(costs),
        ("staleness", f"{s.staleness:.1f} inner steps, {costs.staleness_seconds:.3g} s"),
        ("a learner's device memory", f"{m.device_gb:,.1f} GB without activations; {m.device_gb_chip:,.2f} GB a chip if sharded"),
    ]  # fmt: skip
    if need is not None:
        rows += [
            ("", f"{m.device_ratio:.3f} of data-parallel's; {m.all_on_device_gb:,.1f} GB if all outer state sat there"),
            ("a learner's host memory", f"{m.host_gb:,.1f} GB of outer copies"),
            (f"the syncer, at {need.site}", f"{need.memory_gb:,.1f} GB, {need.cores:.2g} cores, {need.gbit:.2g} Gbit/s, "
                                            f"disk {need.disk_mb_per_s:,.3g} MB/s and up to {need.disk_gb:,.0f} GB"),
        ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _tokens(answer: Plan) -> str:
    s, (low, high), (least, most) = answer.scored, answer.loss_band, answer.token_band
    if answer.candidate.learners == 1:
        return "100.0 %"
    loss = f"loss {s.loss_percent:.2f} % ({low:.2f} to {high:.2f}) over data-parallel at equal tokens"
    return f"{100 * s.tokens:.1f} % ({100 * least:.0f} to {100 * most:.0f}): {loss}"


def _start(seconds: float, if_away: float) -> list[tuple[str, str]]:
    away = f" ({if_away:,.3g} s if a learner is away then)" if if_away > seconds else ""
    return [("start-up", f"{seconds:,.3g} s until the first round{away}, apart from the above")] if seconds else []


def _slack(costs: Costs) -> list[tuple[str, str]]:
    if costs.link_load is None:
        return []
    used = f"{100 * costs.link_load:.0f} % of its rate is used on average, {100 * (1 - costs.link_load):.0f} % is slack"
    return [("the busiest link", used)]


def _site_table(costs: Costs) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("one site")
    priced = any(t.price_day for t in costs.traffic)
    for name in ("learners", "GB sent a day", "GB received a day", "peak Gbit/s", *(("price a day",) if priced else ())):
        table.add_column(name, justify="right")
    for t in costs.traffic:
        learners, peak = (f"{value:.3g}" if value else "" for value in (t.learners, t.peak_gbit))
        price = (f"{t.price_day:,.2f}",) if priced else ()
        table.add_row(t.site, learners, f"{t.sent_gb_day:,.1f}", f"{t.received_gb_day:,.1f}", peak, *price)
    return table


def _runner_table(answer: Plan) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("runners-up")
    for name in ("M", "H", "P", "tau", "K"):
        table.add_column(name, justify="right")
    table.add_column("up/down")
    for name in ("score", "util.", "goodput", "pace", "tokens"):
        table.add_column(name, justify="right")
    s = answer.scored
    chosen = Runner(answer.candidate, s.score, s.utilisation, s.goodput, s.pace, s.tokens)
    for r in (chosen, *answer.runners_up):
        c = r.candidate
        shares = (r.score, r.utilisation, r.goodput, r.pace, r.tokens)
        table.add_row(
            c.preset, str(c.learners), str(c.interval), str(c.fragments), str(c.overlap), str(c.quorum or "all"),
            f"{c.codec_up}/{c.codec_down}", *(f"{100 * share:.1f}" for share in shares),
        )  # fmt: skip
    return table


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
