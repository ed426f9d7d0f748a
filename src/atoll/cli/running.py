"""Commands that run something: `train`, `sim`, `compare`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from atoll import config
from atoll.chaos import Plan, load_plan
from atoll.cli import live
from atoll.cli.shared import (
    ChaosOption,
    JsonOption,
    LearnersOption,
    OutOption,
    PresetOption,
    Recipe,
    RunProgress,
    SeedOption,
    SetOption,
    ThreadsOption,
    VirtualOption,
    err,
    new_directory,
    out,
    print_json,
    settings_from,
    show,
    write_summary,
)  # fmt: skip
from atoll.config import CUSTOM, PRESETS, Config
from atoll.errors import UserError
from atoll.tape.folder import refuse_used
from atoll.views.run import RunView, Summary, summarise
from atoll.views.tables import comparison_table

if TYPE_CHECKING:  # torch takes seconds to import
    from atoll.sim.run import Outputs

DeviceOption = Annotated[
    str, typer.Option("--device", help="Where learners train: cpu, cuda, ...; with --virtual they share it.")
]


def train(
    recipe: Recipe = None,
    virtual: VirtualOption = False,
    preset: PresetOption = None,
    learners: LearnersOption = None,
    set_: SetOption = None,
    chaos: ChaosOption = None,
    seed: SeedOption = None,
    out_dir: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = 1,
    twin: Annotated[bool, typer.Option("--twin", help="Then run it without faults, and say how the losses differ.")] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Go on from the newest snapshot of this run's folder, in a new run.")
    ] = None,
    snapshot: Annotated[int | None, typer.Option("--snapshot", help="With --resume: from this outer step's snapshot.")] = None,
    device: DeviceOption = "cpu",
    allow_model: live.AllowOption = None,
    tape: Annotated[
        Path | None,
        typer.Option("--tape", help="Train on this history, in virtual time: a virtual run's folder, or of atoll simulate tape."),
    ] = None,
) -> None:
    """Train a model: a syncer and learners as processes of this machine, or with --virtual in virtual time."""
    if tape is not None:
        others = (resume, snapshot, chaos, preset, learners)
        if virtual or twin or device != "cpu" or any(other is not None for other in others):
            raise UserError("--tape: goes with a recipe, --set, --seed, --out, --threads, --allow-model and --json only")
        show(run_on_tape(tape, recipe, seed, set_ or [], out_dir, threads, as_json, allow_model or []), as_json)
        return
    if virtual and (resume is not None or twin):
        raise UserError("--virtual: goes with neither --resume nor --twin")
    if snapshot is not None and resume is None:
        raise UserError("--snapshot: says which snapshot --resume takes; give --resume RUN too")
    if resume is not None:
        recipe = _recipe_to_resume(resume, recipe)
        _refuse_other_preset(resume, preset, f"--preset {preset}", "leave --preset out")
    settings = settings_from(recipe, preset, learners, seed, set_)
    if resume is not None:
        named = f"recipe {recipe} is of preset {settings.preset!r}"
        _refuse_other_preset(resume, settings.preset, named, "leave the recipe out, or give --preset too")
    plan = load_plan(chaos, settings.learners) if chaos is not None else Plan()
    allowed = allow_model or []
    if twin and not plan.faults:
        raise UserError("--twin: runs the same again without faults; give some with --chaos")
    if virtual:
        done = run_virtually(
            settings, plan, out_dir, tensors=True, threads=threads, quiet=as_json, device=device, allowed=allowed
        )
        show(done, as_json)
        return
    start = live.snapshot_to_resume(resume, snapshot, settings) if resume is not None else None
    directory = out_dir or new_directory(settings.preset, settings.seed)
    if twin:
        refuse_used(_twin_of(directory))
    summary = run_live(settings, plan, directory, threads, as_json, device, allowed, start)
    if twin:
        again = run_live(settings, Plan(), _twin_of(directory), threads, as_json, device, allowed, start)
        summary = msgspec.structs.replace(summary, twin_loss=again.loss_final)
        write_summary(directory, summary)
    show(summary, as_json)


def _recipe_to_resume(run: Path, recipe: Path | None) -> Path:
    """The run's own config, unless a recipe is given: two machines' folders, brought together, need not have one."""
    own = run / "config.toml"
    if not run.is_dir() or (recipe is None and not own.is_file()):
        raise UserError(f"--resume {run}: is no run's folder, it has no config.toml")
    return recipe or own


def _refuse_other_preset(run: Path, wanted: str | None, who: str, instead: str) -> None:
    own = run / "config.toml"
    if wanted is not None and own.is_file() and (was := config.load(own).preset) != wanted:
        kept = f"the run in {run} is of preset {was!r}, and a resumed run keeps it"
        raise UserError(f"{who}: {kept}; {instead}")


def _twin_of(directory: Path) -> Path:
    named = directory if directory.name not in ("", "..") else directory.resolve()  # --out . has no name to add to
    return named.with_name(named.name + "-twin")


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
    settings = settings_from(recipe, preset, learners, seed, set_)
    plan = load_plan(chaos, settings.learners) if chaos is not None else Plan()
    show(run_virtually(settings, plan, out_dir, tensors=False, threads=1, quiet=as_json), as_json)


def compare(
    presets: Annotated[list[str] | None, typer.Argument(help="Presets to run; by default all of them.")] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", readable=False, help="The recipe all of them share.")] = None,
    virtual: VirtualOption = False,
    learners: LearnersOption = None,
    set_: SetOption = None,
    chaos: ChaosOption = None,
    seed: SeedOption = None,
    out_dir: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = 1,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the table too: .png or .svg; by default comparison.png in --out.")
    ] = None,
    device: DeviceOption = "cpu",
    allow_model: live.AllowOption = None,
) -> None:
    """Train several presets on the same recipe, data and number of outer steps; print one table and draw it."""
    names = list(dict.fromkeys(presets or PRESETS))
    each = [settings_from(recipe, name, learners, seed, set_) for name in names]
    plan = load_plan(chaos, min(settings.learners for settings in each)) if chaos is not None else Plan()
    if chaos is not None and not virtual and "ddp" in names:
        raise UserError("--chaos: torch's DDP has no answer to faults; leave ddp out, or say --virtual")
    base, allowed = out_dir or new_directory("compare", each[0].seed), allow_model or []
    refuse_used(base)
    _check_comparison(each, figure, device, allowed, virtual=virtual)
    summaries: list[Summary] = []
    try:
        for settings in each:
            directory = base / settings.preset
            if virtual:
                done = run_virtually(
                    settings, plan, directory, tensors=True, threads=threads, quiet=as_json, device=device, allowed=allowed
                )
            else:
                done = run_live(settings, plan, directory, threads, as_json, device, allowed)
            summaries.append(done)
    finally:  # hours of training are told whatever became of the rest
        if summaries and as_json:
            print_json(summaries)
        elif summaries:
            out.print(comparison_table(summaries))
    _draw(summaries, figure or base / "comparison.png", asked=figure is not None)


def _check_comparison(
    each: Sequence[Config], figure: Path | None, device: str, allowed: Collection[str], *, virtual: bool
) -> None:
    """All that can be known of any of the runs, before the first."""
    from atoll.executor.device import checked_device
    from atoll.views.figures import check_suffix

    if figure is not None:
        check_suffix(figure)
    for settings in each:
        _refuse_custom(settings)
        if virtual:
            checked_device(device)
        else:
            live.check_live(settings, device)
    live.check_buildable(each, allowed, lambda text: err.print(text, soft_wrap=True))


def _draw(summaries: Sequence[Summary], path: Path, *, asked: bool) -> None:
    from atoll.views.figures import plot_comparison

    try:
        plot_comparison(summaries, path)
    except UserError as error:
        if asked:
            raise
        err.print(f"no figure: {error}", style="yellow", soft_wrap=True)
        return
    err.print(f"figure: {path}", soft_wrap=True)


# ---------------------------------------------------------------- virtual


def run_virtually(
    settings: Config, plan: Plan, directory: Path | None, *, tensors: bool, threads: int, quiet: bool, device: str = "cpu",
    allowed: Collection[str] = (),
) -> Summary:  # fmt: skip
    from atoll.executor.device import checked_device
    from atoll.executor.environment import use_threads  # torch takes seconds to import; --help and config do not wait for it
    from atoll.sim.run import run_virtual

    if tensors:
        _refuse_custom(settings)
    use_threads(threads)
    there = checked_device(device)
    directory = directory or new_directory(settings.preset, settings.seed)
    refuse_used(directory)
    view = RunView(settings.learners)
    with RunProgress(settings, view, quiet, "virtual ") as observer, readable_tape(directory):
        bench = live.built(settings, allowed, observer.say) if tensors else None
        done = run_virtual(
            settings, plan, directory, tensors=tensors, observers=[view, observer], bench=bench, device=there,
            looked=observer.looked,
        )  # fmt: skip
    return virtual_summary(settings, view, done, directory)


@contextmanager
def readable_tape(directory: Path) -> Iterator[None]:
    """Ctrl-C ends a virtual run and leaves its tape, if it had got as far as one; a full disk is told by its folder."""
    try:
        yield
    except KeyboardInterrupt:
        tape = directory / "run.tape"
        left = f"; {tape} is readable up to its last whole record" if tape.exists() else " before the run began"
        err.print(f"atoll: interrupted{left}", soft_wrap=True)
        raise typer.Exit(130) from None
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(directory)) from None  # of a file that was open: it is one of these


def virtual_summary(settings: Config, view: RunView, done: Outputs, directory: Path) -> Summary:
    summary = summarise(
        settings, view, done.fates, loss_first=done.loss_first, loss_final=done.loss_final,
        theta_sha256=done.theta_sha256, tape=str(done.tape), run_dir=str(directory), accuracy=done.accuracy,
        looks=done.looks,
    )  # fmt: skip
    write_summary(directory, summary)
    return summary


def run_on_tape(
    path: Path, recipe: Path | None, seed: int | None, assignments: Sequence[str], directory: Path | None, threads: int,
    quiet: bool, allowed: Collection[str] = (),
) -> Summary:  # fmt: skip
    """Decisions are the tape's; model, data, optimisers and seed may be the recipe's or --set."""
    from atoll.executor.environment import use_threads
    from atoll.sim.run import config_on_tape, train_on_tape
    from atoll.tape.format import Tape

    if path.is_dir() and not (path / "run.tape").exists():
        raise UserError(f"--tape {path}: holds no run.tape of a virtual run; atoll simulate tape and --virtual write one")
    tape = Tape(path / "run.tape" if path.is_dir() else path)
    tables = config.recipe_for(recipe, tape.header.config["preset"]) if recipe is not None else {}
    settings = config_on_tape(tape, tables | ({} if seed is None else {"seed": seed}), assignments)
    _refuse_custom(settings)
    use_threads(threads)
    directory = directory or new_directory(f"{settings.preset}-on-tape", settings.seed)
    view = RunView(settings.learners)
    with RunProgress(settings, view, quiet, "virtual ") as progress, readable_tape(directory):
        done = train_on_tape(tape, settings, directory, observers=[view, progress], allowed=allowed, looked=progress.looked)
    if tape.cut:
        err.print(f"the history did not end: {tape.path} stops after record {tape.whole_records}", soft_wrap=True)
    return virtual_summary(settings, view, done, directory)


# ---------------------------------------------------------------- live


def run_live(
    settings: Config, plan: Plan, directory: Path | None, threads: int, quiet: bool, device: str, allowed: list[str],
    resume: tuple[Path, int] | None = None,
) -> Summary:  # fmt: skip
    """Processes on this machine; `--preset ddp` is torch's own data-parallel training under the same launcher."""
    from atoll.executor.environment import use_threads

    _refuse_custom(settings)
    ddp = settings.preset == "ddp"
    if ddp and (plan.faults or resume is not None):
        raise UserError("--preset ddp: torch's DDP has no answer to faults or snapshots; see --virtual")
    directory = directory or new_directory(settings.preset, settings.seed)
    refuse_used(directory)
    live.check_live(settings, device)
    use_threads(threads)
    live.log_to_stderr()
    view = RunView(settings.learners)
    with RunProgress(settings, view, quiet, "") as progress:
        try:
            if ddp:
                summary = live.ddp_summary(settings, directory, threads, device, allowed, progress)
            else:
                summary = live.cluster_summary(settings, plan, directory, threads, device, allowed, resume, view, progress)
        except KeyboardInterrupt:
            began = directory.is_dir() and any(directory.iterdir())
            left = f"; tapes and versions are in {directory}" if began else " before the run began"
            err.print(f"atoll: interrupted{left}", soft_wrap=True)
            raise typer.Exit(130) from None
    write_summary(directory, summary)
    return summary


def _refuse_custom(settings: Config) -> None:
    if settings.model.name == CUSTOM:
        raise UserError("model.name = 'custom': learners bring that model; start `atoll syncer`, and join with atoll.join(...)")
