"""`atoll snapshot`: list and verify a run's snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.shared import JsonOption, RunArgument, out, print_json
from atoll.errors import UserError
from atoll.tape.folder import find_run

if TYPE_CHECKING:
    from atoll.store.snapshots import SnapshotInfo, SnapshotProblem


def snapshots_of(run: Path) -> list[SnapshotInfo]:
    from atoll.store.snapshots import list_snapshots

    infos = list_snapshots(run)
    if not infos:
        raise UserError(f"run {run}: holds no snapshots; set protocol.snapshot_interval in the recipe to take some")
    return infos


def problems_of(run: Path, outer_step: int) -> list[SnapshotProblem]:
    from atoll.store.snapshots import verify

    return verify(run, outer_step)


snapshots = typer.Typer(no_args_is_help=True, help="List and verify a run's snapshots, which `atoll train --resume` starts from.")


@snapshots.command("ls")
def snapshot_ls(run: RunArgument, as_json: JsonOption = False) -> None:
    """List a run's snapshots, oldest first."""
    found = snapshots_of(find_run(run).folder)
    if as_json:
        print_json(found)
        return
    for info in found:
        state = "complete" if info.complete else "not complete"
        gone = f", missing {', '.join(map(str, info.missing))}" if info.missing else ""
        gone += f", left out {', '.join(map(str, info.left_out))}" if info.left_out else ""
        out.print(f"step {info.outer_step}: {state}, learners {list(info.present)}{gone}, {info.bytes / 1e6:,.1f} MB")


@snapshots.command("verify")
def snapshot_verify(
    run: RunArgument,
    outer_step: Annotated[
        int | None, typer.Argument(metavar="STEP", help="The step of one snapshot. Default: all snapshots.")
    ] = None,
) -> None:
    """Check every byte of a run's snapshots against their checksums; exit code 1 if any is damaged."""
    run = find_run(run).folder
    found = snapshots_of(run)
    if outer_step is not None and outer_step not in [info.outer_step for info in found]:
        raise UserError(f"run {run}: has no snapshot of step {outer_step}")
    sound = True
    for info in found:
        if outer_step in (None, info.outer_step):
            problems = problems_of(run, info.outer_step)
            sound = sound and not problems
            out.print(f"step {info.outer_step}: " + ("; ".join(map(str, problems)) or "sound"), soft_wrap=True)
    if not sound:
        raise typer.Exit(1)
