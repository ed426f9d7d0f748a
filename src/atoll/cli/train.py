"""`atoll train`: train a model, as processes of this machine or in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from atoll import config
from atoll.chaos import ChaosPlan, load_plan
from atoll.cli.dashboard import AllowChaosOption, Dashboard, DashboardOption
from atoll.cli.log import LogToOption, log_targets
from atoll.cli.options import (
    AllowOption,
    DeviceOption,
    MetricsOption,
    MetricsTokenOption,
    ParallelOption,
    PluginOption,
    RanksOption,
    ShardsOption,
)
from atoll.cli.resume import snapshot_to_resume
from atoll.cli.runs import Sight, run_live, run_on_tape, run_virtually, with_curve
from atoll.cli.shared import (
    ChaosOption,
    InitOption,
    JsonOption,
    LearnersOption,
    OutOption,
    PresetOption,
    Recipe,
    SeedOption,
    SetOption,
    ThreadsOption,
    VirtualOption,
    new_directory,
    settings_from,
    show,
    write_summary,
)
from atoll.config import Config
from atoll.errors import UserError
from atoll.tape.folder import find_run, refuse_used

TwinOption = Annotated[
    bool, typer.Option("--twin", help="With --chaos: train again without faults, and compare the final losses.")
]
ResumeOption = Annotated[
    Path | None, typer.Option("--resume", metavar="RUN", help="Start a new run from a snapshot of this one.")
]
SnapshotOption = Annotated[
    int | None,
    typer.Option("--snapshot", metavar="STEP", help="With --resume: the snapshot of this step. Default: the newest."),
]
TapeOption = Annotated[
    Path | None,
    typer.Option("--tape", metavar="RUN", help="Train with the decisions of this virtual run (see `atoll simulate tape`)."),
]


def train(
    recipe: Recipe = None,
    virtual: VirtualOption = False,
    preset: PresetOption = None,
    learners: LearnersOption = None,
    set_: SetOption = None,
    init: InitOption = None,
    chaos: ChaosOption = None,
    seed: SeedOption = None,
    out_dir: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = 1,
    ranks: RanksOption = 1,
    parallel: ParallelOption = "ddp",
    shards: ShardsOption = None,
    twin: TwinOption = False,
    resume: ResumeOption = None,
    snapshot: SnapshotOption = None,
    device: DeviceOption = "cpu",
    allow_model: AllowOption = None,
    allow_plugin: PluginOption = None,
    tape: TapeOption = None,
    metrics: MetricsOption = None,
    metrics_token: MetricsTokenOption = None,
    log_to: LogToOption = None,
    dashboard: DashboardOption = False,
    allow_chaos: AllowChaosOption = False,
) -> None:
    """Train a model: a syncer and its learners as processes of this machine, or in this process with --virtual.

    At the end it prints a summary and where the trained weights are (theta.safetensors)."""
    page = Dashboard.of(dashboard, allow_chaos, live=not virtual and tape is None)
    if tape is not None:
        others = (resume, snapshot, chaos, preset, learners, init, metrics, log_to)
        if virtual or twin or device != "cpu" or ranks > 1 or shards or any(other is not None for other in others):
            raise UserError("--tape: goes with a recipe, --set, --seed, --out, --threads, --allow-model and --json only")
        show(run_on_tape(tape, recipe, seed, set_ or [], out_dir, threads, as_json, allow_model or []), as_json)
        return
    words = (_rank_words(ranks, parallel, virtual=virtual), _shard_words(shards, virtual=virtual))
    _refuse_unfit(resume, snapshot, init, virtual=virtual, twin=twin)
    if resume is not None:
        resume = find_run(resume, "--resume").folder
        recipe = _recipe_to_resume(resume, recipe)
        _refuse_other_preset(resume, preset, f"--preset {preset}", "leave --preset out")
    settings = settings_from(recipe, preset, learners, seed, set_, init)
    if resume is not None:
        named = f"recipe {recipe} has preset {settings.preset!r}"
        _refuse_other_preset(resume, settings.preset, named, "leave the recipe out, or give --preset too")
    sight = _sight(settings, metrics, metrics_token, log_to, virtual=virtual)
    plan = load_plan(chaos, settings.learners) if chaos is not None else ChaosPlan()
    allowed = allow_model or []
    if twin and not plan.faults:
        raise UserError("--twin: runs the same again without faults; give faults with --chaos")
    if virtual:
        done = run_virtually(
            settings, plan, out_dir, tensors=True, threads=threads, quiet=as_json, device=device, allowed=allowed, sight=sight
        )
        show(done, as_json)
        return
    start = snapshot_to_resume(resume, snapshot, settings) if resume is not None else None
    directory = out_dir or new_directory(settings.preset, settings.seed)
    if twin:
        refuse_used(_twin_of(directory))
    summary = run_live(
        settings, plan, directory, threads, as_json, device, allowed, start, sight=sight, dashboard=page, words=words
    )
    if twin:
        again = run_live(
            settings, ChaosPlan(), _twin_of(directory), threads, as_json, device, allowed, start, sight=sight, words=words
        )
        summary = with_curve(msgspec.structs.replace(summary, twin_loss=again.loss_final), directory, again)
        write_summary(directory, summary)
    show(summary, as_json)


def _refuse_unfit(resume: Path | None, snapshot: int | None, init: str | None, *, virtual: bool, twin: bool) -> None:
    if virtual and (resume is not None or twin):
        raise UserError("--virtual: goes with neither --resume nor --twin")
    if init is not None and resume is not None:
        raise UserError("--init: a resumed run goes on with the weights of its snapshot; leave out --init or --resume")
    if snapshot is not None and resume is None:
        raise UserError("--snapshot: says which snapshot --resume starts from; give --resume RUN too")


def _rank_words(ranks: int, parallel: str, *, virtual: bool) -> list[str]:
    if ranks > 1 and virtual:
        raise UserError(f"--ranks {ranks}: learners of several ranks are processes: it does not go with --virtual")
    return ["--ranks", str(ranks), "--parallel", parallel] if ranks > 1 else []


def _shard_words(shards: int | None, *, virtual: bool) -> list[str]:
    if shards is not None and virtual:
        raise UserError(f"--shards {shards}: shards are processes: it does not go with --virtual")
    return ["--shards", str(shards)] if shards is not None else []


def _sight(settings: Config, metrics: str | None, token: Path | None, log_to: list[str] | None, *, virtual: bool) -> Sight:
    targets = log_targets(log_to)
    if metrics is None and token is None:
        return Sight(log_to=targets)
    from atoll.runtime.metrics import metrics_at, refuse_taken_ports

    if metrics is not None and (virtual or settings.preset == "ddp"):
        what = "a virtual run has no clock that a scraper could use" if virtual else "torch's DDP has no syncer and no learners"
        raise UserError(f"--metrics-at: {what}; leave it out")
    at = metrics_at(metrics, token)
    if at is not None:
        refuse_taken_ports(at, 1 + settings.learners)
    return Sight(at, token.absolute() if token is not None else None, targets)


def _recipe_to_resume(run: Path, recipe: Path | None) -> Path:
    """The run's own config, unless a recipe is given: a folder put together from two machines' need not have one."""
    own = run / "config.toml"
    if recipe is None and not own.is_file():
        raise UserError(f"--resume {run}: has no config.toml; give the recipe too")
    return recipe or own


def _refuse_other_preset(run: Path, wanted: str | None, who: str, instead: str) -> None:
    own = run / "config.toml"
    if wanted is not None and own.is_file() and (was := config.load(own).preset) != wanted:
        kept = f"the run in {run} has preset {was!r}, and a resumed run keeps it"
        raise UserError(f"{who}: {kept}; {instead}")


def _twin_of(directory: Path) -> Path:
    named = directory if directory.name not in ("", "..") else directory.resolve()  # --out . has no name to add to
    return named.with_name(named.name + "-twin")
