"""`--on slurm`: one job for the syncer and one for each learner, in a folder that all nodes see.

Never one big job: Slurm would start none before it can start all, and end all with one. A job that is requeued comes back as the
same learner; the syncer writes its address into the run's folder, and learners read it there for every connection.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from atoll.engines.commands import run_command
from atoll.engines.deployment import LEFT_CODE, SYNCER, Deployment, EngineState, LearnerReach, Rendered, WorkerStatus
from atoll.engines.logs import last_line, lines_of
from atoll.engines.record import ENGINE_FOLDER, UpRecord, prepare_folder, read_record, record_of, write_record, write_whole
from atoll.engines.trust import ensure_keys
from atoll.errors import RunFailed, UserError
from atoll.store.lock import is_locked

NAME: Final = "slurm"
ACTIVE: Final = {
    "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "SUSPENDED",
    "STOPPED", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT",
}  # fmt: skip
"""States of a job that runs or will run. The words are squeue's; what is not here has ended."""
LOOK_SECONDS: Final = 0.5
END_SECONDS: Final = 90.0
"""What a job needs to end beyond its time to leave: Slurm's KillWait and its epilogue."""
LEAVE_FILE: Final = "leave"
LEARNER_END = f"""learner=$!
while :; do
  wait "$learner"
  code=$?
  kill -0 "$learner" 2>/dev/null || break  # otherwise a signal ended the wait, and not the learner
done
if [ "$code" -gt 128 ]; then wait "$learner"; ended=$?; [ "$ended" -eq 127 ] || code=$ended; fi
# Its time is nearly over: back into the queue. After scancel and scontrol requeue Slurm decides.
if [ "$code" -eq {LEFT_CODE} ] && [ "$again" -eq 1 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


class SlurmEngine:
    """Engine: see choose.py."""

    def render(self, deployment: Deployment) -> list[Rendered]:
        scripts = [Rendered(str(script_path(deployment, worker)), script(deployment, worker)) for worker in deployment.workers]
        submits = "\n".join(shlex.join(_sbatch(script_path(deployment, worker))) for worker in deployment.workers)
        return [*scripts, Rendered("commands", submits + "\n")]

    def up(self, deployment: Deployment) -> bool:
        """Submits the jobs that are neither waiting nor running: all of a new run, one that was cancelled."""
        prepare_folder(deployment)
        ensure_keys(deployment)
        jobs = _jobs_before(deployment)
        states = _states(jobs.values())
        missing = [worker for worker in deployment.workers if states.get(jobs.get(worker, ""), ("",))[0] not in ACTIVE]
        for worker in missing:
            path = script_path(deployment, worker)
            write_whole(path, script(deployment, worker).encode(), 0o700)  # its environment may hold secrets
            printed = run_command(_sbatch(path), f"the job of {worker} was not submitted")
            jobs[worker] = printed.strip().partition(";")[0]
            write_record(record_of(deployment, NAME, jobs))  # at once: what is submitted can be cancelled
        return bool(missing)

    def status(self, record: UpRecord) -> EngineState:
        states = _states(record.jobs.values())
        workers = []
        for worker in record.workers:
            job = record.jobs.get(worker, "")
            state, why = states.get(job, ("ended" if job else "not submitted", ""))
            note = last_line(record.log(worker))
            workers.append(WorkerStatus(worker, state.lower(), f"job {job} {why}".strip() if job else "", note))
        return EngineState(workers, any(state in ACTIVE for state, _ in states.values()))

    def logs(self, record: UpRecord, workers: list[str], follow: bool) -> Iterator[tuple[str, str]]:
        files = {worker: record.log(worker) for worker in workers}
        return lines_of(files, follow, lambda: self.status(record).is_up)

    def down(self, record: UpRecord) -> None:
        """Learners that train are asked by a file, because Slurm's own grace (KillWait) may be shorter than theirs."""
        learners = {worker: job for worker, job in record.jobs.items() if worker != SYNCER}
        training = [job for worker, job in learners.items() if _ask_to_leave(record.folder, worker)]
        _cancel(job for job in learners.values() if job not in training)
        _wait_for_end(training, record.leave_seconds + END_SECONDS)
        _cancel(training)
        _cancel(job for worker, job in record.jobs.items() if worker == SYNCER)
        left = _wait_for_end(record.jobs.values(), END_SECONDS)
        if left:
            raise RunFailed(f"jobs {', '.join(left)} have not ended within {END_SECONDS:.0f} s of scancel; see `squeue`")


def script_path(deployment: Deployment, worker: str) -> Path:
    return deployment.run / ENGINE_FOLDER / f"{worker}.sbatch"


def _sbatch(path: Path) -> list[str]:
    return ["sbatch", "--parsable", str(path)]


def script(deployment: Deployment, worker: str) -> str:
    _, _, environment = deployment.needs(worker)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    head = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(deployment, worker)), *exports]
    head += deployment.placement.slurm.setup
    if worker == SYNCER:
        place = deployment.placement.syncer
        listen = f"{place.host or '$(hostname -f)'}:{place.port}"
        words = deployment.syncer_words(listen, keys=deployment.keys)
        return "\n".join([*head, f"exec {_command(deployment, words)}"]) + "\n"
    reach = LearnerReach(keys=deployment.keys, listen="$(hostname -f):0")
    words = deployment.learner_words(int(worker.removeprefix("learner-")), reach=reach)
    traps = ["again=0", "trap 'again=1; kill -USR1 \"$learner\"' USR1", "trap 'kill -TERM \"$learner\"' TERM"]
    return "\n".join([*head, *traps, f"{_command(deployment, words)} &", LEARNER_END])


def _command(deployment: Deployment, words: list[str]) -> str:
    """Quoted, but for the node's name, which only the node knows."""
    quoted = [word if word.startswith("$(hostname") else shlex.quote(word) for word in (deployment.python, "-m", "atoll", *words)]
    return " ".join(f'"{word}"' if word.startswith("$(hostname") else word for word in quoted)


def _options(deployment: Deployment, worker: str) -> list[str]:
    resources, site, _ = deployment.needs(worker)
    place = deployment.placement.slurm
    notice = round(deployment.placement.leave_seconds)
    optional = {
        "--partition": place.partition, "--account": place.account, "--constraint": site,
        "--gres": f"gpu:{resources.gpus}" if resources.gpus else "", "--time": place.time if worker != SYNCER else "",
        "--signal": f"B:USR1@{notice}" if worker != SYNCER else "",
    }  # fmt: skip
    return [
        f"--job-name={deployment.name}-{worker}", f"--output={deployment.log(worker)}", "--open-mode=append", "--nodes=1",
        "--ntasks=1", f"--cpus-per-task={resources.cpus}", f"--mem={round(1024 * resources.memory_gb)}M", "--requeue",
        *(f"{name}={value}" for name, value in optional.items() if value), *place.options,
    ]  # fmt: skip


def _jobs_before(deployment: Deployment) -> dict[str, str]:
    try:
        record = read_record(deployment.run)
    except UserError:
        return {}  # a new run
    return dict(record.jobs) if record.engine == NAME else {}


def _states(jobs: Iterable[str]) -> Mapping[str, tuple[str, str]]:
    """Job to (state, nodes or why it waits), as far as Slurm still knows them."""
    wanted = sorted(set(jobs) - {""})
    if not wanted:
        return {}
    asked = ["squeue", "--noheader", "--states=all", "--format=%A|%T|%R"]  # of all: --jobs refuses a job that is forgotten
    found = {}
    for line in run_command(asked, "the jobs cannot be listed").splitlines():
        job, state, where = [*line.strip().split("|", 2), "", ""][:3]
        if job in wanted:
            found[job] = (state, where)
    return found


def _ask_to_leave(run: Path, worker: str) -> bool:
    """True: a learner trains there, and was asked."""
    folder = run / "learners" / worker.removeprefix("learner-")
    if not is_locked(folder):
        return False
    write_whole(folder / LEAVE_FILE, b"")
    return True


def _cancel(jobs: Iterable[str]) -> None:
    active = [job for job, (state, _) in _states(jobs).items() if state in ACTIVE]
    if active:
        run_command(["scancel", *active], f"jobs {', '.join(active)} were not cancelled")


def _wait_for_end(jobs: Iterable[str], seconds: float) -> list[str]:
    """The jobs that are still there after that time."""
    jobs, until, pause = list(jobs), time.monotonic() + seconds, threading.Event()
    while left := [job for job, (state, _) in _states(jobs).items() if state in ACTIVE]:
        if time.monotonic() > until:
            break
        pause.wait(LOOK_SECONDS)
    return left
