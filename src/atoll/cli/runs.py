"""Runs, for the commands that start some: `train`, `sim`, `compare`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from atoll import config
from atoll.chaos import ChaosPlan
from atoll.cli.building import built, log_to_stderr
from atoll.cli.dashboard import NO_DASHBOARD, Dashboard
from atoll.cli.progress import COMPILE_NOTE, ReplayProgress, RunProgress
from atoll.cli.resume import _syncer_part, what_is_resumed
from atoll.cli.shared import err, new_directory, write_summary
from atoll.config import CUSTOM, Config
from atoll.errors import UserError
from atoll.tape.folder import RunFolder, find_run, refuse_used
from atoll.views.run import RunView, Summary, summarise

if TYPE_CHECKING:
    import torch

    from atoll.runtime.loggers.sinks import LogTarget
    from atoll.runtime.metrics import MetricsAt
    from atoll.sim.run import Outputs
    from atoll.tape.format import Record


@dataclass(frozen=True)
class Sight:
    """How others look at a run while it trains."""

    metrics: MetricsAt | None = None
    metrics_token: Path | None = None
    log_to: tuple[LogTarget, ...] = ()


NO_SIGHT = Sight()


# ---------------------------------------------------------------- virtual


def run_virtually(
    settings: Config, plan: ChaosPlan, directory: Path | None, *, tensors: bool, threads: int, quiet: bool, device: str = "cpu",
    allowed: Collection[str] = (), sight: Sight = NO_SIGHT,
) -> Summary:  # fmt: skip
    from atoll.executor.environment import use_threads  # torch takes seconds to import; --help and config do not wait for it
    from atoll.executor.virtual_run import checked_device, refuse_too_many
    from atoll.sim.run import run_virtual

    began = time.monotonic()
    if tensors:
        _refuse_custom(settings)
    use_threads(threads)
    there = checked_device(device)
    directory = directory or new_directory(settings.preset, settings.seed)
    refuse_used(directory)
    view = RunView(settings.learners)
    with (
        RunProgress(settings, view, quiet, "virtual ") as observer,
        readable_tape(directory),
        logged_to(sight.log_to, directory, observer.say),
    ):
        task = built(settings, allowed, observer.say, observer.bars) if tensors else None
        if task is not None:
            refuse_too_many(task, there, settings.learners)
            _say_if_compiled(settings, there, observer)
        done = run_virtual(
            settings, plan, directory, tensors=tensors, observers=[view, observer], task=task, device=there,
            on_point=observer.on_point,
        )  # fmt: skip
    return virtual_summary(settings, view, done, directory, began)


@contextmanager
def readable_tape(directory: Path) -> Iterator[None]:
    """Ctrl-C ends a virtual run and leaves its tape, if there is one already. An error of a full disk names the folder."""
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
        # The error of a file that was open has no name: it is a file of this folder.
        raise OSError(error.errno, error.strerror, str(directory)) from None


def virtual_summary(settings: Config, view: RunView, done: Outputs, directory: Path, began: float) -> Summary:
    """`began`: when the command did, by the monotonic clock."""
    summary = summarise(
        settings, view, done.fates, loss_first=done.loss_first, loss_final=done.loss_final, loss_average=done.loss_average,
        theta_sha256=done.theta_sha256, tape=str(done.tape), run_dir=str(directory), accuracy=done.accuracy,
        points=done.points, theta=str(done.theta) if done.theta is not None else None,
        compute={"all": done.compute} if done.compute else {},
    )  # fmt: skip
    return _finished(summary, directory, began)


def _finished(summary: Summary, directory: Path, began: float) -> Summary:
    summary = with_curve(summary, directory)
    summary = msgspec.structs.replace(summary, command_seconds=round(time.monotonic() - began, 3))
    write_summary(directory, summary)
    return summary


def with_curve(summary: Summary, directory: Path, twin: Summary | None = None) -> Summary:
    """Draws the held-out losses, where some were measured on the way. A run is not lost for its picture."""
    if not summary.heldout or summary.loss_first is None:
        return summary
    from atoll.views.curve import CURVE, draw_curve

    runs = {"this run": summary} if twin is None else {"with faults": summary, "its twin without": twin}
    try:
        draw_curve(directory / CURVE, runs)
    except UserError as error:
        err.print(f"warning: {error}", soft_wrap=True)
        return summary
    return msgspec.structs.replace(summary, curve=str(directory / CURVE))


def run_on_tape(
    path: Path, recipe: Path | None, seed: int | None, assignments: Sequence[str], directory: Path | None, threads: int,
    quiet: bool, allowed: Collection[str] = (),
) -> Summary:  # fmt: skip
    """Decisions are the tape's; model, data, optimisers and seed may come from the recipe and --set."""
    from atoll.executor.environment import use_threads
    from atoll.sim.run import config_on_tape, train_on_tape
    from atoll.tape.format import Tape

    began = time.monotonic()
    found = path if path.is_file() else find_run(path, "--tape").tape
    if not found.exists():
        raise UserError(f"--tape {path}: holds no run.tape of a virtual run; atoll simulate tape and --virtual write one")
    tape = Tape(found)
    tables = config.recipe_for(recipe, tape.header.config["preset"]) if recipe is not None else {}
    settings = config_on_tape(tape, tables | ({} if seed is None else {"seed": seed}), assignments)
    _refuse_custom(settings)
    use_threads(threads)
    directory = directory or new_directory(f"{settings.preset}-on-tape", settings.seed)
    view = RunView(settings.learners)
    with RunProgress(settings, view, quiet, "virtual ") as progress, readable_tape(directory):
        done = train_on_tape(tape, settings, directory, observers=[view, progress], allowed=allowed, on_point=progress.on_point)
    if tape.cut:
        cut = f"the run of {tape.path} did not end: its tape stops after record {tape.whole_records}"
        err.print(f"warning: {cut}", soft_wrap=True)
    return virtual_summary(settings, view, done, directory, began)


@contextmanager
def logged_to(targets: tuple[LogTarget, ...], directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    if not targets:
        yield
        return
    from atoll.runtime.loggers.process import LoggerProcesses

    with LoggerProcesses(directory, targets, say):
        yield


# ---------------------------------------------------------------- live


def run_live(
    settings: Config, plan: ChaosPlan, directory: Path | None, threads: int, quiet: bool, device: str, allowed: list[str],
    resume: tuple[Path, int] | None = None, sight: Sight = NO_SIGHT, dashboard: Dashboard = NO_DASHBOARD,
    words: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> Summary:  # fmt: skip
    """Processes on this machine. `--preset ddp` is torch's own data-parallel training, with a launcher of its own. `words`: more
    options of each learner, for its ranks, and of the syncer, for its shards."""
    from atoll.executor.environment import use_threads

    began = time.monotonic()
    _refuse_custom(settings)
    ddp = settings.preset == "ddp"
    if ddp and (plan.faults or resume is not None):
        raise UserError("--preset ddp: torch's DDP survives no faults and takes no snapshots; use --virtual, or another preset")
    if ddp and words[1]:
        raise UserError("--shards: torch's DDP has no syncer; leave it out")
    if ddp and words[0]:
        raise UserError("--ranks: with --preset ddp every learner is a rank of torch's DDP already; give --learners instead")
    if ddp and dashboard.chaos:
        raise UserError("--allow-chaos: torch's DDP survives no faults; leave it out, or use another preset")
    directory = directory or new_directory(settings.preset, settings.seed)
    refuse_used(directory)
    check_live(settings, device)
    use_threads(threads)
    log_to_stderr()
    view = RunView(settings.learners)
    with RunProgress(settings, view, quiet, "") as progress, logged_to(sight.log_to, directory, progress.say):
        try:
            if ddp:
                with dashboard.shown(RunFolder(directory, directory), progress.say):
                    summary = ddp_summary(settings, directory, threads, device, allowed, progress)
            else:
                summary = cluster_summary(
                    settings, plan, directory, threads, device, allowed, resume, view, progress, sight, dashboard, words
                )
        except KeyboardInterrupt:
            written = directory.is_dir() and any(directory.iterdir())
            left = f"; tapes and versions are in {directory}" if written else " before the run began"
            err.print(f"atoll: interrupted{left}", soft_wrap=True)
            raise typer.Exit(130) from None
    return _finished(summary, directory, began)


def _refuse_custom(settings: Config) -> None:
    if settings.model.name == CUSTOM:
        join = "start `atoll syncer`, and join it from your own training loop with atoll.join(...)"
        raise UserError(f"key model.name = 'custom': the learners have the code of that model; {join}")


def check_live(settings: Config, device: str) -> None:
    """Refuses what the processes would refuse, before any is started. torch's own data-parallel refuses more."""
    from atoll.executor.compute import resolved
    from atoll.executor.virtual_run import checked_device

    if settings.preset != "ddp":
        resolved(settings, checked_device(device))
        return
    from atoll.runtime.ddp.launch import check_supported, devices_for

    check_supported(settings)
    devices_for(device, settings.learners)


def _say_if_compiled(settings: Config, device: torch.device, progress: RunProgress) -> None:
    from atoll.executor.compute import resolved

    if resolved(settings, device).compiled:
        progress.compiles()


def ddp_summary(
    settings: Config, directory: Path, threads: int, device: str, allowed: Sequence[str], progress: RunProgress
) -> Summary:
    from atoll.executor.virtual_run import checked_device
    from atoll.runtime.ddp.launch import run_ddp
    from atoll.runtime.ddp.report import summary_of

    task = built(settings, allowed, progress.say, progress.bars)  # to refuse what cannot be built: every rank builds its own
    _say_if_compiled(settings, checked_device(device), progress)
    began = time.monotonic()
    outcome = run_ddp(
        settings, directory, threads=threads, device=device, allowed=allowed,
        progress=lambda step, loss: progress.reached(step, time.monotonic() - began, loss), on_point=progress.on_point,
        data_fingerprint=task.fingerprint, say=progress.say,
    )  # fmt: skip
    return summary_of(settings, outcome, directory)


def cluster_summary(
    settings: Config, plan: ChaosPlan, directory: Path, threads: int, device: str, allowed: list[str],
    resume: tuple[Path, int] | None, view: RunView, progress: RunProgress, sight: Sight, dashboard: Dashboard,
    words: tuple[Sequence[str], Sequence[str]],
) -> Summary:  # fmt: skip
    from atoll.executor.compute import resolved
    from atoll.executor.virtual_run import checked_device, evaluated_on, refuse_too_many
    from atoll.runtime.local.cluster import LocalCluster
    from atoll.runtime.local.summary import verdict
    from atoll.runtime.syncer.resume import refuse_other_data, resume_warnings

    task = built(settings, allowed, progress.say, progress.bars)
    refuse_too_many(task, checked_device(device), settings.learners)
    if resume is not None:
        refuse_other_data(_syncer_part(*resume), task)
        for warning in resume_warnings(_syncer_part(*resume), settings, task):
            progress.say(f"warning: {warning}")
        for line in what_is_resumed(*resume):
            progress.say(line)

    def watch(record: Record) -> None:
        view(record.now, record.worker, record.event, record.effects)
        progress(record.now, record.worker, record.event, record.effects)

    progress.say(f"starting a syncer and {settings.learners} learners; logs and tapes in {directory}")
    progress.waits_for_learners(COMPILE_NOTE if resolved(settings, checked_device(device)).compiled else "")
    cluster = LocalCluster(
        settings, directory, plan, threads=threads, device=device, allowed=allowed, resume=resume, watch=watch,
        say=progress.say, on_point=progress.on_point, metrics=sight.metrics, metrics_token=sight.metrics_token, words=words,
    )  # fmt: skip
    there = evaluated_on(task, checked_device(device))
    run = RunFolder(directory, directory / "syncer")
    with dashboard.shown(run, progress.say, cluster.ask_fault), ThreadPoolExecutor(1, "first loss") as beside:
        # A large model takes seconds to build, and the end of a run should not. On the CPU it would take cores from learners.
        build = there.scratch if resume is None else None
        first = beside.submit(lambda: there.evaluate(build())) if build is not None else None
        cluster.run()
        progress.say("the run is finished; its tapes are replayed and its weights evaluated for the summary")
        return verdict(
            settings, directory, faults=cluster.struck, task=there, first=first.result if first else None,
            progress=ReplayProgress(settings.total_steps, progress.say, progress.bars),
        )  # fmt: skip
