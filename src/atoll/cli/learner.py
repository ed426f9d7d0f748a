"""`atoll learner`: one learner's process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.building import log_to_stderr
from atoll.cli.options import AllowOption, InsecureOption, KeysOption, ObeyOption, PluginOption
from atoll.cli.shared import ThreadsOption
from atoll.errors import UserError
from atoll.tape.folder import refuse_unusable


def learner(
    syncer_address: Annotated[str, typer.Option("--syncer", help="HOST:PORT of the syncer.")] = "127.0.0.1:7077",
    token: Annotated[Path | None, typer.Option("--token", help="File with the join token; or set ATOLL_TOKEN.")] = None,
    wants: Annotated[int, typer.Option("--id", help="The learner id to ask for; by default the lowest that is free.")] = -1,
    run: Annotated[str, typer.Option("--run", help="Join only this run.")] = "",
    keys: KeysOption = None,
    name: Annotated[str | None, typer.Option("--name", help="Whose certificate of --keys to use, such as learner-0.")] = None,
    listen: Annotated[
        str, typer.Option("--listen", help="HOST:PORT where peers that recover are served; port 0 picks one; '' serves nobody.")
    ] = "127.0.0.1:0",
    advertise: Annotated[str, typer.Option("--advertise", help="HOST:PORT peers are told to dial.")] = "",
    connections: Annotated[
        int, typer.Option("--connections", min=1, max=16, help="Connections for bulk data; more for long fat links.")
    ] = 1,
    insecure: InsecureOption = False,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")] = "cpu",
    allow_model: AllowOption = None,
    allow_plugin: PluginOption = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Where its tape and its part of snapshots go.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="This learner's part of a snapshot.")] = None,
    threads: ThreadsOption = 1,
    obey_stdin: ObeyOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Warnings and errors only.")] = False,
) -> None:
    """Run one learner: it gets its whole config from the syncer, trains, and never waits."""
    from atoll.runtime.learner.address import address_of
    from atoll.runtime.learner.process import WorkerOptions, run_worker

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("WORLD_SIZE is above 1: a learner is one process so far; start several learners instead of ranks")
    log_to_stderr(verbose=not quiet)
    if out_dir is not None:
        refuse_unusable(out_dir)
    address = address_of(
        syncer_address, token, keys, name, run, listen, advertise, insecure, connections=connections, dash="--"
    )
    run_worker(WorkerOptions(address, wants, out_dir, device, threads, allow_model or [], resume, obey_stdin))
