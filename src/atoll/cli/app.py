"""The command line: parse, build, call. Exit codes: 0, 1 (the run failed), 2 (the user's input)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from atoll import __version__, config
from atoll.chaos import Plan, load_plan
from atoll.cli import live
from atoll.config import PRESETS, Config
from atoll.errors import AtollError, UserError
from atoll.ids import SYNCER, Nanos, WorkerId
from atoll.protocol.vocabulary import Effect, Event, Finished, FixParticipants
from atoll.tape.format import Tape, find_tape
from atoll.views.run import RunView, Summary, summarise
from atoll.views.strip import strip_lines
from atoll.views.tables import comparison_table, run_table

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Atoll trains one model on many islands of compute that never wait for each other.",
)  # fmt: skip
PLAIN_WIDTH = 132  # a file or a pipe has no width of its own, and tables must not be cut there


def _console(stderr: bool) -> Console:
    """User text is shown as it is: no markup, no emoji."""
    stream = sys.stderr if stderr else sys.stdout
    terminal = stream is not None and stream.isatty()
    return Console(stderr=stderr, width=None if terminal else PLAIN_WIDTH, markup=False, emoji=False, highlight=False)


out, err = _console(stderr=False), _console(stderr=True)

Recipe = Annotated[Path | None, typer.Argument(help="A TOML recipe; without one, the preset's defaults.")]
VirtualOption = Annotated[
    bool, typer.Option("--virtual", help="Train on the simulated cluster: real training in virtual time. The only way so far.")
]
PresetOption = Annotated[str | None, typer.Option("--preset", help=f"One of {', '.join(PRESETS)}.")]
LearnersOption = Annotated[int | None, typer.Option("--learners", help="How many learners (M).")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override one key, such as protocol.overlap=2. Repeatable.")]
ChaosOption = Annotated[str | None, typer.Option("--chaos", help="A plan of faults: a TOML file, or random:SEED:COUNT:SECONDS.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of model, data order and virtual hardware.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Where the run goes; by default a new folder under runs/.")]
JsonOption = Annotated[bool, typer.Option("--json", help="End with one JSON object on standard output; progress goes to stderr.")]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, max=256, help="CPU threads of torch; replay uses as many.")]


def main() -> None:
    try:
        app()
    except UserError as error:
        err.print(f"atoll: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except AtollError as error:
        err.print(f"atoll: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except OSError as error:
        err.print(f"atoll: {error}", style="red", soft_wrap=True)
        sys.exit(1)


def _version(show: bool) -> None:
    if show:
        out.print(f"atoll {__version__}")
        raise typer.Exit()


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """Atoll trains one model on many islands of compute that never wait for each other."""


# ---------------------------------------------------------------- running


@app.command()
def train(
    recipe: Recipe = None,
    virtual: VirtualOption = True,
    preset: PresetOption = None,
    learners: LearnersOption = None,
    set_: SetOption = None,
    chaos: ChaosOption = None,
    seed: SeedOption = None,
    out_dir: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = 1,
) -> None:
    """Train a model. Time is virtual: the protocol, the faults and the training are real."""
    settings = _settings(recipe, preset, learners, seed, set_)
    plan = load_plan(chaos, settings.learners) if chaos else Plan()
    summary = _run(settings, plan, out_dir, tensors=True, threads=threads, quiet=as_json)
    _show(summary, as_json)


@app.command()
def sim(
    recipe: Recipe = None,
    preset: PresetOption = None,
    learners: LearnersOption = None,
    set_: SetOption = None,
    chaos: ChaosOption = None,
    seed: SeedOption = None,
    out_dir: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the protocol alone, without tensors: who merges with whom, who waits, what travels."""
    settings = _settings(recipe, preset, learners, seed, set_)
    plan = load_plan(chaos, settings.learners) if chaos else Plan()
    _show(_run(settings, plan, out_dir, tensors=False, threads=1, quiet=as_json), as_json)


@app.command()
def compare(
    presets: Annotated[list[str] | None, typer.Argument(help="Presets to run; by default all of them.")] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", help="The recipe all of them share.")] = None,
    learners: LearnersOption = None,
    set_: SetOption = None,
    chaos: ChaosOption = None,
    seed: SeedOption = None,
    out_dir: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = 1,
) -> None:
    """Train several presets on the same recipe, data and number of outer steps, and print one table."""
    names = list(dict.fromkeys(presets or PRESETS))
    each = [_settings(recipe, name, learners, seed, set_) for name in names]
    plan = load_plan(chaos, min(settings.learners for settings in each)) if chaos else Plan()
    base = out_dir or _new_directory("compare", each[0].seed)
    summaries = [
        _run(settings, plan, base / settings.preset, tensors=True, threads=threads, quiet=as_json) for settings in each
    ]
    if as_json:
        _print_json(summaries)
    else:
        out.print(comparison_table(summaries))


def _settings(
    recipe: Path | None, preset: str | None, learners: int | None, seed: int | None, assignments: Sequence[str] | None
) -> Config:
    overrides: dict[str, Any] = {}
    if learners is not None:
        overrides["learners"] = learners
    if seed is not None:
        overrides["seed"] = seed
    settings = config.load(recipe, preset_name=preset, assignments=assignments or (), overrides=overrides)
    for warning in config.warnings(settings):
        err.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    return settings


def _run(settings: Config, plan: Plan, directory: Path | None, *, tensors: bool, threads: int, quiet: bool) -> Summary:
    from atoll.executor.environment import use_threads  # torch takes seconds to import; --help and config do not wait for it
    from atoll.sim.run import run_virtual

    use_threads(threads)
    directory = directory or _new_directory(settings.preset, settings.seed)
    view = RunView(settings.learners)
    try:
        with _progress(settings, view, quiet) as observer:
            done = run_virtual(settings, plan, directory, tensors=tensors, observers=[view, observer])
    except KeyboardInterrupt:
        err.print(f"atoll: interrupted; {directory / 'run.tape'} is readable up to its last whole record", soft_wrap=True)
        raise typer.Exit(130) from None
    summary = summarise(
        settings, view, done.fates, loss_first=done.loss_first, loss_final=done.loss_final,
        theta_sha256=done.theta_sha256, tape=str(done.tape), run_dir=str(directory),
    )  # fmt: skip
    (directory / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
    return summary


def _new_directory(name: str, seed: int) -> Path:
    number = 1
    while (path := Path("runs") / f"{name}-seed{seed}-{number}").exists():
        number += 1
    return path


class _progress:
    """A bar on a terminal, a line every tenth of the run otherwise."""

    def __init__(self, settings: Config, view: RunView, quiet: bool) -> None:
        self._settings, self._view, self._quiet = settings, view, quiet
        self._bar: Progress | None = None
        self._next = 0

    def __enter__(self) -> _progress:
        console = err if self._quiet else out
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("{task.fields[loss]}"), console=console,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(self._settings.preset, total=self._settings.outer_steps, loss="")
        self._console = console
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        fixed = next((e.outer_step for e in effects if isinstance(e, FixParticipants | Finished)), None)
        if worker != SYNCER or fixed is None:
            return
        loss = f"train loss {self._view.train_loss:.4f}" if self._view.train_loss is not None else ""
        if self._bar is not None:
            self._bar.update(self._task, completed=fixed, loss=loss)
        elif fixed >= self._next:
            self._next = fixed + max(1, self._settings.outer_steps // 10)
            done = f"{self._settings.preset}: outer step {fixed} of {self._settings.outer_steps}"
            self._console.print(f"{done}, {now / 1e9:.1f} virtual s {loss}".rstrip())


# ---------------------------------------------------------------- the live cluster, process by process


@app.command()
def syncer(
    recipe: Recipe = None,
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT to listen on; port 0 picks one.")] = "127.0.0.1:7077",
    directory: Annotated[Path, typer.Option("--dir", help="Where its state lives; started again there, it goes on.")] = Path(
        "runs/syncer"
    ),
    preset: PresetOption = None,
    learners: LearnersOption = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    keys: live.KeysOption = None,
    insecure: live.InsecureOption = False,
    allow_model: live.AllowOption = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="A snapshot's folder to go on from.")] = None,
    threads: ThreadsOption = 1,
    quiet: Annotated[bool, typer.Option("--quiet", help="Warnings and errors only.")] = False,
) -> None:
    """Run the syncer: CPU only. It merges what learners send, stores it durably, and announces it."""
    live.log_to_stderr(verbose=not quiet)
    settings = _settings(recipe, preset, learners, seed, set_)
    live.run_syncer(settings, directory, listen, keys, insecure, allow_model or [], resume, threads)


@app.command()
def learner(
    syncer_address: Annotated[str, typer.Option("--syncer", help="HOST:PORT of the syncer.")] = "127.0.0.1:7077",
    token: Annotated[Path | None, typer.Option("--token", help="File with the join token; or set ATOLL_TOKEN.")] = None,
    wants: Annotated[int, typer.Option("--id", help="The learner id to ask for; by default the lowest that is free.")] = -1,
    run: Annotated[str, typer.Option("--run", help="Join only this run.")] = "",
    keys: live.KeysOption = None,
    name: Annotated[str | None, typer.Option("--name", help="Whose certificate of --keys to use, such as learner-0.")] = None,
    listen: Annotated[
        str, typer.Option("--listen", help="HOST:PORT where peers that recover are served; port 0 picks one; '' serves nobody.")
    ] = "127.0.0.1:0",
    advertise: Annotated[str, typer.Option("--advertise", help="HOST:PORT peers are told to dial.")] = "",
    connections: Annotated[
        int, typer.Option("--connections", min=1, max=16, help="Connections for bulk data; more for long fat links.")
    ] = 1,
    insecure: live.InsecureOption = False,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")] = "cpu",
    allow_model: live.AllowOption = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Where its tape and its part of snapshots go.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="This learner's part of a snapshot.")] = None,
    threads: ThreadsOption = 1,
    obey_stdin: Annotated[bool, typer.Option("--obey-stdin", hidden=True)] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Warnings and errors only.")] = False,
) -> None:
    """Run one learner: it gets its whole config from the syncer, trains, and never waits."""
    from atoll.runtime.worker import WorkerOptions, run_worker

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("WORLD_SIZE is above 1: a learner is one process so far; start several learners instead of ranks")
    live.log_to_stderr(verbose=not quiet)
    address = live.learner_address(syncer_address, token, run, keys, name, listen, advertise, connections, insecure)
    run_worker(WorkerOptions(address, wants, out_dir, device, threads, allow_model or [], resume, obey_stdin))


@app.command()
def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where certificates, keys and the join token go.")],
    learners: Annotated[int, typer.Option("--learners", min=1, max=4096, help="How many learner certificates.")] = 1,
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="How long they are valid.")] = 365,
    add: Annotated[bool, typer.Option("--add", help="Add learners to the authority that is there.")] = False,
    token: Annotated[bool, typer.Option("--token", help="Only print another join token.")] = False,
    run: Annotated[str, typer.Option("--run", help="With --token: for this run only.")] = "*",
    hours: Annotated[float, typer.Option("--hours", min=0.01, max=87600, help="With --token: how long it is valid.")] = 24.0,
) -> None:
    """Make a certificate authority, the syncer's and learners' certificates, and a join token."""
    if token:
        typer.echo(live.make_token_command(directory, run, hours))
        return
    for path in live.make_keys_command(directory, learners, days, add):
        out.print(path)


snapshots = typer.Typer(no_args_is_help=True, help="Look at a run's snapshots.")
app.add_typer(snapshots, name="snapshot")
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]


@snapshots.command("ls")
def snapshot_ls(run: RunArgument, as_json: JsonOption = False) -> None:
    """List snapshots, oldest first."""
    found = live.snapshots_of(run)
    if as_json:
        _print_json(found)
        return
    for info in found:
        state = "complete" if info.complete else "not complete"
        gone = f", missing {', '.join(map(str, info.missing))}" if info.missing else ""
        out.print(f"outer step {info.outer_step}: {state}, learners {list(info.present)}{gone}, {info.bytes / 1e6:,.1f} MB")


@snapshots.command("verify")
def snapshot_verify(
    run: RunArgument,
    outer_step: Annotated[int | None, typer.Argument(help="Which one; by default all of them.")] = None,
) -> None:
    """Check every byte of snapshots against their checksums; exit code 1 if any is damaged."""
    found = live.snapshots_of(run)
    if outer_step is not None and outer_step not in [info.outer_step for info in found]:
        raise UserError(f"run {run}: has no snapshot of outer step {outer_step}")
    sound = True
    for info in found:
        if outer_step in (None, info.outer_step):
            problems = live.problems_of(run, info.outer_step)
            sound = sound and not problems
            out.print(f"outer step {info.outer_step}: " + ("; ".join(problems) or "sound"), soft_wrap=True)
    if not sound:
        raise typer.Exit(1)


# ---------------------------------------------------------------- reading


@app.command()
def replay(
    path: Annotated[Path, typer.Argument(metavar="DIR_OR_TAPE", help="A run's folder or its tape.")],
    weights: Annotated[bool, typer.Option("--weights", help="Train again, and demand every Theta bit for bit.")] = False,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="By default as many as the tape says.")] = None,
) -> None:
    """Feed a tape to new machines and demand the same decisions; stops at the first difference with its story."""
    from atoll.executor.environment import use_threads
    from atoll.sim.run import replay_run

    tape = Tape(find_tape(path))
    use_threads(threads or tape.header.threads)
    def doubt(sentence: str) -> None:
        err.print(f"warning: {sentence}", style="yellow", soft_wrap=True)

    outcome, theta, _ = replay_run(tape, weights=weights, doubt=doubt)
    if outcome.cut:
        err.print(f"the run did not end: the tape stops after record {outcome.records}, and all of it is whole", soft_wrap=True)
    out.print(f"{outcome.records} records re-derived, outer step {outcome.outer_step}: every decision as taped", highlight=False)
    if theta is not None:
        out.print(f"every Theta as taped, bit for bit; final sha256 {theta}", highlight=False, soft_wrap=True)


@app.command()
def strip(path: Annotated[Path, typer.Argument(metavar="TAPE", help="A tape or a run's folder.")]) -> None:
    """Print a tape, one fixed-width line per event."""
    for line in strip_lines(Tape(find_tape(path)).records()):
        typer.echo(line)


@app.command("config")
def show_config(
    recipe: Recipe = None,
    preset: PresetOption = None,
    learners: LearnersOption = None,
    set_: SetOption = None,
    seed: SeedOption = None,
) -> None:
    """Print the complete resolved config as TOML that `atoll train` accepts."""
    typer.echo(config.to_toml(_settings(recipe, preset, learners, seed, set_)), nl=False)


def _show(summary: Summary, as_json: bool) -> None:
    if as_json:
        _print_json(summary)
    else:
        out.print(run_table(summary))


def _print_json(value: Any) -> None:
    typer.echo(msgspec.json.encode(value).decode())


if __name__ == "__main__":
    main()
