"""`atoll replay`: re-derive a run's decisions, and its weights, from its tapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from atoll.cli.bars import Bars
from atoll.cli.options import AllowOption, PluginOption
from atoll.cli.progress import ReplayProgress
from atoll.cli.shared import RunArgument, err, out
from atoll.errors import UserError
from atoll.tape.folder import find_run
from atoll.tape.format import Tape
from atoll.tape.weave import Woven, open_run

if TYPE_CHECKING:
    import torch

    from atoll.tasks.task import Task


def replay(
    run: RunArgument,
    weights: Annotated[
        bool, typer.Option("--weights", help="Train the model again from the tapes, and demand every Theta bit for bit.")
    ] = False,
    since: Annotated[
        int | None, typer.Option("--since", min=0, metavar="STEP", help="Begin at the checkpoints at or before this outer step.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads of torch. Default: as many as the tape was recorded with.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="With --weights, where learners train again: cpu, cuda, cuda:1, ...")
    ] = "cpu",
    tolerance: Annotated[
        float | None, typer.Option(
            "--tolerance", min=0.0, metavar="SHARE",
            help="With --weights, demand no bits: the final Theta may differ from the recorded one by this share of its norm.",
        ),
    ] = None,
    allow_model: AllowOption = None,
    allow_plugin: PluginOption = None,
) -> None:
    """Feed a run's tapes to new state machines and demand the same decisions.

    Stops at the first difference and prints the events that led to it. A folder stands for all tapes of its run; a tape that is
    named itself is replayed alone, unless --weights needs the others.

    Bits are promised on a CPU, and on a GPU of the same name with the same software for runs with model.deterministic = true. For
    other runs on a GPU use --tolerance."""
    from atoll.executor.environment import use_threads
    from atoll.executor.virtual_run import checked_device
    from atoll.sim.run import replay_run

    if weights and since is not None:
        raise UserError("--since: --weights trains the model again from the beginning; leave one of them out")
    if not weights and (device != "cpu" or tolerance is not None):
        raise UserError("--device and --tolerance: are for --weights; decisions alone need neither")
    there = checked_device(device)
    tape = _tapes_of(run, since, weights=weights)
    use_threads(threads or tape.header.threads)
    if weights:
        _to_stderr(f"replaying {tape.path}: all inner steps are trained again in this process, one after the other")

    def on_mismatch(sentence: str) -> None:
        err.print(f"warning: {sentence}", style="yellow", soft_wrap=True)

    with Bars(err) as bars:
        outcome, theta, _ = replay_run(
            tape, weights=weights, on_mismatch=on_mismatch, allowed=allow_model or [],
            executor_of=_executor_of(tape, there), device=there, tolerance=tolerance,
            progress=ReplayProgress(tape.header.config["total_steps"], _to_stderr, bars),
        )  # fmt: skip
    for each in outcome.missing:
        err.print(f"warning: {each}; the decisions of this learner are checked up to there", style="yellow", soft_wrap=True)
    if outcome.cut:
        err.print(f"the run did not end: its tape stops after record {outcome.records}, and is whole up to there", soft_wrap=True)
    checked = "every decision that is on the tapes" if outcome.missing else "every decision"
    out.print(f"{outcome.records} records replayed up to step {outcome.outer_step}: {checked} as recorded", soft_wrap=True)
    if theta is not None and tolerance is not None:
        out.print(
            f"{outcome.differing} Thetas differ in bits; the final one by {outcome.distance:.2e} of its norm, at most "
            f"{tolerance:g} allowed; final sha256 {theta}", soft_wrap=True,
        )  # fmt: skip
    elif theta is not None:
        out.print(f"every Theta as recorded, bit for bit; final sha256 {theta}", soft_wrap=True)


def _executor_of(tape: Tape | Woven, device: torch.device) -> Callable[[Task], Any]:
    """As the run was: a live one's learners on the device and its syncer on the host, a virtual one's all together."""
    from atoll.chaos import ChaosPlan
    from atoll.executor.virtual_run import executor_on
    from atoll.runtime.local.summary import executor_for_replay
    from atoll.sim.run import learners_expected

    if isinstance(tape, Woven):
        return executor_for_replay(tape.path, None if device.type == "cpu" else device)
    faults = tape.header.plan

    def together(task: Task) -> Any:
        return executor_on(task, device, learners_expected(task.config, msgspec.convert({"faults": faults}, ChaosPlan)))

    return together


def _tapes_of(run: Path, since: int | None, *, weights: bool) -> Tape | Woven:
    tape = open_run(run, since)
    if weights and isinstance(tape, Tape) and tape.header.worker is not None:  # of a live worker: weights need all of them
        return open_run(find_run(run).folder)
    return tape


def _to_stderr(text: str) -> None:
    err.print(text, soft_wrap=True)
