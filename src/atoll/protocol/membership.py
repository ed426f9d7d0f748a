"""Who is here, and how far along. A member's standing moves only along the arrows of `NEXT`.

    joining ──entered──▶ in_sync ──unheard──▶ silent
       ▲                    │                    │ (any) ──lost──▶ lost ──hello──▶ joining
       └──────recover───────┴────────────────────┘ (any) ──left──▶ left ──hello──▶ joining
                                                   (any) ──expelled──▶ expelled, for good

A *silent* member may still be training (its connection stands); a *lost* one's connection closed; one that *left*
said so. Only members in sync are counted, pulled from and asked to serve a recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from enum import StrEnum

from atoll.errors import PeerViolation
from atoll.ids import FragmentId, Incarnation, LearnerId, LocalStep, Nanos, OuterStep
from atoll.protocol.accounts import Account
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import NO_VERSION, Standing
from atoll.rules import Policy

JOINING, IN_SYNC, SILENT, LOST, LEFT, EXPELLED = Standing


class StandingChange(StrEnum):
    """What moves a member from one standing to another."""

    ENTERED = "entered"
    UNHEARD = "unheard"
    RECOVER = "recover"
    HELLO = "hello"
    LOST = "lost"
    LEFT = "left"
    EXPELLED = "expelled"


NEXT: dict[tuple[Standing, StandingChange], Standing] = {
    (JOINING, StandingChange.ENTERED): IN_SYNC,
    (SILENT, StandingChange.ENTERED): IN_SYNC,
    (IN_SYNC, StandingChange.ENTERED): IN_SYNC,
    (IN_SYNC, StandingChange.UNHEARD): SILENT,
    **{(s, StandingChange.RECOVER): JOINING for s in (JOINING, IN_SYNC, SILENT)},
    **{(s, StandingChange.HELLO): JOINING for s in (JOINING, IN_SYNC, SILENT, LOST, LEFT)},
    **{(s, StandingChange.LOST): LOST for s in (JOINING, IN_SYNC, SILENT, LOST)},
    **{(s, StandingChange.LEFT): LEFT for s in (JOINING, IN_SYNC, SILENT)},
    **{(s, StandingChange.EXPELLED): EXPELLED for s in (JOINING, IN_SYNC, SILENT, LOST)},
    (EXPELLED, StandingChange.LOST): EXPELLED,
    (LEFT, StandingChange.LOST): LEFT,
    (LEFT, StandingChange.LEFT): LEFT,
}


SKIPPED_MAX = 64
"""Outer steps: a learner that keeps missing deadlines is asked again at least this often."""


class Member:
    """What the syncer knows of one learner."""

    __slots__ = (
        "_moved",
        "account",
        "accusers",
        "born_at",
        "connected",
        "counted",
        "deferred",
        "given_up",
        "heard_at",
        "held",
        "incarnation",
        "join_deadline",
        "join_reason",
        "joined_at",
        "learner",
        "lent",
        "loaded_at",
        "local_steps",
        "lost_at",
        "missed",
        "offences",
        "peer",
        "position",
        "pull_time",
        "pulls",
        "report_ema",
        "reported",
        "reported_at",
        "reports",
        "returns",
        "samples",
        "seen",
        "sent",
        "session",
        "skipped_until",
        "source",
        "sources_failed",
        "standing",
        "step_ema",
        "suspicions",
        "ticket",
        "tokens",
        "tried",
    )  # fmt: skip

    def __init__(self, learner: LearnerId, fragments: int, moved: Callable[[], None] = lambda: None) -> None:
        self.learner = learner
        self._moved = moved
        self.incarnation: Incarnation = -1
        self.standing: Standing = JOINING
        self.connected = False
        self.session = 0
        self.reported: LocalStep = 0
        self.counted: LocalStep = 0
        self.position: OuterStep = 0
        self.tokens = 0
        self.samples = 0
        self.step_ema: Nanos | None = None
        self.report_ema: Nanos | None = None
        """Between two reports of new steps, by the syncer's clock."""
        self.local_steps = 0
        """Dynamic local updates: how many it was told to train on the version that it was sent last."""
        self.born_at: Nanos = 0
        self.heard_at: Nanos = 0
        self.lost_at: Nanos = 0
        self.pulls: dict[OuterStep, Nanos] = {}
        """When it was asked, by round, as long as it owes an answer."""
        self.given_up = False
        self.returns = False
        """Of one that left: it means to come back."""
        self.suspicions = 0
        self.offences = 0
        """Broken rules; accepted contributions pay them off."""
        self.account = Account(fragments)
        self.reports = 0
        """Of new steps, since its Hello."""
        self.reported_at: Nanos = 0
        self.pull_time: Nanos | None = None
        self.missed = 0
        """Pull deadlines missed in a row."""
        self.skipped_until: OuterStep = 0
        """Up to this outer step it is invited only where the quorum needs it."""
        self.held: list[OuterStep] = [NO_VERSION] * fragments
        self.sent: list[OuterStep] = [NO_VERSION] * fragments
        self.lent: dict[FragmentId, OuterStep] = {}
        """What it held when it was pulled from: its answer may be a difference to that, though a report of a newer adoption
        overtakes it."""
        self.deferred: dict[FragmentId, OuterStep] = {}
        # joining
        self.ticket = 0
        self.peer: LearnerId = -1
        self.tried: set[LearnerId] = set()
        self.joined_at: Nanos = 0
        self.join_deadline: Nanos | None = None
        self.join_reason = Reason(Why.JOINS)
        self.seen: OuterStep = 0
        # recovery states
        self.sources_failed = 0
        self.source: LearnerId = -1
        """The peer whose state it loaded last, at `loaded_at`; -1: Theta."""
        self.loaded_at: LocalStep = 0
        self.accusers: set[LearnerId] = set()
        """Learners to which this one sent a bad recovery state. Kept over incarnations: a restart does not clear it."""

    def missed_deadline(self, outer_step: OuterStep) -> None:
        self.missed += 1
        self.skipped_until = outer_step + min(2**self.missed, SKIPPED_MAX)

    def move(self, change: StandingChange) -> None:
        to = NEXT.get((self.standing, change))
        if to is None:
            raise PeerViolation(f"learner {self.learner} is {self.standing}: {change} makes no sense")
        self.standing = to
        self._moved()


class Roster:
    """Members by id, always walked in LearnerId order: nothing may depend on who arrived first."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._members: dict[LearnerId, Member] = {}
        self._in_sync: list[Member] | None = None
        self.entering: set[LearnerId] = set()
        """Who has loaded and waits to be let in: asked at every event."""

    def get(self, learner: LearnerId) -> Member | None:
        return self._members.get(learner)

    def admit(self, learner: LearnerId) -> Member:
        if learner not in self._members:
            self._members[learner] = Member(learner, self._fragments, self._forget_in_sync)
            self._members = dict(sorted(self._members.items()))
        return self._members[learner]

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def in_sync(self) -> list[Member]:
        """Asked at every report, changed by few events: kept until somebody's standing moves."""
        if self._in_sync is None:
            self._in_sync = [m for m in self._members.values() if m.standing == IN_SYNC]
        return self._in_sync

    def _forget_in_sync(self) -> None:
        self._in_sync = None

    def invited(
        self, reported: Collection[LearnerId], outer_step: OuterStep, quorum: int, policy: Policy
    ) -> tuple[LearnerId, ...]:
        """Who reported, without those who missed their last deadlines, unless the quorum needs them or adoption is exact."""
        late = {m for m in reported if self._members[m].skipped_until >= outer_step}
        needed = policy.exact or len(reported) - len(late) < quorum
        return tuple(sorted(reported if needed else set(reported) - late))

    def quorum_of_all(self, *, elastic: bool) -> int:
        """How many reports a round of "all" needs. That shrinks with the members in sync; where `elastic` is false only those
        that left are not waited for."""
        if not elastic:
            return max(1, sum(1 for m in self if m.standing not in (LEFT, EXPELLED) and m.incarnation >= 0))
        return max(1, len(self.in_sync()))

    def connected(self) -> list[Member]:
        return [m for m in self._members.values() if m.connected]
