"""`atoll replay`: re-derive a run's decisions, and its weights, from its tapes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import AllowOption, PluginOption
from atoll.cli.shared import err, out
from atoll.tape.weave import Woven, open_run


def replay(
    path: Annotated[Path, typer.Argument(metavar="DIR_OR_TAPE", help="A run's folder or its tape.")],
    weights: Annotated[bool, typer.Option("--weights", help="Train again, and demand every Theta bit for bit.")] = False,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="By default as many as the tape says.")] = None,
    allow_model: AllowOption = None,
    allow_plugin: PluginOption = None,
) -> None:
    """Feed a run's tapes to new machines and demand the same decisions; stops at the first difference with its story."""
    from atoll.executor.environment import use_threads
    from atoll.executor.virtual_run import TensorExecutor
    from atoll.runtime.local.summary import executor_for_replay
    from atoll.sim.run import replay_run

    tape = open_run(path)
    use_threads(threads or tape.header.threads)

    def on_mismatch(sentence: str) -> None:
        err.print(f"warning: {sentence}", style="yellow", soft_wrap=True)

    executor = executor_for_replay(path) if isinstance(tape, Woven) else TensorExecutor
    outcome, theta, _ = replay_run(
        tape, weights=weights, on_mismatch=on_mismatch, executor_of=executor, allowed=allow_model or []
    )
    if outcome.cut:
        err.print(f"the run did not end: the tape stops after record {outcome.records}, and all of it is whole", soft_wrap=True)
    out.print(f"{outcome.records} records re-derived, outer step {outcome.outer_step}: every decision as taped", highlight=False)
    if theta is not None:
        out.print(f"every Theta as taped, bit for bit; final sha256 {theta}", highlight=False, soft_wrap=True)
