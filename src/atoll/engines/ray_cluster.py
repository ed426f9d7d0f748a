"""`--on ray`: a keeper, a syncer and the learners as detached actors, each learner in a placement group of its own.

The run's folder must be one that all nodes see: there are the syncer's state, which outlives its node, the keys, which therefore
no argument and no environment variable of an actor holds, and the file by which learners find a syncer that has moved.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from atoll.engines.commands import in_one_line
from atoll.engines.deployment import SYNCER, Deployment, EngineState, LearnerReach, Rendered, WorkerStatus
from atoll.engines.logs import last_line, lines_of
from atoll.engines.ray_keeper import NAMESPACE, NODE_IP, Keeper, RayPlan, RayProcess, ray_package
from atoll.engines.record import ENGINE_FOLDER, UpRecord, prepare_folder, record_of, write_record, write_whole
from atoll.engines.trust import ensure_keys
from atoll.errors import RunFailed, UserError
from atoll.toml import to_toml

NAME: Final = "ray"
PLAN_FILE: Final = "ray.json"
METRICS: Final = ("--metrics-at", "127.0.0.1:0")
"""To this machine alone; the actor beside it gives them to Ray."""
METRICS_FILE: Final = "metrics.address"
ANSWER_SECONDS: Final = 120.0
GIB: Final = 1 << 30


class RayEngine:
    """Engine: see choose.py."""

    def render(self, deployment: Deployment) -> list[Rendered]:
        plan = msgspec.json.encode(_plan(_with_spares(deployment)))
        return [Rendered(f"actors ({ENGINE_FOLDER}/{PLAN_FILE})", msgspec.json.format(plan, indent=1).decode() + "\n")]

    def up(self, deployment: Deployment) -> bool:
        deployment = _with_spares(deployment)
        with _cluster(deployment.placement.ray.address) as ray:
            return self._up(ray, deployment)

    def _up(self, ray: Any, deployment: Deployment) -> bool:
        before = _keeper(ray, deployment.name)
        if before is not None and _answer(ray, before.is_over.remote(), "the keeper of a run before does not answer"):
            ray.kill(before)
            before = None
        if before is not None:
            if deployment.recipe.exists() and deployment.recipe.read_text(encoding="utf8") == to_toml(deployment.settings):
                return False
            raise UserError(f"--out {deployment.run}: a run named {deployment.name} is up on this cluster; `atoll down` ends it")
        prepare_folder(deployment)
        ensure_keys(deployment)
        plan = deployment.run / ENGINE_FOLDER / PLAN_FILE
        write_whole(plan, msgspec.json.encode(_plan(deployment)), 0o600)
        write_record(record_of(deployment, NAME, address=deployment.placement.ray.address))
        keeper = ray.remote(Keeper).options(
            name=_keeper_name(deployment.name), namespace=NAMESPACE, lifetime="detached", max_restarts=-1, max_task_retries=-1,
            num_cpus=0, max_concurrency=8,
        )  # fmt: skip
        _answer(ray, keeper.remote(str(plan)).status.remote(), "the keeper did not start")
        return True

    def status(self, record: UpRecord) -> EngineState:
        with _cluster(str(record.details["address"])) as ray:
            keeper = _keeper(ray, record.name)
            if keeper is None:
                ended = [WorkerStatus(worker, "not up", "", last_line(record.log(worker))) for worker in record.workers]
                return EngineState(ended, False)
            found = _answer(ray, keeper.status.remote(), "the keeper does not say how the run stands")
            over = _answer(ray, keeper.is_over.remote(), "the keeper does not say how the run stands")
        workers = [
            WorkerStatus(worker, state, f"node {node[:12]}" if node else "", last_line(record.log(worker)))
            for worker, (state, node) in found.items()
        ]  # fmt: skip
        return EngineState(workers, not over)

    def logs(self, record: UpRecord, workers: list[str], follow: bool) -> Iterator[tuple[str, str]]:
        files = {worker: record.log(worker) for worker in workers}
        if not follow:
            yield from lines_of(files, False, lambda: False)
            return
        with _connection(str(record.details["address"])):  # one for all of the questions
            yield from lines_of(files, True, lambda: self.status(record).is_up)

    def down(self, record: UpRecord) -> None:
        with _cluster(str(record.details["address"])) as ray:
            keeper = _keeper(ray, record.name)
            if keeper is None:
                return
            _answer(ray, keeper.down.remote(), "the run did not go down", record.leave_seconds + ANSWER_SECONDS)
            ray.kill(keeper)


def _with_spares(deployment: Deployment) -> Deployment:
    return replace(deployment, spares=True)


def _keeper_name(name: str) -> str:
    return f"{name}-keeper"


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """What Ray prints of its nodes meanwhile goes to stderr: stdout is the answer of `atoll status --json`."""
    with redirect_stdout(sys.stderr), _connection(address) as ray:
        yield ray


@contextmanager
def _connection(address: str) -> Iterator[Any]:
    ray = ray_package()
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise RunFailed(f"no Ray cluster answers at {address}; give placement.ray.address: {in_one_line(error)}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _keeper(ray: Any, name: str) -> Any:
    try:
        return ray.get_actor(_keeper_name(name), namespace=NAMESPACE)
    except ValueError:
        return None


def _answer(ray: Any, future: Any, what: str, seconds: float = ANSWER_SECONDS) -> Any:
    try:
        return ray.get(future, timeout=seconds)
    except ray.exceptions.RayError as error:
        raise RunFailed(f"{what}: {type(error).__name__}: {in_one_line(error)}") from None


def _plan(deployment: Deployment) -> RayPlan:
    wanted = deployment.settings.learners

    def process(worker: str, words: list[str], folder: Path, group: str = "", spare: bool = False) -> RayProcess:
        resources, site, environment = deployment.needs(worker)
        amounts = {"CPU": float(resources.cpus), "memory": float(round(resources.memory_gb * GIB))}
        amounts |= {"GPU": float(resources.gpus)} if resources.gpus else {}
        amounts |= {f"site:{site}": 0.001} if site else {}
        return RayProcess(
            worker=worker, argv=[deployment.python, "-m", "atoll", *words], log=str(deployment.log(worker)),
            metrics=str(folder / METRICS_FILE), environment=dict(environment), resources=amounts, group=group, spare=spare,
        )  # fmt: skip

    port = deployment.placement.syncer.port
    listen = f"{deployment.placement.syncer.host or NODE_IP}:{port}"
    reach = LearnerReach(keys=deployment.keys, listen=f"{NODE_IP}:0")
    learners = [
        process(
            f"learner-{n}", deployment.learner_words(n, reach=reach, more=METRICS), deployment.out(n),
            deployment.group_of[n].group, n >= wanted,
        ) for n in deployment.learners
    ]  # fmt: skip
    syncer = process(SYNCER, deployment.syncer_words(listen, keys=deployment.keys, more=METRICS), deployment.run / SYNCER)
    groups = deployment.placement.groups(wanted)
    return RayPlan(
        name=deployment.name, run=str(deployment.run), leave_seconds=deployment.placement.leave_seconds,
        processes=[syncer, *learners],
        least={group.group: group.least or 1 for group in groups},
    )  # fmt: skip
