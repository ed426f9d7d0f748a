"""From time to time: which members are silent, whose joining takes too long, and who is lost for good."""

from __future__ import annotations

from collections.abc import Callable, Collection

from atoll.ids import LearnerId, Nanos, seconds
from atoll.protocol.admission import Admission
from atoll.protocol.effects import Effects
from atoll.protocol.membership import IN_SYNC, JOINING, LOST, Member, Roster
from atoll.protocol.pulse import Pulse
from atoll.protocol.reasons import Reason, Why


class Watch:
    def __init__(
        self, effects: Effects, roster: Roster, pulse: Pulse, admission: Admission, drop_from_rounds: Callable[[Member], None]
    ) -> None:
        self._effects = effects
        self._roster = roster
        self._pulse = pulse
        self._admission = admission
        self._drop_from_rounds = drop_from_rounds
        self.at: Nanos | None = None
        """When to look next."""

    def soon(self) -> None:
        if self.at is None:
            self.at = self._effects.now + self._pulse.watch_interval()

    def is_due(self, now: Nanos) -> bool:
        return self.at is not None and now >= self.at

    def check(self, fresh: Collection[LearnerId], *, heard_since: Nanos, silence: bool) -> None:
        """`heard_since`: nobody was silent before. `silence` is false while members may be silent because they wait for us."""
        now = self._effects.now
        for member in self._roster:
            if member.standing == IN_SYNC:
                if silence and member.learner not in fresh:
                    self._check_silence(member, now - max(member.heard_at, heard_since))
            elif member.standing == JOINING and member.join_deadline is not None and now >= member.join_deadline:
                self._admission.deadline_passed(member)
            elif member.standing == LOST and not member.given_up and now - member.lost_at > self._pulse.give_up_after():
                self._admission.give_up(member)
        self.at = now + self._pulse.watch_interval()

    def _check_silence(self, member: Member, quiet: Nanos) -> None:
        if quiet > self._pulse.silence_patience(member):
            self._drop_from_rounds(member)
            self._admission.mark_silent(member, Reason(Why.SILENT, f"silent for {seconds(quiet):.1f} s"))
