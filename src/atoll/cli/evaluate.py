"""`atoll eval`: a run's outer parameters on benchmarks from local files, and on the held-out text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from atoll.cli import live
from atoll.cli.shared import JsonOption, ThreadsOption, err, out, print_json
from atoll.errors import DataError


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run of `atoll train`.")],
    tasks: Annotated[
        str, typer.Option("--tasks", help="Separated by commas, such as piqa,lambada,heldout.")
    ] = "heldout",
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Folder with the benchmarks' JSON lines.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many examples of each.")] = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = 1,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")] = "cpu",
    allow_model: live.AllowOption = None,
) -> None:
    """Evaluate a run's model: multiple choice by likelihood, LAMBADA, and the loss on held-out text."""
    from atoll.executor.device import checked_device
    from atoll.executor.environment import use_threads
    from atoll.executor.trained import check_tasks, evaluate_run, open_trained

    wanted = check_tasks([name.strip() for name in tasks.split(",") if name.strip()], data, limit)
    use_threads(threads)
    trained = open_trained(run, allow_model or [])
    if trained.early:
        err.print(f"warning: {trained.early}", style="yellow", soft_wrap=True)
    trained.model.to(checked_device(device))
    results = evaluate_run(trained, wanted, limit, _Progress())
    if as_json:
        reached = {"outer_step": trained.outer_step, "outer_steps": trained.config.outer_steps}
        print_json({"run": str(run), **reached, "results": [msgspec.structs.asdict(each) for each in results]})
    else:
        table = Table("task", "examples", "loss", "acc", "acc_norm", "acc_bytes", "perplexity")
        for r in results:
            table.add_row(
                r.task, f"{r.examples:,}", f"{r.loss:.4f}" if r.loss is not None else "", _told(r.acc, r.acc_stderr),
                _told(r.acc_norm, r.acc_norm_stderr), _told(r.acc_bytes, r.acc_bytes_stderr),
                _told(r.perplexity, r.perplexity_stderr),
            )  # fmt: skip
        out.print(table)
    for r in results:  # at the end: whatever else was asked is answered
        if r.loss is not None and not math.isfinite(r.loss):
            why = "its weights have diverged or are damaged; train with a lower inner.learning_rate, or bring them back"
            raise DataError(f"run {run}: its loss on {r.task} is {r.loss}: {why}")


def _told(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"


class _Progress:
    """A line every tenth of a task."""

    def __init__(self) -> None:
        self._task, self._told = "", 0

    def __call__(self, task: str, done: int, of: int) -> None:
        if task != self._task:
            self._task, self._told = task, 0
        if done * 10 // of > self._told or done == of:
            self._told = done * 10 // of
            err.print(f"{task}: {done} of {of} choices", soft_wrap=True)
