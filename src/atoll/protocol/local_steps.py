"""Dynamic local updates: how many steps each learner trains between two of its contributions.

The syncer measures, decides and pulls. Speed is the time between two reports of new steps by the syncer's own clock; what a
learner says of its step times does not count. A learner is told its number with each version that it is sent, and only saves
itself copies by it: one that trains less is not pulled from, one that trains more is pulled from all the same.
"""

from __future__ import annotations

from atoll.config import Config
from atoll.ids import OuterStep
from atoll.protocol.membership import Member, Roster
from atoll.rules import dynamic_local_steps


class LocalSteps:
    def __init__(self, config: Config, roster: Roster) -> None:
        self._interval, self._end = config.protocol.local_steps_per_round, config.total_steps
        self._roster = roster

    def begins(self, member: Member) -> int:
        """It is sent a version: so many steps it is to train on it. The number stays until the next version."""
        paces = [m.report_ema for m in self._roster.in_sync() if m.report_ema is not None]
        member.local_steps = dynamic_local_steps(self._interval, member.report_ema, paces)
        return member.local_steps

    def ready(self, member: Member, outer_step: OuterStep) -> bool:
        """It has trained them on the version that it was sent last. The last outer step takes what there is."""
        adopted = member.sent == member.held
        least = 1 if outer_step == self._end else member.local_steps or self._interval
        return adopted and all(member.account.steps_since(p, member.reported) >= least for p in range(len(member.held)))
