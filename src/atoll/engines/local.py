"""`--on local`: the run's processes on this machine, under a supervisor that outlives the command that started it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from atoll.engines.deployment import SYNCER, Deployment, EngineState, LearnerReach, Rendered, WorkerStatus
from atoll.engines.logs import last_line, lines_of
from atoll.engines.record import ENGINE_FOLDER, UpRecord, prepare_folder, record_of, write_record, write_whole
from atoll.engines.supervisor import PLAN_FILE, STATE_FILE, UNENDED, Process, ProcessPlan, ProcessStage, Seen, seen_workers
from atoll.errors import RunFailed, UserError
from atoll.store.lock import LOCK_FILE, is_locked
from atoll.toml import to_toml

NAME: Final = "local"
START_SECONDS: Final = 30.0
END_SECONDS: Final = 30.0
"""Beyond the learners' time to leave: the syncer's end, and the supervisor's own."""
LOOK_SECONDS: Final = 0.05


class LocalEngine:
    """Engine: see choose.py."""

    def render(self, deployment: Deployment) -> list[Rendered]:
        plan = _plan(deployment)
        lines = []
        for process in (plan.syncer, *plan.learners):
            given = "".join(f"{name}={shlex.quote(value)} " for name, value in sorted(process.environment.items()))
            lines.append(f"{process.worker}: {given}{shlex.join(process.argv)} >>{process.log} 2>&1")
        return [Rendered("processes of this machine", "\n".join(lines) + "\n")]

    def up(self, deployment: Deployment) -> bool:
        """False: the run is up already."""
        folder = deployment.run / ENGINE_FOLDER
        if is_locked(folder):
            _refuse_another(deployment)
            return False
        prepare_folder(deployment)
        write_record(record_of(deployment, NAME))
        (folder / STATE_FILE).unlink(missing_ok=True)
        write_whole(folder / PLAN_FILE, msgspec.json.encode(_plan(deployment)), 0o600)  # environments may hold secrets
        pid = _detached([deployment.python, "-m", "atoll.engines.supervisor", str(folder)], deployment.log("supervisor"))
        until, pause = time.monotonic() + START_SECONDS, threading.Event()
        while not (folder / STATE_FILE).exists():
            if os.waitpid(pid, os.WNOHANG)[0] or time.monotonic() > until:
                raise RunFailed(f"the supervisor did not start; its log ends: {last_line(deployment.log('supervisor'))}")
            pause.wait(LOOK_SECONDS)
        return True

    def status(self, record: UpRecord) -> EngineState:
        is_up, found = is_locked(record.engine_folder), seen_workers(record.engine_folder)
        workers = []
        for worker in record.workers:
            seen = found.get(worker, Seen(ProcessStage.WAITING))
            state = str(seen) if is_up or seen.stage not in UNENDED else "ended with its supervisor"
            where = f"pid {seen.pid}" if seen.stage is ProcessStage.RUNNING and is_up else ""
            workers.append(WorkerStatus(worker, state, where, last_line(record.log(worker))))
        return EngineState(workers, is_up)

    def logs(self, record: UpRecord, workers: list[str], follow: bool) -> Iterator[tuple[str, str]]:
        files = {worker: record.log(worker) for worker in workers}
        return lines_of(files, follow, lambda: is_locked(record.engine_folder))

    def down(self, record: UpRecord) -> None:
        """The supervisor lets the learners leave, then ends everything. If it was killed, its processes end by themselves."""
        if is_locked(record.engine_folder):
            supervisor = [_number(record.engine_folder / LOCK_FILE)]
            _signal(supervisor, signal.SIGTERM)
            _end(record, lambda: supervisor, record.leave_seconds + END_SECONDS)
        _end(record, lambda: [seen.pid for seen in seen_workers(record.engine_folder).values()], END_SECONDS)


def _detached(words: list[str], log: Path) -> int:
    """In a session of its own, so that it outlives the terminal."""
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    actions = [(os.POSIX_SPAWN_DUP2, nothing, 0), (os.POSIX_SPAWN_DUP2, written, 1), (os.POSIX_SPAWN_DUP2, written, 2)]
    try:
        return os.posix_spawn(words[0], words, os.environ, file_actions=actions, setsid=True)
    finally:
        os.close(written)
        os.close(nothing)


def _refuse_another(deployment: Deployment) -> None:
    if deployment.recipe.read_text(encoding="utf8") != to_toml(deployment.settings):
        raise UserError(
            f"--out {deployment.run}: a run with another config is up there; `atoll down {deployment.run}` ends it, "
            "or give another folder"
        )


def _plan(deployment: Deployment) -> ProcessPlan:
    def process(worker: str, words: list[str]) -> Process:
        _, _, environment = deployment.needs(worker)
        return Process(
            worker=worker, argv=[deployment.python, "-m", "atoll", *words], log=str(deployment.log(worker)),
            environment=dict(environment),
        )  # fmt: skip

    obey, port = ("--obey-stdin",), deployment.placement.syncer.port
    syncer = process(SYNCER, deployment.syncer_words(f"127.0.0.1:{port}", keys=None, more=obey))
    reach = LearnerReach(token=deployment.run / SYNCER / "token")
    learners = [process(f"learner-{n}", deployment.learner_words(n, reach=reach, more=obey)) for n in deployment.learners]
    return ProcessPlan(
        syncer=syncer, learners=learners, address=str(deployment.address_file), leave_seconds=deployment.placement.leave_seconds
    )


def _end(record: UpRecord, pids_now: Callable[[], list[int]], seconds: float) -> None:
    """Until none of these processes is there; after that time they are killed."""
    until, pause = time.monotonic() + seconds, threading.Event()
    while pids := [pid for pid in pids_now() if _is_of(record, pid)]:
        if time.monotonic() > until:
            _signal(pids, signal.SIGKILL)
        pause.wait(LOOK_SECONDS)


def _is_of(record: UpRecord, pid: int) -> bool:
    """It runs, and its command says that the number is not another process's by now. A zombie's command is empty."""
    try:
        return record.run.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _number(lock: Path) -> int:
    """The lock is held, so the number in it is its holder's; 0 for the moment before it is written."""
    text = lock.read_text(encoding="ascii").strip()
    return int(text) if text.isdigit() else 0


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in filter(None, pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
