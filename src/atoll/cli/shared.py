"""What commands share: consoles, options, building a config from options, new run folders, and printing a summary."""

from __future__ import annotations

import atexit
import itertools
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from atoll import config
from atoll.cli.recipes import complete_recipe, found_plan, found_recipe
from atoll.config import PRESETS, Config
from atoll.views.run import Summary
from atoll.views.tables import run_table

PLAIN_WIDTH = 132
"""Columns where standard output is a file or a pipe, which has no width of its own: tables must not be cut there."""


def _console(stderr: bool) -> Console:
    """Text is printed as it is: no markup, no emoji."""
    stream = sys.stderr if stderr else sys.stdout
    terminal = stream is not None and stream.isatty()
    return Console(stderr=stderr, width=None if terminal else PLAIN_WIDTH, markup=False, emoji=False, highlight=False)


out, err = _console(stderr=False), _console(stderr=True)

Recipe = Annotated[  # readable=False: a file that cannot be read is refused by the code that reads it, in one sentence
    Path | None,
    typer.Argument(
        readable=False, callback=found_recipe, autocompletion=complete_recipe,
        help="A TOML recipe, or the name of one of Atoll's own, such as tiny. Without one, the preset's defaults are used.",
    ),
]  # fmt: skip
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run: its folder, its syncer's folder, or its tape (run.tape).")
]
VirtualOption = Annotated[
    bool,
    typer.Option("--virtual", help="Train in this process, on a simulated cluster: real gradients in virtual time."),
]
PresetOption = Annotated[
    str | None,
    typer.Option("--preset", help=f"The algorithm: {', '.join(PRESETS)}. Default: the recipe's, or decoupled."),
]
LearnersOption = Annotated[int | None, typer.Option("--learners", help="Number of learners (M). Default: the recipe's, or 4.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the config, as in protocol.overlap=2. Repeatable."),
]
ChaosOption = Annotated[
    str | None,
    typer.Option(
        "--chaos", callback=found_plan,
        help="Faults to carry out during the run: a TOML plan, or random:SEED:COUNT:SECONDS. Default: none.",
    ),
]  # fmt: skip
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", help="Seed of model, data order and virtual hardware. Default: the recipe's, or 0."),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Folder for the run; new or empty. Default: a new one under runs/.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output at the end; progress goes to standard error.")
]
InitOption = Annotated[
    str | None,
    typer.Option(
        "--init", metavar="WEIGHTS",
        help="Begin with these weights: dcp:FOLDER, a checkpoint of torch.distributed.checkpoint, or a .safetensors file. "
        "The same as model.init.",
    ),
]  # fmt: skip
ThreadsOption = Annotated[
    int,
    typer.Option("--threads", min=1, max=256, help="CPU threads of torch in each process; they affect the bits."),
]


def settings_from(
    recipe: Path | None, preset: str | None, learners: int | None, seed: int | None, assignments: Sequence[str] | None,
    init: str | None = None,
) -> Config:  # fmt: skip
    given: dict[str, Any] = {"learners": learners, "seed": seed, "model": None if init is None else {"init": init}}
    overrides = {key: value for key, value in given.items() if value is not None}
    settings = config.load(recipe, preset_name=preset, assignments=assignments or (), overrides=overrides)
    for warning in config.warnings(settings):
        err.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    return settings


def new_directory(name: str, seed: int) -> Path:
    """Created at once, so that two runs that start together get a folder each. A run that fails before it writes leaves none."""
    for number in itertools.count(1):
        path = Path("runs") / f"{name}-seed{seed}-{number}"
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            atexit.register(_remove_if_empty, path.absolute())
            return path
    raise AssertionError("numbers do not end")


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):  # a folder that is not empty stays
        path.rmdir()
        path.parent.rmdir()


def given_options(context: typer.Context) -> set[str]:
    """The parameters that the running command was given on its command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def show(summary: Summary, as_json: bool) -> None:
    if as_json:
        print_json(summary)
    else:
        out.print(run_table(summary))
        if summary.theta is not None:  # below the table, whose border would end up in what is copied
            out.print(f"trained weights: {summary.theta}", soft_wrap=True)


def print_json(value: Any) -> None:
    typer.echo(msgspec.json.encode(value).decode())


def write_summary(directory: Path, summary: Summary) -> None:
    path = directory / "summary.json"
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
    except OSError as error:  # half a summary would make the run unreadable
        path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
