"""The command line: parse, build, call. Exit codes: 0, 1 (the run failed), 2 (the user's input)."""

from __future__ import annotations

import errno
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, NoReturn

import typer

from atoll.cli.compare import compare
from atoll.cli.config import show_config
from atoll.cli.doctor import doctor
from atoll.cli.down import down
from atoll.cli.eval import evaluate
from atoll.cli.export import export
from atoll.cli.keys import keys
from atoll.cli.learner import learner
from atoll.cli.leave import leave
from atoll.cli.log import log
from atoll.cli.logs import logs
from atoll.cli.plan import plan
from atoll.cli.replay import replay
from atoll.cli.rollback import rollback
from atoll.cli.shard import shard
from atoll.cli.shared import err, out
from atoll.cli.sim import sim
from atoll.cli.simulate.app import simulate
from atoll.cli.snapshot import snapshots
from atoll.cli.status import status
from atoll.cli.strip import strip
from atoll.cli.syncer import syncer
from atoll.cli.train import train
from atoll.cli.up import up
from atoll.cli.watch import watch
from atoll.errors import AtollError, NotAdmitted, UserError
from atoll.runtime.local.failure import Failure, report_failure
from atoll.version import __version__

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Atoll trains one model on many islands of compute that never wait for each other.",
)  # fmt: skip
COMMANDS: tuple[tuple[str, Callable[..., None], str], ...] = (
    ("train", train, "Train a model, as processes or in virtual time."),
    ("up", up, "Bring a run up on an engine."),
    ("status", status, "Show how a run that is up stands."),
    ("logs", logs, "Print the logs of a run that is up."),
    ("down", down, "End a run that is up."),
    ("config", show_config, "Print the complete config of a recipe."),
    ("compare", compare, "Train several presets and compare them."),
    ("eval", evaluate, "Evaluate a run's model."),
    ("export", export, "Write a run's model for Hugging Face."),
    ("watch", watch, "Show a run on a page or in the terminal."),
    ("replay", replay, "Derive a run again from its tapes."),
    ("strip", strip, "Print a run's tapes as text."),
    ("log", log, "Log a run to TensorBoard, W&B or MLflow."),
    ("doctor", doctor, "Check a run's folder, and repair it."),
    ("rollback", rollback, "Return a run to the weights of an earlier step."),
    ("syncer", syncer, "Run a syncer, for learners elsewhere."),
    ("learner", learner, "Run one learner of a syncer."),
    ("leave", leave, "Ask one learner to leave its run."),
    ("keys", keys, "Make certificates and join tokens."),
    ("sim", sim, "Run the protocol alone, without tensors."),
    ("plan", plan, "Recommend settings for a cluster."),
)
"""Names, functions and what the list of commands says of them: a longer line would be cut there."""
for name, function, line in COMMANDS:
    app.command(name, short_help=line)(function)
app.command("shard")(shard)
app.add_typer(snapshots, name="snapshot", short_help="List and verify a run's snapshots.")
app.add_typer(simulate, name="simulate", short_help="Estimate bandwidth and goodput of clusters.")


def main() -> None:
    try:
        app()
    except AtollError as error:
        _fail(str(error), users_fault=isinstance(error, UserError), refused=isinstance(error, NotAdmitted))
    except OSError as error:
        _fail(_sentence(error), users_fault=error.errno in UNUSABLE and error.filename is not None)


def _fail(message: str, *, users_fault: bool, refused: bool = False) -> NoReturn:
    """One sentence for the user, the same as a value for a launcher, and the exit code."""
    err.print(f"atoll: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    report_failure(Failure(message, users_fault, refused))
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
        out.print(f"atoll {__version__}, torch {_torch_version()}, Python {platform.python_version()}, {platform.platform()}")
        raise typer.Exit()


def _torch_version() -> str:
    """As it is installed: importing torch takes seconds."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the versions of Atoll, torch and Python, and the platform."
        ),
    ] = False,
) -> None:
    """Atoll trains one model on many islands of compute that never wait for each other."""


if __name__ == "__main__":
    main()
