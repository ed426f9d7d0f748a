"""A run at a glance, folded from its events. It can be fed live, as an observer, or from a tape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from atoll.config import Config
from atoll.ids import SYNCER, LearnerId, Nanos, OuterStep, WorkerId, seconds, worker_name
from atoll.protocol.ledger import Fates
from atoll.protocol.vocabulary import (
    Effect,
    Event,
    Finished,
    FixParticipants,
    Hello,
    Loaded,
    Merge,
    Received,
    Recovered,
    Refuse,
    Report,
    Resume,
    Send,
    StepDone,
    Stored,
)  # fmt: skip
from atoll.tape.format import Record
from atoll.tape.heldout import HeldoutPoint


class Recovery(msgspec.Struct, frozen=True):
    learner: LearnerId
    seconds: float
    source: str
    bytes: int


class LearnerTraffic(msgspec.Struct, frozen=True):
    learner: LearnerId
    bytes_up: int
    bytes_down: int


class RunView:
    """Goodput: the share of the learners' time that went into inner steps which reached the syncer's books.
    Uptime: the share of time in which at least one learner was stepping."""

    def __init__(self, learners: int, *, from_first_step: bool = False) -> None:
        """`from_first_step`: a live run's clock starts when its processes do, which is not the protocol's doing."""
        self._learners = learners
        self._from_first_step = from_first_step
        self.began: Nanos | None = None
        self.now: Nanos = 0
        self.refused = 0
        self.up: Counter[LearnerId] = Counter()
        self.down: Counter[LearnerId] = Counter()
        self.outer_step: OuterStep = 0
        self.records = 0
        self.participants: Counter[int] = Counter()
        self.waited: Nanos = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self.bytes_between_learners = 0
        self.recoveries: list[Recovery] = []
        self.losses: dict[LearnerId, float] = {}
        self._useful: Nanos = 0
        self._reported: dict[tuple[LearnerId, int], int] = {}
        self._stepping: list[tuple[Nanos, Nanos]] = []
        self._stepped_before: Nanos = 0
        self._merging: dict[OuterStep, int] = {}
        self._since_hello: Counter[LearnerId] = Counter()
        self._loaded_bytes: dict[LearnerId, int] = {}

    def feed(self, records: Iterable[Record]) -> RunView:
        for r in records:
            self(r.now, r.worker, r.event, r.effects)
        return self

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        self.now = max(self.now, now)
        self.records += 1
        if worker == SYNCER:
            self._syncer(event, effects)
        else:
            self._learner(now, worker, event, effects)

    def _syncer(self, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, Received):
            self.bytes_up += event.payload_bytes
            self.up[event.envelope.sender] += event.payload_bytes
            if isinstance(event.envelope.body, Report):
                self._report(event.envelope.sender, event.envelope.incarnation, event.envelope.body)
        elif isinstance(event, Stored):
            self.participants[self._merging.pop(event.outer_step, 0)] += 1
        for effect in effects:
            if isinstance(effect, Refuse):
                self.refused += 1
            elif isinstance(effect, FixParticipants):
                self.outer_step = max(self.outer_step, effect.outer_step - 1)
            elif isinstance(effect, Finished):
                self.outer_step = effect.outer_step
            elif isinstance(effect, Merge):
                self._merging[effect.outer_step] = len(effect.shares)
            elif isinstance(effect, Recovered) and self.outer_step > 0:
                moved = self._loaded_bytes.pop(effect.learner, 0)
                source = worker_name(effect.source)
                self.recoveries.append(Recovery(effect.learner, seconds(effect.nanos), source, moved))

    def _report(self, learner: LearnerId, incarnation: int, body: Report) -> None:
        if body.local_step > self._reported.get((learner, incarnation), 0):
            self._reported[learner, incarnation] = body.local_step
            self._useful += body.step_nanos
            if body.loss is not None:
                self.losses[learner] = body.loss

    def _learner(self, now: Nanos, worker: LearnerId, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, StepDone):
            self.began = min(now - event.nanos, self.began if self.began is not None else now)
            self._stepped(now - event.nanos, now)
        elif isinstance(event, Received) and event.payload_bytes:
            self._since_hello[worker] += event.payload_bytes
            if event.envelope.sender == SYNCER:
                self.bytes_down += event.payload_bytes
                self.down[worker] += event.payload_bytes
            else:
                self.bytes_between_learners += event.payload_bytes
        for effect in effects:
            if isinstance(effect, Resume):
                self.waited += effect.waited_nanos
            elif isinstance(effect, Send):
                if isinstance(effect.envelope.body, Hello):
                    self._since_hello[worker] = 0
                elif isinstance(effect.envelope.body, Loaded):
                    self._loaded_bytes[worker] = self._since_hello[worker]

    def _stepped(self, start: Nanos, end: Nanos) -> None:
        """A union of intervals whose ends come in order: what an interval overlaps is at the end of the list."""
        while self._stepping and self._stepping[-1][1] >= start:
            start = min(start, self._stepping.pop()[0])
        self._stepping.append((start, end))

    @property
    def lasted(self) -> Nanos:
        return self.now - (self.began or 0) if self._from_first_step else self.now

    @property
    def goodput(self) -> float:
        return self._useful / (self.lasted * self._learners) if self.lasted else 0.0

    @property
    def uptime(self) -> float:
        return sum(end - start for start, end in self._stepping) / self.lasted if self.lasted else 0.0

    def traffic(self) -> list[LearnerTraffic]:
        return [LearnerTraffic(m, self.up[m], self.down[m]) for m in sorted({*self.up, *self.down})]

    @property
    def train_loss(self) -> float | None:
        return sum(self.losses.values()) / len(self.losses) if self.losses else None


class TokenCounts(msgspec.Struct, frozen=True):
    """In (token, fragment) units."""

    trained: int
    merged: int
    discarded: int
    in_flight: int
    discarded_by_reason: dict[str, int]


def tokens_of(fates: Fates) -> TokenCounts:
    by_reason = {reason.value: count for reason, count in fates.discarded.items()}
    return TokenCounts(fates.trained, fates.merged, sum(fates.discarded.values()), fates.in_flight, by_reason)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` ends with."""

    preset: str
    learners: int
    seed: int
    total_steps: int
    goodput: float
    uptime: float
    waited_seconds: float
    participants: dict[str, int]
    tokens: TokenCounts
    recoveries: list[Recovery]
    bytes_up: int
    bytes_down: int
    loss_first: float | None
    loss_final: float | None
    theta_sha256: str | None
    tape: str | None
    run_dir: str | None
    clock: str
    """`virtual` or `wall`."""
    seconds: float
    """Of that clock: a virtual run's from its start, a live run's from its first inner step."""
    fragments: int
    traffic: list[LearnerTraffic] = []
    refused: int = 0
    faults: list[str] = []
    twin_loss: float | None = None
    """Final held-out loss of the same run without faults."""
    accuracy: float | None = None
    """Share of held-out answers that are right, of Theta at the end; None where a task has no right answers."""
    heldout: list[HeldoutPoint] = []
    """Held-out losses of Theta on the way, where data.heldout_every asks for them."""


def summarise(
    config: Config, view: RunView, fates: Fates, *, loss_first: float | None = None, loss_final: float | None = None,
    theta_sha256: str | None = None, tape: str | None = None, run_dir: str | None = None, clock: str = "virtual",
    faults: Sequence[str] = (), accuracy: float | None = None, points: Sequence[HeldoutPoint] = (),
) -> Summary:  # fmt: skip
    return Summary(
        preset=config.preset, learners=config.learners, seed=config.seed, total_steps=view.outer_step,
        goodput=round(view.goodput, 6), uptime=round(view.uptime, 6), waited_seconds=round(seconds(view.waited), 6),
        participants={str(n): count for n, count in sorted(view.participants.items())}, tokens=tokens_of(fates),
        recoveries=view.recoveries, bytes_up=view.bytes_up, bytes_down=view.bytes_down, loss_first=loss_first,
        loss_final=loss_final, theta_sha256=theta_sha256, tape=tape, run_dir=run_dir,
        clock=clock, seconds=round(seconds(view.lasted), 6), fragments=config.protocol.fragments, traffic=view.traffic(),
        refused=view.refused, faults=list(faults), accuracy=accuracy, heldout=list(points),
    )  # fmt: skip
