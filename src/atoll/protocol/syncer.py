"""The syncer: gathers fresh reports, fixes who takes part, pulls, merges, stores, announces. Sans I/O.

Read `round.py` first. Everything here happens in `on`: one event in, effects out, in the order in which they must be
carried out. The tape of its events is its state: a syncer that was killed is re-derived by feeding them to a new one.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.config import Config
from atoll.errors import PeerViolation
from atoll.ids import SYNCER, LearnerId, Nanos, OuterStep
from atoll.protocol.accounts import StepMost
from atoll.protocol.admission import Admission
from atoll.protocol.causality import Mailbox
from atoll.protocol.discipline import Discipline
from atoll.protocol.effects import Effects
from atoll.protocol.gathering import Gathering
from atoll.protocol.leases import Leases
from atoll.protocol.ledger import Fates, Ledger
from atoll.protocol.local_steps import LocalSteps
from atoll.protocol.membership import EXPELLED, IN_SYNC, LEFT, SILENT, Member, Roster
from atoll.protocol.merging import Merging
from atoll.protocol.pulse import Pulse
from atoll.protocol.reasons import ANSWERED, Reason, Why, wrong_receiver
from atoll.protocol.rollback import Rollbacks, stored_versions
from atoll.protocol.round import GATHERING, GRACE, PULLING, READY, STORING, Round, Rounds, RoundStep
from atoll.protocol.snapshot import Snapshot, marker_of
from atoll.protocol.validity import claims_too_much, hello_claims, objection, report_claims
from atoll.protocol.versions import Versions
from atoll.protocol.vocabulary import (
    AbortRound,
    Accept,
    Adoption,
    ConnectionLost,
    Contribution,
    DeadlinePassed,
    Decline,
    Discard,
    Effect,
    Envelope,
    Event,
    Finish,
    Finished,
    Goodbye,
    Hello,
    Loaded,
    Measure,
    MergeRejected,
    Message,
    Received,
    RecoveryFailed,
    Report,
    Restored,
    RollbackAsked,
    SnapshotPart,
    Started,
    Stored,
    SyncerState,
    Violated,
)  # fmt: skip
from atoll.protocol.watch import Watch
from atoll.rules import Schedule


class SyncerMachine:
    def __init__(self, config: Config) -> None:
        p = config.protocol
        self.config = config
        self.schedule = Schedule(config)
        self.outer_step: OuterStep = 0
        self._effects = Effects(Mailbox(SYNCER, 0))
        self.roster = Roster(p.fragments)
        local_steps = LocalSteps(config, self.roster) if p.dynamic_steps else None
        self.versions = Versions(config, self._effects, self.roster, local_steps)
        self.ledger = Ledger(p.fragments, adoption_discards=p.anchor != "round_start")
        self.leases = Leases(p.fragments, p.local_steps_per_round)
        self.snapshot = Snapshot(self._effects)
        self.pulse = Pulse(config)
        self.admission = Admission(
            config, self._effects, self.roster, self.versions, self.ledger, self.leases,
            self.pulse, lambda: self.outer_step,
        )  # fmt: skip
        self.merging = Merging(config, self._effects, self.roster, self.versions, self.ledger)
        self.discipline = Discipline(
            config, self._effects, self.roster, self.admission, self._drop, self._drop_from_rounds, self._end_incarnation
        )
        self._watch = Watch(self._effects, self.roster, self.pulse, self.admission, self._drop_from_rounds)
        self.rounds = Rounds()
        self.rollback = Rollbacks(
            config, self._effects, self.roster, self.versions, self.ledger, self.admission, self.rounds
        )
        self.gathering = Gathering(
            config, self.schedule, self._effects, self.roster, self.rounds, self.pulse, self.versions, local_steps
        )
        self._step_most = StepMost.of(config)
        self._last_commit_at: Nanos = 0
        self.refused, self.finished = 0, False

    # ------------------------------------------------------------ the door

    def on(self, event: Event, now: Nanos) -> Sequence[Effect]:
        self._effects.now = now
        match event:
            case Received():
                self._receive(event)
            case Violated(peer=peer, detail=detail):
                self.roster.admit(peer)  # it may never have said Hello
                self._refuse(peer, Reason(Why.VIOLATION, detail), disconnect=True)
            case Stored():
                self._stored(event)
            case MergeRejected():
                self._rejected(event)
            case DeadlinePassed():
                self._deadlines()
            case ConnectionLost(peer=peer, reason=reason):
                self._connection_lost(peer, reason)
            case Started(incarnation=incarnation):
                self._started(incarnation)
            case Restored(syncer_state=syncer_state):
                self._restored(syncer_state)
            case RollbackAsked():
                self.rollback.ask(event)
            case _:
                pass  # Connected: a peer speaks first, with Hello
        self._turn()
        return self._effects.take()

    def deadline(self) -> Nanos | None:
        if self.finished:
            return None
        soonest = self.gathering.hold_until
        if self._watch.at is not None and (soonest is None or self._watch.at < soonest):
            soonest = self._watch.at
        for round_ in self.rounds.values():
            if round_.phase == PULLING and (soonest is None or round_.pull_deadline < soonest):
                soonest = round_.pull_deadline
        return soonest

    @property
    def mailbox(self) -> Mailbox:
        return self._effects.mailbox

    @property
    def now(self) -> Nanos:
        """Of the last event."""
        return self._effects.now

    def fates(self) -> Fates:
        return self.ledger.fates()

    def stored_versions(self) -> tuple[tuple[OuterStep, ...], ...]:
        return stored_versions(self.versions, self.rollback.points())

    # ------------------------------------------------------------ messages

    def _receive(self, event: Received) -> None:
        envelope = event.envelope
        learner = envelope.sender
        if not 0 <= learner < self.config.limits.members_max:
            return self._refuse(learner, Reason(Why.NOT_A_LEARNER), disconnect=True)
        if (impossible := objection(self.config, envelope)) is not None:
            return self._refuse(learner, impossible, disconnect=True)
        refusal = self._effects.mailbox.refusal(envelope)
        if refusal is not None:
            return self._refuse(learner, refusal, disconnect=True) if refusal.why is not Why.DUPLICATE else None
        if self.snapshot.marker:
            self.snapshot.saw(envelope)
        body = envelope.body
        if isinstance(body, Hello):
            return self._hello(learner, envelope, body)
        member = self.roster.get(learner)
        if member is None or not member.connected:
            return self._refuse(learner, Reason(Why.NO_HELLO), disconnect=True)
        member.heard_at = self._effects.now
        if event.flaw is not None:
            return self._poisoned(member, body, event.flaw)
        try:
            self._said(member, event)
        except PeerViolation as violation:
            self._refuse(learner, Reason(Why.VIOLATION, str(violation)), disconnect=True)
        return None

    def _said(self, member: Member, event: Received) -> None:
        body = event.envelope.body
        if member.standing == SILENT and not self._is_heard(member, body):
            self.admission.readmit(member)  # it may wait for a round that went on without it, and never report again
        match body:
            case Report():
                self._report(member, body)
            case Contribution():
                self._contribution(member, body, event.measure)
            case Decline(outer_step=outer_step, reason=reason):
                member.pulls.pop(outer_step, None)
                self._drop(member, outer_step, Reason(Why.DECLINED, str(reason)))
            case Loaded():
                self.admission.loaded(member, body)
            case RecoveryFailed():
                self.admission.failed(member, body)
            case SnapshotPart():
                pass  # `snapshot.saw` took it
            case Goodbye(reason=reason):
                self._drop_from_rounds(member)
                self._end_incarnation(member.learner)
                self.admission.mark_left(member, reason)
            case _:
                self._refuse(member.learner, wrong_receiver(body, "the syncer"), disconnect=True)

    def _is_heard(self, member: Member, body: Message) -> bool:
        """A silent member that is let in soon, or by this very message, or that leaves."""
        return member.learner in self.roster.entering or isinstance(body, Report | Goodbye)

    def _refuse(self, learner: LearnerId, reason: Reason, *, disconnect: bool = False) -> None:
        self.refused += 1
        self.discipline.refuse(learner, reason, disconnect=disconnect)

    def _hello(self, learner: LearnerId, envelope: Envelope, body: Hello) -> None:
        if (unearned := hello_claims(body, learner, self.outer_step, self.leases, self._step_most)) is not None:
            return self._refuse(learner, unearned, disconnect=True)
        member = self.roster.get(learner)
        if member is not None and member.standing == EXPELLED:
            return self._refuse(learner, Reason(Why.EXPELLED), disconnect=True)
        if member is not None and member.standing == LEFT and member.incarnation == envelope.incarnation:
            return self._refuse(learner, Reason(Why.ALREADY_LEFT), disconnect=True)
        if member is not None:
            self._drop_from_rounds(member)
            if member.incarnation != envelope.incarnation:
                self._end_incarnation(learner)
        member = self.admission.hello(learner, envelope.incarnation, body)
        # it may be asked for what it trained while it was away before its next report, and a Hello does not count samples
        member.tokens, member.samples = body.tokens, body.local_step * self._step_most.samples
        self.gathering.heard_hello()
        if self.finished:
            self._effects.send(learner, Finish(self.outer_step))
        self._watch.soon()
        return None

    def _report(self, member: Member, body: Report) -> None:
        if (unearned := report_claims(body, member, self.versions, self.leases, self._step_most)) is not None:
            return self._refuse(member.learner, unearned, disconnect=True)
        newer = body.local_step > member.reported
        self.ledger.trained(member.learner, body.tokens)
        if newer:  # on entering it repeats the last step, which its Hello has accounted for
            self.leases.drew(member.learner, body.stream, body.batch, body.local_step)
        for adoption in body.adopted:
            self._adopted(member, adoption)
        member.tokens, member.samples = body.tokens, body.samples
        if newer:
            member.reported = body.local_step
            self.pulse.reported(member, body.step_nanos, self._effects.now)
        if body.session != member.session or member.standing not in (IN_SYNC, SILENT):
            return
        if member.standing == SILENT:
            return self.admission.readmit(member)
        member.position = body.position
        self.gathering.mark(member)
        if self.leases.is_low(member.learner):
            self.admission.top_up(member)
        return None

    def _adopted(self, member: Member, adoption: Adoption) -> None:
        fragment, version, p = adoption.fragment, adoption.version, self.config.protocol
        # a claim to have kept work counts only for a version that the learner's own work is in
        keeps = p.keep_overlap and adoption.kept > 0 and self.ledger.is_merged_in(member.learner, fragment, version)
        self.ledger.adopted(member.learner, fragment, adoption.tokens - (adoption.kept if keeps else 0), version)
        if p.anchor != "round_start":  # there a difference goes on from the last one, not from an adoption
            member.account.adopted(fragment, version, adoption.local_step, keeps=keeps)
        self.versions.acknowledged(member, adoption)
        self.versions.prune((adoption.fragment,))
        self.pulse.adopted(adoption.version, self._effects.now)

    def _contribution(self, member: Member, body: Contribution, measure: Measure | None) -> None:
        round_ = self.rounds.get(body.outer_step)
        not_open = Reason(Why.LATE, f"round {body.outer_step} is not open")
        objection = not_open if round_ is None else round_.objection(member.learner, body)
        if objection is not None or round_ is None:
            self.pulse.answered(member, body.outer_step, self._effects.now, whole=True)
            return self._refuse(member.learner, not_open if objection is None else objection)
        if not self.versions.has(body.fragment, body.anchor):
            gone = f"fragment {body.fragment} is against version {body.anchor}, which is gone"
            self._refuse(member.learner, Reason(Why.VERSION_FORGOTTEN, gone))
            self._drop_from_rounds(member)
            return self.admission.recover(member, Reason(Why.NOT_REBASED))
        if claims_too_much(body, member.reported, member.tokens, member.samples, self._step_most):
            unearned = Reason(Why.UNEARNED, "contribution claims more than was reported")
            return self._refuse(member.learner, unearned, disconnect=True)
        count = member.account.count(body, self._step_most)
        unusual = None if measure is None else self.merging.objection(body, count, measure)
        if unusual is not None:
            self.pulse.answered(member, body.outer_step, self._effects.now, whole=True)
            return self._poisoned(member, body, unusual)
        round_.take(member.learner, body, count, measure.norm if measure is not None else None)
        self.versions.give_back(member, (body.fragment,))
        member.account.taken(body.fragment, body.local_step)
        member.missed = member.skipped_until = 0
        self.pulse.answered(member, body.outer_step, self._effects.now, whole=member.learner not in round_.awaited)
        self.leases.pulled(member.learner, body.fragment, body.local_step)
        self._effects.emit(Accept(body.outer_step, body.fragment, member.learner, body.anchor))
        return None

    def _poisoned(self, member: Member, body: Message, flaw: Reason) -> None:
        """A learner whose weights went wrong is of no use until it has new ones; a large norm may be a bad batch."""
        self._refuse(member.learner, flaw)
        if flaw.why is Why.OUTLIER and isinstance(body, Contribution):
            self.discipline.suspect(member, body.outer_step, flaw)
        else:
            self.discipline.send_to_recover(member, flaw)

    # ------------------------------------------------------------ turns

    def _turn(self) -> None:
        """Let whatever can move, move. Each pass either changes something or ends the loop."""
        if self.roster.entering:
            self._let_in()
        if self.rollback.pending:
            self.rollback.begin(self.outer_step)
        while not (self.finished or self.rollback.pending):
            if not self.gathering.advance(self.outer_step) and not self._ready_to_merge():
                break

    def _let_in(self) -> None:
        """Members that loaded enter between two rounds; where nothing overlaps, only while none is in flight."""
        entering = [m for m in self.roster if m.learner in self.roster.entering and m.connected]
        if not entering:
            return
        if any(r.policy.overlap == 0 for r in self.rounds.in_flight()):
            return
        gathering = self.rounds.gathering()
        stands_at = (gathering.outer_step if gathering else self.rounds.last(self.outer_step) + 1) - 1
        for member in entering:
            self.admission.enter(member, stands_at)

    # ------------------------------------------------------------ merging

    def _ready_to_merge(self) -> bool:
        round_ = self.rounds.get(self.outer_step + 1)
        if round_ is None or round_.phase != READY:
            return False
        if self._drop_outliers(round_):
            return True
        round_.move(RoundStep.TURN)
        if not round_.due:
            self._commit(round_)  # the tape alone makes an empty round durable
            return True
        self.merging.begin(round_)
        return False

    def _drop_outliers(self, round_: Round) -> bool:
        """Contributions far from the others of their round. True if one was dropped: the round may not be ready any more."""
        found = self.merging.outliers(round_)
        for learner, reason in sorted(found.items()):
            member = self.roster.get(learner)
            assert member is not None
            self._refuse(learner, reason)
            self.discipline.suspect(member, round_.outer_step, reason)
        return bool(found)

    def _stored(self, event: Stored) -> None:
        if self.rollback.is_storing(event.outer_step):
            return self._commit_rollback(event.outer_step)
        round_ = self.rounds.storing(event.outer_step)
        self.merging.moved(round_, event.jumps)
        return self._commit(round_)

    def _rejected(self, event: MergeRejected) -> None:
        """Nothing was stored: the same outer step is gathered again, and its contributors are suspected."""
        round_ = self.rounds.storing(event.outer_step)
        reason, participants = self.merging.rejection(round_, event), round_.participants
        self._regather(round_, reason)
        for learner in participants:
            member = self.roster.get(learner)
            assert member is not None
            self.discipline.suspect(member, round_.outer_step, reason)

    def _commit(self, round_: Round) -> None:
        """Durable: count it, take the snapshot if one is due, announce."""
        outer_step = round_.outer_step
        del self.rounds[outer_step]
        self._advance(outer_step)
        for fragment in round_.due:
            self.versions.add(fragment, outer_step, round_.participants)
            self.merging.merged(round_, fragment)
        self.rollback.committed(outer_step)
        interval = self.config.protocol.snapshot_interval
        if interval and marker_of(outer_step, interval) == outer_step:
            kept, points = self.versions.all_kept_versions(), self.rollback.points()
            syncer_state = SyncerState(outer_step, kept, *self.leases.record(), points)
            self.snapshot.begin(outer_step, [m.learner for m in self.roster.in_sync()], syncer_state)
        self._announce(round_)
        self.versions.prune(round_.due)
        if self.roster.entering:
            self._let_in()
        if outer_step == self.config.total_steps:
            self._finish()

    def _advance(self, outer_step: OuterStep) -> None:
        self.outer_step = outer_step
        self._last_commit_at = self._effects.now
        self._effects.mailbox.advance(outer_step)

    def _commit_rollback(self, outer_step: OuterStep) -> None:
        self._advance(outer_step)
        self.gathering.clear()
        self.snapshot.abandon(Reason(Why.ROLLED_BACK))
        self.rollback.stored()
        if outer_step == self.config.total_steps:
            self._finish()

    def _announce(self, round_: Round) -> None:
        self.versions.announce_step(round_.outer_step, round_.due)
        if round_.due:
            self.pulse.announced(round_)

    def _finish(self) -> None:
        self.finished = True
        self.snapshot.abandon(Reason(Why.RUN_OVER))
        self._effects.emit(Finished(self.outer_step))
        for member in self.roster.connected():
            self._effects.send(member.learner, Finish(self.outer_step))

    # ------------------------------------------------------------ losses

    def _connection_lost(self, learner: LearnerId, reason: str) -> None:
        member = self.roster.get(learner)
        if member is not None and member.connected:
            self._drop_from_rounds(member)
            self.admission.mark_lost(member, Reason(Why.RUN_OVER) if self.finished else Reason(Why.CONNECTION_LOST, reason))
            self._watch.soon()

    def _drop_from_rounds(self, member: Member) -> None:
        """It cannot be counted on in any open round, nor in the snapshot."""
        self.snapshot.leave_out(member.learner)
        for outer_step in list(self.rounds):
            self._drop(member, outer_step, Reason(Why.GONE), silence=False)
        self.gathering.reported.discard(member.learner)  # a round that gathers again has just marked everybody in sync

    def _end_incarnation(self, learner: LearnerId) -> None:
        for round_ in self.rounds.values():
            if round_.phase == STORING:  # of earlier ones it was dropped, and its next incarnation may take part in them
                round_.ended.add(learner)

    def _drop(self, member: Member, outer_step: OuterStep, reason: Reason, *, silence: bool = True) -> None:
        round_ = self.rounds.get(outer_step)
        if round_ is None or round_.phase not in (PULLING, READY) or member.learner not in round_.participants:
            return
        self._effects.emit(Discard(outer_step, member.learner, reason))
        round_.drop(member.learner)
        self.versions.give_back(member, round_.due)
        if silence and round_.policy.exact and member.standing == IN_SYNC:
            # exact adoption has no place for one that is out of step: it must enter again
            self.gathering.reported.discard(member.learner)
            self.snapshot.leave_out(member.learner)
            self.admission.mark_silent(member, reason)
            if reason.why in ANSWERED:
                self.admission.readmit(member)
        need = 1 if round_.policy.quorum_all and self.config.protocol.elastic else self.gathering.quorum(round_)
        if len(round_.participants) < need:
            self._regather(round_, Reason(Why.BELOW_QUORUM, f"{len(round_.participants)} left of a quorum of {need}"))

    def _regather(self, round_: Round, reason: Reason) -> None:
        self._effects.emit(AbortRound(round_.outer_step, reason))
        for learner, counted in round_.counted_before.items():
            member = self.roster.get(learner)
            if member is not None:
                member.counted = min(member.counted, counted)
                self.versions.give_back(member, round_.due)
        round_.counted_before.clear()
        round_.regather(self._effects.now)
        self.rounds.close_gathering_after(round_.outer_step)
        self.gathering.remark()

    def _deadlines(self) -> None:
        now = self._effects.now
        for round_ in list(self.rounds.values()):
            if round_.phase == PULLING and now >= round_.pull_deadline:
                asked_at = round_.fixed_at
                for learner in sorted(round_.awaited):
                    member = self.roster.get(learner)
                    assert member is not None
                    member.missed_deadline(round_.outer_step)
                    self._drop(member, round_.outer_step, Reason(Why.MISSED_DEADLINE))
                if round_.phase in (GATHERING, GRACE):
                    self.pulse.starved(now - asked_at)
                    round_.patience_least = 2 * (now - asked_at)
        if self._watch.is_due(now):
            leads = self._leads()
            # where a lead is bounded everybody waits for a round in flight, and its pull deadline says who is late
            busy = leads and bool(self.rounds.in_flight())
            self._watch.check(self.gathering.reported, heard_since=self._last_commit_at if leads else 0, silence=not busy)

    # ------------------------------------------------------------ beginnings

    def _leads(self) -> bool:
        """Where a lead is bounded a member may be silent because it waits for us."""
        return self.schedule.policy(self.outer_step + 1).lead >= 0

    def _restored(self, syncer_state: SyncerState) -> None:
        """Rounds that were open at the cut are gathered again, as after a restart: what was in flight is still part of
        its learner's weights. Learners of the snapshot count as lost until they are back, with time to come."""
        self.rounds.clear()  # nobody has reported yet: what began to gather is the first outer step of a new run
        self.outer_step = self.gathering.begins_after = syncer_state.outer_step
        self._effects.mailbox.advance(syncer_state.outer_step)
        self.versions.restore(syncer_state.kept)
        self.rollback.restore(syncer_state.points)
        self.leases.restore(syncer_state.own_next, syncer_state.pool, syncer_state.leases)
        self.admission.await_back(lease.learner for lease in syncer_state.leases)

    def _started(self, incarnation: int) -> None:
        """First start, or a return from the dead: what was not stored is gathered again."""
        self._effects.mailbox.restart(incarnation)
        for outer_step in self.rounds:
            self._effects.emit(AbortRound(outer_step, Reason(Why.NOT_STORED)))
        self.rounds.clear()
        self.gathering.clear()
        self.rollback.restarted()
        self.snapshot.abandon(Reason(Why.SYNCER_RESTARTED))
        self.pulse.last_fixed_at = None
        self.admission.mark_all_lost(Reason(Why.SYNCER_RESTARTED))
