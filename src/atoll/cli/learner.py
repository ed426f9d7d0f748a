"""`atoll learner`: one learner's process."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.building import log_to_stderr
from atoll.cli.options import (
    AllowOption,
    InsecureOption,
    KeysOption,
    MetricsOption,
    MetricsTokenOption,
    ObeyOption,
    ParallelOption,
    PluginOption,
    QuietOption,
    RanksOption,
)
from atoll.cli.shared import ThreadsOption
from atoll.errors import UserError
from atoll.tape.folder import refuse_unusable

SyncerOption = Annotated[
    str,
    typer.Option(
        "--syncer", metavar="ADDRESS",
        help="HOST:PORT of the syncer; or file:PATH, its file `address`, which is read anew for every connection.",
    ),
]
ConnectionsOption = Annotated[
    int | None,
    typer.Option(
        "--connections", min=1, max=16, show_default="1, or 2 for fragments of 8 million parameters and more",
        help="Connections for weights; more for links with a long delay.",
    ),
]  # fmt: skip
JoinSecondsOption = Annotated[
    float, typer.Option("--join-seconds", min=0.0, help="How long to wait for a syncer that is not there yet.")
]
LeaveSecondsOption = Annotated[
    float | None,
    typer.Option(
        "--leave-seconds", min=0.0, show_default=False,
        help="Seconds to deliver and leave in, once it is asked to. Default: limits.leave_seconds of the run.",
    ),
]
LeaveFileOption = Annotated[
    Path | None,
    typer.Option("--leave-file", metavar="FILE", help="Leave when this file appears; a number in it is the seconds left."),
]
LeftCodeOption = Annotated[
    int, typer.Option("--left-code", min=0, max=125, help="Exit code after it was asked to leave, before the run was over.")
]
AllowDataOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--allow-data", metavar="FOLDER",
        help="A folder that the syncer's recipe may name data in. Repeatable. Default: the working directory.",
    ),
]


def learner(
    syncer_address: SyncerOption = "127.0.0.1:7077",
    token: Annotated[
        Path | None,
        typer.Option("--token", metavar="FILE", help="File with the join token. Default: token in --keys, else $ATOLL_TOKEN."),
    ] = None,
    wants: Annotated[
        int, typer.Option("--id", show_default=False, help="The learner id to ask for. Default: the lowest that is free.")
    ] = -1,
    run: Annotated[str, typer.Option("--run", metavar="ID", help="Join only the run with this id. Default: any.")] = "",
    keys: KeysOption = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Which certificate of --keys to use, as in learner-0. Default: the only one.")
    ] = None,
    listen: Annotated[
        str,
        typer.Option("--listen", metavar="HOST:PORT", help="Where this learner helps others recover; port 0: any; '': nowhere."),
    ] = "127.0.0.1:0",
    advertise: Annotated[
        str, typer.Option("--advertise", metavar="HOST:PORT", help="The address that other learners dial. Default: --listen.")
    ] = "",
    join_seconds: JoinSecondsOption = 60.0,
    connections: ConnectionsOption = None,
    insecure: InsecureOption = False,
    device: Annotated[str, typer.Option("--device", help="Where it trains: cpu, cuda, cuda:1, ...")] = "cpu",
    allow_data: AllowDataOption = None,
    allow_model: AllowOption = None,
    allow_plugin: PluginOption = None,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for its tape and its snapshots. Default: a new one under runs/."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Start from this learner's part of a snapshot.")
    ] = None,
    leave_seconds: LeaveSecondsOption = None,
    leave_file: LeaveFileOption = None,
    left_code: LeftCodeOption = 0,
    threads: ThreadsOption = 1,
    ranks: RanksOption = 1,
    parallel: ParallelOption = "ddp",
    metrics: MetricsOption = None,
    metrics_token: MetricsTokenOption = None,
    obey_stdin: ObeyOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run one learner: it joins the run at --syncer, gets the config from there, and trains until the run is finished.

    It waits --join-seconds for a syncer that is not there yet. SIGTERM, SIGUSR1, --leave-file and `atoll leave` make it deliver
    what it has and leave; with the same --out it comes back to its place. With --ranks N it is N processes on this machine;
    under torchrun it is the ranks that are there."""
    here = _ranks_here(ranks)
    from atoll.runtime.learner.address import address_of
    from atoll.runtime.learner.process import WorkerOptions, run_worker
    from atoll.runtime.metrics import metrics_at
    from atoll.transport.keys import load_learner

    log_to_stderr(verbose=not quiet)
    if out_dir is not None:
        refuse_unusable(out_dir)
    at = metrics_at(metrics, metrics_token, lambda: load_learner(keys, name) if keys is not None else None)
    address = replace(
        address_of(syncer_address, token, keys, name, run, listen, advertise, insecure, connections=connections or 0, dash="--"),
        join_timeout_seconds=join_seconds,
    )
    options = WorkerOptions(
        address, wants, out_dir, device, threads, allow_model or [], resume, data_folders=allow_data or [],
        leave_seconds=leave_seconds, leave_file=leave_file, obey_stdin=obey_stdin, metrics=at,
    )  # fmt: skip
    left = run_worker(options) if here == 1 else import_module("atoll.runtime.join.built_in").run_rank(options, parallel)
    if left and left_code:
        raise typer.Exit(left_code)


def _ranks_here(asked: int) -> int:
    """How many ranks this process is one of. Where they are still to be started it starts them, and ends with them."""
    from atoll.runtime.ranks.launch import end_with_parent, launch, ranks_in_environment

    end_with_parent()  # before the imports, which take seconds
    here = ranks_in_environment()
    if asked > 1 and here == 1:
        raise typer.Exit(launch(asked, sys.argv[1:]))
    if asked not in (1, here):
        raise UserError(f"--ranks {asked}: WORLD_SIZE is {here}, so the ranks are there already; leave out --ranks")
    return here
