"""Checkers of a run, separate from the code they check. They see only events and effects, and keep their own accounts.

The numbers are those of ARCHITECTURE.md's invariants. `Safety` runs after every event; `Liveness` once the plan has healed.
(The executors check number 5, that anchors equal the announced bytes: by digests in `null`, by the bytes in `learner`.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.config import Config
from atoll.errors import InvariantViolated
from atoll.ids import SYNCER, FragmentId, LearnerId, Nanos, OuterStep, WorkerId, seconds, worker_name
from atoll.protocol.membership import IN_SYNC, Member
from atoll.protocol.phases import DONE, JOINING
from atoll.protocol.reasons import Reason
from atoll.protocol.vocabulary import (
    AbortRound,
    Accept,
    Adopt,
    Announce,
    AnswerRollback,
    ConnectionLost,
    CopyVersions,
    Discard,
    Effect,
    Enter,
    Event,
    Finished,
    FixParticipants,
    ForgetVersion,
    Goodbye,
    Grant,
    Hello,
    InnerStep,
    Keep,
    LeaveAsked,
    LoadState,
    Membership,
    Merge,
    Received,
    RecordState,
    Refuse,
    Reissue,
    Report,
    Restored,
    Resumed,
    Send,
    Started,
    StateTransfer,
    StepDone,
    Store,
    Stored,
    TakeRollback,
    Tick,
    Wait,
)  # fmt: skip
from atoll.rules import Schedule
from atoll.sim.rollback_checks import RollbackChecks

if TYPE_CHECKING:
    from atoll.sim.cluster import VirtualCluster


class Safety:
    """Raises InvariantViolated at the first event after which an invariant does not hold."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._schedule = Schedule(config)
        self._fragments = config.protocol.fragments
        self.cluster: VirtualCluster | None = None
        self._running: dict[WorkerId, bool] = {}
        self._standing: dict[LearnerId, str] = {}
        self._fixed: dict[OuterStep, FixParticipants] = {}
        self._accepted: dict[OuterStep, dict[FragmentId, set[LearnerId]]] = defaultdict(lambda: defaultdict(set))
        self._storing: Store | None = None
        self._committed: OuterStep = 0
        self._announced: OuterStep = 0
        self._incarnation: dict[LearnerId, int] = {}
        self._tokens: dict[tuple[LearnerId, int], int] = {}
        self._tokens_before: dict[tuple[LearnerId, int], int] = {}
        """Trained before this run, by resumed learners."""
        self._pending: dict[LearnerId, dict[FragmentId, OuterStep]] = defaultdict(dict)
        self._held: dict[LearnerId, dict[FragmentId, OuterStep]] = defaultdict(dict)
        self._left: set[LearnerId] = set()
        self._asked_to_leave: set[LearnerId] = set()
        self._unit_steps = config.protocol.local_steps_per_round
        self._drawn: dict[tuple[LearnerId, int], set[tuple[int, int]]] = defaultdict(set)
        self._reissued: set[tuple[int, int]] = set()
        self._took_part: dict[tuple[LearnerId, FragmentId], OuterStep] = {}
        self._rollbacks = RollbackChecks(self._fragments, self._demand)

    def attach(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        try:
            if worker == SYNCER:
                self._syncer(event, effects)
            else:
                self._learner(worker, event, effects)
        except InvariantViolated as violated:
            raise InvariantViolated(f"{violated} (at {seconds(now):.6f} s, {worker_name(worker)}, on {event})") from None

    @staticmethod
    def _demand(holds: bool, number: int, what: str) -> None:
        if not holds:
            raise InvariantViolated(f"invariant {number}: {what}")

    # ------------------------------------------------------------ the syncer

    def _syncer(self, event: Event, effects: Sequence[Effect]) -> None:
        match event:
            case Stored(outer_step=t):
                self._demand(self._storing is not None and self._storing.outer_step == t, 7, f"{t} was not being stored")
                self._commit(t)
            case Received():
                self.received(event, effects)
            case Started(incarnation=incarnation) if incarnation > 0:
                self._restarted()
            case Restored(syncer_state=syncer_state):
                self._committed = self._announced = syncer_state.outer_step
                self._rollbacks.restored(syncer_state)
            case _:
                pass
        for effect in effects:
            self._check_effect(effect)
        self._check_accounting()

    def received(self, event: Received, effects: Sequence[Effect]) -> None:
        e = event.envelope
        if isinstance(e.body, StateTransfer):
            raise InvariantViolated("invariant 4: inner optimiser state was sent to the syncer")
        known = self._incarnation.get(e.sender, -1)
        if e.incarnation < known:
            taken = [x for x in effects if not isinstance(x, Refuse)]
            self._demand(not taken, 7, f"the syncer acted on a message of an older incarnation of learner {e.sender}")
        elif isinstance(e.body, Hello):
            self._incarnation[e.sender] = e.incarnation
        if isinstance(e.body, Report | Hello) and e.incarnation >= known:
            key = (e.sender, e.incarnation)
            refused = any(isinstance(x, Refuse) for x in effects)
            if not refused:
                self._tokens_before.setdefault(key, e.body.tokens)
                self._tokens[key] = max(self._tokens.get(key, 0), e.body.tokens)

    def _check_effect(self, effect: Effect) -> None:
        match effect:
            case Membership(learner=m, standing=standing):
                self._standing[m] = standing
            case Reissue(units=units):
                self._reissued.update((u.stream, u.index) for u in units)
            case FixParticipants():
                self._check_fixed(effect)
            case Accept(outer_step=t, fragment=p, learner=m, anchor=anchor):
                self._rollbacks.accepted(m, anchor)
                self._demand(m in self._participants(t), 2, f"learner {m} is not of round {t}")
                self._demand(m not in self._accepted[t][p], 2, f"learner {m} contributed fragment {p} twice to round {t}")
                self._accepted[t][p].add(m)
            case Discard(outer_step=t, learner=m):
                for accepted in self._accepted[t].values():
                    accepted.discard(m)
            case AbortRound(outer_step=t):
                self._demand(t > self._committed, 2, f"stored round {t} was aborted")
                self._fixed.pop(t, None)
                self._accepted.pop(t, None)
            case Merge():
                self._check_merge(effect)
            case Store(outer_step=t):
                self._demand(t == self._committed + 1, 2, f"outer step {t} is stored after {self._committed}")
                self._storing = effect
            case CopyVersions():
                self._rollbacks.copies(effect, [t for t in self._fixed if t > self._committed])
            case AnswerRollback():
                assert self.cluster is not None
                self._rollbacks.answered(effect, self.cluster.syncer.fates(), self._committed)
            case ForgetVersion(fragment=p, version=v):
                self._rollbacks.forgotten(p, v)
            case Send(envelope=envelope):
                self._check_sent(envelope.body, envelope.receiver)
            case _:
                pass

    def _participants(self, t: OuterStep) -> tuple[LearnerId, ...]:
        fixed = self._fixed.get(t)
        self._demand(fixed is not None, 2, f"round {t} has no participants fixed")
        assert fixed is not None
        return fixed.participants

    def _check_fixed(self, effect: FixParticipants) -> None:
        t, learners = effect.outer_step, effect.participants
        self._demand(t > self._committed and t not in self._fixed, 2, f"round {t} was fixed before")
        self._demand(learners == tuple(sorted(set(learners))), 3, f"participants {learners} are not in LearnerId order")
        in_sync = [m for m, standing in self._standing.items() if standing == IN_SYNC]
        self._demand(set(learners) <= set(in_sync), 2, f"round {t} counts {learners}, in sync are {sorted(in_sync)}")
        self._demand(len(learners) >= self._quorum(t, len(in_sync)), 2, f"round {t} closed with {len(learners)}, below quorum")
        due = effect.fragments == self._schedule.due(t) or (self.config.protocol.dynamic_steps and not effect.fragments)
        self._demand(due, 2, f"round {t} takes {effect.fragments}, not what is due")
        self._fixed[t] = effect
        policy = self._schedule.policy(t)
        flying = [s for s in self._fixed if s > self._committed]
        self._demand(len(flying) <= max(1, policy.overlap), 9, f"rounds {flying} are in flight, tau is {policy.overlap}")
        if not effect.fragments and t == self._committed + 1:
            self._commit(t)  # nothing to store

    def _quorum(self, t: OuterStep, in_sync: int) -> int:
        policy = self._schedule.policy(t)
        return max(1, in_sync) if policy.quorum_all else policy.quorum

    def _check_merge(self, effect: Merge) -> None:
        t = effect.outer_step
        learners = [s.learner for s in effect.shares]
        self._demand(t > self._committed, 2, f"stored round {t} was merged again")
        self._demand(learners == sorted(set(learners)), 3, f"round {t} merges in the order {learners}")
        self._demand(set(learners) == self._accepted[t][effect.fragment], 2, f"round {t} merges {learners}, not those accepted")
        policy = self._schedule.policy(t)
        least = 1 if policy.quorum_all else policy.quorum
        self._demand(len(learners) >= least, 2, f"round {t} merges {len(learners)} learners, below its quorum {least}")
        self._demand(all(s.weight >= 0 for s in effect.shares) and sum(s.weight for s in effect.shares) > 0, 2, "bad weights")

    def _commit(self, t: OuterStep) -> None:
        self._demand(t == self._committed + 1, 2, f"outer step {t} follows {self._committed}")
        self._committed = t
        if self._storing is not None and self._storing.outer_step == t:
            self._rollbacks.stored(t, self._storing.fragments)
        self._storing = None
        for p, learners in self._accepted.pop(t, {}).items():
            self._took_part.update({(m, p): t for m in learners})
        following = self._fixed.get(t + 1)
        if following is not None and not following.fragments:
            self._commit(t + 1)

    def _check_sent(self, body: object, receiver: WorkerId) -> None:
        match body:
            case Announce(outer_step=t) | Tick(outer_step=t):
                self._demand(t <= self._committed, 7, f"outer step {t} was announced before it was durable")
                self._announced = max(self._announced, t)
            case Enter(outer_step=t):
                self._demand(t >= self._committed, 6, f"learner {receiver} enters at {t}, behind {self._committed}")
            case StateTransfer():
                raise InvariantViolated("invariant 4: the syncer sent inner optimiser state")
            case Grant(units=units):
                self._demand(len(units) <= 8, 9, f"{len(units)} units granted at once")
            case _:
                pass

    def _restarted(self) -> None:
        assert self.cluster is not None
        outer_step = self.cluster.syncer.outer_step
        self._demand(outer_step == self._committed, 7, f"the syncer resumes at {outer_step}, {self._committed} was durable")
        self._demand(outer_step >= self._announced, 7, f"the syncer resumes at {outer_step}, {self._announced} was announced")
        self._storing = None
        self._fixed = {t: fixed for t, fixed in self._fixed.items() if t <= self._committed}
        self._accepted.clear()
        self._standing = dict.fromkeys(self._standing, "lost")

    def _check_accounting(self) -> None:
        assert self.cluster is not None
        syncer = self.cluster.syncer
        fates = syncer.fates()
        self._rollbacks.committed(self._committed, fates)
        self._demand(fates.add_up(), 8, f"fates do not add up: {fates}")
        self._demand(fates.in_flight >= 0 and fates.merged >= 0, 8, f"negative fates: {fates}")
        reported = (sum(self._tokens.values()) - sum(self._tokens_before.values())) * self._fragments
        ledger = f"learners reported {reported} (token, fragment), the ledger has {fates.trained}"
        self._demand(fates.trained == reported, 8, ledger)
        versions, limit = syncer.versions, syncer.versions.keep_max
        for fragment in range(self._fragments):
            if (count := versions.count(fragment)) > limit:
                raise InvariantViolated(f"invariant 9: {count} versions of fragment {fragment} kept")
        newest = [versions.newest(fragment) for fragment in range(self._fragments)]
        for member in syncer.roster:
            if member.standing == IN_SYNC:
                self._demand(member.connected, 6, f"learner {member.learner} is in sync without a connection")
                self._check_up_to_date(member, newest)

    def _check_up_to_date(self, member: Member, newest: Sequence[OuterStep]) -> None:
        """Asked after every event of the syncer, for every fragment: sentences are made only for what is wrong."""
        m, sent, held, deferred = member.learner, member.sent, member.held, member.deferred
        dynamic = self.config.protocol.dynamic_steps
        for fragment, version in enumerate(newest):
            coming = max(sent[fragment], deferred.get(fragment, -1))
            # with dynamic local updates a learner that trains on is sent only what it took part in
            least = self._took_part.get((m, fragment), -1) if dynamic else version
            if not least <= coming <= version:
                raise InvariantViolated(f"invariant 6: learner {m} was not sent version {version} of {fragment}")
            if fragment in deferred and sent[fragment] == held[fragment]:
                raise InvariantViolated(f"invariant 6: learner {m} waits for version {version} of {fragment} in vain")

    # ------------------------------------------------------------ the learners

    def _learner(self, m: LearnerId, event: Event, effects: Sequence[Effect]) -> None:
        match event:
            case Started():
                self._running[m] = False
                self._left.discard(m)
                self._asked_to_leave.discard(m)
                self._pending[m], self._held[m] = {}, {}
            case Resumed(learner_state=learner_state):
                self._held[m] = dict(enumerate(learner_state.held))
            case StepDone():
                self._demand(self._running.get(m, False), 1, f"learner {m} finished a step it did not start")
                self._running[m] = False
            case Received(envelope=envelope) if isinstance(envelope.body, TakeRollback):
                self._rollbacks.told(m, envelope.body.outer_step)
            case ConnectionLost(peer=peer) if peer == SYNCER:
                self._rollbacks.cut_off(m)
            case LeaveAsked():
                self._asked_to_leave.add(m)
            case _:
                pass
        moved_on = False
        for effect in effects:
            match effect:
                case InnerStep(stream=stream, batch=batch):
                    self._demand(not self._running.get(m, False), 1, f"learner {m} runs two inner steps at once")
                    self._running[m] = moved_on = True
                    self._rollbacks.steps(m, self._held[m])
                    self._check_draw(m, stream, batch)
                case Wait(reason=reason):
                    self._check_wait(m, reason)
                    moved_on = True
                case Keep(fragment=p, version=v):
                    self._pending[m][p] = v
                case Adopt(fragment=p, version=v, keeps=keeps):
                    self._check_adoption(m, p, v)
                    if keeps:
                        mine = self._took_part.get((m, p)) == v
                        self._demand(mine, 5, f"learner {m} keeps work on version {v} of {p}, which has none of its own")
                case LoadState(held=held):
                    self._held[m] = dict(enumerate(held))
                    came = _pending_with_state(event)
                    known = {p: max(came.get(p, -1), self._pending[m].get(p, -1)) for p in came | self._pending[m]}
                    self._pending[m] = {p: v for p, v in known.items() if v > held[p]}
                case RecordState(snapshot=marker):
                    late = {p: v for p, v in self._held[m].items() if v > marker}
                    self._demand(not late, 4, f"learner {m} records {late} for snapshot {marker}: the cut is not consistent")
                case Finished():
                    moved_on = True
                case Send(envelope=envelope):
                    body = envelope.body
                    wrong = isinstance(body, StateTransfer) and envelope.receiver == SYNCER
                    self._demand(not wrong, 4, f"learner {m} sends inner state to the syncer")
                    moved_on = moved_on or isinstance(body, Hello)
                    if isinstance(body, Goodbye):
                        self._left.add(m)
                case _:
                    pass
        if isinstance(event, StepDone):
            machine = self.cluster.learner(m) if self.cluster else None
            joining = machine is not None and machine.phase == JOINING
            gone = m in self._left or (m in self._asked_to_leave and machine is not None and machine.phase == DONE)
            self._demand(moved_on or joining or gone, 1, f"learner {m} neither steps nor waits")
            if moved_on and self._running.get(m) and self.config.protocol.adopt == "arrival":
                late = {p: v for p, v in self._pending[m].items() if not self._schedule.policy(v).exact}
                self._demand(not late, 6, f"learner {m} went on without adopting {late}")

    def _check_wait(self, m: LearnerId, reason: Reason) -> None:
        p = self.config.protocol
        everyone = p.quorum == "all" or int(p.quorum) >= self.config.learners or p.lead >= 0
        machine = self.cluster.learner(m) if self.cluster else None
        ramping = machine is not None and self._schedule.policy(machine.position).exact
        self._demand(everyone or ramping, 1, f"learner {m} waits where its preset never does: {reason}")

    def _check_adoption(self, m: LearnerId, p: FragmentId, v: OuterStep) -> None:
        self._demand(self._pending[m].get(p) == v, 5, f"learner {m} adopts version {v} of fragment {p}, which it was not sent")
        self._demand(v >= self._held[m].get(p, -1), 6, f"learner {m} goes back to version {v} of fragment {p}")
        self._demand(v <= self._committed, 7, f"learner {m} adopts version {v}, which is not durable")
        del self._pending[m][p]
        self._held[m][p] = v

    def _check_draw(self, m: LearnerId, stream: int, batch: int) -> None:
        """An incarnation draws a batch a second time only if its unit was re-issued."""
        machine = self.cluster.learner(m) if self.cluster else None
        assert machine is not None
        drawn = self._drawn[m, machine.incarnation]
        again = (stream, batch) in drawn and (stream, batch // self._unit_steps) not in self._reissued
        self._demand(not again, 8, f"learner {m} draws batch {batch} of stream {stream} again")
        drawn.add((stream, batch))


def _pending_with_state(event: Event) -> dict[FragmentId, OuterStep]:
    """Versions that came with a peer's state and are not adopted yet."""
    body = event.envelope.body if isinstance(event, Received) else None
    return dict(body.pending) if isinstance(body, StateTransfer) else {}


class Liveness:
    """After the plan has healed, every learner is in sync again and rounds continue."""

    def __init__(self, cluster: VirtualCluster, healed_at: float | None = None) -> None:
        self._cluster = cluster
        self._healed_at = cluster.plan.healed_at() if healed_at is None else healed_at

    def check_end(self) -> None:
        syncer, config = self._cluster.syncer, self._cluster.config
        if syncer.outer_step != config.total_steps:
            raise InvariantViolated(f"liveness: outer step {syncer.outer_step} of {config.total_steps}")
        # a run that ended sooner after healing gave the learners too little time to rejoin
        if self._cluster.virtual_seconds() > self._healed_at + settle_seconds(config):
            out = [m.learner for m in syncer.roster if m.standing != IN_SYNC]
            if out or len(syncer.roster) < config.learners:
                raise InvariantViolated(f"liveness: learners {out} did not come back in sync after the plan healed")


def settle_seconds(config: Config) -> float:
    """A generous bound on the time to notice a fault, dial and recover, with one source that does not answer."""
    c, limits = config.cluster, config.limits
    step = c.step_seconds * c.slow_factor + 4 * c.latency_seconds
    state = 2 * 8 * 12 * c.parameters / (min(c.up_gbit, c.down_gbit) * 1e9)
    rounds = 2 * -(-config.protocol.local_steps_per_round // config.protocol.fragments)
    return 3 * c.detect_seconds + (2 * limits.silence_steps + 4 * rounds + 60) * step + 2 * state
