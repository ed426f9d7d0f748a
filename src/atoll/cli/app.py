"""The command line: parse, build, call. Exit codes: 0, 1 (the run failed), 2 (the user's input)."""

from __future__ import annotations

import errno
import sys
from typing import Annotated, NoReturn

import typer

from atoll.cli.compare import compare
from atoll.cli.config import show_config
from atoll.cli.eval import evaluate
from atoll.cli.export import export
from atoll.cli.keys import keys
from atoll.cli.learner import learner
from atoll.cli.plan import plan
from atoll.cli.replay import replay
from atoll.cli.shared import err, out
from atoll.cli.sim import sim
from atoll.cli.simulate.app import simulate
from atoll.cli.snapshot import snapshots
from atoll.cli.strip import strip
from atoll.cli.syncer import syncer
from atoll.cli.train import train
from atoll.errors import AtollError, UserError
from atoll.runtime.local.failure import Failure, report_failure
from atoll.version import __version__

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Atoll trains one model on many islands of compute that never wait for each other.",
)  # fmt: skip
for command in (train, sim, compare, plan, export, syncer, learner, keys, replay, strip):
    app.command()(command)
app.command("eval")(evaluate)
app.command("config")(show_config)
app.add_typer(snapshots, name="snapshot")
app.add_typer(simulate, name="simulate")


def main() -> None:
    try:
        app()
    except AtollError as error:
        _fail(str(error), users_fault=isinstance(error, UserError))
    except OSError as error:
        _fail(_sentence(error), users_fault=error.errno in UNUSABLE and error.filename is not None)


def _fail(message: str, *, users_fault: bool) -> NoReturn:
    """One sentence for the user, the same as a value for a launcher, and the exit code."""
    err.print(f"atoll: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    report_failure(Failure(message, users_fault))
    sys.exit(2 if users_fault else 1)


UNUSABLE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
"""Errors that the same path gives at every try: the user has to name another one."""


def _sentence(error: OSError) -> str:
    """For an error that no command expected. The system knows the reason, and most often the file."""
    where = "" if error.filename is None else f"{error.filename}: "
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}the disk is full ({error.strerror}); make room and try again"
    return f"{where}cannot be used ({error.strerror})" if where and error.strerror else str(error)


def _version(show: bool) -> None:
    if show:
        out.print(f"atoll {__version__}")
        raise typer.Exit()


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """Atoll trains one model on many islands of compute that never wait for each other."""


if __name__ == "__main__":
    main()
