"""What a learner that breaks the rules loses: the message, its part in a round, its weights, at last its place."""

from __future__ import annotations

from typing import Protocol

from atoll.config import Config
from atoll.ids import LearnerId, OuterStep
from atoll.protocol.admission import Admission
from atoll.protocol.effects import Effects
from atoll.protocol.membership import EXPELLED, IN_SYNC, JOINING, LEFT, SILENT, Member, Roster
from atoll.protocol.reasons import OFFENCES, Reason, Why
from atoll.protocol.vocabulary import Refuse


class DropFromRound(Protocol):
    def __call__(self, member: Member, outer_step: OuterStep, reason: Reason) -> None: ...


class DropFromRounds(Protocol):
    def __call__(self, member: Member) -> None: ...


class EndIncarnation(Protocol):
    def __call__(self, learner: LearnerId) -> None: ...


class Discipline:
    def __init__(
        self, config: Config, effects: Effects, roster: Roster, admission: Admission, drop: DropFromRound,
        drop_from_rounds: DropFromRounds, end_incarnation: EndIncarnation,
    ) -> None:  # fmt: skip
        self._limits = config.limits
        self._effects = effects
        self._roster = roster
        self._admission = admission
        self._drop = drop
        self._drop_from_rounds = drop_from_rounds
        self._end_incarnation = end_incarnation

    def refuse(self, learner: LearnerId, reason: Reason, *, disconnect: bool) -> None:
        self._effects.emit(Refuse(learner, reason, disconnect))
        member = self._roster.get(learner)
        if member is None or reason.why not in OFFENCES or member.standing in (LEFT, EXPELLED):
            return
        member.offences += 1
        if member.offences >= self._limits.offences_max:
            self._expel(member, Reason(Why.EXPELLED, f"{member.offences} times, the last time: {reason}"))

    def _expel(self, member: Member, reason: Reason) -> None:
        self._drop_from_rounds(member)
        self._end_incarnation(member.learner)
        self._admission.expel(member, reason)
        self._effects.emit(Refuse(member.learner, reason, disconnect=True))

    def suspect(self, member: Member, outer_step: OuterStep, reason: Reason) -> None:
        """Once may be a bad batch, and costs only its part in the round; after `suspicions_max` in a row it must recover."""
        if member.standing == EXPELLED:
            return
        member.suspicions += 1
        if member.suspicions < self._limits.suspicions_max:
            self._drop(member, outer_step, reason)
        else:
            self.send_to_recover(member, reason)

    def send_to_recover(self, member: Member, reason: Reason) -> None:
        if member.standing == EXPELLED:
            return
        member.suspicions = 0
        self._drop_from_rounds(member)
        if member.connected and member.standing in (JOINING, IN_SYNC, SILENT):
            self._admission.recover(member, reason)
