"""What the syncer itself counted of a learner's work. A claim may say less than this, and then it counts; it may not say more.

A learner reports every step, and a report that skips one is refused, so the distance between two reported steps is a number of
reports that the syncer received. An account remembers, for each fragment, the step from which work counts: the step of the last
adoption, which cannot be earlier than the one reported when the adopted version was announced; with `keep_overlap` the step of
the copy that was merged, which cannot be older than what was reported when it was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from atoll.config import Config
from atoll.ids import FragmentId, LearnerId, LocalStep, Nanos, OuterStep
from atoll.protocol.counters import Count
from atoll.protocol.medians import Medians
from atoll.protocol.vocabulary import Contribution
from atoll.rules import samples_per_step_max, tokens_per_step_max

RATIO_MAX = 8.0
"""A share is computed from at most this many times the median of the other participants: their steps, and where no config
says how large a batch is, their tokens and samples per step."""


class StepMost(NamedTuple):
    """What one inner step can hold at most."""

    tokens: int
    samples: int

    @classmethod
    def of(cls, config: Config) -> StepMost:
        return cls(tokens_per_step_max(config), samples_per_step_max(config))


class Account:
    __slots__ = ("_announced", "_asked", "_least", "_since", "_taken")

    def __init__(self, fragments: int) -> None:
        self._since: list[LocalStep] = [0] * fragments
        self._announced: dict[FragmentId, tuple[OuterStep, LocalStep]] = {}
        self._asked: dict[FragmentId, LocalStep] = {}
        """From where work counted when it was pulled from: a report of a newer adoption may overtake the answer."""
        self._least: list[LocalStep] = [0] * fragments
        """The earliest step of the copy that answers the last pull, by what was reported when it was sent."""
        self._taken: list[LocalStep] = [0] * fragments
        """Up to which step work on a fragment was taken into a round."""

    def begins(self, local_step: LocalStep) -> None:
        """A new incarnation, or one that loaded new weights: nothing before this step counts."""
        self._since = [max(0, local_step)] * len(self._since)
        self._taken, self._least = list(self._since), list(self._since)
        self._announced.clear()
        self._asked.clear()

    def returns(self, claimed: LocalStep, reported: LocalStep, credit: int) -> None:
        """It was away and claims steps that nobody counted. At most `credit` of them count."""
        excess = claimed - reported - credit
        if excess > 0:
            self._since = [since + excess for since in self._since]
            self._taken = [taken + excess for taken in self._taken]
        self._asked.clear()

    def announced(self, fragment: FragmentId, version: OuterStep, reported: LocalStep) -> None:
        if self._announced.get(fragment, (-1, 0))[0] != version:  # the first time, if it is sent again after a broken connection
            self._announced[fragment] = (version, reported)

    def adopted(self, fragment: FragmentId, version: OuterStep, local_step: LocalStep, *, keeps: bool = False) -> None:
        """`keeps`: what was trained since it was last taken goes on counting, and nothing of before."""
        if keeps:
            return self.counts_from(fragment, self._taken[fragment])
        announced, at = self._announced.get(fragment, (version, 0))
        return self.counts_from(fragment, at if announced == version and at > local_step else local_step)

    def asked(self, fragments: Sequence[FragmentId], least: LocalStep) -> None:
        """`least`: no copy that it holds now is older."""
        for fragment in fragments:
            self._asked.setdefault(fragment, self._since[fragment])
            self._least[fragment] = least

    def answered(self, fragments: Sequence[FragmentId]) -> None:
        for fragment in fragments:
            self._asked.pop(fragment, None)

    def taken(self, fragment: FragmentId, local_step: LocalStep) -> None:
        """`local_step` is what it says of its copy: one that understates it has the steps between not counted at all."""
        self._taken[fragment] = max(self._taken[fragment], self._least[fragment], local_step)

    def steps_since(self, fragment: FragmentId, reported: LocalStep) -> int:
        """Since the adoption from which work on it counts."""
        return reported - self._since[fragment]

    def has_untaken(self, fragments: Sequence[FragmentId], reported: LocalStep) -> bool:
        """Whether it trained all of them since it adopted them, and since they were last taken from it."""
        return all(reported > max(self._since[p], self._taken[p]) for p in fragments)

    def counts_from(self, fragment: FragmentId, local_step: LocalStep) -> None:
        if local_step > self._since[fragment]:
            self._since[fragment] = local_step

    def count(self, claim: Contribution, most: StepMost) -> Count:
        """The claim, lowered to what was counted. `most` is what one step can hold."""
        steps = min(claim.c_steps, claim.local_step - self._asked.get(claim.fragment, self._since[claim.fragment]))
        if steps <= 0:
            return Count(0, 0, 0)
        share = 1.0 if steps == claim.c_steps else steps / claim.c_steps  # fewer steps hold fewer of the tokens claimed
        tokens, samples = int(claim.c_tokens * share), int(claim.c_samples * share)
        return Count(steps, min(tokens, steps * most.tokens), min(samples, steps * most.samples))


def credit_while_away(elapsed: Nanos, step_time: Nanos, interval: int) -> int:
    """Steps that a learner may have trained while it was not connected: twice what its measured pace allows."""
    return 2 * interval + (2 * elapsed // step_time if step_time > 0 else 0)


def bounded_counts(counts: Mapping[LearnerId, Count], *, own_data: bool) -> dict[LearnerId, Count]:
    """Each count, lowered to `RATIO_MAX` times the median of the others. `own_data`: no config says what a step holds."""
    trained = [count for count in counts.values() if count.steps]
    if len(trained) < 2 or (not own_data and _alike([count.steps for count in trained])):
        return dict(counts)
    usual = _Usual(trained)
    return {m: usual.bounded(count, own_data) if count.steps else count for m, count in counts.items()}


def _alike(steps: Sequence[int]) -> bool:
    """Nobody's steps exceed `RATIO_MAX` times anybody's, so not the median of the others' either."""
    return max(steps) <= RATIO_MAX * min(steps)


class _Usual:
    """What those of a round that trained did, to compare each of them with the others."""

    def __init__(self, trained: Sequence[Count]) -> None:
        self._steps = Medians(count.steps for count in trained)
        self._tokens = Medians(count.tokens / count.steps for count in trained)
        self._samples = Medians(count.samples / count.steps for count in trained)

    def bounded(self, count: Count, own_data: bool) -> Count:
        steps = min(count.steps, int(RATIO_MAX * self._steps.without(count.steps)) or 1)
        tokens, samples = count.tokens / count.steps, count.samples / count.steps
        if own_data:
            tokens = min(tokens, RATIO_MAX * self._tokens.without(tokens))
            samples = min(samples, RATIO_MAX * self._samples.without(samples))
        elif steps == count.steps:
            return count
        return Count(steps, min(count.tokens, int(tokens * steps)), min(count.samples, int(samples * steps)))


def capped(weights: Mapping[LearnerId, float], share_max: float, from_learners: int = 4) -> dict[LearnerId, float]:
    """No learner has more than `share_max` of a merge of at least `from_learners`. With `share_max` >= 1/2 at most one can."""
    total = sum(weights.values())
    if len(weights) < from_learners or share_max >= 1.0:
        return dict(weights)
    largest = max(weights, key=lambda m: weights[m])
    others = total - weights[largest]
    limit = share_max / (1.0 - share_max) * others
    return {m: min(w, limit) if m == largest and others > 0 else w for m, w in weights.items()}
