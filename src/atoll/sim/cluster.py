"""The simulated cluster: the real protocol machines on virtual time.

`_handle` has the order that every driver keeps: ask the machine, append to the tape, then carry out the effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from atoll.chaos import ChaosPlan, Clog, Corrupt, Fault, Hostile, Kill, KillSyncer, Partition, Pause, Rollback, Scavenge, Slow
from atoll.config import Config
from atoll.errors import RunFailed
from atoll.executor.null import NullDisk, NullLearner, NullSyncer
from atoll.ids import SYNCER, Incarnation, Nanos, WorkerId, nanos, seconds, worker_name
from atoll.protocol.interface import CLEAN, Executor, Observer, Payload
from atoll.protocol.learner import LearnerMachine
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import (
    DeadlinePassed,
    Envelope,
    Event,
    InnerStep,
    Lane,
    LeaveAsked,
    Poisoned,
    Received,
    Refuse,
    Resized,
    Restored,
    Resumed,
    RollbackAsked,
    Send,
    Started,
    StepDone,
)  # fmt: skip
from atoll.sim.hardware import Hardware
from atoll.sim.network import Network
from atoll.sim.world import World
from atoll.store.memory_snapshots import MemorySnapshot
from atoll.tape.in_flight import RoundsInFlight

if TYPE_CHECKING:
    from atoll.executor.hostile import Attacker

STANDSTILL_EVENTS = 100_000
"""More events than this at one instant are a loop."""

ExecutorFor = Callable[[WorkerId, Incarnation], Executor]


class _Worker:
    __slots__ = (
        "alive", "backlog", "deadline", "executor", "incarnation", "machine", "paused", "stepping_since", "stop", "worker",
    )  # fmt: skip

    def __init__(self, worker: WorkerId) -> None:
        self.worker = worker
        self.incarnation: Incarnation = -1
        self.machine: SyncerMachine | LearnerMachine
        """From the first start on, as the executor."""
        self.executor: Executor
        self.alive = False
        self.paused = 0
        self.backlog: list[tuple[Event, Payload | None]] = []
        self.deadline: Nanos | None = None
        self.stepping_since: Nanos = 0
        self.stop: Nanos = 0
        """Pause before the next step, for a resize."""


class VirtualCluster:
    def __init__(
        self, config: Config, *, plan: ChaosPlan | None = None, executor_for: ExecutorFor | None = None,
        observers: Sequence[Observer] = (),
        syncer_machine: Callable[[Config], SyncerMachine] = SyncerMachine,
        learner_machine: Callable[[Config, WorkerId, Incarnation], LearnerMachine] = LearnerMachine,
        resume: MemorySnapshot | None = None, hardware: Hardware | None = None,
    ) -> None:  # fmt: skip
        """`resume`: continue from this snapshot; `executor_for` provides its tensors. Learners that are not in the snapshot join
        as usual."""
        self.config = config
        self._resume = resume
        self.plan = plan or ChaosPlan()
        self.world = World()
        self.network = Network(config, self.world, self)
        self.hardware = hardware or Hardware(config)
        self._executor_for = executor_for or null_executor(config)
        self._observers = list(observers)
        self._syncer_machine = syncer_machine
        self._learner_machine = learner_machine
        scavenged = sorted({f.learner for f in self.plan.faults if isinstance(f, Scavenge)})
        self._workers = {w: _Worker(w) for w in (SYNCER, *range(config.learners), *scavenged)}
        self._lent_until: dict[WorkerId, Nanos] = {}
        self._attackers: dict[WorkerId, Attacker] = {}
        self._held_until: dict[WorkerId, Nanos] = {}
        self._in_flight: RoundsInFlight | None = None
        """From the first kill on that waits for a round."""
        self._due_in_round: list[Kill] = []
        self._syncer_log: list[tuple[Event, Nanos]] = []
        self._poisoned = ""
        self.events = 0

    # ------------------------------------------------------------ running

    @property
    def syncer(self) -> SyncerMachine:
        machine = self._workers[SYNCER].machine
        assert isinstance(machine, SyncerMachine)
        return machine

    def learner(self, worker: WorkerId) -> LearnerMachine | None:
        machine = self._workers[worker].machine if self._workers[worker].alive else None
        return machine if isinstance(machine, LearnerMachine) else None

    def start(self) -> None:
        self._start_worker(SYNCER)
        for learner in range(self.config.learners):
            absent = self.hardware.absent_at_start(learner)
            if absent:
                self.world.at(absent, self._start_worker, learner)
            else:
                self._start_worker(learner)
        for fault in self.plan.faults:
            self.world.at(nanos(fault.at), self.inject, fault)

    def run(self, *, until_seconds: float = float("inf"), pause: Callable[[], bool] | None = None) -> bool:
        """Run to the last outer step, or until `pause`, which is asked between two events, says so; called again, it goes on.
        Returns whether the run is at its end. RunFailed if virtual time passes `until_seconds` before that."""
        if not self.events:
            self.start()
        limit = nanos(until_seconds) if until_seconds != float("inf") else None
        world, syncer = self.world, self._workers[SYNCER]
        instant, since = world.now, self.events
        while not (syncer.alive and syncer.machine.finished):
            if pause is not None and pause():
                return False
            if not world.step():
                raise RunFailed(f"no event is left at outer step {self.syncer.outer_step}")
            if world.now != instant:
                instant, since = world.now, self.events
            elif self.events - since > STANDSTILL_EVENTS:
                raise RunFailed(f"virtual time stopped at {seconds(instant):.6f} s: workers answer each other in a loop")
            if limit is not None and world.now > limit:
                reached = f"outer step {self.syncer.outer_step} of {self.config.total_steps}"
                raise RunFailed(f"no more than {reached} after {until_seconds:.0f} virtual seconds{self._poisoned}")
        self._drain()
        return True

    def _drain(self) -> None:
        """Until every live learner knows that the run has ended."""
        until = self.world.now + nanos(4 * self.config.cluster.latency_seconds + 1e-6)
        while self.world.now <= until and any(w.alive and not w.machine.finished for w in self._workers.values()):
            if not self.world.step():
                return

    # ------------------------------------------------------------ workers

    def _start_worker(self, worker: WorkerId) -> None:
        w = self._workers[worker]
        if w.alive or self.world.now >= self._lent_until.get(worker, self.world.now + 1):
            return
        w.alive, w.incarnation, w.deadline = True, w.incarnation + 1, None
        w.paused, w.backlog, w.stop = 0, [], 0
        w.executor = self._executor_for(worker, w.incarnation)
        if worker == SYNCER:
            w.machine = self._rederived_syncer()
        else:
            w.machine = self._learner_machine(self.config, worker, w.incarnation)
            self.world.after(nanos(0.001), self.network.dial, worker)
            fails_after = self.hardware.time_to_failure(worker)
            if fails_after is not None:
                self.world.after(fails_after, self._fail, worker, w.incarnation)
        self.dispatch(worker, Started(w.incarnation))
        if worker != SYNCER and self.hardware.share(worker) < 1.0:
            self.dispatch(worker, Resized(self.hardware.share(worker)))
        if self._resume is not None and w.incarnation == 0:
            self._restore_from(self._resume, worker)

    def _restore_from(self, snapshot: MemorySnapshot, worker: WorkerId) -> None:
        assert snapshot.syncer_state is not None
        if worker == SYNCER:
            self.dispatch(worker, Restored(snapshot.syncer_state))
        elif worker in snapshot.learners:
            self.dispatch(worker, Resumed(snapshot.syncer_state.outer_step, snapshot.learners[worker][0]))

    def _rederived_syncer(self) -> SyncerMachine:
        """A killed syncer's state is its tape: replay it into a new machine."""
        machine = self._syncer_machine(self.config)
        for event, now in self._syncer_log:
            machine.on(event, now)
        return machine

    def is_up(self, worker: WorkerId) -> bool:
        return self._workers[worker].alive

    def arrive(self, envelope: Envelope, payload: Payload | None) -> None:
        w = self._workers[envelope.receiver]
        if payload is None:
            event = Received(envelope, 0)
        else:
            found = w.executor.inspect(envelope.body, payload) if w.incarnation >= 0 else CLEAN
            event = Received(envelope, payload.nbytes, found.flaw, found.measure)
        if w.alive and not w.paused:
            self._handle(w, event, payload)
        else:
            self._tell(w, event, payload)

    def dispatch(self, worker: WorkerId, event: Event) -> None:
        self._tell(self._workers[worker], event, None)

    def _tell(self, w: _Worker, event: Event, payload: Payload | None) -> None:
        if not w.alive:
            return
        if w.paused:
            w.backlog.append((event, payload))
            return
        self._handle(w, event, payload)

    def _handle(self, w: _Worker, event: Event, payload: Payload | None) -> None:
        machine, executor = w.machine, w.executor
        now = self.world.now
        effects = machine.on(event, now)
        self.events += 1
        if type(event) is Poisoned:
            self._poisoned = f"; {worker_name(w.worker)}'s {event.where} held NaN or Inf: lower inner.learning_rate"
        if w.worker == SYNCER:
            self._syncer_log.append((event, now))
            if self._in_flight is not None:
                self._in_flight.note(event, effects)
                self._strike_in_round(self._in_flight)
        for observe in self._observers:
            observe(now, w.worker, event, effects)
        for effect in effects:
            if type(effect) is Send:
                envelope = effect.envelope
                beside = executor.payload_for(effect) if envelope.body.lane is Lane.BULK else None
                if w.worker in self._attackers:
                    self._send_attacked(w, envelope, beside)
                else:
                    self.network.send(envelope, beside)
            elif type(effect) is InnerStep:
                self._begin_step(w, executor, effect)
            elif type(effect) is Refuse:
                if effect.disconnect:
                    self.network.cut(w.worker, effect.peer, str(effect.reason), 0)
            else:
                for follows in executor.execute(effect, payload):
                    self.world.at(now, self._later, w, w.incarnation, follows)
        deadline = machine.deadline()
        if deadline != w.deadline:
            w.deadline = deadline
            if deadline is not None:
                self.world.at(deadline, self._deadline, w, w.incarnation, deadline)

    def _begin_step(self, w: _Worker, executor: Executor, effect: InnerStep) -> None:
        (done,) = executor.execute(effect, None)
        w.stepping_since, w.stop = self.world.now + w.stop, 0
        self.world.at(w.stepping_since + self.hardware.step_nanos(w.worker), self._step_done, w, w.incarnation, done)

    def _send_attacked(self, w: _Worker, envelope: Envelope, payload: Payload | None) -> None:
        if envelope.receiver != SYNCER:
            self.network.send(envelope, payload)
            return
        attacker = self._attackers[w.worker]
        envelope, payload = attacker.sent(envelope, payload)
        until = max(self._held_until.get(w.worker, 0), self.world.now + attacker.delay(envelope))
        if until <= self.world.now or not attacker.may_be_held(envelope):
            self.network.send(envelope, payload)
            return
        self._held_until[w.worker] = until
        self.world.at(until, self._send_held, w, w.incarnation, envelope, payload)

    def _send_held(self, w: _Worker, incarnation: Incarnation, envelope: Envelope, payload: Payload | None) -> None:
        if w.alive and w.incarnation == incarnation:
            self.network.send(envelope, payload)

    def _later(self, w: _Worker, incarnation: Incarnation, event: Event) -> None:
        if w.incarnation == incarnation:
            self.dispatch(w.worker, event)

    def _step_done(self, w: _Worker, incarnation: Incarnation, done: Event) -> None:
        assert isinstance(done, StepDone)
        if not w.alive or w.incarnation != incarnation:
            return
        boundary = self.hardware.boundary(w.worker, self.world.now)
        if boundary is not None and boundary.share > 0:
            w.stop = boundary.stop
            self.dispatch(w.worker, Resized(boundary.share))
        self._tell(w, StepDone(done.tokens, done.samples, self.world.now - w.stepping_since, done.loss), None)
        if boundary is not None and boundary.share == 0:
            self._kill(w.worker, seconds(boundary.stop))

    def _deadline(self, w: _Worker, incarnation: Incarnation, deadline: Nanos) -> None:
        if w.alive and w.incarnation == incarnation and w.deadline == deadline:
            if w.paused:
                w.backlog.append((DeadlinePassed(), None))
                return
            w.deadline = None
            self._handle(w, DeadlinePassed(), None)

    # ------------------------------------------------------------ faults

    def inject(self, fault: Fault) -> None:
        match fault:
            case Kill(learner=learner, lasts=lasts, in_round=in_round):
                if in_round:
                    self._due_in_round.append(fault)
                    self._in_flight = self._in_flight or RoundsInFlight()
                else:
                    self._kill(learner, lasts)
            case KillSyncer(lasts=lasts):
                self._kill(SYNCER, lasts)
            case Pause(learner=learner, lasts=lasts):
                self._pause(learner, lasts)
            case Slow(learner=learner, factor=factor, lasts=lasts):
                self.hardware.slow(learner, factor)
                self.world.after(nanos(lasts), self.hardware.slow, learner, 1.0 / factor)
            case Partition(a=a, b=b, lasts=lasts, one_way=one_way):
                self.world.after(nanos(lasts), self.network.block(a, b, one_way=one_way, breaks=True))
            case Clog(a=a, b=b, lasts=lasts):
                self.world.after(nanos(lasts), self.network.block(a, b, one_way=False, breaks=False))
            case Corrupt(a=a, b=b):
                self.network.corrupt_next(a, b)
            case Scavenge(learner=learner, lasts=lasts):
                self._scavenge(learner, lasts)
            case Hostile(learner=learner, lasts=lasts):
                from atoll.executor.hostile import Attacker  # it needs torch, which other simulations do without

                self._attackers[learner] = Attacker(self.config, fault)
                self.world.after(nanos(lasts), self._calm, learner)

            case Rollback(points=points, reset_optimizer=reset):
                self.dispatch(SYNCER, RollbackAsked(-points, reset, f"{fault.at}", "the chaos plan"))

    def _strike_in_round(self, in_flight: RoundsInFlight) -> None:
        for fault in [f for f in self._due_in_round if in_flight.takes_part(f.learner)]:
            self._due_in_round.remove(fault)
            self.world.at(self.world.now, self._kill, fault.learner, fault.lasts)

    def _fail(self, worker: WorkerId, incarnation: Incarnation) -> None:
        if self._workers[worker].incarnation == incarnation:
            self._kill(worker, self.hardware.repair_seconds(worker))

    def _kill(self, worker: WorkerId, lasts: float) -> None:
        w = self._workers[worker]
        if w.alive:
            w.alive = False
            self.network.cut_all(worker, "the process died")
            self.world.after(nanos(lasts), self._start_worker, worker)

    def _scavenge(self, worker: WorkerId, lasts: float) -> None:
        """The owner asks it to leave after `lasts`, and takes it back once `limits.leave_seconds` are over too."""
        self._lent_until[worker] = self.world.now + nanos(lasts)
        self._start_worker(worker)
        self.world.after(nanos(lasts), self.dispatch, worker, LeaveAsked("its owner wants it back"))
        self.world.after(nanos(lasts + self.config.limits.leave_seconds + 1.0), self._take_back, worker, self._lent_until[worker])

    def _take_back(self, worker: WorkerId, lent_until: Nanos) -> None:
        w = self._workers[worker]
        if w.alive and self._lent_until[worker] == lent_until:
            w.alive = False
            self.network.cut_all(worker, "its owner took it back")

    def _calm(self, worker: WorkerId) -> None:
        self._attackers.pop(worker, None)

    def _pause(self, worker: WorkerId, lasts: float) -> None:
        w = self._workers[worker]
        if w.alive:
            w.paused += 1
            self.world.after(nanos(lasts), self._unpause, w, w.incarnation)

    def _unpause(self, w: _Worker, incarnation: Incarnation) -> None:
        if not w.alive or w.incarnation != incarnation:
            return
        w.paused -= 1
        if w.paused == 0:
            backlog, w.backlog = w.backlog, []
            for event, payload in backlog:
                if isinstance(event, StepDone):
                    event = msgspec.structs.replace(event, nanos=self.world.now - w.stepping_since)
                if isinstance(event, DeadlinePassed):
                    w.deadline = None
                self._handle(w, event, payload)

    def virtual_seconds(self) -> float:
        return seconds(self.world.now)


def null_executor(config: Config) -> ExecutorFor:
    disk = NullDisk(config.protocol.fragments)

    def executor(worker: WorkerId, incarnation: Incarnation) -> Executor:
        return NullSyncer(config, disk) if worker == SYNCER else NullLearner(config, worker)

    return executor
