"""Joining, rejoining and falling silent: the syncer's side of recovery.

A newcomer says Hello and waits for the first broadcast after it (stamped t_s); then it gets a ticket for a healthy peer,
which answers once it has itself seen t_s. Where there is no broadcast in time or no peer to ask, the syncer sends all of
Theta and the inner moments start fresh; the reason goes on the tape. A member that merely lost its connection, and whose
versions are all still kept, only catches up: a short stall needs no recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from atoll.config import Config
from atoll.ids import SYNCER, Incarnation, LearnerId, OuterStep, nanos
from atoll.protocol.accounts import credit_while_away
from atoll.protocol.effects import Effects
from atoll.protocol.leases import Leases
from atoll.protocol.ledger import LEFT as FATE_LEFT
from atoll.protocol.ledger import LOST as FATE_LOST
from atoll.protocol.ledger import Ledger
from atoll.protocol.membership import JOINING, Member, Roster, StandingChange
from atoll.protocol.pulse import Pulse
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.versions import Versions
from atoll.protocol.vocabulary import (
    NO_VERSION,
    Enter,
    Grant,
    Hello,
    Loaded,
    Membership,
    Recover,
    Recovered,
    RecoveryFailed,
    Reissue,
    Serve,
    TakeRollback,
    TakeTheta,
    Ticket,
    Welcome,
)  # fmt: skip

SOURCES_MAX = 2
"""Failed sources of one recovery, after which Theta is sent: each costs the newcomer the transfer of a whole state."""
ACCUSERS_MAX = 2
"""Learners that a source sent a bad state to, before it serves no others either. One accuser could be lying: it is believed for
its own recoveries, and cannot take away the sources of all others."""


class Admission:
    def __init__(
        self, config: Config, effects: Effects, roster: Roster, versions: Versions, ledger: Ledger, leases: Leases,
        pulse: Pulse, outer_step: Callable[[], OuterStep],
    ) -> None:  # fmt: skip
        self._config = config
        self._effects = effects
        self._roster = roster
        self._versions = versions
        self._ledger = ledger
        self._leases = leases
        self._pulse = pulse
        self._outer_step = outer_step
        self._tickets = 0

    # ------------------------------------------------------------ coming

    def hello(self, learner: LearnerId, incarnation: Incarnation, body: Hello) -> Member:
        member = self._roster.admit(learner)
        if body.needs_state:
            self._blame_source(member, body.reason)
        if incarnation != member.incarnation:
            claims = not body.needs_state and self._leases.claim(learner, body.left, body.own_next, body.local_step)
            self._begin_incarnation(member, incarnation, keeps_leases=claims)
            # nothing that another process trained counts; a resumed one brings what its snapshot had not delivered
            member.account.begins(body.local_step - (2 * self._config.protocol.local_steps_per_round if claims else 0))
            self._ledger.begins(learner, body.tokens)
        else:
            away, pace = self._effects.now - member.heard_at, member.step_ema or self._pulse.step_time
            credit = credit_while_away(away, pace, self._config.protocol.local_steps_per_round)
            member.account.returns(body.local_step, member.reported, credit)
            self._leases.square(
                learner, body.left, body.own_next, body.local_step, body.grants, broke=not member.connected
            )
        if not member.connected:
            member.pulls.clear()  # what was asked on a connection that broke is not answered any more
        self._effects.send(learner, Welcome(self._outer_step()))
        member.connected, member.given_up, member.heard_at = True, False, self._effects.now
        member.reported, member.reports = body.local_step, 0
        self._ledger.trained(learner, body.tokens)
        self._versions.restart_channel(member, body.held)
        self.forget_joining(member)
        stand(self._effects, member, StandingChange.HELLO, body.reason)
        member.joined_at, member.join_reason = self._effects.now, body.reason
        if body.needs_state:
            self._begin_recovery(member)
        elif self._versions.all_kept(body.held):
            self._roster.entering.add(member.learner)  # nothing to load: it catches up by announcements
        else:
            self.recover(member, Reason(Why.VERSION_FORGOTTEN, "its versions were forgotten while it was away"))
        return member

    def _begin_incarnation(self, member: Member, incarnation: Incarnation, *, keeps_leases: bool) -> None:
        """The old incarnation is proved dead: its tokens in flight are lost, its leases go back."""
        self._ledger.closed(member.learner, FATE_LOST)
        if not keeps_leases:
            self.release_leases(member)
        member.incarnation, member.born_at = incarnation, self._effects.now
        member.step_ema, member.pull_time, member.missed, member.skipped_until = None, None, 0, 0
        member.report_ema = None
        member.counted = member.reported = member.tokens = member.samples = member.suspicions = 0

    def _begin_recovery(self, member: Member) -> None:
        self._versions.restart_channel(member, [NO_VERSION] * self._config.protocol.fragments)
        if self._outer_step() == 0:
            self._send_theta(member, Reason(Why.NOTHING_MERGED))
        elif not self._peers(member):
            self._send_theta(member, Reason(Why.NO_PEER))
        else:
            # It is sent all that is announced from now on, so a state that has seen all that was announced before lacks nothing.
            member.seen = self._outer_step()
            self._give_ticket(member)

    def _peers(self, newcomer: Member) -> list[Member]:
        return [
            m for m in self._roster.in_sync()
            if m is not newcomer and m.connected and m.learner not in newcomer.tried and _is_trusted(m, newcomer.learner)
        ]  # fmt: skip

    def _give_ticket(self, member: Member) -> None:
        if member.sources_failed >= SOURCES_MAX:
            self._send_theta(member, Reason(Why.SOURCES_FAILED))
            return
        serving = [m.peer for m in self._roster if m.standing == JOINING and m.peer >= 0 and m is not member]
        room = self._config.limits.serves_max
        peers = [p for p in self._peers(member) if serving.count(p.learner) < room]
        if not peers:
            self._send_theta(member, Reason(Why.NO_PEER_LEFT))
            return
        # the least busy, then the lowest id: a choice that replay can repeat
        peer = min(peers, key=lambda p: (serving.count(p.learner), p.learner))
        self._tickets += 1
        member.ticket, member.peer = self._tickets, peer.learner
        patience = self._pulse.transfer_patience()
        member.join_deadline = self._effects.now + 2 * patience  # the newcomer gives up first; this is for one that cannot say so
        self._effects.send(peer.learner, Serve(member.ticket, member.learner, member.seen))
        self._effects.send(member.learner, Ticket(member.ticket, peer.learner, member.seen, patience))

    def _send_theta(self, member: Member, reason: Reason) -> None:
        self._tickets += 1
        member.ticket, member.peer = self._tickets, -1
        member.join_deadline = None
        self._versions.announce_missing(member)
        self._effects.send(member.learner, TakeTheta(member.ticket, reason))

    def failed(self, member: Member, body: RecoveryFailed) -> None:
        if member.standing == JOINING and body.ticket == member.ticket and member.peer >= 0:
            if body.reason.why is Why.BAD_STATE:
                self._roster.admit(member.peer).accusers.add(member.learner)
            member.tried.add(member.peer)
            member.sources_failed += 1
            self._give_ticket(member)

    def _blame_source(self, member: Member, reason: Reason) -> None:
        """A state that passed every check may still turn into NaN, or into outliers, within the first rounds: NaN is noticed
        where a fragment is staged, which takes up to H steps, and outliers when they were pulled."""
        fresh = member.reported - member.loaded_at <= 2 * self._config.protocol.local_steps_per_round
        if member.source >= 0 and fresh and reason.why in (Why.POISONED, Why.OUTLIER):
            self._roster.admit(member.source).accusers.add(member.learner)
        member.source = -1

    def loaded(self, member: Member, body: Loaded) -> None:
        if member.standing != JOINING or body.ticket != member.ticket or len(body.held) != len(member.held):
            return
        if not all(0 <= v <= newest for v, newest in zip(body.held, self._versions.all_newest(), strict=True)):
            return
        self._versions.restart_channel(member, body.held)
        member.reported, member.heard_at = body.local_step, self._effects.now
        member.source, member.loaded_at = member.peer, body.local_step
        member.account.begins(body.local_step)
        self._roster.entering.add(member.learner)
        nanos = self._effects.now - member.joined_at
        source = SYNCER if body.source == SYNCER else body.source
        self._effects.emit(Recovered(member.learner, source, nanos, member.join_reason))

    def enter(self, member: Member, outer_step: OuterStep) -> None:
        """Send what it misses, then the word: FIFO makes the order hold."""
        self._roster.entering.discard(member.learner)
        member.join_deadline = None
        member.session += 1
        member.counted = member.reported
        member.position = 0
        member.heard_at = self._effects.now
        stand(self._effects, member, StandingChange.ENTERED, Reason(Why.ENTERED, f"stands at outer step {outer_step}"))
        self._versions.announce_missing(member)
        self.top_up(member)
        self._effects.send(member.learner, Enter(member.session, outer_step))

    def top_up(self, member: Member) -> None:
        units = self._leases.top_up(member.learner)
        if units:
            self._effects.send(member.learner, Grant(units, self._leases.own_next(member.learner)))

    # ------------------------------------------------------------ going

    def mark_lost(self, member: Member, reason: Reason) -> None:
        member.connected = False
        member.lost_at = self._effects.now
        self.forget_joining(member)
        stand(self._effects, member, StandingChange.LOST, reason)
        self._replace_source(member.learner)

    def mark_all_lost(self, reason: Reason) -> None:
        """This syncer was killed: every connection broke."""
        for member in self._roster.connected():
            member.connected = False
            member.lost_at = self._effects.now
            self.forget_joining(member)
            stand(self._effects, member, StandingChange.LOST, reason)

    def await_back(self, learners: Iterable[LearnerId]) -> None:
        """Learners of a snapshot: lost until they are back, with time to come."""
        for learner in learners:
            member = self._roster.admit(learner)
            stand(self._effects, member, StandingChange.LOST, Reason(Why.RESUMED))
            member.lost_at = self._effects.now + nanos(self._config.limits.start_wait_seconds)

    def mark_left(self, member: Member, reason: Reason) -> None:
        stand(self._effects, member, StandingChange.LEFT, reason)
        member.returns = reason.why is Why.LEAVES_FOR_A_WHILE
        member.connected = False  # its incarnation is over: nothing it says counts any more, nothing is sent to it
        self._ledger.closed(member.learner, FATE_LEFT)
        self.release_leases(member)
        self.forget_joining(member)
        self._replace_source(member.learner)

    def expel(self, member: Member, reason: Reason) -> None:
        """It broke the rules too often. Its place stays taken, so that nobody comes back under its id."""
        stand(self._effects, member, StandingChange.EXPELLED, reason)
        member.connected = False
        self._ledger.closed(member.learner, FATE_LOST)
        self.release_leases(member)
        self.forget_joining(member)
        self._replace_source(member.learner)

    def mark_silent(self, member: Member, reason: Reason) -> None:
        stand(self._effects, member, StandingChange.UNHEARD, reason)
        self._replace_source(member.learner)

    def recover(self, member: Member, reason: Reason) -> None:
        self.forget_joining(member)
        stand(self._effects, member, StandingChange.RECOVER, reason)
        self._effects.send(member.learner, Recover(reason))
        self._replace_source(member.learner)

    def roll_back(self, member: Member, outer_step: OuterStep, reason: Reason, *, reset_optimizer: bool) -> None:
        """It loads the versions of the rollback, sent in full, and enters again: what it says of rounds before is not counted."""
        self.forget_joining(member)
        stand(self._effects, member, StandingChange.RECOVER, reason)
        member.joined_at, member.join_reason = self._effects.now, reason
        member.pulls.clear()
        self._tickets += 1
        member.ticket = self._tickets
        self._versions.restart_channel(member, member.held)
        self._versions.announce_missing(member)
        self._effects.send(member.learner, TakeRollback(member.ticket, outer_step, reset_optimizer, reason))

    def readmit(self, member: Member) -> None:
        """A silent member is heard again: it catches up if its versions are still kept, else it recovers."""
        if self._versions.all_kept(member.held):
            self._roster.entering.add(member.learner)
        else:
            self.recover(member, Reason(Why.VERSION_FORGOTTEN, "its versions were forgotten while it was silent"))

    def give_up(self, member: Member) -> None:
        """Lost for long: its data goes to others and nothing is kept for it any more."""
        member.given_up = True
        self.release_leases(member)

    def release_leases(self, member: Member) -> None:
        units, repeats = self._leases.release(member.learner)
        if units:
            self._effects.emit(Reissue(member.learner, units, repeats))

    def _replace_source(self, peer: LearnerId) -> None:
        """Recovery survives the death of its source."""
        for member in self._roster:
            if member.standing == JOINING and member.peer == peer and member.learner not in self._roster.entering:
                member.tried.add(peer)
                self._give_ticket(member)

    def deadline_passed(self, member: Member) -> None:
        """A transfer that nobody hears of: Theta itself."""
        self._send_theta(member, Reason(Why.TRANSFER_SILENT))

    def forget_joining(self, member: Member) -> None:
        self._roster.entering.discard(member.learner)
        member.peer, member.ticket, member.join_deadline = -1, 0, None
        member.tried = set()
        member.sources_failed = 0


def _is_trusted(source: Member, newcomer: LearnerId) -> bool:
    return newcomer not in source.accusers and len(source.accusers) < ACCUSERS_MAX


def stand(effects: Effects, member: Member, change: StandingChange, reason: Reason) -> None:
    before = member.standing
    member.move(change)
    if member.standing != before:
        effects.emit(Membership(member.learner, member.standing, reason))

