"""`atoll rollback`: make a run's weights what they were at an earlier step."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.options import PluginOption
from atoll.cli.shared import JsonOption, RunArgument, err, out, print_json
from atoll.errors import UserError
from atoll.store.lock import is_locked
from atoll.tape.folder import find_run

if TYPE_CHECKING:
    from atoll.runtime.syncer.rollback import RollbackAnswer, RollbackRequest

LOOK_SECONDS = 0.2
SAY_SECONDS = 10.0


def rollback(
    run: RunArgument,
    to: Annotated[
        int | None, typer.Option("--to", metavar="STEP", min=0, help="The step to return to. Default: list those that are kept.")
    ] = None,
    reset_optimizer: Annotated[
        bool, typer.Option("--reset-optimizer", help="Learners start with empty moments. Default: they keep theirs.")
    ] = False,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the tape and the log.")] = "an operator asked",
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0.0, help="How long to wait for a running syncer's answer.")
    ] = 600.0,
    allow_plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Roll a run back: its next step gets the weights and the outer optimiser's state of an earlier one.

    A running syncer does it at once, and its learners load the weights at their next step; a stopped one does it when it is
    started again. Which steps are kept: protocol.rollback_interval, limits.rollback_points."""
    from atoll.runtime.syncer.rollback import ask, points_of

    home = find_run(run).home
    kept = points_of(home)
    if to is None:
        _list(home, kept, as_json)
        return
    if to not in kept:
        known = f"kept are {', '.join(map(str, kept))}" if kept else "none is kept yet (protocol.rollback_interval)"
        raise UserError(f"--to {to}: run {home} does not keep that step; {known}")
    request = ask(home, to, reset_optimizer=reset_optimizer, reason=reason)
    if not is_locked(home):
        out.print(f"no syncer runs in {home}: it rolls back to step {to} when it is started again", soft_wrap=True)
        return
    answer = _await_answer(home, request, wait)
    if as_json:
        print_json(answer)
    elif answer.outer_step:
        out.print(f"step {answer.outer_step} has the weights of step {answer.to}", soft_wrap=True)
    if not answer.outer_step:
        raise UserError(f"--to {to}: {answer.sentence}")


def _list(home: Path, kept: tuple[int, ...], as_json: bool) -> None:
    if as_json:
        print_json({"run": str(home), "steps": kept})
    else:
        steps = ", ".join(map(str, kept)) or "none yet (protocol.rollback_interval, limits.rollback_points)"
        out.print(f"{home} can be rolled back to steps: {steps}", soft_wrap=True)


def _await_answer(home: Path, request: RollbackRequest, wait: float) -> RollbackAnswer:
    from atoll.runtime.syncer.rollback import REQUEST_FILE, answer_to

    began = said = time.monotonic()
    pause = threading.Event()
    while (answer := answer_to(home, request)) is None:
        now = time.monotonic()
        if now - began > wait:
            raise UserError(f"run {home}: no answer within {wait:g} s; the request stays in {home / REQUEST_FILE}")
        if now - said > SAY_SECONDS:
            said = now
            err.print(f"waiting for the syncer since {now - began:.0f} s", soft_wrap=True)
        pause.wait(LOOK_SECONDS)
    return answer
