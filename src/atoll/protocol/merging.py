"""A round's contributions become one: what each weighs, which are not usual, and how far Theta may move by it."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.config import CUSTOM, Config
from atoll.ids import FragmentId, LearnerId
from atoll.protocol.counters import Count
from atoll.protocol.effects import Effects
from atoll.protocol.ledger import Ledger
from atoll.protocol.membership import Roster
from atoll.protocol.norms import Norms
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.round import Round, shares_of
from atoll.protocol.versions import Versions
from atoll.protocol.vocabulary import Contribution, Measure, Merge, MergeRejected, Store


class Merging:
    def __init__(self, config: Config, effects: Effects, roster: Roster, versions: Versions, ledger: Ledger) -> None:
        self._protocol, self._limits = config.protocol, config.limits
        self._own_data = config.model.name == CUSTOM
        self._effects = effects
        self._roster = roster
        self._versions = versions
        self._ledger = ledger
        self.norms = Norms(config)

    def objection(self, body: Contribution, count: Count, measure: Measure) -> Reason | None:
        """Why a contribution is not taken into its round. Without tensors nothing is measured, and nobody asks."""
        return self.norms.objection(body.fragment, measure, self.norms.scale(count.steps, body.outer_step))

    def outliers(self, round_: Round) -> dict[LearnerId, Reason]:
        return {m: why for p in round_.due for m, why in self.norms.outliers(p, round_.judged[p]).items()}

    def begin(self, round_: Round) -> None:
        for p in round_.due:
            shares = shares_of(
                self._protocol.aggregation_weighting, round_.accepted[p], round_.counts[p], self._limits.share_max, self._own_data
            )
            newest = self._versions.newest(p)
            self._effects.emit(Merge(round_.outer_step, p, shares, newest, round_.policy.plain_average))
        limits = tuple(self.norms.jump_limit(p, self._scale(round_, p)) for p in round_.due)
        self._effects.emit(Store(round_.outer_step, round_.due, limits if any(limits) else ()))

    def moved(self, round_: Round, jumps: Sequence[float]) -> None:
        for p, jump in zip(round_.due, jumps, strict=False):  # none where no tensor moves
            self.norms.moved(p, jump, self._scale(round_, p))

    def rejection(self, round_: Round, event: MergeRejected) -> Reason:
        names = ", ".join(map(str, round_.participants))
        moved = f"fragment {event.fragment} of outer step {event.outer_step} moved by {event.jump:.3g}"
        return Reason(Why.MERGE_REJECTED, f"{moved}; contributors: {names}")

    def merged(self, round_: Round, fragment: FragmentId) -> None:
        """It is stored: tokens meet their fate, and the norms become those that later ones are compared with."""
        for learner, c in sorted(round_.accepted[fragment].items()):
            if learner in round_.ended:
                continue
            self._ledger.merged(learner, fragment, c.tokens, round_.outer_step, c.c_tokens)
            member = self._roster.get(learner)
            assert member is not None
            member.offences, member.suspicions = max(0, member.offences - 1), 0
            if self._protocol.anchor == "round_start":
                member.account.counts_from(fragment, c.local_step)
        self.norms.merged(fragment, round_.outer_step, round_.judged[fragment])

    def _scale(self, round_: Round, fragment: FragmentId) -> float:
        steps = max((count.steps for count in round_.counts[fragment].values()), default=0)
        return self.norms.scale(steps, round_.outer_step)
