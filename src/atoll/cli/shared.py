"""What commands share: consoles, options, the border where a config is built, and how a result is shown."""

from __future__ import annotations

import atexit
import itertools
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from atoll import config
from atoll.config import PRESETS, Config
from atoll.ids import SYNCER, Nanos, WorkerId
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Effect, Event, Finished, FixParticipants, Refuse
from atoll.tape.heldout import HeldoutPoint
from atoll.views.run import RunView, Summary
from atoll.views.tables import run_table

PLAIN_WIDTH = 132  # a file or a pipe has no width of its own, and tables must not be cut there


def _console(stderr: bool) -> Console:
    """User text is shown as it is: no markup, no emoji."""
    stream = sys.stderr if stderr else sys.stdout
    terminal = stream is not None and stream.isatty()
    return Console(stderr=stderr, width=None if terminal else PLAIN_WIDTH, markup=False, emoji=False, highlight=False)


out, err = _console(stderr=False), _console(stderr=True)

Recipe = Annotated[  # that it cannot be read is told by whoever reads it, in a sentence of ours
    Path | None, typer.Argument(readable=False, help="A TOML recipe; without one, the preset's defaults.")
]
VirtualOption = Annotated[
    bool, typer.Option("--virtual", help="On the simulated cluster: real training in virtual time, in this process.")
]
PresetOption = Annotated[str | None, typer.Option("--preset", help=f"One of {', '.join(PRESETS)}.")]
LearnersOption = Annotated[int | None, typer.Option("--learners", help="How many learners (M).")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override one key, such as protocol.overlap=2. Repeatable.")]
ChaosOption = Annotated[str | None, typer.Option("--chaos", help="A plan of faults: a TOML file, or random:SEED:COUNT:SECONDS.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of model, data order and virtual hardware.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Where the run goes; by default a new folder under runs/.")]
JsonOption = Annotated[bool, typer.Option("--json", help="End with one JSON object on standard output; progress goes to stderr.")]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, max=256, help="CPU threads of torch; replay uses as many.")]


def settings_from(
    recipe: Path | None, preset: str | None, learners: int | None, seed: int | None, assignments: Sequence[str] | None
) -> Config:
    overrides = {key: value for key, value in (("learners", learners), ("seed", seed)) if value is not None}
    settings = config.load(recipe, preset_name=preset, assignments=assignments or (), overrides=overrides)
    for warning in config.warnings(settings):
        err.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    return settings


def new_directory(name: str, seed: int) -> Path:
    """Made at once: of two runs that start together each gets its own. A run that comes to nothing leaves none behind."""
    for number in itertools.count(1):
        path = Path("runs") / f"{name}-seed{seed}-{number}"
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            atexit.register(_remove_if_empty, path.absolute())
            return path
    raise AssertionError("numbers do not end")


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):  # whatever holds something stays
        path.rmdir()
        path.parent.rmdir()


STANDSTILL = 5
"""Of every learner, without an outer step between them."""


class RunProgress:
    """A bar on a terminal, a line every tenth of the run otherwise."""

    def __init__(self, settings: Config, view: RunView, quiet: bool, clock: str) -> None:
        self._settings, self._view, self._quiet, self._clock = settings, view, quiet, clock
        self._bar: Progress | None = None
        self._next = 0
        self._poisoned = 0
        self._heldout = ""

    def __enter__(self) -> RunProgress:
        console = err if self._quiet else out
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("{task.fields[loss]}"), console=console,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(self._settings.preset, total=self._settings.total_steps, loss="")
        self._console = console
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if worker != SYNCER:
            return
        for effect in effects:
            if isinstance(effect, FixParticipants | Finished):
                self._poisoned = 0
                self.reached(effect.outer_step, now / 1e9, self._view.train_loss)
            elif isinstance(effect, Refuse) and effect.reason.why in (Why.POISONED, Why.OUTLIER):
                self._refused(effect.reason)

    def _refused(self, reason: Reason) -> None:
        """Learners that recover only to fail again are in no round, and nothing else would tell why the run stands still."""
        self._poisoned += 1
        if self._poisoned == STANDSTILL * self._settings.learners:
            told = f"no outer step since {self._poisoned} updates were refused ({reason.detail})"
            self.say(f"warning: {told}; lower inner.learning_rate")

    def on_point(self, point: HeldoutPoint) -> None:
        """At Theta, on the way."""
        if self._bar is None:
            self.say(f"{self._settings.preset}: {told(point, self._settings.total_steps)}")
        else:
            self._heldout = f", {told(point)}"

    def reached(self, step: int, seconds: float, loss: float | None) -> None:
        text = f"train loss {loss:.4f}" if loss is not None else ""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=text + self._heldout)
        elif step >= self._next:
            self._next = step + max(1, self._settings.total_steps // 10)
            done = f"{self._settings.preset}: outer step {step} of {self._settings.total_steps}"
            self.say(f"{done}, {seconds:.1f} {self._clock}s {text}".rstrip())


def told(point: HeldoutPoint, of: int | None = None) -> str:
    loss = "no number" if point.loss is None or not math.isfinite(point.loss) else f"{point.loss:.4f}"
    where = f"outer step {point.outer_step} of {of}, " if of is not None else ""
    return f"{where}held-out loss {loss}" + ("" if where else f" at {point.outer_step}")


def show(summary: Summary, as_json: bool) -> None:
    if as_json:
        print_json(summary)
    else:
        out.print(run_table(summary))


def print_json(value: Any) -> None:
    typer.echo(msgspec.json.encode(value).decode())


def write_summary(directory: Path, summary: Summary) -> None:
    path = directory / "summary.json"
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
    except OSError as error:  # half a summary would keep the run from being read
        path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
