"""Commands of the live cluster: `syncer`, `learner`, `keys`, `snapshot`."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.errors import UserError

if TYPE_CHECKING:
    from atoll.chaos import Plan
    from atoll.cli.shared import RunProgress
    from atoll.config import Config
    from atoll.executor.snapshots import SnapshotInfo
    from atoll.executor.syncer import TensorHands
    from atoll.executor.workbench import Workbench
    from atoll.tape.format import Record
    from atoll.views.run import RunView, Summary

KeysOption = Annotated[Path | None, typer.Option("--keys", help="Folder with certificates, made by `atoll keys`: mutual TLS.")]
AllowOption = Annotated[
    list[str] | None,
    typer.Option("--allow-model", help="package.module:function that a recipe may name as its model. Repeatable."),
]
ObeyOption = Annotated[bool, typer.Option("--obey-stdin", hidden=True, help="Of a launcher: end when it does.")]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Talk in the clear on an address others can reach. Tokens are still asked for.")
]

SAY_EVERY_SECONDS = 5.0


def log_to_stderr(verbose: bool = False) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, stream=sys.stderr, force=True,
        format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S",
    )  # fmt: skip


def built(settings: Config, allowed: Collection[str], say: Callable[[str], None]) -> Workbench:
    """What cannot be built, what was left out of the data and what takes long is said before anything is started."""
    bench = _workbench(settings, allowed, say)
    for note in bench.notes:
        say(f"warning: {note}")
    return bench


def _workbench(settings: Config, allowed: Collection[str], say: Callable[[str], None]) -> Workbench:
    from atoll.executor.tasks import workbench_for

    said_at = time.monotonic()

    def progress(what: str, done: int, total: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > SAY_EVERY_SECONDS:
            said_at = time.monotonic()
            say(f"{what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    return workbench_for(settings, allowed, progress)


def check_buildable(each: Sequence[Config], allowed: Collection[str], say: Callable[[str], None]) -> None:
    """Of several presets on one recipe: what cannot be built is told before the first is trained. Model and data are most often
    the same, and loaded once; fragments are each preset's own."""
    from atoll.executor.workbench import layout_for

    known: list[Workbench] = []
    for settings in each:
        like = next((b for b in known if _same_task(b.config, settings)), None)
        if like is None:
            known.append(_workbench(settings, allowed, say))
        else:
            layout_for(settings, like.build())


def _same_task(one: Config, other: Config) -> bool:
    return (one.model, one.data, one.seed, one.learners) == (other.model, other.data, other.seed, other.learners)


def run_syncer(
    settings: Config, directory: Path, listen: str, keys: Path | None, insecure: bool, allowed: list[str],
    resume: Path | None, threads: int, obey_stdin: bool,
) -> None:  # fmt: skip
    from atoll.config import CUSTOM
    from atoll.executor.environment import use_threads
    from atoll.executor.snapshots import read_manifest
    from atoll.runtime.home import Home
    from atoll.runtime.resumed import TAPE, refuse_unfit
    from atoll.runtime.syncer import SyncerProcess
    from atoll.transport import server_credentials
    from atoll.transport.keys import is_loopback, load_server

    if not is_loopback(listen) and keys is None and not insecure:
        raise UserError(f"--listen {listen}: others can reach it; give --keys DIR (see `atoll keys`), or say --insecure")
    credentials = None
    if keys is not None:
        found = load_server(keys)
        for warning in found.warnings:
            logging.getLogger("atoll.syncer").warning(warning)
        credentials = server_credentials(found.certificate, found.key, found.ca)
    if resume is not None and not (directory / TAPE).exists():  # the same command again goes on from its tape, not from there
        _refuse_nothing_left(settings, resume, read_manifest(resume).snapshot)
        refuse_unfit(resume, settings)
    use_threads(threads)
    say = logging.getLogger("atoll.syncer").warning
    bench = None if settings.model.name == CUSTOM else built(settings, allowed, say)
    home = Home(directory, settings, bench, keys=keys, resume=resume)
    process = SyncerProcess(home, listen, credentials)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, process.leave)
        if obey_stdin:
            end_with_stdin(lambda: loop.call_soon_threadsafe(process.leave))
        await process.run()

    asyncio.run(main())


def end_with_stdin(end: Callable[[], object]) -> None:
    """A launcher holds the other end of our standard input: when it is gone, so are we."""

    def watch() -> None:
        for _ in sys.stdin:
            pass
        end()

    threading.Thread(target=watch, daemon=True).start()


def make_keys_command(directory: Path, learners: int, days: int, add: bool) -> list[Path]:
    from atoll.transport.keys import add_learner, make_keys

    if add:
        return [path for _ in range(learners) for path in add_learner(directory, days=days)]
    return make_keys(directory, learners=learners, days=days)


def make_token_command(directory: Path, run: str, hours: float) -> str:
    from atoll.transport.keys import Tokens

    return Tokens.load(directory).make(run=run, expires=datetime.now(UTC) + timedelta(hours=hours))


def snapshots_of(run: Path) -> list[SnapshotInfo]:
    from atoll.executor.snapshots import found

    if not run.is_dir():
        raise UserError(f"run {run}: is no folder; give the one that `atoll train --out` or `atoll syncer --dir` named")
    infos = found(run)
    if not infos:
        raise UserError(f"run {run}: holds no snapshots; a recipe asks for them with protocol.snapshot_interval")
    return infos


def problems_of(run: Path, outer_step: int) -> list[str]:
    from atoll.executor.snapshots import verify

    return verify(run, outer_step)


def _refuse_nothing_left(settings: Config, where: Path, outer_step: int) -> None:
    """A syncer ends when it stores the last outer step, and here that is behind it: it would wait for ever."""
    if settings.outer_steps <= outer_step:
        raise UserError(
            f"outer_steps = {settings.outer_steps}: the snapshot in {where} is of outer step {outer_step} already; give more"
        )


def snapshot_to_resume(run: Path, wanted: int | None, settings: Config) -> tuple[Path, int]:
    """A learner whose part is missing joins the resumed run as a newcomer; what is there must be sound. Nobody is taken further
    back than the newest without being asked: a damaged one is told, one that was never finished is not the newest."""
    from atoll.runtime.resumed import refuse_unfit

    infos = snapshots_of(run)
    complete = [info.outer_step for info in infos if info.complete]
    if wanted is not None and wanted not in complete:
        raise UserError(f"run {run}: has no complete snapshot of outer step {wanted}; there are {complete}")
    sealed = [step for step in complete if wanted is None or step == wanted]
    tried = [info.outer_step for info in infos if info.outer_step in sealed or (wanted is None and _is_damaged(run, info))]
    if not tried:
        raise UserError(f"run {run}: none of its snapshots is complete")
    chosen = tried[-1]
    absent = [f"{part} is missing" for part in _absent_parts(run, infos, chosen)]
    if damaged := [problem for problem in problems_of(run, chosen) if problem not in absent]:
        others = [step for step in complete if step != chosen]
        instead = f"give --snapshot {others[-1]} to go on from that one" if others else "there is no other"
        raise UserError(f"run {run}: snapshot {chosen} is damaged: {damaged[0]}; {instead}")
    _refuse_nothing_left(settings, run, chosen)
    refuse_unfit(_syncer_part(run, chosen), settings)
    return run, chosen


def _is_damaged(run: Path, info: SnapshotInfo) -> bool:
    """Sealed, and not what was sealed: one that the syncer gave up has nothing in it that could be damaged."""
    part = _syncer_part(run, info.outer_step)
    return not info.complete and part.is_dir() and any(str(part) in problem for problem in problems_of(run, info.outer_step))


def _absent_parts(run: Path, infos: Sequence[SnapshotInfo], snapshot: int) -> list[Path]:
    from atoll.executor.snapshots import learner_root, snapshot_dir

    (info,) = (info for info in infos if info.outer_step == snapshot)
    parts = [snapshot_dir(learner_root(run, learner), snapshot) for learner in info.missing]
    return [part for part in parts if not part.is_dir()]


def what_is_resumed(run: Path, snapshot: int) -> Iterator[str]:
    yield f"going on from snapshot {snapshot} of {run}"
    for part in _absent_parts(run, snapshots_of(run), snapshot):
        yield f"warning: {part} is missing: its learner joins as a newcomer"


def _syncer_part(run: Path, snapshot: int) -> Path:
    from atoll.executor.snapshots import snapshot_dir, syncer_root

    return snapshot_dir(syncer_root(run), snapshot)


def check_live(settings: Config, device: str) -> None:
    """What processes would refuse, before there are any: torch's own data-parallel has more of it."""
    from atoll.executor.device import checked_device

    if settings.preset != "ddp":
        checked_device(device)
        return
    from atoll.runtime.ddp import check, devices_for

    check(settings)
    devices_for(device, settings.learners)


def ddp_summary(
    settings: Config, directory: Path, threads: int, device: str, allowed: Sequence[str], progress: RunProgress
) -> Summary:
    from atoll.runtime.ddp import run_ddp, summary_of

    built(settings, allowed, progress.say)  # for what it refuses: ranks build for themselves, when their folder is there
    began = time.monotonic()
    outcome = run_ddp(
        settings, directory, threads=threads, device=device, allowed=allowed,
        progress=lambda step, loss: progress.reached(step, time.monotonic() - began, loss), looked=progress.looked,
    )  # fmt: skip
    return summary_of(settings, outcome, directory)


def cluster_summary(
    settings: Config, plan: Plan, directory: Path, threads: int, device: str, allowed: list[str],
    resume: tuple[Path, int] | None, view: RunView, progress: RunProgress,
) -> Summary:  # fmt: skip
    from atoll.runtime.cluster import LocalCluster
    from atoll.runtime.resumed import doubts, refuse_other_data
    from atoll.runtime.verdict import verdict

    bench = built(settings, allowed, progress.say)
    if resume is not None:
        refuse_other_data(_syncer_part(*resume), bench)
        for doubt in doubts(_syncer_part(*resume), settings, bench):
            progress.say(f"warning: {doubt}")
        for line in what_is_resumed(*resume):
            progress.say(line)

    def watch(record: Record) -> None:
        view(record.now, record.worker, record.event, record.effects)
        progress(record.now, record.worker, record.event, record.effects)

    progress.say(f"starting a syncer and {settings.learners} learners; logs and tapes in {directory}")
    cluster = LocalCluster(
        settings, directory, plan, threads=threads, device=device, allowed=allowed, resume=resume, watch=watch,
        say=progress.say, looked=progress.looked,
    )  # fmt: skip
    cluster.run()
    progress.say("reading the tapes")
    return verdict(settings, directory, faults=cluster.struck, bench=bench)


def hands_for_replay(directory: Path) -> Callable[[Workbench], TensorHands]:
    from atoll.runtime.verdict import hands_for_replay

    return hands_for_replay(directory)
