"""A run's figures, folded from its events: live, as an observer, or from a tape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from atoll.config import Config
from atoll.ids import SYNCER, LearnerId, Nanos, OuterStep, WorkerId, seconds, worker_name
from atoll.protocol.ledger import Fates
from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import (
    AbortRound,
    AnswerRollback,
    Effect,
    Event,
    Finished,
    FixParticipants,
    Hello,
    Loaded,
    Membership,
    Merge,
    Received,
    Recovered,
    Refuse,
    Report,
    Resized,
    Resume,
    Send,
    Standing,
    StepDone,
    Stored,
)  # fmt: skip
from atoll.tape.format import Missing, Record
from atoll.tape.heldout import HeldoutPoint
from atoll.views.stages import RoundClock


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
    """Goodput: the share of the learners' time spent in inner steps that were reported to the syncer. It measures time; the
    ledger measures what became of tokens. Uptime: the share of time in which at least one learner was stepping."""

    def __init__(self, learners: int, *, from_first_step: bool = False) -> None:
        """`from_first_step`: a live run's clock starts when its processes start, which is no training time."""
        self._learners = learners
        self._from_first_step = from_first_step
        self.began: Nanos | None = None
        self.now: Nanos = 0
        self.refused = 0
        self.expelled: dict[LearnerId, str] = {}
        self.rejected: list[str] = []
        self.rollbacks: list[str] = []
        self.up: Counter[LearnerId] = Counter()
        self.down: Counter[LearnerId] = Counter()
        self.outer_step: OuterStep = 0
        self.records = 0
        self.first_round: Nanos | None = None
        """When the participants of the first round were fixed. Before it a run starts up."""
        self._useful_after: float = 0.0
        self._live: dict[LearnerId, float] = {}
        """The share of a learner's chips that are up, where it is not 1."""
        self.participants: Counter[int] = Counter()
        self.waited: Nanos = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self.bytes_between_learners = 0
        self.recoveries: list[Recovery] = []
        self.losses: dict[LearnerId, float] = {}
        self.tokens_done = 0
        """Of all inner steps that ended, as the learners' own tapes have them."""
        self._useful: Nanos = 0
        self._reported: dict[tuple[LearnerId, int], int] = {}
        self._stepping: list[tuple[Nanos, Nanos]] = []
        self._stepped_before: Nanos = 0
        self._merging: dict[OuterStep, int] = {}
        self.rounds = RoundClock()
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
            self.rounds(now, worker, event, effects)
            self._syncer(now, event, effects)
        else:
            self._learner(now, worker, event, effects)

    def _syncer(self, now: Nanos, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, Received):
            self.bytes_up += event.payload_bytes
            self.up[event.envelope.sender] += event.payload_bytes
            if isinstance(event.envelope.body, Report):
                self._report(now, event.envelope.sender, event.envelope.incarnation, event.envelope.body)
        elif isinstance(event, Stored) and event.outer_step in self._merging:
            self.participants[self._merging.pop(event.outer_step)] += 1
        for effect in effects:
            if isinstance(effect, Refuse):
                self.refused += 1
            elif isinstance(effect, Membership) and effect.standing is Standing.EXPELLED:
                self.expelled[effect.learner] = str(effect.reason)
            elif isinstance(effect, AbortRound) and effect.reason.why is Why.MERGE_REJECTED:
                self.rejected.append(str(effect.reason))
            elif isinstance(effect, AnswerRollback) and effect.outer_step:
                self.rollbacks.append(str(effect.reason))
            elif isinstance(effect, FixParticipants):
                self.first_round = now if self.first_round is None else self.first_round
                self.outer_step = max(self.outer_step, effect.outer_step - 1)
            elif isinstance(effect, Finished):
                self.outer_step = effect.outer_step
            elif isinstance(effect, Merge):
                self._merging[effect.outer_step] = len(effect.shares)
            elif isinstance(effect, Recovered) and self.outer_step > 0:
                moved = self._loaded_bytes.pop(effect.learner, 0)
                source = worker_name(effect.source)
                self.recoveries.append(Recovery(effect.learner, seconds(effect.nanos), source, moved))

    def _report(self, now: Nanos, learner: LearnerId, incarnation: int, body: Report) -> None:
        if body.local_step > self._reported.get((learner, incarnation), 0):
            self._reported[learner, incarnation] = body.local_step
            self._useful += body.step_nanos
            if self.first_round is not None:
                self._useful_after += min(body.step_nanos, now - self.first_round) * self._live.get(learner, 1.0)
            if body.loss is not None:
                self.losses[learner] = body.loss

    def _learner(self, now: Nanos, worker: LearnerId, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, StepDone):
            self.tokens_done += event.tokens
            self.began = min(now - event.nanos, self.began if self.began is not None else now)
            self._stepped(now - event.nanos, now)
        elif isinstance(event, Resized):
            self._live[worker] = event.share
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
        """Adds to a union of intervals. Ends come in order, so the intervals that overlap are at the end of the list."""
        while self._stepping and self._stepping[-1][1] >= start:
            start = min(start, self._stepping.pop()[0])
        self._stepping.append((start, end))

    @property
    def lasted_from(self) -> Nanos:
        return (self.began or 0) if self._from_first_step else 0

    @property
    def lasted(self) -> Nanos:
        return self.now - self.lasted_from

    @property
    def goodput(self) -> float:
        return self._useful / (self.lasted * self._learners) if self.lasted else 0.0

    @property
    def startup(self) -> Nanos:
        """Until the first round: connections, and the first transfer of the model."""
        return (self.first_round or 0) - (self.lasted_from if self.first_round else 0)

    @property
    def goodput_after_startup(self) -> float:
        """A learner with a share of its chips counts as that share."""
        lasted = self.now - (self.first_round or self.now)
        return self._useful_after / (lasted * self._learners) if lasted else 0.0

    @property
    def uptime(self) -> float:
        return sum(end - start for start, end in self._stepping) / self.lasted if self.lasted else 0.0

    def traffic(self) -> list[LearnerTraffic]:
        return [LearnerTraffic(m, self.up[m], self.down[m]) for m in sorted({*self.up, *self.down})]

    @property
    def train_loss(self) -> float | None:
        return sum(self.losses.values()) / len(self.losses) if self.losses else None


class TokenCounts(msgspec.Struct, frozen=True):
    """Counted in (token, fragment) pairs, which add up exactly: a token trains every fragment of the model, and fragments are
    merged at different steps. `Summary.token_shares` has the same as shares of `trained`."""

    trained: int
    merged: int
    discarded: int
    in_flight: int
    discarded_by_reason: dict[str, int]


def tokens_of(fates: Fates) -> TokenCounts:
    by_reason = {reason.value: count for reason, count in fates.discarded.items()}
    return TokenCounts(fates.trained, fates.merged, sum(fates.discarded.values()), fates.in_flight, by_reason)


def token_shares(tokens: TokenCounts) -> dict[str, float]:
    """Of what was trained: `merged`, `discarded_REASON` by the reasons of `protocol/ledger.py`, `in_flight`. The sum is 1."""
    parts = {f"discarded_{reason}": count for reason, count in tokens.discarded_by_reason.items()}
    counts = {"merged": tokens.merged} | parts | {"in_flight": tokens.in_flight}
    return {name: round(count / tokens.trained, 6) for name, count in counts.items()} if tokens.trained else {}


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON object that `--json` ends with, and a run's summary.json."""

    preset: str
    learners: int
    seed: int
    total_steps: int
    """Steps of the run that were reached. A step of the run is one inner step of every learner that keeps pace."""
    goodput: float
    """Share of the learners' time spent in inner steps that were reported to the syncer: time, not tokens."""
    token_goodput: float = 0.0
    """Share of all trained tokens, those in steps that the syncer never heard of included, that reached Theta."""
    startup_seconds: float = 0.0
    """Until the first round's participants were fixed; a virtual run's from its start."""
    goodput_after_startup: float = 0.0
    """`goodput` without that time, where a learner with a share of its chips counts as that share: what `atoll plan` promises."""
    uptime: float
    """Share of the time in which at least one learner was stepping."""
    waited_seconds: float
    """Of all learners together, on `clock`."""
    participants: dict[str, int]
    """By number of learners: how many rounds merged the updates of so many."""
    tokens: TokenCounts
    recoveries: list[Recovery]
    bytes_up: int
    bytes_down: int
    loss_first: float | None
    """Held-out loss of the initial weights."""
    loss_final: float | None
    """Held-out loss of Theta at the end."""
    loss_average: float | None = None
    """Held-out loss of the average of Theta over time, where outer.average_decay asks for one."""
    theta_sha256: str | None
    """Digest of Theta's numbers; not of the file."""
    tape: str | None
    run_dir: str | None
    clock: str
    """`virtual` or `wall`: what `seconds` and `waited_seconds` are measured on."""
    seconds: float
    """Training time: a virtual run's from its start, a live run's from its first inner step, to the last event."""
    fragments: int
    command_seconds: float = 0.0
    """Wall-clock duration of the command up to this summary: imports, data, processes, training, evaluation and, of a live run,
    the replay of its tapes. In `atoll compare`, of this run."""
    theta: str | None = None
    """Path of theta.safetensors, the trained weights; None where nothing was trained (`atoll sim`)."""
    rounds_merged: int = 0
    """Rounds that merged the updates of at least one learner: with P fragments and H local steps a round, at most P in every H
    steps of the run."""
    tokens_trained: int = 0
    """By all learners together, as far as the syncer heard of it."""
    tokens_unreported: int = 0
    """Trained in steps that the syncer never heard of, because their learner was killed or cut off first. They are counted on the
    learners' tapes, and are part of none of the shares below."""
    compute: dict[str, str] = {}
    """Precision and compilation of the inner steps as each learner resolved them, by learner; `all` in virtual time."""
    kernels: str = ""
    """What computed a live run's merges: numba, torch, or both."""
    stages: dict[str, float] = {}
    """Of the syncer's rounds, medians in seconds: `gather`, `queue`, `merge`, `store`, and `between_commits`."""
    token_shares: dict[str, float] = {}
    """What became of them, as shares: see `token_shares`."""
    traffic: list[LearnerTraffic] = []
    refused: int = 0
    """Messages that the syncer refused."""
    expelled: dict[str, str] = {}
    """Learners that lost their place because they broke the rules too often, with the last reason."""
    rejected_merges: list[str] = []
    """Merges that were not stored because Theta would have jumped or held NaN, with their contributors."""
    rollbacks: list[str] = []
    """By whom and to which step."""
    faults: list[str] = []
    """Of the chaos plan, as they were carried out."""
    twin_loss: float | None = None
    """Final held-out loss of the same run without faults."""
    accuracy: float | None = None
    """Share of held-out answers that Theta gets right at the end; None where a task has no right answers."""
    missing: list[Missing] = []
    """Records that a learner's tape lacks, because its disk was full: its figures are too low, and its decisions are checked up
    to there."""
    heldout: list[HeldoutPoint] = []
    """Held-out losses of Theta during training, where data.heldout_every asks for them."""
    curve: str | None = None
    """Path of the picture of them."""


def summarise(
    config: Config, view: RunView, fates: Fates, *, loss_first: float | None = None, loss_final: float | None = None,
    loss_average: float | None = None, theta_sha256: str | None = None,
    theta: str | None = None, tape: str | None = None, run_dir: str | None = None,
    clock: str = "virtual",
    faults: Sequence[str] = (), accuracy: float | None = None, points: Sequence[HeldoutPoint] = (),
    missing: Sequence[Missing] = (), compute: Mapping[str, str] | None = None,
    kernels: str = "",
) -> Summary:  # fmt: skip
    tokens, fragments = tokens_of(fates), max(1, config.protocol.fragments)
    trained = tokens.trained // fragments
    done = max(trained, view.tokens_done)  # a tape with a gap lacks some that were reported
    return Summary(
        preset=config.preset, learners=config.learners, seed=config.seed, total_steps=view.outer_step,
        goodput=round(view.goodput, 6), startup_seconds=round(max(0.0, seconds(view.startup)), 6),
        goodput_after_startup=round(view.goodput_after_startup, 6), uptime=round(view.uptime, 6),
        waited_seconds=round(seconds(view.waited), 6),
        participants={str(n): count for n, count in sorted(view.participants.items())}, tokens=tokens,
        recoveries=view.recoveries, bytes_up=view.bytes_up, bytes_down=view.bytes_down, loss_first=loss_first,
        loss_final=loss_final, loss_average=loss_average, theta_sha256=theta_sha256, theta=theta, tape=tape, run_dir=run_dir,
        clock=clock, seconds=round(seconds(view.lasted), 6), fragments=config.protocol.fragments, traffic=view.traffic(),
        rounds_merged=sum(count for n, count in view.participants.items() if n), token_shares=token_shares(tokens),
        tokens_trained=trained, tokens_unreported=done - trained,
        token_goodput=round(tokens.merged / (fragments * done), 6) if done else 0.0,
        refused=view.refused, expelled={str(m): why for m, why in sorted(view.expelled.items())},
        rejected_merges=view.rejected, rollbacks=view.rollbacks,
        faults=list(faults), accuracy=accuracy, heldout=list(points), missing=list(missing), compute=dict(compute or {}),
        kernels=kernels, stages=view.rounds.medians(),
    )  # fmt: skip
