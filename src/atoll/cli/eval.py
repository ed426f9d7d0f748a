"""`atoll eval`: measure a run's model on benchmarks and on held-out text; with --follow also while it trains."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from atoll.cli.bars import Bars
from atoll.cli.building import built
from atoll.cli.options import AllowOption, ObeyOption, PluginOption
from atoll.cli.progress import heldout_line
from atoll.cli.shared import JsonOption, RunArgument, ThreadsOption, err, out, print_json
from atoll.cli.syncer import end_with_stdin
from atoll.config import CUSTOM
from atoll.errors import DataError, UserError
from atoll.tape.folder import find_run
from atoll.tape.heldout import HeldoutPoint

NICE = 10
"""An evaluator that a launcher starts beside its learners runs at low priority."""


def evaluate(
    run: RunArgument,
    tasks: Annotated[
        str, typer.Option("--tasks", help="Tasks, separated by commas, as in piqa,lambada,heldout.")
    ] = "heldout",
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Folder with the benchmarks' JSON lines. heldout needs none.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Evaluate only the first so many examples of each task. Default: all.")
    ] = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = 1,
    device: Annotated[str, typer.Option("--device", help="Where the model runs: cpu, cuda, cuda:1, ...")] = "cpu",
    allow_model: AllowOption = None,
    allow_plugin: PluginOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Print the held-out loss of a live run while it trains, until it ends.")
    ] = False,
    every: Annotated[
        int | None, typer.Option("--every", min=1, help="With --follow: steps between two losses. Default: data.heldout_every.")
    ] = None,
    obey_stdin: ObeyOption = False,
) -> None:
    """Evaluate a run's model: multiple choice by likelihood, LAMBADA, and the loss on held-out text."""
    if follow:
        if tasks != "heldout" or data is not None or limit is not None:
            raise UserError("--follow: prints the held-out loss; takes --every, --device, --threads, --allow-model and --json")
        _follow(find_run(run).folder, every, device, threads, allow_model or [], as_json=as_json, obeys=obey_stdin)
        return
    if every is not None:
        raise UserError("--every: says how often --follow evaluates; give --follow too")
    from atoll.executor.compute import autocast, resolved
    from atoll.executor.environment import use_threads
    from atoll.executor.merging import remerge_for
    from atoll.executor.virtual_run import checked_device
    from atoll.tasks.trained import check_tasks, evaluate_run, open_trained

    wanted = check_tasks([name.strip() for name in tasks.split(",") if name.strip()], data, limit)
    run = find_run(run).folder
    use_threads(threads)
    trained = open_trained(run, allow_model or [], remerge_for)
    if trained.early:
        err.print(f"warning: {trained.early}", style="yellow", soft_wrap=True)
    there = checked_device(device)
    trained.model.to(there)
    with autocast(resolved(trained.config, there), there), Bars(err) as bars:
        results = evaluate_run(trained, wanted, limit, _Progress(bars))
    if as_json:
        reached = {"outer_step": trained.outer_step, "total_steps": trained.config.total_steps}
        print_json({"run": str(run), **reached, "results": [msgspec.structs.asdict(each) for each in results]})
    else:
        table = Table("task", "examples", "loss", "acc", "acc_norm", "acc_bytes", "perplexity")
        for r in results:
            table.add_row(
                r.task, f"{r.examples:,}", f"{r.loss:.4f}" if r.loss is not None else "", _figure(r.acc, r.acc_stderr),
                _figure(r.acc_norm, r.acc_norm_stderr), _figure(r.acc_bytes, r.acc_bytes_stderr),
                _figure(r.perplexity, r.perplexity_stderr),
            )  # fmt: skip
        out.print(table)
    for r in results:  # last, so that the other results are printed first
        name, figure = ("loss", r.loss) if r.loss is not None else ("acc", r.acc)
        if figure is not None and not math.isfinite(figure):
            why = "the weights have diverged or are damaged; train with a lower inner.learning_rate, or restore them"
            raise DataError(f"run {run}: its {name} on {r.task} is {figure}: {why}")


def _follow(
    run: Path, every: int | None, device: str, threads: int, allowed: Collection[str], *, as_json: bool, obeys: bool
) -> None:
    from atoll.executor.environment import use_threads
    from atoll.executor.virtual_run import checked_device, evaluated_on
    from atoll.runtime.local.heldout import Evaluator
    from atoll.tasks.trained import config_of

    settings = config_of(run)
    often = every or settings.data.heldout_every
    if not often:
        raise UserError(f"--follow: run {run} has data.heldout_every = 0; give --every STEPS")
    if settings.model.name == CUSTOM:
        raise UserError(f"run {run}: model.name = 'custom' is your own code, and only that can evaluate the model")
    use_threads(threads)
    stop = threading.Event()
    if obeys:
        os.nice(NICE)
        end_with_stdin(stop.set)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with Bars(err) as bars:
        task = built(settings, allowed, lambda text: err.print(text, soft_wrap=True), bars)

    def on_point(point: HeldoutPoint) -> None:
        if as_json:
            print_json(point)
        else:
            out.print(heldout_line(point))

    Evaluator(run, evaluated_on(task, checked_device(device)), often).follow(on_point, stop)


def _figure(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"


class _Progress:
    """A bar on a terminal, otherwise a line every tenth of a task."""

    def __init__(self, bars: Bars) -> None:
        self._bars, self._task, self._shown = bars, "", 0

    def __call__(self, task: str, done: int, of: int) -> None:
        if self._bars.shown:
            self._bars.update(task, done, of, "choices")
            return
        if task != self._task:
            self._task, self._shown = task, 0
        if done * 10 // of > self._shown or done == of:
            self._shown = done * 10 // of
            err.print(f"{task}: {done} of {of} choices", soft_wrap=True)
