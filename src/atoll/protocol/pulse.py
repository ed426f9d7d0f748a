"""What the syncer measured of time, and the deadlines that follow from it: the user has no timeout to guess."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from atoll.config import Config
from atoll.ids import Nanos, OuterStep, nanos
from atoll.protocol.membership import Member
from atoll.protocol.round import Round
from atoll.rules import ema, grace_window, median_nanos

PULLS_KEPT = 64
"""Of one member, so many that it owes an answer to: more than ever overlap. What is older is not timed."""


JITTER: Nanos = nanos(0.1)
"""Time between reports below this says nothing: the network and a busy machine shift them by as much."""


LATE_REPORTS = 2
"""After it is back, a learner's first report is of a step that began before, and comes late: neither it nor the time to the next
says how long a step takes. Such steps count as no longer than usual."""


STALL = 4
"""A report that took this many times as long as usual counts as that."""


class Pulse:
    """Moving averages: a step, a round, a pull, and from participants fixed to the first reported adoption."""

    def __init__(self, config: Config) -> None:
        self._protocol = config.protocol
        self._limits = config.limits
        self._floor = nanos(config.limits.patience_seconds)
        self.step_time: Nanos = 0
        """Median over the learners of their own averages."""
        self.last_fixed_at: Nanos | None = None
        self._round_time: Nanos | None = None
        self._sync_time: Nanos | None = None
        self._longest: Nanos = nanos(config.limits.first_pull_seconds)
        self._unadopted: dict[OuterStep, Nanos] = {}

    # ------------------------------------------------------------ measuring

    def reported(self, member: Member, step: Nanos, now: Nanos) -> None:
        """A step takes no longer than the time between two reports, which the syncer measures: this one, or twice the mean
        (reports may arrive in bursts). A learner that claims more must not stretch everybody's pace."""
        since = member.joined_at if member.reports == 0 else member.reported_at
        if member.reports > LATE_REPORTS:  # a stall says nothing of speed
            gap = now - since if member.report_ema is None else min(now - since, STALL * member.report_ema)
            member.report_ema = ema(member.report_ema, gap, self._protocol.ema_weight)
        member.reports += 1
        member.reported_at = now
        most = max(now - since, 2 * (now - member.joined_at) // member.reports, JITTER)
        if member.reports <= LATE_REPORTS:
            most = max(most, now - member.born_at if member.step_ema is None else member.step_ema)
        step = min(step, most)
        member.step_ema = ema(member.step_ema, step, self._protocol.ema_weight)

    def fixed(self, now: Nanos, in_sync: Iterable[Member]) -> None:
        if self.last_fixed_at is not None:
            # a stall is not how long a round takes: it must not stretch every deadline after it
            took = now - self.last_fixed_at
            usual = max(self.step_time, self._round_time or 0)
            self._round_time = ema(self._round_time, min(took, 4 * usual) if usual else took, self._protocol.ema_weight)
        self.last_fixed_at = now
        self.step_time = median_nanos(m.step_ema for m in in_sync)

    def asked(self, member: Member, outer_step: OuterStep, now: Nanos) -> None:
        """One that still owes its answer was asked when it was asked first: that is what it will answer first."""
        member.pulls.setdefault(outer_step, now)
        if len(member.pulls) > PULLS_KEPT:
            del member.pulls[min(member.pulls)]

    def answered(self, member: Member, outer_step: OuterStep, now: Nanos, *, whole: bool) -> None:
        """How long a pull took, up at once, down slowly. Each counts once, `whole` when nothing more is due of it; an answer that
        was not asked for does not count: it must not stretch everybody's deadlines."""
        asked = member.pulls.get(outer_step)
        if asked is not None:
            took = min(now - asked, self._longest)
            member.pull_time = max(took, ema(member.pull_time, took, self._protocol.ema_weight))
            if whole:
                del member.pulls[outer_step]

    def starved(self, waited: Nanos) -> None:
        """A round fell apart for want of answers: those who are needed may take longer than anybody was believed to. Only so
        much longer than was really waited, and not because somebody dawdles whom the round can do without."""
        self._longest = max(self._longest, 4 * waited)

    def announced(self, round_: Round) -> None:
        self._unadopted[round_.outer_step] = round_.fixed_at
        for old in [t for t in self._unadopted if t <= round_.outer_step - 4 * self._protocol.fragments]:
            del self._unadopted[old]

    def adopted(self, version: OuterStep, now: Nanos) -> None:
        fixed_at = self._unadopted.pop(version, None)
        if fixed_at is not None:
            self._sync_time = ema(self._sync_time, now - fixed_at, self._protocol.ema_weight)

    # ------------------------------------------------------------ deadlines

    def expected_round(self) -> Nanos:
        return max(self._round_time or 0, self.step_time, nanos(0.001))

    def grace(self, round_: Round) -> Nanos:
        p = self._protocol
        if p.grace == "none" or round_.policy.plain_average:
            return 0
        quorum_time = round_.quorum_at - round_.opened_at
        return grace_window(round_.policy.overlap, self.step_time, quorum_time, self._sync_time or 0, p.grace_gamma)

    def pull_patience(self, invited: Sequence[Member], needed: int) -> Nanos:
        """The slowest answers decide how long to wait, but where a round can do without them, not those of the slowest learner
        of four or more (of every eight)."""
        times = sorted(m.pull_time for m in invited if m.pull_time is not None)
        if not times:
            return nanos(self._limits.first_pull_seconds)
        spare = min(max(1, len(times) // 8), len(invited) - needed) if len(times) >= 4 else 0
        slowest = times[len(times) - 1 - max(0, spare)]
        return max(self._floor, 4 * slowest + 4 * max(self.step_time, 1))

    def silence_patience(self, member: Member) -> Nanos:
        if member.step_ema is None:
            return nanos(self._limits.first_pull_seconds)
        away = 2 * max(member.pull_time or 0, self._sync_time or 0)  # a trip there and back, measured: distance is no silence
        return max(self._floor, int(self._limits.silence_steps * max(member.step_ema, self.step_time)) + away)

    def transfer_patience(self) -> Nanos:
        """For a peer's state to arrive."""
        steps = self._limits.recovery_intervals * max(2, self._protocol.local_steps_per_round)
        return max(self._floor, int(steps * self.expected_round()))

    def give_up_after(self) -> Nanos:
        return max(self._floor, 2 * self._protocol.local_steps_per_round * self.expected_round())

    def watch_interval(self) -> Nanos:
        return self.step_time or nanos(1.0)
