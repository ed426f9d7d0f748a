"""One outer step, from the first fresh report to the stored result.

    GATHERING ──quorum met──▶ GRACE ──window closed──▶ PULLING ──all in──▶ READY ──its turn──▶ STORING ──▶ committed
        ▲                       │                         │
        └──── fewer than K ─────┴──── fewer than K ───────┘   (the same outer step gathers again, also if its merge is rejected)

Gathering is serial: t+1 opens when t's participants are fixed. Pulls of at most tau rounds overlap, on different
fragments; commits keep the order of outer steps, so that "the last announced outer step" says everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from atoll.errors import PeerViolation
from atoll.ids import FragmentId, LearnerId, LocalStep, Nanos, OuterStep, seconds
from atoll.protocol.accounts import bounded_counts, capped
from atoll.protocol.counters import Count
from atoll.protocol.norms import Judged
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Contribution, Share
from atoll.rules import Policy, contribution_weight


class RoundPhase(StrEnum):
    GATHERING = "gathering"
    GRACE = "grace"
    PULLING = "pulling"
    READY = "ready"
    STORING = "storing"


class RoundStep(StrEnum):
    """What moves a round from one phase to the next."""

    QUORUM_MET = "quorum_met"
    QUORUM_LOST = "quorum_lost"
    FIXED = "fixed"
    ALL_IN = "all_in"
    TURN = "turn"


GATHERING, GRACE, PULLING, READY, STORING = RoundPhase

NEXT: dict[tuple[RoundPhase, RoundStep], RoundPhase] = {
    (GATHERING, RoundStep.QUORUM_MET): GRACE,
    (GRACE, RoundStep.QUORUM_LOST): GATHERING,
    (GRACE, RoundStep.FIXED): PULLING,
    (PULLING, RoundStep.ALL_IN): READY,
    (PULLING, RoundStep.QUORUM_LOST): GATHERING,
    (READY, RoundStep.QUORUM_LOST): GATHERING,
    (STORING, RoundStep.QUORUM_LOST): GATHERING,
    (READY, RoundStep.TURN): STORING,
}

IN_FLIGHT = (PULLING, READY, STORING)


class Round:
    __slots__ = (
        "accepted",
        "awaited",
        "counted_before",
        "counts",
        "due",
        "ended",
        "fixed_at",
        "grace_until",
        "judged",
        "opened_at",
        "outer_step",
        "participants",
        "patience_least",
        "phase",
        "policy",
        "pull_deadline",
        "quorum_at",
    )  # fmt: skip

    def __init__(self, outer_step: OuterStep, due: tuple[FragmentId, ...], policy: Policy, now: Nanos) -> None:
        self.outer_step = outer_step
        self.due = due
        self.policy = policy
        self.phase: RoundPhase = GATHERING
        self.opened_at = now
        self.quorum_at: Nanos = 0
        self.grace_until: Nanos = 0
        self.fixed_at: Nanos = 0
        self.pull_deadline: Nanos = 0
        self.patience_least: Nanos = 0
        """After answers that did not come in time: the next time they are waited for longer."""
        self.participants: tuple[LearnerId, ...] = ()
        self.counted_before: dict[LearnerId, LocalStep] = {}
        self.awaited: dict[LearnerId, set[FragmentId]] = {}
        self.ended: set[LearnerId] = set()
        """Their incarnation ended while this round was being stored: their tokens have met their fate already."""
        self.accepted: dict[FragmentId, dict[LearnerId, Contribution]] = {}
        self.counts: dict[FragmentId, dict[LearnerId, Count]] = {}
        """Of accepted contributions, what weighs: the claims, lowered to what the syncer counted."""
        self.judged: dict[FragmentId, dict[LearnerId, Judged]] = {}
        """Of accepted contributions, what was measured; empty where no tensor moves."""

    def move(self, step: RoundStep) -> None:
        to = NEXT.get((self.phase, step))
        assert to is not None, f"round {self.outer_step} is {self.phase}: {step} makes no sense"
        self.phase = to

    def fix(self, participants: tuple[LearnerId, ...], now: Nanos) -> None:
        self.move(RoundStep.FIXED)
        self.fixed_at = now
        self.participants = participants
        self.awaited = {m: set(self.due) for m in participants} if self.due else {}
        self.accepted = {p: {} for p in self.due}
        self.counts = {p: {} for p in self.due}
        self.judged = {p: {} for p in self.due}
        self._settle()

    def why_fixed(self, in_sync: int, quorum: int, everybody: bool) -> Reason:
        if everybody:
            return Reason(Why.ALL_REPORTED, f"all {in_sync} in sync reported")
        held = seconds(self.fixed_at - self.quorum_at)
        words = f"{len(self.participants)} of {in_sync}: quorum {quorum} met, window closed after {held:.3f} s"
        return Reason(Why.WINDOW_CLOSED, words)

    def objection(self, learner: LearnerId, body: Contribution) -> Reason | None:
        """Why a contribution does not belong here."""
        if self.phase != PULLING:
            return Reason(Why.LATE, f"round {self.outer_step} is {self.phase}")
        if learner not in self.participants:
            return Reason(Why.LATE, f"not a participant of round {self.outer_step}")
        if body.fragment not in self.awaited.get(learner, ()):
            return Reason(Why.LATE, f"fragment {body.fragment} of round {self.outer_step} is not awaited from it")
        return None

    def take(self, learner: LearnerId, body: Contribution, count: Count, norm: float | None = None) -> None:
        if body.fragment not in self.awaited.get(learner, ()):  # asked before any other work was done for it: `objection`
            raise PeerViolation(f"learner {learner}: {self.objection(learner, body)}")
        self.accepted[body.fragment][learner] = body
        self.counts[body.fragment][learner] = count
        if norm is not None:
            self.judged[body.fragment][learner] = Judged(norm, count.steps)
        awaited = self.awaited[learner]
        awaited.discard(body.fragment)
        if not awaited:
            del self.awaited[learner]
        self._settle()

    def drop(self, learner: LearnerId) -> None:
        """Whatever it sent or owes, it is not of this round any more."""
        self.participants = tuple(m for m in self.participants if m != learner)
        self.awaited.pop(learner, None)
        for by_fragment in (self.accepted, self.counts, self.judged):
            for by_learner in by_fragment.values():
                by_learner.pop(learner, None)
        if self.phase == PULLING and self.participants:
            self._settle()

    def regather(self, now: Nanos) -> None:
        self.move(RoundStep.QUORUM_LOST)
        self.opened_at = now
        self.participants, self.awaited, self.accepted, self.counts, self.judged = (), {}, {}, {}, {}
        self.ended.clear()

    def _settle(self) -> None:
        if not self.awaited:
            self.move(RoundStep.ALL_IN)


def shares_of(
    weighting: str, accepted: Mapping[LearnerId, Contribution], counts: Mapping[LearnerId, Count], share_max: float,
    own_data: bool,
) -> tuple[Share, ...]:
    """In LearnerId order. If nobody trained since its last adoption, they count alike. `own_data`: learners draw data that the
    syncer did not grant."""
    bounded = bounded_counts(counts, own_data=own_data)
    weights = capped({m: contribution_weight(weighting, *bounded[m]) for m in sorted(accepted)}, share_max)
    alike = sum(weights.values()) == 0
    return tuple(Share(m, 1.0 if alike else w, accepted[m].anchor, accepted[m].local_step) for m, w in weights.items())


class Rounds(dict[OuterStep, Round]):
    """Open rounds by outer step, in order and without gaps: some in flight, and of the rest the lowest gathers."""

    def gathering(self) -> Round | None:
        """The lowest round that still gathers."""
        for round_ in self.values():
            if round_.phase is GATHERING or round_.phase is GRACE:
                return round_
        return None

    def storing(self, outer_step: OuterStep) -> Round:
        round_ = self.get(outer_step)
        if round_ is None or round_.phase != STORING:
            raise PeerViolation(f"outer step {outer_step} was stored, but it is not being stored")
        return round_

    def in_flight(self) -> list[Round]:
        return [r for r in self.values() if r.phase in IN_FLIGHT]

    def last(self, committed: OuterStep) -> OuterStep:
        return max(self, default=committed)

    def block(self, round_: Round) -> bool:
        """At most tau rounds in flight, on different fragments."""
        flying = self.in_flight()
        if any(r.policy.overlap == 0 for r in flying) or (flying and round_.policy.overlap == 0):
            return True
        return len(flying) >= max(1, round_.policy.overlap) or any(set(r.due) & set(round_.due) for r in flying)

    def close_gathering_after(self, outer_step: OuterStep) -> None:
        """An earlier round gathers again: a later one had counted nobody yet. The last of all opens anew in its turn; one below
        rounds in flight would never be opened again, and stays to gather after this one."""
        for later in sorted((t for t in self if t > outer_step), reverse=True):
            if self[later].phase == GRACE:
                self[later].move(RoundStep.QUORUM_LOST)
            if self[later].phase == GATHERING and later == self.last(outer_step):
                del self[later]
