"""A whole live run on one machine: a process for the syncer, one for each learner, and the faults of a chaos plan.

A kill is SIGKILL, a pause is SIGSTOP, and links fail in a proxy between the processes. The clock of a plan starts with the first
round. The tapes record what happened; this file starts processes, carries faults out and watches.
"""

from __future__ import annotations

import heapq
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from atoll.chaos import (
    ChaosPlan,
    Clog,
    Corrupt,
    Fault,
    Hostile,
    Kill,
    KillSyncer,
    Partition,
    Pause,
    Rollback,
    Scavenge,
    Slow,
    check_plan,
    describe_fault,
)  # fmt: skip
from atoll.config import Config, to_toml
from atoll.errors import AtollError, RunFailed, UserError
from atoll.extend import loaded_plugins
from atoll.ids import SYNCER, LearnerId, WorkerId, worker_name
from atoll.protocol.vocabulary import Finished, FixParticipants
from atoll.runtime.local.failure import Failure
from atoll.runtime.local.fault_proxies import FaultProxies
from atoll.runtime.local.forkserver import Child, ForkServer
from atoll.runtime.metrics import MetricsAt
from atoll.runtime.syncer.rollback import ask
from atoll.store.snapshots import snapshot_dir, syncer_root
from atoll.tape.folder import refuse_used
from atoll.tape.format import Record, Tape
from atoll.tape.heldout import HELDOUT_FILE, HeldoutPoint, points_in
from atoll.tape.in_flight import RoundsInFlight
from atoll.tape.tail import Tail

TICK_SECONDS = 0.05
FINE_TICK_SECONDS = 0.001
ROUND_SECONDS = 10.0
"""How long a kill that should strike in a round waits for one."""
START_SECONDS = 120.0
RESTARTS_MAX = 3
"""How often one worker is started again after it ended without a fault of the plan."""
END_SECONDS = 25.0
"""How long learners have to end after the syncer has ended."""
LEAVE_SECONDS = 5.0
"""How long of it they have before they are asked to."""
LOG_LINES = 3
"""Of a log, in a message about the process that wrote it."""
EVALUATOR_LOG = "heldout.log"
ASKED_MAX = 16
"""Faults that were asked for and are not carried out yet."""


@dataclass
class _Worker:
    worker: WorkerId
    argv: list[str]
    log: Path
    child: Child | None = None
    died: int = 0
    back_at: float | None = None
    """When it is to be started again."""
    refused: bool = False
    """It ended because the syncer refuses it for good."""
    slowed: list[float] = field(default_factory=list)

    def start(self, fork_server: ForkServer) -> None:
        self.back_at, self.refused = None, False
        self.child = fork_server.spawn(self.argv, self.log)

    def signal(self, number: int) -> None:
        if self.child is not None:
            self.child.signal(number)

    def code(self) -> int | None:
        return self.child.poll() if self.child is not None else None

    def failure(self) -> Failure | None:
        return self.child.failure if self.child is not None else None


def error_of(worker: WorkerId, code: int, failure: Failure | None, log: Path) -> AtollError:
    """What the run fails with when this worker's process has ended for good. By what it reported; its log is for people."""
    if failure is not None and failure.users_fault:
        return UserError(failure.message)
    why = failure.message if failure is not None else f"the last lines of its log: {last_lines(log)}"
    return RunFailed(f"{worker_name(worker)} {how_it_ended(code)}; {why} (all of it: {log})")


def how_it_ended(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join(line for line in lines[-LOG_LINES:] if line.strip()) or "none"


class LocalCluster:
    def __init__(
        self, config: Config, directory: Path, plan: ChaosPlan, *, threads: int = 1, device: str = "cpu",
        allowed: Sequence[str] = (), resume: tuple[Path, int] | None = None,
        watch: Callable[[Record], None] | None = None, say: Callable[[str], None] = lambda text: None,
        on_point: Callable[[HeldoutPoint], None] = lambda point: None, metrics: MetricsAt | None = None,
        metrics_token: Path | None = None, words: tuple[Sequence[str], Sequence[str]] = ((), ()),
    ) -> None:  # fmt: skip
        """`resume`: another run's folder and which of its snapshots. `watch` is called with the syncer's records, `on_point` with
        held-out losses while the run trains. The syncer serves its metrics at `metrics`, learner m at the port 1 + m above.
        `words`: more options of each learner, and of the syncer."""
        self.config = config
        self.directory = directory
        self._plan = plan
        self._watch = watch or (lambda record: None)
        self._say = say
        self._on_point = on_point
        self._points_shown = self._points_bytes = 0
        self._evaluator: Child | None = None
        self._fault_proxies = FaultProxies(plan, config.learners)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._clock0: float | None = None
        self._finished = False
        self._in_flight = RoundsInFlight()
        self._pause = threading.Event()
        self._address = ""
        self._asked: queue.Queue[Fault] = queue.Queue(ASKED_MAX)
        self.struck: list[str] = []
        common = ["--threads", str(threads), "--obey-stdin"]
        own_code = [word for name in allowed for word in ("--allow-model", name)]
        own_code += [word for name in loaded_plugins() for word in ("--allow-plugin", name)]
        self._workers: dict[WorkerId, _Worker] = {}
        self._syncer_options = ["--dir", str(directory / "syncer"), *common, *own_code, *_resume_syncer(resume), *words[1]]
        # The recipe is that of this user, on this machine: it may name any path.
        self._learner_options = [*common, *own_code, "--device", device, "--allow-data", "/", *words[0]]
        self._evaluator_argv = ["eval", str(directory), "--follow", "--obey-stdin", *own_code, "--device", device]
        self._resume = resume
        self._metrics = metrics
        self._metrics_token = ["--metrics-token", str(metrics_token)] if metrics_token is not None else []

    # ------------------------------------------------------------ running

    def run(self) -> None:
        """Until the syncer ends. No process is left behind, whatever happens."""
        self._prepare()
        self._fork_server = ForkServer()
        try:
            self._start_all()
            while not self._syncer_is_done():
                self._tick()
            self._wait_for_learners()
        finally:
            self._fork_server.close()
            self._fault_proxies.stop()

    def _prepare(self) -> None:
        refuse_used(self.directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "config.toml").write_text(to_toml(self.config), encoding="utf8")
            (self.directory / "plan.toml").write_text(self._plan.to_toml(), encoding="utf8")
        except OSError as error:
            raise UserError(f"--out {self.directory}: cannot be used ({error.strerror})") from None

    def _start_all(self) -> None:
        self._workers[SYNCER] = _Worker(SYNCER, self._syncer_argv("127.0.0.1:0"), self.directory / "syncer.log")
        self._workers[SYNCER].start(self._fork_server)
        self._address = self._wait_for_address()
        self._workers[SYNCER].argv = self._syncer_argv(self._address)  # started again, it listens where learners dial
        self._fault_proxies.start(self._address)
        for learner in range(self.config.learners):
            self._workers[learner] = _Worker(learner, self._learner_argv(learner), self._log_of(learner))
            self._workers[learner].start(self._fork_server)
        self._tail = Tail(Tape(self.directory / "syncer" / "run.tape"))
        if self.config.data.heldout_every:
            self._evaluator = self._fork_server.spawn(self._evaluator_argv, self.directory / EVALUATOR_LOG)

    @property
    def fork_server(self) -> ForkServer:
        """More processes may be started beside those of the run."""
        return self._fork_server

    @property
    def address(self) -> str:
        return self._address

    def syncer_child(self) -> Child:
        child = self._workers[SYNCER].child
        assert child is not None
        return child

    def _log_of(self, learner: LearnerId) -> Path:
        return self.directory / "learners" / str(learner) / "log"

    def _syncer_argv(self, listen: str) -> list[str]:
        options = [*self._syncer_options, *self._metrics_options(0)]
        return ["syncer", str(self.directory / "config.toml"), "--listen", listen, *options]

    def _metrics_options(self, offset: int) -> list[str]:
        return ["--metrics-at", self._metrics.next_to(offset), *self._metrics_token] if self._metrics is not None else []

    def _learner_argv(self, learner: LearnerId) -> list[str]:
        out = self.directory / "learners" / str(learner)
        argv = [
            "learner", "--syncer", self._fault_proxies.syncer_address(learner, self._address),
            "--token", str(self.directory / "syncer" / "token"), "--id", str(learner), "--out", str(out),
            *self._fault_proxies.listen_options(learner), *self._learner_options, *self._metrics_options(1 + learner),
        ]  # fmt: skip
        return argv + _resume_learner(self._resume, learner, out)

    def _wait_for_address(self) -> str:
        path = self.directory / "syncer" / "address"
        until = time.monotonic() + START_SECONDS
        syncer = self._workers[SYNCER]
        while not path.exists():
            code = syncer.code()
            if code is not None:
                raise error_of(SYNCER, code, syncer.failure(), syncer.log)
            if time.monotonic() > until:
                raise RunFailed(f"the syncer did not start within {START_SECONDS:.0f} s; its log ends: {last_lines(syncer.log)}")
            self._pause.wait(TICK_SECONDS)
        return path.read_text(encoding="ascii").strip()

    def _read_tape(self) -> None:
        for record in self._tail.more():
            if self._clock0 is None and any(isinstance(e, FixParticipants) for e in record.effects):
                self._begin_plan()
            self._finished = self._finished or any(isinstance(e, Finished) for e in record.effects)
            self._in_flight.note(record.event, record.effects)
            self._watch(record)

    def _tick(self) -> None:
        self._pause.wait(TICK_SECONDS)
        self._read_tape()
        now = time.monotonic()
        while self._agenda and self._agenda[0][0] <= now:
            heapq.heappop(self._agenda)[2]()
        while self._clock0 is not None and not self._asked.empty():
            self.inject(msgspec.structs.replace(self._asked.get(), at=now - self._clock0))
        for worker in self._workers.values():
            self._tend(worker, now)
        if self._evaluator is not None:
            self._listen_to(self._evaluator)

    def _listen_to(self, evaluator: Child) -> None:
        """The run does not depend on the evaluator: if it fails, there are fewer held-out losses, and a warning says so."""
        path = self.directory / HELDOUT_FILE
        size = path.stat().st_size if path.exists() else 0
        if size > self._points_bytes:
            self._points_bytes, points = size, points_in(self.directory)
            for point in points[self._points_shown :]:
                if point.outer_step < self.config.total_steps:  # the loss at the end is in the summary
                    self._on_point(point)
            self._points_shown = len(points)
        if code := evaluator.poll():
            self._evaluator = None
            log = self.directory / EVALUATOR_LOG
            self._say(f"warning: the evaluator {how_it_ended(code)}, so no more held-out losses follow; see {log}")

    def _tend(self, w: _Worker, now: float) -> None:
        if self._finished and w.worker != SYNCER:
            return  # a learner that is started now would only hear that the run is finished
        if w.back_at is not None:
            if now >= w.back_at:
                w.start(self._fork_server)
            return
        code = w.code()
        if code is None or code == 0 or w.refused:
            return
        w.died += 1
        failure = w.failure()
        if failure is not None and failure.refused:
            return self._refused(w, failure)
        if w.died > RESTARTS_MAX or (failure is not None and failure.users_fault):
            raise error_of(w.worker, code, failure, w.log)
        why = failure.message if failure is not None else last_lines(w.log)
        self._say(f"warning: {worker_name(w.worker)} {how_it_ended(code)} and is started again: {why}")
        w.back_at = now + 1.0

    def _refused(self, w: _Worker, failure: Failure) -> None:
        """The run goes on without a learner that the syncer has put out, as long as there is another."""
        w.refused = True
        if all(other.refused for other in self._workers.values() if other.worker != SYNCER):
            raise UserError(failure.message)
        self._say(f"warning: {worker_name(w.worker)} has ended: {failure.message}")

    def _syncer_is_done(self) -> bool:
        w = self._workers[SYNCER]
        return w.back_at is None and w.code() == 0

    def _wait_for_learners(self) -> None:
        for record in self._tail.more():
            self._watch(record)
        until = time.monotonic() + END_SECONDS
        learners = [w for w in self._workers.values() if w.worker != SYNCER and w.back_at is None]
        for w in learners:
            w.signal(signal.SIGCONT)
        while time.monotonic() < until and any(w.code() is None for w in learners):
            self._pause.wait(TICK_SECONDS)
            if time.monotonic() > until - END_SECONDS + LEAVE_SECONDS:
                for w in learners:
                    w.signal(signal.SIGTERM)

    # ------------------------------------------------------------ faults

    def _begin_plan(self) -> None:
        self._clock0 = time.monotonic()
        for fault in self._plan.faults:
            self._at(fault.at, partial(self.inject, fault))

    def _at(self, seconds: float, call: Callable[[], None]) -> None:
        assert self._clock0 is not None
        self._count += 1
        heapq.heappush(self._agenda, (self._clock0 + seconds, self._count, call))

    def ask_fault(self, fault: Fault) -> None:
        """From any thread: carried out at the next tick. Its `at` does not count."""
        check_plan(ChaosPlan((fault,)), self.config.learners)
        if self._clock0 is None:
            raise UserError("a fault: the run has not begun; faults are carried out from the first round on")
        try:
            self._asked.put_nowait(fault)
        except queue.Full:
            raise UserError(f"a fault: {ASKED_MAX} others wait to be carried out; ask again later") from None

    def inject(self, fault: Fault) -> None:
        """Now, whatever its `at` says."""
        began = time.monotonic() - (self._clock0 or time.monotonic())
        self.struck.append(describe_fault(fault).strip())
        self._say(f"chaos: {self.struck[-1]}")
        match fault:
            case Kill(learner=learner, lasts=lasts, in_round=in_round):
                if in_round:
                    self._wait_for_round(learner)
                self._kill(self._workers[learner], lasts)
            case KillSyncer(lasts=lasts):
                self._kill(self._workers[SYNCER], lasts)
            case Pause(learner=learner, lasts=lasts):
                self._workers[learner].signal(signal.SIGSTOP)
                self._at(began + lasts, lambda: self._workers[learner].signal(signal.SIGCONT))
            case Slow(learner=learner, factor=factor, lasts=lasts):
                self._slow(learner, factor)
                self._at(began + lasts, lambda: self._slow(learner, -factor))
            case Partition() | Clog() | Corrupt():
                self._fault_proxies.inject(fault)
            case Hostile(learner=learner, lasts=lasts):
                self._attack(learner, fault)
                self._at(began + lasts, lambda: self._attack(learner, None))
            case Rollback(points=points, reset_optimizer=reset):
                try:
                    ask(self.directory / "syncer", -points, reset_optimizer=reset, reason="the chaos plan")
                except UserError as error:  # the one before waits for a syncer that is dead
                    self._say(f"chaos: {error}")
            case Scavenge(learner=learner, lasts=lasts):
                w = self._workers[learner] = _Worker(learner, self._learner_argv(learner), self._log_of(learner))
                w.start(self._fork_server)
                self._at(began + lasts, lambda: w.signal(signal.SIGTERM))  # it has leave_seconds to deliver what it has

    def _wait_for_round(self, learner: LearnerId) -> None:
        """A round takes milliseconds, so the tape is read as it grows."""
        until = time.monotonic() + ROUND_SECONDS
        self._read_tape()
        while not self._in_flight.takes_part(learner) and not self._finished and time.monotonic() < until:
            self._pause.wait(FINE_TICK_SECONDS)
            self._read_tape()
        if not self._in_flight.takes_part(learner):
            self._say(f"chaos: {worker_name(learner)} took part in no round for {ROUND_SECONDS:.0f} s and is killed all the same")

    def _kill(self, w: _Worker, lasts: float) -> None:
        if w.back_at is not None:
            return  # it was killed before and is not back yet
        w.signal(signal.SIGKILL)
        if w.child is not None:
            w.child.wait()
        w.slowed.clear()
        w.back_at = time.monotonic() + lasts

    def _attack(self, learner: LearnerId, fault: Hostile | None) -> None:
        child = self._workers[learner].child
        if child is not None:
            child.say(f"attack {msgspec.json.encode(fault).decode()}\n")

    def _slow(self, learner: LearnerId, factor: float) -> None:
        """A negative factor ends the slowness of that factor."""
        w = self._workers[learner]
        if factor > 0:
            w.slowed.append(factor)
        elif -factor in w.slowed:
            w.slowed.remove(-factor)
        total = 1.0
        for each in w.slowed:
            total *= each
        if w.child is not None:
            w.child.say(f"slow {total}\n")


def _resume_syncer(resume: tuple[Path, int] | None) -> list[str]:
    if resume is None:
        return []
    run, snapshot = resume
    return ["--resume", str(snapshot_dir(syncer_root(run), snapshot))]


def _resume_learner(resume: tuple[Path, int] | None, learner: LearnerId, out: Path) -> list[str]:
    """Its own part, where it has one, linked into the new run, so that a replay finds the state it began with. A learner without
    a part joins as a newcomer."""
    if resume is None:
        return []
    run, snapshot = resume
    part = run / "learners" / str(learner) / "snapshots" / str(snapshot)
    if not (part / "manifest.json").exists():
        return []
    start = out / "start"
    start.mkdir(parents=True)
    for path in part.iterdir():
        try:
            os.link(path, start / path.name)
        except OSError:  # another file system, or one without links
            shutil.copyfile(path, start / path.name)
    return ["--resume", str(start)]
