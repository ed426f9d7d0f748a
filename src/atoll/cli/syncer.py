"""`atoll syncer`: the process that merges."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.building import built, log_to_stderr
from atoll.cli.options import (
    AllowOption,
    InsecureOption,
    KeysOption,
    MetricsOption,
    MetricsTokenOption,
    ObeyOption,
    PluginOption,
    QuietOption,
    ShardsOption,
)
from atoll.cli.resume import _refuse_nothing_left
from atoll.cli.shared import InitOption, LearnersOption, PresetOption, Recipe, SeedOption, SetOption, ThreadsOption, settings_from
from atoll.errors import UserError
from atoll.store.lock import refuse_locked
from atoll.tape.folder import TAPE_FILE, refuse_unusable

if TYPE_CHECKING:
    from atoll.config import Config
    from atoll.runtime.metrics import MetricsAt
    from atoll.runtime.shards.group import ShardStarter


def run_syncer(
    settings: Config, directory: Path, listen: str, keys: Path | None, allowed: list[str],
    resume: Path | None, threads: int, obey_stdin: bool, metrics: MetricsAt | None, bulk_port: int | None = None,
    shards: int | None = None, kernel_threads: int = 0, shard_at: Sequence[str] = (), hide_shards: bool = False,
) -> None:  # fmt: skip
    from atoll.config import CUSTOM
    from atoll.executor.environment import use_threads
    from atoll.runtime.shards.group import ShardsElsewhere
    from atoll.runtime.syncer.directory import SyncerDirectory
    from atoll.runtime.syncer.lives import run_lives
    from atoll.runtime.syncer.resume import load_resumable_state
    from atoll.store.snapshots import read_manifest
    from atoll.transport import client_credentials, raise_open_files_limit, server_credentials
    from atoll.transport.keys import SHARD_NAME, load_server, token_warnings

    starter = _starter(directory, 1 if shard_at else shards)
    credentials = others = None

    def key_warnings() -> list[str]:
        return load_server(keys).warnings + token_warnings(keys) if keys is not None else []

    for warning in key_warnings():
        logging.getLogger("atoll.syncer").warning(warning)
    if keys is not None:
        found = load_server(keys)
        credentials = server_credentials(found.certificate, found.key, found.ca)
        dials = client_credentials(found.ca, found.certificate, found.key, SHARD_NAME)
        others = ShardsElsewhere(tuple(shard_at), dials.bulk, hide_shards)
    if resume is not None and not (directory / TAPE_FILE).exists():  # started again it goes on from its tape, not from there
        _refuse_nothing_left(settings, resume, read_manifest(resume).snapshot)
        load_resumable_state(resume, settings)
    raise_open_files_limit()
    use_threads(threads)
    say = logging.getLogger("atoll.syncer").warning
    task = None if settings.model.name == CUSTOM else built(settings, allowed, say)

    def open_home(starter: ShardStarter) -> SyncerDirectory:
        return SyncerDirectory(
            directory, settings, task, keys=keys, resume=resume, shards=shards, threads=kernel_threads, starter=starter,
            others=others,
        )  # fmt: skip

    run_lives(open_home, starter, listen, credentials, key_warnings, bulk_port, metrics, end_with_stdin if obey_stdin else None)


def _starter(directory: Path, shards: int | None) -> ShardStarter:
    """Before this process has a thread or a lock. A run that goes on without --shards has those of its folder."""
    from atoll.runtime.local.forked import as_atoll
    from atoll.runtime.local.forkserver import ForkServer
    from atoll.runtime.shards.group import ShardStarter
    from atoll.runtime.shards.process import ShardServer  # noqa: F401  the shards are forked with it
    from atoll.store.version_folder import shard_folders

    several = shards > 1 if shards is not None else bool(shard_folders(directory))
    return ShardStarter(ForkServer(become=as_atoll) if several else None)


def end_with_stdin(end: Callable[[], object]) -> None:
    """A launcher holds the other end of standard input: when the launcher ends, so does this process."""

    def watch() -> None:
        for _ in sys.stdin:
            pass
        end()

    threading.Thread(target=watch, daemon=True).start()


def syncer(
    recipe: Recipe = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address to listen on; port 0 takes a free one.")
    ] = "127.0.0.1:7077",
    bulk_port: Annotated[
        int | None,
        typer.Option("--bulk-port", min=1, max=65535, help="Another port for weights. Default: all uses the port of --listen."),
    ] = None,
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Folder for all of its state. Started again there, it goes on.")
    ] = Path("runs/syncer"),
    preset: PresetOption = None,
    learners: LearnersOption = None,
    set_: SetOption = None,
    init: InitOption = None,
    seed: SeedOption = None,
    keys: KeysOption = None,
    insecure: InsecureOption = False,
    allow_model: AllowOption = None,
    allow_plugin: PluginOption = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="DIR", help="Start from a snapshot: the folder snapshots/STEP in a syncer's folder."),
    ] = None,
    threads: ThreadsOption = 1,
    shards: ShardsOption = None,
    shard_at: Annotated[
        list[str] | None,
        typer.Option(
            "--shard-at", metavar="HOST:PORT",
            help="A shard that `atoll shard` runs on another machine, where learners dial it too; needs --keys. Repeatable: in "
            "the order of the shards.",
        ),
    ] = None,
    hide_shards: Annotated[
        bool,
        typer.Option("--hide-shards", help="Learners cannot reach the shards of --shard-at: the syncer passes everything on."),
    ] = False,
    kernel_threads: Annotated[
        int,
        typer.Option("--kernel-threads", min=0, max=1024, help="Threads that merge, in each shard. 0: its share of the cores."),
    ] = 0,
    obey_stdin: ObeyOption = False,
    tls_log: Annotated[
        bool, typer.Option("--tls-log", help="With --keys: also log why TLS handshakes fail, in gRPC's own words.")
    ] = False,
    metrics: MetricsOption = None,
    metrics_token: MetricsTokenOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run the syncer, on the CPU: it merges the learners' updates, stores the result durably and sends it to the learners.

    It ends after total_steps and leaves theta.safetensors in --dir. Learners join with `atoll learner` and the token in --dir."""
    if tls_log:  # before gRPC is loaded
        os.environ.setdefault("GRPC_VERBOSITY", "INFO")
    log_to_stderr(verbose=not quiet)
    settings = settings_from(recipe, preset, learners, seed, set_, init)
    _refuse_early(directory, listen, bulk_port, keys, insecure)
    if hide_shards and not shard_at and (shards is not None or not (directory / TAPE_FILE).exists()):
        raise UserError("--hide-shards: is for shards on other machines (--shard-at), and this run has none")
    _refuse_shards(shard_at or [], shards, keys, listen, hide_shards)
    at = _metrics_of(metrics, metrics_token, keys)
    logging.getLogger("atoll.syncer").info("loading data and model")
    run_syncer(
        settings, directory, listen, keys, allow_model or [], resume, threads, obey_stdin, at, bulk_port, shards, kernel_threads,
        shard_at or [], hide_shards,
    )  # fmt: skip


def _refuse_shards(shard_at: Sequence[str], shards: int | None, keys: Path | None, listen: str, hidden: bool) -> None:
    from atoll.transport.keys import is_loopback, split_address

    if shard_at and keys is None:
        raise UserError("--shard-at: shards on other machines show certificates; give --keys DIR (see `atoll keys --shards`)")
    if shard_at and shards not in (None, len(shard_at)):
        raise UserError(f"--shards {shards}: there are {len(shard_at)} of --shard-at; leave --shards out")
    for address in shard_at:
        try:
            _, port = split_address(address)
        except UserError as error:
            raise UserError(f"--shard-at: {error}") from None
        if not port:
            raise UserError(f"--shard-at {address}: give the port that `atoll shard` says it listens on")
        if is_loopback(address) and not is_loopback(listen) and not hidden:
            remedy = "give an address that they reach, or --hide-shards"
            raise UserError(f"--shard-at {address}: learners on other machines cannot dial it; {remedy}")
    if len(set(shard_at)) < len(shard_at):
        raise UserError("--shard-at: names a shard twice; each needs a process and a folder of its own")


def _metrics_of(address: str | None, token: Path | None, keys: Path | None) -> MetricsAt | None:
    from atoll.runtime.metrics import metrics_at, refuse_taken_ports
    from atoll.transport.keys import load_server

    found = metrics_at(address, token, lambda: load_server(keys) if keys is not None else None)
    if found is not None:
        refuse_taken_ports(found, 1)
    return found


def _refuse_early(directory: Path, listen: str, bulk_port: int | None, keys: Path | None, insecure: bool) -> None:
    """Refuses what would otherwise stop a syncer only after it has loaded its data and filled its folder."""
    refuse_unusable(directory, "--dir")
    refuse_locked(directory)
    from atoll.transport.acceptor import refuse_taken
    from atoll.transport.keys import JoinTokens, is_loopback, split_address

    if not is_loopback(listen) and keys is None and not insecure:
        raise UserError(f"--listen {listen}: other machines can reach it; give --keys DIR (see `atoll keys`), or --insecure")
    if bulk_port == split_address(listen)[1]:
        raise UserError(f"--bulk-port {bulk_port}: is the port of --listen; give another, or leave it out: one port takes all")

    if keys is not None and os.path.exists(keys / "token.key"):
        JoinTokens.load(keys)
    if not (directory / TAPE_FILE).exists():  # a syncer that goes on may find its own old connections on the port
        refuse_taken(listen)
        if bulk_port is not None:
            refuse_taken(f"{listen.rpartition(':')[0]}:{bulk_port}")
