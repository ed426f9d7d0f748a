"""The two kinds of Ray actors of a run: one for each process, and a keeper that creates them, one by one, wherever there is room.

Both are plain classes: `ray_cluster.py` makes actors of them. The keeper holds no state that it could lose. Started again on
another node, it reads the plan in the run's folder and finds the actors by their names.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from atoll.engines.deployment import LEFT_CODE, SYNCER
from atoll.engines.ray_metrics import MetricsCopy
from atoll.errors import UserError

NAMESPACE: Final = "atoll"
NODE_IP: Final = "{node_ip}"
"""In a command: the address of the node that it runs on."""
TICK_SECONDS: Final = 0.5
BACK_SECONDS: Final = 2.0
RESTARTS_MAX: Final = 10
"""In a row."""
STABLE_SECONDS: Final = 60.0
STOP_SECONDS: Final = 15.0
PLACED_SECONDS: Final = 10.0
"""How long a learner waits for room before a spare makes it."""
DIES_WITH_PARENT: Final = (
    "-c", "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])",
)  # fmt: skip
"""PR_SET_PDEATHSIG: a process must not outlive its actor, or it would hold the folder that its successor needs."""


def ray_package() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UserError("--on ray: the package ray is not installed; install atoll[ray]") from None


class RayProcess(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    argv: list[str]
    log: str
    metrics: str
    """The file into which it writes where it serves its metrics."""
    environment: dict[str, str] = {}
    resources: dict[str, float] = {}
    """As Ray names them: CPU, GPU, memory, site:NAME."""
    group: str = ""
    spare: bool = False
    """Beyond its group's `count`: placed only while there is room for it."""


class RayPlan(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    run: str
    processes: list[RayProcess]
    """The syncer first."""
    least: dict[str, int]
    """By group: so many must have room before the first of them starts."""
    leave_seconds: float


class WorkerActor:
    """Runs one command. Its output goes to the run's log and to this actor's, which Ray's dashboard shows; its metrics go to
    Ray."""

    def __init__(self, run: str, process: RayProcess) -> None:
        self._run, self._process = run, process
        self._child: subprocess.Popen[bytes] | None = None
        self._lock, self._over = threading.Lock(), threading.Event()

    def node(self) -> str:
        return str(ray_package().get_runtime_context().get_node_id())

    def run(self) -> int:
        """Until the command ends: its exit code. Called again, it waits for the same command."""
        with self._lock:
            if self._child is None:
                metrics = MetricsCopy(Path(self._process.metrics), self._run, self._process.worker)
                self._child = self._start()
                threading.Thread(target=self._copy, args=(self._child,), daemon=True).start()
                threading.Thread(target=metrics.follow, args=(self._over,), daemon=True).start()
        code = self._child.wait()
        self._over.set()
        return code

    def _start(self) -> subprocess.Popen[bytes]:
        address = importlib.import_module("ray.util").get_node_ip_address()
        words = [word.replace(NODE_IP, address) for word in self._process.argv]
        return subprocess.Popen(
            [words[0], *DIES_WITH_PARENT, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | self._process.environment,
        )  # fmt: skip

    def _copy(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        with open(self._process.log, "ab", buffering=0) as log:
            for line in child.stdout:
                log.write(line)
                sys.stdout.write(line.decode(errors="replace"))
                sys.stdout.flush()

    def leave(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)


@dataclass
class _Kept:
    """A process as the keeper has it."""

    process: RayProcess
    room: Any = None
    """Its placement group."""
    actor: Any = None
    ended: Any = None
    """The future of its exit code."""
    node: str = ""
    node_asked: Any = None
    state: str = "waits for room"
    asked: bool = False
    """It was asked to leave, because its node is drained or the run goes down."""
    is_final: bool = False
    failures: int = 0
    restarts: int = 0
    began: float = 0.0
    back_at: float = 0.0
    waits_since: float = 0.0
    has_room: bool = False
    looked_for: bool = False


class Keeper:
    """Looks twice a second at what runs, and does the next thing that is missing."""

    def __init__(self, plan_file: str) -> None:
        self._ray, self._util = ray_package(), importlib.import_module("ray.util")
        self._plan = msgspec.json.decode(Path(plan_file).read_bytes(), type=RayPlan)
        self._kept = {process.worker: _Kept(process) for process in self._plan.processes}
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._pause = threading.Event()
        threading.Thread(target=self._run, name="keeper", daemon=True).start()

    # ------------------------------------------------------------ what the command line asks

    def status(self) -> dict[str, tuple[str, str]]:
        """Worker to (state, node)."""
        return {
            name: (kept.state + (f", restarts: {kept.restarts}" if kept.restarts else ""), kept.node)
            for name, kept in self._kept.items() if kept.actor is not None or kept.is_final or not kept.process.spare
        }  # fmt: skip

    def is_over(self) -> bool:
        return self._stopped.is_set()

    def down(self) -> None:
        """Learners leave, then the syncer stops. Returns when nothing of it is left."""
        self._stopping.set()
        self._stopped.wait()

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        while not self._stopping.is_set() and not self._kept[SYNCER].is_final:
            self._attempt(self._look)
            self._pause.wait(TICK_SECONDS)
        while not self._attempt(self._end_all):
            self._pause.wait(TICK_SECONDS)
        self._stopped.set()

    def _attempt(self, step: Callable[[], None]) -> bool:
        """A cluster that loses nodes answers with errors of many classes. Each step begins from what is there, so the next
        attempt makes up for one that failed; this actor's log has why it did."""
        try:
            step()
        except Exception:
            traceback.print_exc()
            return False
        return True

    def _look(self) -> None:
        draining = set(importlib.import_module("ray._private.state").state.get_draining_nodes())
        for kept in self._kept.values():
            if kept.is_final:
                continue
            if kept.actor is None:
                self._place(kept)
            else:
                self._follow(kept, draining)
        self._make_room()

    def _place(self, kept: _Kept) -> None:
        """Room first, then an actor in it: a learner that does not fit holds nobody up."""
        if time.monotonic() < kept.back_at:
            return
        if not kept.looked_for:  # there may be those of a keeper before this one
            kept.looked_for, kept.room, kept.waits_since = True, self._room_before(kept.process.worker), time.monotonic()
            if (found := self._actor_before(kept.process.worker)) is not None:
                self._adopt(kept, found)
                return
        if kept.room is None:
            if kept.process.spare and (self._short_of_room() or not self._fits(kept.process)):
                return
            kept.waits_since = time.monotonic()
            kept.room = self._util.placement_group(
                [kept.process.resources], strategy="STRICT_PACK", name=self._name(kept.process.worker), lifetime="detached"
            )
        kept.has_room = self._util.placement_group_table(kept.room)["state"] == "CREATED"
        kept.state = "waits for its group" if kept.has_room else "waits for room"
        if kept.has_room and self._enough(kept.process.group):
            self._create(kept)

    def _short_of_room(self) -> list[_Kept]:
        """Learners that a group must have, and that nothing has room for."""
        waiting = [kept for kept in self._kept.values() if kept.room is not None and not kept.has_room and not kept.process.spare]
        return [kept for kept in waiting if time.monotonic() - kept.waits_since > PLACED_SECONDS]

    def _make_room(self) -> None:
        """One spare at a time goes for those."""
        spares = [kept for kept in self._kept.values() if kept.process.spare and kept.room is not None]
        if not spares or not self._short_of_room() or any(kept.asked for kept in spares):
            return
        last = spares[-1]
        if last.actor is None:
            self._release(last)
        else:
            last.asked, last.state = True, "makes room"
            last.actor.leave.remote()

    def _room_before(self, worker: str) -> Any:
        try:
            found = self._util.get_placement_group(self._name(worker))
        except ValueError:
            return None
        return found if self._util.placement_group_table(found)["state"] != "REMOVED" else None

    def _fits(self, process: RayProcess) -> bool:
        free = self._ray.available_resources()
        return all(free.get(name, 0.0) >= amount for name, amount in process.resources.items())

    def _enough(self, group: str) -> bool:
        alike = [kept for kept in self._kept.values() if kept.process.group == group]
        here = sum(kept.has_room or kept.actor is not None for kept in alike)
        return here >= self._plan.least.get(group, 1)

    def _name(self, worker: str) -> str:
        return f"{self._plan.name}-{worker}"

    def _actor_before(self, worker: str) -> Any:
        try:
            return self._ray.get_actor(self._name(worker), namespace=NAMESPACE)
        except ValueError:
            return None

    def _create(self, kept: _Kept) -> None:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        amounts = dict(kept.process.resources)
        actor = self._ray.remote(WorkerActor).options(
            name=self._name(kept.process.worker), namespace=NAMESPACE, lifetime="detached", max_restarts=0, max_concurrency=8,
            num_cpus=amounts.pop("CPU", 0), num_gpus=amounts.pop("GPU", 0), memory=amounts.pop("memory", None), resources=amounts,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(kept.room),
        )  # fmt: skip
        self._adopt(kept, actor.remote(self._plan.name, kept.process))

    def _adopt(self, kept: _Kept, actor: Any) -> None:
        kept.actor, kept.ended, kept.node_asked = actor, actor.run.remote(), actor.node.remote()
        kept.state, kept.began, kept.asked, kept.node, kept.has_room = "running", time.monotonic(), False, "", True

    def _follow(self, kept: _Kept, draining: set[str]) -> None:
        if not kept.node and self._ray.wait([kept.node_asked], timeout=0)[0]:
            with contextlib.suppress(self._ray.exceptions.RayError):
                kept.node = self._ray.get(kept.node_asked)
        if kept.node in draining and not kept.asked:
            kept.asked, kept.state = True, "leaves a node that is drained"
            kept.actor.leave.remote()
        if self._ray.wait([kept.ended], timeout=0)[0]:
            self._ended(kept)

    def _ended(self, kept: _Kept) -> None:
        try:
            code: int | None = self._ray.get(kept.ended)
        except self._ray.exceptions.RayError:
            code = None  # its node is gone, or its actor was killed
        self._release(kept)
        over = (Path(self._plan.run) / SYNCER / "theta.safetensors").exists()
        if code == 0 and (over or (kept.process.worker != SYNCER and not kept.asked)):
            kept.state, kept.is_final = "done", True
        elif code == LEFT_CODE and not kept.asked:
            kept.state, kept.is_final = "left", True
        else:
            self._again(kept, code)

    def _again(self, kept: _Kept, code: int | None) -> None:
        counts = code is not None and not kept.asked
        stable = time.monotonic() - kept.began > STABLE_SECONDS
        kept.failures = 0 if stable or not counts else kept.failures + 1
        kept.restarts += 1
        kept.back_at = time.monotonic() + BACK_SECONDS
        kept.state = "waits for room"
        if kept.failures > RESTARTS_MAX:
            kept.state, kept.is_final = f"failed with exit code {code}", True

    def _release(self, kept: _Kept) -> None:
        """Actor and room: the next ones may be on another node."""
        if kept.actor is not None:
            self._ray.kill(kept.actor)
        if kept.room is not None:
            self._util.remove_placement_group(kept.room)
        kept.actor = kept.room = None
        kept.node, kept.has_room = "", False

    def _end_all(self) -> None:
        learners = [kept for kept in self._kept.values() if kept.process.worker != SYNCER]
        self._end(learners, self._plan.leave_seconds + STOP_SECONDS)
        self._end([self._kept[SYNCER]], STOP_SECONDS)

    def _end(self, several: list[_Kept], seconds: float) -> None:
        running = [kept for kept in several if kept.actor is not None]
        for kept in running:
            kept.actor.leave.remote()
        if running:
            self._ray.wait([kept.ended for kept in running], num_returns=len(running), timeout=seconds)
        for kept in several:
            if kept.actor is not None or kept.room is not None:
                self._release(kept)
            if not kept.is_final:
                kept.state, kept.is_final = "ended", True
