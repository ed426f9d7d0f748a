"""The first half of a round: fresh reports are gathered, a grace window opens at the quorum, and the participants are fixed."""

from __future__ import annotations

from atoll.config import Config
from atoll.ids import LearnerId, Nanos, OuterStep, nanos
from atoll.protocol.effects import Effects
from atoll.protocol.local_steps import LocalSteps
from atoll.protocol.membership import IN_SYNC, Member, Roster
from atoll.protocol.pulse import Pulse
from atoll.protocol.round import GATHERING, GRACE, Round, Rounds, RoundStep
from atoll.protocol.versions import Versions
from atoll.protocol.vocabulary import FixParticipants, Pull
from atoll.rules import Schedule, fresh, learner_overlap, paced_until


class Gathering:
    def __init__(
        self, config: Config, schedule: Schedule, effects: Effects, roster: Roster, rounds: Rounds, pulse: Pulse,
        versions: Versions, local_steps: LocalSteps | None = None,
    ) -> None:  # fmt: skip
        self._config, self._schedule = config, schedule
        self._effects, self._roster, self._rounds, self._pulse, self._versions = effects, roster, rounds, pulse, versions
        self._local_steps = local_steps
        self.reported: set[LearnerId] = set()
        """Whose reports are fresh for the round that gathers."""
        self.hold_until: Nanos | None = None
        self._started_up = False
        self._start_wait_until: Nanos | None = None
        self.begins_after: OuterStep = 0
        """Of a resumed run: the outer step that it goes on from."""

    def clear(self) -> None:
        self.reported.clear()
        self.hold_until = None

    def heard_hello(self) -> None:
        if self._start_wait_until is None:
            self._start_wait_until = self._effects.now + nanos(self._config.limits.start_wait_seconds)

    def mark(self, member: Member) -> None:
        if member.standing != IN_SYNC or member.learner in self.reported:
            return
        round_ = self._rounds.gathering()
        if round_ is not None:
            self._mark(member, round_)

    def _mark(self, member: Member, round_: Round) -> None:
        stands = round_.policy.exact or round_.policy.lead >= 0  # who may wait for a round is counted where it stands
        if fresh(stands, round_.outer_step, member.position, member.reported, member.counted):
            self.reported.add(member.learner)

    def remark(self) -> None:
        self.reported.clear()
        round_ = self._rounds.gathering()
        if round_ is not None:
            for member in self._roster.in_sync():
                self._mark(member, round_)

    def quorum(self, round_: Round) -> int:
        policy = round_.policy
        return self._roster.quorum_of_all(elastic=self._config.protocol.elastic) if policy.quorum_all else policy.quorum

    def advance(self, committed: OuterStep) -> bool:
        """Fixes the participants of the round that gathers, if it is time. True if it did."""
        round_ = self._rounds.gathering() or self._open_next(committed)
        self.hold_until = None
        if round_ is None:
            return False
        if len(self.reported) < self.quorum(round_) or not (self._started_up or self._may_start(round_)):
            if round_.phase == GRACE:
                round_.move(RoundStep.QUORUM_LOST)
            return False
        now = self._effects.now
        if round_.phase == GATHERING:
            round_.move(RoundStep.QUORUM_MET)
            round_.quorum_at = now
            round_.grace_until = now + self._pulse.grace(round_)
        hold = paced_until(self._pulse.last_fixed_at, self._config.protocol.pace, self._pulse.step_time)
        if round_.grace_until > hold and not self._everybody_reported():
            hold = round_.grace_until
        if now < hold:
            self.hold_until = hold
            return False
        if self._local_steps is not None:
            round_.due = self._schedule.due(round_.outer_step)
            if not any(self._invited(round_)):
                round_.due = ()
        if self._rounds.block(round_):
            return False
        self._fix(round_, self._everybody_reported())
        return True

    def _everybody_reported(self) -> bool:
        return len(self.reported) == len(self._roster.in_sync())

    def _open_next(self, committed: OuterStep) -> Round | None:
        outer_step = self._rounds.last(committed) + 1
        if outer_step > self._config.total_steps:
            return None
        round_ = Round(outer_step, self._schedule.due(outer_step), self._schedule.policy(outer_step), self._effects.now)
        self._rounds[outer_step] = round_
        self.remark()
        return round_

    def _may_start(self, round_: Round) -> bool:
        """The first round waits for the declared learners; nobody could ever equalise a start alone."""
        until, begun = self._start_wait_until or 0, round_.outer_step > self.begins_after + 1
        self._started_up = len(self._roster.in_sync()) >= self._config.learners or begun or self._effects.now >= until
        if not self._started_up:
            self.hold_until = until
        return self._started_up

    def _fix(self, round_: Round, everybody: bool) -> None:
        now = self._effects.now
        reported, in_step = self._invited(round_)
        participants = tuple(sorted((*reported, *in_step)))
        invited = [member for member in self._roster if member.learner in participants]
        for member in invited:
            round_.counted_before[member.learner] = member.counted
            member.counted = member.reported
            if round_.due:
                self._pulse.asked(member, round_.outer_step, now)
        round_.fix(participants, now)
        round_.pull_deadline = now + max(self._pulse.pull_patience(invited, self.quorum(round_)), round_.patience_least)
        why = round_.why_fixed(len(self._roster.in_sync()), self.quorum(round_), everybody)
        self._effects.emit(FixParticipants(round_.outer_step, round_.due, participants, why))
        if round_.due:
            for member in invited:
                behind = learner_overlap(self._config, round_.policy, member.learner) if round_.policy.exact else 0
                self._versions.lend(member, round_.due, behind)
                self._effects.send(member.learner, Pull(round_.outer_step, round_.due, member.learner in in_step))
        self._pulse.fixed(now, self._roster.in_sync())
        if (following := self._rounds.gathering()) is not None:
            following.opened_at = now
        self.remark()

    def _invited(self, round_: Round) -> tuple[tuple[LearnerId, ...], tuple[LearnerId, ...]]:
        """Who reported, and who is in the middle of a step; with dynamic local updates those who have trained their steps."""
        reported = self._roster.invited(self.reported, round_.outer_step, self.quorum(round_), round_.policy)
        in_step = self._in_mid_step(round_)
        if self._local_steps is None or not round_.due:
            return reported, in_step
        ready = {m.learner for m in self._roster.in_sync() if self._local_steps.ready(m, round_.outer_step)}
        return tuple(m for m in reported if m in ready), tuple(m for m in in_step if m in ready)

    def _in_mid_step(self, round_: Round) -> tuple[LearnerId, ...]:
        """Who has not reported since it was last counted, but trained what is due since that was last taken: it gives the copy of
        its last boundary. Else the round's result would overwrite an interval of its work because one step took a little longer.
        It counts for no quorum, and nobody waits for its boundary; one that hangs misses its deadline, and is not asked again
        for a while. Without a grace window only those who reported take part."""
        if self._config.protocol.grace == "none" or round_.policy.exact or round_.policy.lead >= 0 or not round_.due:
            return ()
        return tuple(
            member.learner for member in self._roster.in_sync()
            if member.learner not in self.reported and member.skipped_until < round_.outer_step
            and member.account.has_untaken(round_.due, member.reported)
        )  # fmt: skip
