"""The command line: parse, build, call. Exit codes: 0, 1 (the run failed), 2 (the user's input)."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from atoll import __version__, config
from atoll.cli import live, running
from atoll.cli.evaluate import evaluate
from atoll.cli.export import export
from atoll.cli.plan import plan
from atoll.cli.shared import (
    JsonOption,
    LearnersOption,
    PresetOption,
    Recipe,
    SeedOption,
    SetOption,
    ThreadsOption,
    err,
    out,
    print_json,
    settings_from,
)  # fmt: skip
from atoll.cli.simulate import simulate
from atoll.errors import AtollError, UserError
from atoll.tape.folder import refuse_unusable
from atoll.tape.weave import Woven, open_run
from atoll.views.strip import strip_lines

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Atoll trains one model on many islands of compute that never wait for each other.",
)  # fmt: skip
for command in (running.train, running.sim, running.compare, plan, export):
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(simulate, name="simulate")


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
        err.print(f"atoll: {_told(error)}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2 if error.errno in UNUSABLE and error.filename is not None else 1)


UNUSABLE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
"""A path that is what it is however often it is tried: somebody named it."""


def _told(error: OSError) -> str:
    """Of what no command foresaw. The system knows the reason, and most often the file."""
    where = "" if error.filename is None else f"{error.filename}: "
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}the disk is full ({error.strerror}); make room and try again"
    return f"{where}cannot be used ({error.strerror})" if where and error.strerror else str(error)


def _version(show: bool) -> None:
    if show:
        out.print(f"atoll {__version__}")
        raise typer.Exit()


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """Atoll trains one model on many islands of compute that never wait for each other."""


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
    obey_stdin: live.ObeyOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Warnings and errors only.")] = False,
) -> None:
    """Run the syncer: CPU only. It merges what learners send, stores it durably, and announces it."""
    live.log_to_stderr(verbose=not quiet)
    settings = settings_from(recipe, preset, learners, seed, set_)
    _refuse_false_start(directory, listen, keys)
    live.run_syncer(settings, directory, listen, keys, insecure, allow_model or [], resume, threads, obey_stdin)


def _refuse_false_start(directory: Path, listen: str, keys: Path | None) -> None:
    """What would stop a syncer only after it has loaded its data and filled its folder. One that goes on in its folder loses
    nothing by starting in vain, and is told rather who holds that."""
    refuse_unusable(directory, "--dir")
    if keys is not None:  # before gRPC is loaded, or it tells nobody why a handshake failed
        os.environ.setdefault("GRPC_VERBOSITY", "INFO")
    from atoll.transport.keys import Tokens
    from atoll.transport.wire import refuse_taken

    if keys is not None and os.path.exists(keys / "token.key"):
        Tokens.load(keys)
    if not (directory / "run.tape").exists():
        refuse_taken(listen)


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
    obey_stdin: live.ObeyOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Warnings and errors only.")] = False,
) -> None:
    """Run one learner: it gets its whole config from the syncer, trains, and never waits."""
    from atoll.runtime.entrance import address_of
    from atoll.runtime.worker import WorkerOptions, run_worker

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("WORLD_SIZE is above 1: a learner is one process so far; start several learners instead of ranks")
    live.log_to_stderr(verbose=not quiet)
    if out_dir is not None:
        refuse_unusable(out_dir)
    address = address_of(
        syncer_address, token, keys, name, run, listen, advertise, insecure, connections=connections, dash="--"
    )
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
        print_json(found)
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
    allow_model: live.AllowOption = None,
) -> None:
    """Feed a run's tapes to new machines and demand the same decisions; stops at the first difference with its story."""
    from atoll.executor.environment import use_threads
    from atoll.executor.syncer import TensorHands
    from atoll.sim.run import replay_run

    tape = open_run(path)
    use_threads(threads or tape.header.threads)

    def doubt(sentence: str) -> None:
        err.print(f"warning: {sentence}", style="yellow", soft_wrap=True)

    hands = live.hands_for_replay(path) if isinstance(tape, Woven) else TensorHands
    outcome, theta, _ = replay_run(tape, weights=weights, doubt=doubt, hands_of=hands, allowed=allow_model or [])
    if outcome.cut:
        err.print(f"the run did not end: the tape stops after record {outcome.records}, and all of it is whole", soft_wrap=True)
    out.print(f"{outcome.records} records re-derived, outer step {outcome.outer_step}: every decision as taped", highlight=False)
    if theta is not None:
        out.print(f"every Theta as taped, bit for bit; final sha256 {theta}", highlight=False, soft_wrap=True)


@app.command()
def strip(path: Annotated[Path, typer.Argument(metavar="TAPE", help="A tape or a run's folder.")]) -> None:
    """Print a run, one fixed-width line per event."""
    for line in strip_lines(open_run(path).records()):
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
    typer.echo(config.to_toml(settings_from(recipe, preset, learners, seed, set_)), nl=False)


if __name__ == "__main__":
    main()
