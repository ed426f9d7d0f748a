"""The learner: report, adopt what is due, inner step; for ever. Sans I/O.

Everything that touches weights happens at a step boundary, in `_boundary`; while an inner step runs, messages are only
noted, except a Pull, which is answered from the copy staged at the last boundary. A learner under `arrival` never
waits. Under `exact` adoption, or with a bounded lead, it may, and then `Wait` and `Resume` are on the tape.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.config import Config
from atoll.ids import SYNCER, FragmentId, Incarnation, LearnerId, Nanos, OuterStep, WorkerId, nanos
from atoll.protocol.batches import Batches
from atoll.protocol.causality import Mailbox
from atoll.protocol.counters import Count, Counters
from atoll.protocol.departure import Departure
from atoll.protocol.effects import Effects
from atoll.protocol.phases import AT_REST, DONE, JOINING, TRAINING, WAITING, LearnerPhase, Turn, after
from atoll.protocol.position import Position
from atoll.protocol.reasons import DUE, Reason, Why, wrong_receiver
from atoll.protocol.recovery import PendingTransfer, Service
from atoll.protocol.snapshot import marker_of
from atoll.protocol.staging import Pending, Staging
from atoll.protocol.vocabulary import (
    NO_VERSION,
    Adopt,
    Adoption,
    Announce,
    ApplyOwnShare,
    Connected,
    ConnectionLost,
    DeadlinePassed,
    Decline,
    Effect,
    Enter,
    Envelope,
    Event,
    Finish,
    Finished,
    Goodbye,
    Grant,
    Hello,
    InnerStep,
    Keep,
    LearnerState,
    LeaveAsked,
    Loaded,
    LoadSnapshot,
    LoadState,
    LoadTheta,
    Message,
    Poisoned,
    Pull,
    Received,
    RecordState,
    Recover,
    RecoveryFailed,
    Refuse,
    Report,
    Resized,
    Resume,
    Resumed,
    Serve,
    SnapshotPart,
    Started,
    StateRequest,
    StateTransfer,
    StateWritten,
    StepDone,
    TakeRollback,
    TakeTheta,
    Tick,
    Ticket,
    Wait,
    Welcome,
)  # fmt: skip
from atoll.rules import Schedule


class LearnerMachine:
    def __init__(self, config: Config, learner: LearnerId, incarnation: Incarnation) -> None:
        p = config.protocol
        self.config = config
        self.learner, self.incarnation = learner, incarnation
        self.schedule = Schedule(config)
        self._effects = Effects(Mailbox(learner, incarnation))
        self._fragments = p.fragments
        self.phase: LearnerPhase = JOINING
        self._connected = self._has_state = self._finish = False
        self._session = 0
        self._entering: Enter | None = None
        self._must_recover: Reason | None = None
        self._must_roll_back: TakeRollback | None = None
        self.position: OuterStep = 0
        self._place = Position(config, self.schedule, learner)
        self.outer_known: OuterStep = 0
        self.counters = Counters(p.fragments)
        self.held: list[OuterStep] = [NO_VERSION] * p.fragments
        self._pending: dict[FragmentId, Pending] = {}
        self._staged = Staging(config, self.schedule, self._effects, self.counters)
        self._pulls: list[Pull] = []
        self._adoptions: list[Adoption] = []
        self._batches = Batches(learner, p.local_steps_per_round)
        self._drawn: tuple[LearnerId, int] = (learner, 0)
        self._last_step: StepDone | None = None
        self._recorded: OuterStep = 0
        self._marker: OuterStep = 0
        self._departure = Departure()
        self._waiting_since: Nanos = 0
        self._wait_reason = Reason(Why.VERSION_AWAITED)
        self.waited: Nanos = 0
        self._transfer = PendingTransfer()
        self._service = Service(2 * config.limits.serves_max)

    # ------------------------------------------------------------ the door

    def on(self, event: Event, now: Nanos) -> Sequence[Effect]:
        self._effects.now = now
        if self.phase == DONE:
            return ()
        match event:
            case Received(envelope=envelope, flaw=flaw):
                self._receive(envelope, flaw)
            case StepDone():
                self._step_done(event)
            case Connected(peer=peer):
                if peer == SYNCER:
                    self._connected = True
                    self._hello(Reason(Why.RECONNECTED if self._has_state else Why.JOINS))
            case ConnectionLost(peer=peer, reason=reason):
                self._connection_lost(peer, reason)
            case StateWritten(snapshot=snapshot, flaw=flaw):
                self._send(SnapshotPart(snapshot, flaw))
            case Poisoned(where=where):
                self._recover(Reason(Why.POISONED, f"{where} holds NaN or Inf"))
            case LeaveAsked():
                self._leave(event)
            case Resumed(learner_state=learner_state):
                self._resumed(event.snapshot, learner_state)
            case DeadlinePassed():
                self._deadline_passed()
            case Resized(share=share):
                self._batches.share = share
            case Started():
                pass
            case _:
                raise AssertionError(f"no learner expects {event}")
        return self._effects.take()

    @property
    def finished(self) -> bool:
        return self.phase == DONE

    @property
    def mailbox(self) -> Mailbox:
        return self._effects.mailbox

    def deadline(self) -> Nanos | None:
        if self.phase == DONE:
            return None
        give_up_at, leaves_by = self._transfer.give_up_at, self._departure.by
        if give_up_at is None or leaves_by is None:
            return leaves_by if give_up_at is None else give_up_at
        return min(give_up_at, leaves_by)

    def _send(self, body: Message, to: WorkerId = SYNCER) -> None:
        if self._connected or to != SYNCER:
            self._effects.send(to, body)

    # ------------------------------------------------------------ messages

    def _receive(self, envelope: Envelope, flaw: Reason | None) -> None:
        refusal = self._effects.mailbox.refusal(envelope)
        if refusal is not None:
            if refusal.why is not Why.DUPLICATE:
                self._effects.emit(Refuse(envelope.sender, refusal, True))
            return
        body = envelope.body
        if self.config.protocol.snapshot_interval and envelope.sender == SYNCER:
            self._marker = max(self._marker, marker_of(envelope.clock, self.config.protocol.snapshot_interval))
        match body:
            case Announce():
                self._announced(body)
            case Pull():
                self._pulled(body)
            case Tick(outer_step=outer_step):
                self._saw(outer_step)
            case Grant():
                self._granted(body)
            case Enter():
                self._entering = body
                if self.phase in (JOINING, WAITING):
                    self._enter()
            case Welcome():
                pass
            case Ticket():
                self._transfer.begin(body, self._effects.now)
                self._send(StateRequest(body.ticket), body.peer)
            case TakeTheta():
                self._take_theta(body)
            case StateTransfer():
                self._take_state(envelope.sender, body, flaw)
            case TakeRollback():
                self._roll_back(body)
            case Recover(reason=reason):
                self._recover(reason)
            case Serve():
                self._service.name(body)
                self._serve()
            case StateRequest(ticket=ticket):
                self._service.ask(ticket, envelope.sender)
                self._serve()
            case Finish():
                self._finish = True
                if self.phase != TRAINING:
                    self._done()
            case _:
                self._effects.emit(Refuse(envelope.sender, wrong_receiver(body, "a learner"), True))

    def _granted(self, body: Grant) -> None:
        self._return_marker()
        self._batches.granted(body, later=self.phase == TRAINING and self._marker > self._recorded)

    def _saw(self, outer_step: OuterStep) -> None:
        if outer_step > self.outer_known:
            self.outer_known = outer_step
        if self.phase != TRAINING:
            self._serve()

    def _announced(self, body: Announce) -> None:
        fragment = body.fragment
        if body.previous != NO_VERSION and self.held[fragment] != body.previous:
            # cannot be, while channels are FIFO; if it is, start the channel over rather than guess
            lacks = f"fragment {fragment} came against version {body.previous}, which I lack"
            return self._hello(Reason(Why.VERSION_MISSING, lacks))
        pending = self._pending.get(fragment)
        if body.outer_step > (pending.version if pending else self.held[fragment]):
            self._effects.emit(Keep(fragment, body.outer_step, body.previous))
            self._staged.lookahead.least_steps = body.local_steps
            self._pending[fragment] = Pending(body.outer_step, body.previous, self.learner in body.merged)
        self._saw(body.outer_step)
        if self._departure.reason is not None and self.learner in body.merged and self._departure.merged(fragment):
            return self._goodbye()
        if self.phase == WAITING:
            self._return_marker()
            self._adopt_due()
            self._go_on()
        return None

    def _connection_lost(self, peer: WorkerId, reason: str) -> None:
        if peer == SYNCER:
            self._connected, self._entering, self._must_roll_back = False, None, None
            self._pulls.clear()
            self._transfer.end()
            return
        self._service.forget_peer(peer)
        if self._transfer.asked(peer):
            self._transfer_failed(Reason(Why.SOURCE_LOST, f"its source was lost: {reason}"))

    # ------------------------------------------------------------ a step boundary

    def _step_done(self, event: StepDone) -> None:
        self.counters.trained(event.tokens, event.samples)
        self._effects.mailbox.advance(self.counters.local_step)
        self.position += 1
        self._last_step = event
        self.phase = after(self.phase, Turn.STEP_DONE)
        self._boundary()

    def _boundary(self) -> None:
        if self._marker > self._recorded:
            self._record()
        self._batches.take_later()
        if self._finish:
            return self._done()
        if self._must_recover is not None:
            return self._recover(self._must_recover)
        if self._must_roll_back is not None:
            return self._roll_back(self._must_roll_back)
        if self._entering is not None:
            self._take_position(self._entering)
        if self.schedule.policy(self.position).exact:
            self._staged.put_exact(self.position, self.held)
            self._report()
            self._adopt_due()
        else:
            self._adopt_due()
            self._staged.put_ahead(self.outer_known, self.held)
            self._report()
        if self._pulls:
            self._answer_pulls()
        self._serve()
        self._go_on()
        return None

    def _record(self) -> None:
        """A marker was seen: record before anything of later than the marker takes effect."""
        if self._marker > self._recorded and self._has_state:
            self._recorded = self._marker
            left, offset, own_next = self._batches.place()
            stand = tuple(self.held), self.position, self.outer_known, left, offset, own_next
            self._effects.emit(RecordState(self._marker, LearnerState(*stand, *self.counters.record())))

    def _resumed(self, snapshot: OuterStep, learner_state: LearnerState) -> None:
        """What was announced and not yet adopted is announced again; staged copies are taken anew. Counters go on: they
        weigh the work that these weights already hold."""
        self.held, self.position, self.outer_known = list(learner_state.held), learner_state.position, learner_state.outer_known
        self._batches.restore(learner_state.left, learner_state.offset, learner_state.own_next)
        self.counters.restore(learner_state.local_step, learner_state.tokens, learner_state.samples, learner_state.since)
        self._effects.mailbox.advance(learner_state.local_step)
        self._has_state = True
        self._effects.emit(LoadSnapshot(snapshot))

    def _return_marker(self) -> None:
        """At rest between two steps: record now, and say so before anything else is sent."""
        if self.phase == WAITING and self._marker > self._recorded and self._has_state:
            self._record()
            self._report()

    def _report(self) -> None:
        step = self._last_step
        if not self._connected:
            return
        self._effects.send(SYNCER, Report(
            self._session, self.counters.local_step, self.position, self.counters.tokens, self.counters.samples,
            step.nanos if step else 0, self.waited, *self._drawn, tuple(self._adoptions), self._recorded,
            step.loss if step else None,
        ))  # fmt: skip
        self._adoptions.clear()

    def _go_on(self) -> None:
        reason = self._place.must_wait(self.position, self.held, self._pending)
        if reason is not None:
            if self._adoptions:
                self._report()  # the syncer sends a newer version only once this one is acknowledged
            if self.phase != WAITING:
                self.phase = after(self.phase, Turn.WAIT)
                self._waiting_since, self._wait_reason = self._effects.now, reason
                self._effects.emit(Wait(reason))
            return
        if self.phase == WAITING:
            self._end_wait()
        self.phase = after(self.phase, Turn.TRAIN)
        if self.config.protocol.eager:  # after every adoption of this boundary, which would overwrite it
            for fragment in self.schedule.due(self.position):
                self._effects.emit(ApplyOwnShare(fragment))
        self._drawn = self._batches.draw()
        policy = self.schedule.policy(self.position + 1)
        progress = self.position if policy.exact else self.outer_known
        self._effects.emit(InnerStep(self.counters.local_step + 1, *self._drawn, progress, self._batches.share))

    # ------------------------------------------------------------ adopting

    def _adopt_due(self) -> None:
        if self._pending:
            for fragment in self._place.due(self.position, self._pending):
                self._adopt(fragment)

    def _adopt(self, fragment: FragmentId, reason: Reason = DUE) -> None:
        pending = self._pending.pop(fragment)
        policy = self.schedule.policy(pending.version)
        regular = pending.merged and not policy.plain_average and self.phase != JOINING  # catching up takes Theta as it is
        alpha = self.config.protocol.alpha if regular else 0.0
        covered = self._staged.covered_by(fragment, pending.version, self.held[fragment])
        kept = covered if regular else None
        self._effects.emit(Adopt(fragment, pending.version, alpha, pending.merged, reason, kept is not None))
        self._holds(fragment, pending.version, kept)
        self._staged.drop_up_to(fragment, pending.version)

    def _holds(self, fragment: FragmentId, version: OuterStep, covered: Count | None = None) -> None:
        """`covered`: how much of what it trained the version holds, where it keeps the rest."""
        self.held[fragment] = version
        if covered is not None:
            self.counters.count_from(fragment, covered)
        elif self.config.protocol.anchor != "round_start":
            self.counters.reset(fragment)
        kept = 0 if covered is None else self.counters.since(fragment).tokens
        self._adoptions.append(Adoption(fragment, version, self.counters.local_step, self.counters.tokens, kept))

    # ------------------------------------------------------------ pulls

    def _pulled(self, pull: Pull) -> None:
        if self.phase in (JOINING, DONE):
            self._send(Decline(pull.outer_step, Reason(Why.NOT_TRAINING, f"is {self.phase}")))
            return
        self._pulls.append(pull)
        if self._marker > self._recorded:
            self._return_marker()
        if self._marker <= self._recorded or self.phase in AT_REST:  # else sent after a snapshot began, still to be recorded
            self._answer_pulls()

    def _answer_pulls(self) -> None:
        """In the middle of a step only from staged copies; at a boundary whatever is missing is staged now."""
        waiting: list[Pull] = []
        for pull in self._pulls:
            exact = self.schedule.policy(pull.outer_step).exact
            slot = pull.outer_step if exact else NO_VERSION
            missing = [p for p in pull.fragments if (p, slot) not in self._staged.copies]
            if missing and exact:
                self._send(Decline(pull.outer_step, Reason(Why.OUT_OF_STEP, f"stands at outer step {self.position}")))
            elif missing and self.phase not in AT_REST and pull.staged_only:
                self._send(Decline(pull.outer_step, Reason(Why.NOT_STAGED, f"fragment {missing[0]}")))
            elif missing and self.phase not in AT_REST:
                waiting.append(pull)
            else:
                for fragment in missing:
                    self._staged.put(fragment, slot, self.held[fragment])
                for fragment in pull.fragments if self._connected else ():
                    self._send(self._staged.contribution(pull.outer_step, fragment, slot))
        self._pulls = waiting

    # ------------------------------------------------------------ joining, recovery, the end

    def _hello(self, reason: Reason) -> None:
        self._batches.take_later()  # a learner that says Hello is part of no open snapshot
        held = tuple(self.held) if self._has_state else (NO_VERSION,) * self._fragments
        self._send(Hello(
            held, self.counters.local_step, self.counters.tokens, not self._has_state, self._batches.left(),
            self._batches.own_next, reason, self._batches.grants,
        ))  # fmt: skip

    def _recover(self, reason: Reason) -> None:
        """This state is of no more use. A running inner step ends first: its result is thrown away with the rest."""
        if self._departure.asked:
            return self._goodbye()  # there is nothing worth delivering any more
        if self.phase == TRAINING:
            self._must_recover = reason
            return None
        self._forget_work()
        self._has_state = False
        self._pending.clear()
        self.held = [NO_VERSION] * self._fragments  # or Theta, sent anew in the same version, would pass for known
        return self._hello(reason)

    def _forget_work(self) -> None:
        self._end_wait()
        self._must_recover = self._must_roll_back = self._entering = None
        self.phase = after(self.phase, Turn.RECOVER)
        self._transfer.end()
        self._pulls.clear()
        self.position = NO_VERSION  # what it had trained is gone: it stands where Enter puts it
        self._staged.forget()

    def _roll_back(self, body: TakeRollback) -> None:
        """Not while a step runs: its result is overwritten with the rest."""
        if self.phase == JOINING:
            return None  # it lost its connection or said Hello meanwhile, and is sent Theta or Recover
        if self._departure.asked:
            return self._goodbye()
        if self.phase == TRAINING:
            self._must_roll_back = body
            return None
        self._forget_work()
        for fragment in sorted(self._pending):
            self._adopt(fragment, body.reason)
        if any(version < body.outer_step for version in self.held):
            return self._recover(Reason(Why.THETA_INCOMPLETE))
        for fragment in range(self._fragments):
            self.counters.reset(fragment)
        self._effects.emit(LoadTheta(body.reason, keep_optimizer=not body.reset_optimizer))
        return self._loaded(body.ticket, SYNCER)

    def _take_theta(self, body: TakeTheta) -> None:
        if self.phase != JOINING:
            return
        if len(self._pending) < self._fragments:
            self._hello(Reason(Why.THETA_INCOMPLETE))
            return
        for fragment in range(self._fragments):
            self._adopt(fragment, body.reason)
            self.counters.reset(fragment)
        self._effects.emit(LoadTheta(body.reason))
        self._loaded(body.ticket, SYNCER)

    def _take_state(self, source: LearnerId, body: StateTransfer, flaw: Reason | None) -> None:
        if self.phase != JOINING or not self._transfer.expects(body.ticket, source):
            return None
        if flaw is not None:
            return self._transfer_failed(flaw)
        self._effects.emit(LoadState(source, body.held))
        for fragment, version in enumerate(body.held):
            self._holds(fragment, version)
            self.counters.reset(fragment)
        for fragment, version in body.pending:
            if fragment not in self._pending or self._pending[fragment].version < version:
                self._pending[fragment] = Pending(version, NO_VERSION, False)
        self._pending = {p: pending for p, pending in self._pending.items() if pending.version > self.held[p]}
        self._loaded(body.ticket, source)  # how far the run is, it hears from the syncer: with Enter
        return None

    def _loaded(self, ticket: int, source: WorkerId) -> None:
        self._has_state = True
        self._transfer.end()
        self._send(Loaded(ticket, source, self.counters.local_step, tuple(self.held)))

    def _transfer_failed(self, reason: Reason) -> None:
        if (ticket := self._transfer.end()) is not None:
            self._send(RecoveryFailed(ticket.ticket, reason))

    def _leave(self, asked: LeaveAsked) -> None:
        trained = [p for p in range(self._fragments) if self.counters.since(p).steps > 0]
        within = nanos(self.config.limits.leave_seconds) if asked.within is None else asked.within
        reason = Reason(Why.LEAVES_FOR_A_WHILE if asked.returns else Why.LEAVES, asked.reason)
        if self._departure.ask(reason, trained, self._effects.now + within) or not self._connected or self.phase == JOINING:
            self._goodbye()

    def _goodbye(self) -> None:
        self._end_wait()
        assert self._departure.reason is not None, "a learner says Goodbye because it was asked to leave"
        self._send(Goodbye(self._departure.reason))
        self.phase = after(self.phase, Turn.END)

    def _deadline_passed(self) -> None:
        if self._departure.is_due(self._effects.now):
            self._goodbye()
        elif self._transfer.give_up_at is not None and self._effects.now >= self._transfer.give_up_at:
            self._transfer_failed(Reason(Why.TRANSFER_LATE))

    def _enter(self) -> None:
        """At rest: stand where the syncer says, say so, and go on."""
        assert self._entering is not None
        if not self._has_state:
            self._entering = None
            return
        if self.phase == JOINING:
            self._recorded = self._marker  # its state is younger than any snapshot that is open: it is not of it
        self._record()
        stands_at = self._entering.outer_step
        self._take_position(self._entering)
        if self.phase == JOINING:
            self.phase = after(self.phase, Turn.ENTER)
            if self.position > stands_at and self.schedule.policy(self.position).exact:
                # resumed from a snapshot, which was taken before this boundary's copies were
                self._staged.put_exact(self.position, self.held)
        if self._finish:
            return self._done()
        self._adopt_due()
        self._report()
        self._serve()
        self._go_on()
        return None

    def _take_position(self, enter: Enter) -> None:
        at = enter.outer_step
        self.position = self._place.after_entering(at, self.position, self._staged.copies, waiting=self.phase == WAITING)
        self._staged.drop_slots_up_to(at)
        self._session = enter.session
        self._entering = None
        self._saw(at)

    def _serve(self) -> None:
        if self.phase not in AT_REST or not self._has_state:
            return
        for ticket, newcomer in self._service.take_ready(self.outer_known):
            pending = tuple((p, pending.version) for p, pending in sorted(self._pending.items()))
            self._send(StateTransfer(ticket, self.outer_known, tuple(self.held), pending), newcomer)

    def _end_wait(self) -> None:
        if self.phase == WAITING:
            waited = self._effects.now - self._waiting_since
            self.waited += waited
            self._effects.emit(Resume(waited, self._wait_reason))
            self.phase = after(self.phase, Turn.GO_ON)

    def _done(self) -> None:
        self._end_wait()
        self.phase = after(self.phase, Turn.END)
        self._effects.emit(Finished(self.outer_known))
