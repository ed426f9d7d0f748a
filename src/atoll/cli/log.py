"""`atoll log`: log a run's curves to TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.options import ObeyOption
from atoll.cli.shared import RunArgument, out
from atoll.cli.syncer import end_with_stdin
from atoll.tape.folder import find_run

if TYPE_CHECKING:
    from atoll.runtime.loggers.sinks import LogTarget

NICE = 10
FORMS = "tensorboard:FOLDER, wandb:PROJECT or mlflow:TRACKING_URI"
LogToOption = Annotated[
    list[str] | None,
    typer.Option("--log-to", metavar="WHERE", help=f"Log the curves while it trains: {FORMS}. Repeatable. Default: nowhere."),
]


def log_targets(texts: list[str] | None, option: str = "--log-to") -> tuple[LogTarget, ...]:
    if not texts:
        return ()
    from atoll.runtime.loggers.sinks import log_target

    return tuple(dict.fromkeys(log_target(text, option) for text in texts))


def log(
    run: RunArgument,
    to: Annotated[list[str], typer.Option("--to", metavar="WHERE", help=f"Where to log it: {FORMS}. Repeatable.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on while the run trains, until it ends.")] = False,
    obey_stdin: ObeyOption = False,
) -> None:
    """Log a run's losses, participants and tokens from its tape, a point for each step. Nothing is logged twice.

    The run may be finished, or train meanwhile with --follow. It does not depend on its loggers."""
    from atoll.runtime.loggers.follow import log_run

    found, targets, stop = find_run(run), log_targets(to, "--to"), threading.Event()
    if obey_stdin:
        os.nice(NICE)
        end_with_stdin(stop.set)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    for target in targets:
        logged = log_run(found, target, follow=follow, stop=stop, lingers=obey_stdin)
        out.print(f"{target}: {logged} points logged", soft_wrap=True)
