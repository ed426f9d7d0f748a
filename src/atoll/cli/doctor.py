"""`atoll doctor`: check a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.shared import JsonOption, RunArgument, err, out, print_json


def doctor(
    run: RunArgument,
    keys: Annotated[
        Path | None, typer.Option("--keys", metavar="DIR", help="Check this folder of `atoll keys` too. Default: none.")
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Close secrets and folders that others may read or change.")] = False,
    cut_tape: Annotated[
        bool, typer.Option("--cut-tape", help="Cut damaged tapes after their last good record; the rest goes to a file beside.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a run's folder: tapes, versions, snapshots, places, and the permissions of secrets.

    Reads every byte and changes nothing, unless asked to. Exit code 1 if something is wrong."""
    from atoll.runtime.doctor import examine as doctor

    report = doctor.repair(run, keys, permissions=repair, tapes=cut_tape) if repair or cut_tape else doctor.examine(run, keys)
    if as_json:
        print_json(report)
    else:
        for line in report.repaired:
            out.print(f"repaired: {line}", soft_wrap=True)
        for note in report.notes:
            out.print(f"note: {note}", soft_wrap=True)
        for problem in report.problems:
            err.print(f"problem: {problem}", style="red", soft_wrap=True)
        read = ", ".join(_count(number, what) for what, number in report.checked.items())
        verdict = "healthy" if report.healthy else _count(len(report.problems), "problems")
        out.print(f"{report.run}: {verdict} ({read})", soft_wrap=True)
    if not report.healthy:
        raise typer.Exit(1)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what.removesuffix('s') if number == 1 else what}"
