"""A worker's metrics, folded from the events it processes and the effects its machine returns for them, as they happen.

The fold runs where the events are processed, between two of them: it adds and compares, and nothing else. What costs more (the
ledger's sums, a count of members) is asked at most once a second.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

from atoll.config import Config
from atoll.ids import SECOND, SYNCER, FragmentId, LearnerId, Nanos, OuterStep, WorkerId, seconds
from atoll.protocol.ledger import Loss
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import (
    AbortRound,
    Adopt,
    AnswerRollback,
    Connected,
    ConnectionLost,
    Effect,
    Event,
    FixParticipants,
    InnerStep,
    Merge,
    Received,
    Recovered,
    Refuse,
    Report,
    Resume,
    Standing,
    StepDone,
    Stored,
)
from atoll.tape.heldout import HeldoutPoint
from atoll.version import __version__
from atoll.views.metrics import Distribution, MetricSeries, exposition, families_of

SAMPLE_NANOS: Nanos = SECOND
"""Between two looks at what is not in the events."""
VERSIONS_KEPT = 64
"""Of a fragment, to tell how stale an update is: one that is staler counts as this."""


class LinkCounts(Protocol):
    """A transport's link."""

    @property
    def bytes_sent(self) -> int: ...

    @property
    def bytes_received(self) -> int: ...


class LinkTotals:
    """Bytes by peer over all of its links: a link's own counters begin at zero."""

    def __init__(self, link_of: Callable[[WorkerId], LinkCounts | None] = lambda peer: None) -> None:
        self.link_of = link_of
        """Asked when a peer has connected."""
        self._open: dict[WorkerId, LinkCounts] = {}
        self._closed: dict[WorkerId, tuple[int, int]] = {}

    def opened(self, peer: WorkerId) -> None:
        link = self.link_of(peer)
        if link is not None:
            self._open[peer] = link

    def lost(self, peer: WorkerId) -> None:
        link = self._open.pop(peer, None)
        if link is not None:
            sent, received = self._closed.get(peer, (0, 0))
            self._closed[peer] = sent + link.bytes_sent, received + link.bytes_received

    def by_peer(self) -> dict[WorkerId, tuple[int, int]]:
        """Sent and received. From any thread."""
        totals = self._closed.copy()
        for peer, link in self._open.copy().items():
            sent, received = totals.get(peer, (0, 0))
            totals[peer] = sent + link.bytes_sent, received + link.bytes_received
        return totals


class _WorkerMetrics:
    def __init__(self, config: Config, role: str, torch_version: str, links: LinkTotals) -> None:
        self._config = config
        self._families = families_of(role)
        self.links = links
        self.series("atoll_build_info").set(1, role, __version__, torch_version, config.preset)

    def series(self, name: str) -> MetricSeries:
        return cast(MetricSeries, self._families[name])

    def _distribution(self, name: str) -> Distribution:
        return cast(Distribution, self._families[name])

    def page(self) -> str:
        """In Prometheus's text format. From any thread."""
        self._ask()
        return exposition(self._families)

    def _ask(self) -> None:
        """What is asked when somebody looks."""

    def _link_event(self, event: Event) -> None:
        if isinstance(event, Connected):
            self.links.opened(event.peer)
        elif isinstance(event, ConnectionLost):
            self.links.lost(event.peer)


class SyncerMetrics(_WorkerMetrics):
    """An observer of the syncer's events."""

    def __init__(
        self, config: Config, machine: SyncerMachine, epoch: int, torch_version: str, links: LinkTotals, *,
        door: Callable[[], Mapping[str, int]] = dict, heldout: Callable[[], HeldoutPoint | None] = lambda: None,
    ) -> None:  # fmt: skip
        """`epoch`: the wall-clock nanoseconds of time 0. `door`: what was refused before the protocol, by kind. The thread that
        renders calls both functions."""
        super().__init__(config, "syncer", torch_version, links)
        self._machine, self._epoch, self._door, self._heldout = machine, epoch, door, heldout
        self._sample_at: Nanos = 0
        self._fixed: dict[OuterStep, Nanos] = {}
        self._merging: dict[OuterStep, dict[FragmentId, int]] = {}
        self._versions: dict[FragmentId, deque[OuterStep]] = {}
        self._reported: dict[LearnerId, tuple[int, int]] = {}
        self._began: Nanos | None = None
        self._useful: Nanos = 0
        self._by_effect: dict[type[Effect], Callable[[Nanos, Effect], None]] = {
            FixParticipants: self._fixes, Merge: self._merges, AbortRound: self._aborts, Refuse: self._refuses,
            Recovered: self._recovers, AnswerRollback: self._rolls_back,
        }  # fmt: skip
        self.series("atoll_total_steps").set(config.total_steps)
        self.series("atoll_last_stored_timestamp_seconds").set(0)
        self.series("atoll_rollbacks_total").set(0)
        for reason in Loss:
            self.series("atoll_discarded_tokens_total").set(0, reason.value)
        self._sample(0)

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, Received):
            body = event.envelope.body
            if isinstance(body, Report):
                self._reports(now, event.envelope.sender, event.envelope.incarnation, body)
        elif isinstance(event, Stored):
            self._stores(now, event.outer_step)
        else:
            self._link_event(event)
        for effect in effects:
            fold = self._by_effect.get(type(effect))
            if fold is not None:
                fold(now, effect)
        if now >= self._sample_at:
            self._sample(now)

    # ------------------------------------------------------------ events

    def _reports(self, now: Nanos, learner: LearnerId, incarnation: int, body: Report) -> None:
        """A report that is older than the last, or of an older incarnation, says nothing new."""
        if not 0 <= learner < self._config.limits.members_max or (incarnation, body.local_step) <= self._reported.get(
            learner, (-1, 0)
        ):
            return
        self._reported[learner] = incarnation, body.local_step
        self._began = now - body.step_nanos if self._began is None else self._began
        self._useful += body.step_nanos
        self._distribution("atoll_learner_step_seconds").observe(seconds(body.step_nanos), str(learner))
        if body.loss is not None:
            self.series("atoll_learner_loss").set(body.loss, str(learner))

    def _stores(self, now: Nanos, outer_step: OuterStep) -> None:
        self.series("atoll_last_stored_timestamp_seconds").set(seconds(self._epoch + now))
        self.series("atoll_outer_step").set(self._machine.outer_step)
        fixed = self._fixed.pop(outer_step, None)
        merged = self._merging.pop(outer_step, None)
        if merged is None:
            return
        for fragment in merged:
            self._versions.setdefault(fragment, deque(maxlen=VERSIONS_KEPT)).append(outer_step)
        self._distribution("atoll_round_participants").observe(max(merged.values()))
        if fixed is not None:
            self._distribution("atoll_round_seconds").observe(seconds(now - fixed))

    # ------------------------------------------------------------ effects

    def _fixes(self, now: Nanos, effect: Effect) -> None:
        assert isinstance(effect, FixParticipants)
        if effect.fragments:
            self._fixed[effect.outer_step] = now
        round_ = self._machine.rounds.get(effect.outer_step)
        if round_ is not None:
            self._distribution("atoll_grace_seconds").observe(seconds(max(0, round_.fixed_at - round_.quorum_at)))

    def _merges(self, now: Nanos, effect: Effect) -> None:
        assert isinstance(effect, Merge)
        self._merging.setdefault(effect.outer_step, {})[effect.fragment] = len(effect.shares)
        newer = self._versions.get(effect.fragment, ())
        for share in effect.shares:
            behind = sum(version > share.anchor for version in newer)
            self.series("atoll_learner_staleness_rounds").set(behind, str(share.learner))

    def _aborts(self, now: Nanos, effect: Effect) -> None:
        assert isinstance(effect, AbortRound)
        self._fixed.pop(effect.outer_step, None)
        self._merging.pop(effect.outer_step, None)
        self.series("atoll_rounds_aborted_total").add(1, effect.reason.why.value)

    def _refuses(self, now: Nanos, effect: Effect) -> None:
        assert isinstance(effect, Refuse)
        self.series("atoll_refusals_total").add(1, effect.reason.why.value)

    def _recovers(self, now: Nanos, effect: Effect) -> None:
        assert isinstance(effect, Recovered)
        self._distribution("atoll_recovery_seconds").observe(seconds(effect.nanos))

    def _rolls_back(self, now: Nanos, effect: Effect) -> None:
        assert isinstance(effect, AnswerRollback)
        if effect.outer_step:
            self.series("atoll_rollbacks_total").add(1)

    # ------------------------------------------------------------ what is asked

    def _sample(self, now: Nanos) -> None:
        self._sample_at = now + SAMPLE_NANOS
        fates, fragments = self._machine.fates(), max(1, self._config.protocol.fragments)
        self.series("atoll_trained_tokens_total").set(fates.trained / fragments)
        self.series("atoll_merged_tokens").set(fates.merged / fragments)
        self.series("atoll_in_flight_tokens").set(fates.in_flight / fragments)
        for reason, pairs in fates.discarded.items():
            self.series("atoll_discarded_tokens_total").set(pairs / fragments, reason.value)
        self.series("atoll_outer_step").set(self._machine.outer_step)
        standings = [member.standing for member in self._machine.roster]
        for standing in Standing:
            self.series("atoll_learners").set(standings.count(standing), standing.value)
        if self._began is not None and now > self._began:
            self.series("atoll_goodput_ratio").set(self._useful / ((now - self._began) * self._config.learners))

    def _ask(self) -> None:
        for learner, (sent, received) in self.links.by_peer().items():
            self.series("atoll_link_bytes_total").set(received, str(learner), "up")
            self.series("atoll_link_bytes_total").set(sent, str(learner), "down")
        for kind, count in self._door().items():
            self.series("atoll_door_refusals_total").set(count, kind)
        point = self._heldout()
        if point is not None:
            self.series("atoll_heldout_loss").set(point.loss if point.loss is not None else math.nan)
            self.series("atoll_heldout_step").set(point.outer_step)


class LearnerMetrics(_WorkerMetrics):
    """An observer of one learner's events."""

    def __init__(self, config: Config, learner: LearnerId, torch_version: str) -> None:
        super().__init__(config, "learner", torch_version, LinkTotals())
        self._name = str(learner)
        self._steps = self._distribution("atoll_learner_step_seconds")
        self._loss = self.series("atoll_learner_loss")
        self._tokens = self.series("atoll_learner_tokens_total")
        for name in ("atoll_learner_tokens_total", "atoll_learner_waited_seconds_total", "atoll_learner_adoptions_total"):
            self.series(name).set(0, self._name)
        self.series("atoll_learner_connected").set(0, self._name)

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, StepDone):
            self._steps.observe(seconds(event.nanos), self._name)
            self._tokens.add(event.tokens, self._name)
            if event.loss is not None:
                self._loss.set(event.loss, self._name)
        elif isinstance(event, Connected | ConnectionLost) and event.peer == SYNCER:
            self._link_event(event)
            self.series("atoll_learner_connected").set(isinstance(event, Connected), self._name)
        for effect in effects:
            if isinstance(effect, InnerStep):
                self.series("atoll_learner_local_step").set(effect.local_step - 1, self._name)
                self.series("atoll_learner_outer_step").set(effect.outer_step, self._name)
            elif isinstance(effect, Adopt):
                self.series("atoll_learner_adoptions_total").add(1, self._name)
            elif isinstance(effect, Resume):
                self.series("atoll_learner_waited_seconds_total").add(seconds(effect.waited_nanos), self._name)
            elif isinstance(effect, Refuse):
                self.series("atoll_refusals_total").add(1, effect.reason.why.value)

    def _ask(self) -> None:
        sent, received = self.links.by_peer().get(SYNCER, (0, 0))
        self.series("atoll_link_bytes_total").set(sent, self._name, "up")
        self.series("atoll_link_bytes_total").set(received, self._name, "down")
