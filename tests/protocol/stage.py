"""Machines on a stage: events go in by name, effects come out as lists to compare. No driver, no network, no tensor.

After every event the stage checks what must hold after all of them: the fates add up, channels are FIFO.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.config import Config, load
from atoll.ids import SYNCER, LearnerId, Nanos, OuterStep, WorkerId
from atoll.protocol.learner import LearnerMachine
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import (
    NO_VERSION,
    Adoption,
    Announce,
    Connected,
    Contribution,
    DeadlinePassed,
    Effect,
    Enter,
    Envelope,
    Event,
    Hello,
    Loaded,
    Message,
    Received,
    Report,
    Send,
    SnapshotPart,
    Started,
    StepDone,
    Stored,
    TakeTheta,
    Unit,
    Welcome,
)  # fmt: skip

MS = 1_000_000
JOINS = Reason(Why.JOINS)
TOKENS = 100
"""Tokens of one inner step, on stage."""


def arrival(learners: int = 3, *, fragments: int = 2, interval: int = 2, overlap: int = 1, **protocol: Any) -> Config:
    """A small decoupled run. Without grace and pace unless asked for, so that a test meets one rule at a time."""
    plain = {"grace": "none", "pace": 0.0} | protocol
    sizes = {"fragments": fragments, "local_steps_per_round": interval, "overlap": overlap}
    limits = {"patience_seconds": 0.0} | plain.pop("limits", {})
    top = {"learners": learners, "total_steps": plain.pop("total_steps", 40)}
    return load(preset_name="decoupled", overrides=top | {"protocol": sizes | plain, "limits": limits})


def exact(preset: str = "diloco", learners: int = 2, *, interval: int = 2, total_steps: int = 40, **protocol: Any) -> Config:
    limits = {"patience_seconds": 0.0} | protocol.pop("limits", {})
    protocol = {"local_steps_per_round": interval} | protocol
    top = {"learners": learners, "total_steps": total_steps}
    return load(preset_name=preset, overrides=top | {"protocol": protocol, "limits": limits})


def sent(effects: Sequence[Effect], to: WorkerId | None = None, kind: type | tuple[type, ...] | None = None) -> list[Message]:
    """Bodies of what was sent, in order."""
    bodies = [e.envelope.body for e in effects if isinstance(e, Send) and to in (None, e.envelope.receiver)]
    return [b for b in bodies if kind is None or isinstance(b, kind)]


def others(effects: Sequence[Effect]) -> list[Effect]:
    """All but what was sent."""
    return [e for e in effects if not isinstance(e, Send)]


def of(effects: Sequence[Effect], *kinds: type) -> list[Any]:
    return [e for e in effects if isinstance(e, kinds)]


class _Fifo:
    """Every lane of every (incarnation, receiver) counts from zero without gaps."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, WorkerId, int], int] = {}

    def check(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                e = effect.envelope
                key = (e.incarnation, e.receiver, e.body.lane)
                assert e.seq == self._next.get(key, 0), f"channel {key} jumps to {e.seq}"
                self._next[key] = e.seq + 1


class Cast:
    """What the stage knows of a learner that the syncer talks to."""

    def __init__(self, config: Config) -> None:
        self.incarnation = 0
        self.seq = [0, 0]
        """Next in each lane."""
        self.session = 0
        self.local_step = 0
        self.position = 0
        self.batch = -1
        self.held = [NO_VERSION] * config.protocol.fragments
        self.told: list[Announce] = []


class SyncerStage:
    """The syncer's machine, with stand-ins for learners that say what a test tells them to say."""

    def __init__(self, config: Config, joined: int = 0) -> None:
        self.config = config
        self.machine = SyncerMachine(config)
        self.now: Nanos = 0
        self.cast: dict[LearnerId, Cast] = {}
        self._fifo = _Fifo()
        self.on(Started(0))
        for learner in range(joined):
            self.joins(learner)

    def on(self, event: Event, at: Nanos | None = None) -> list[Effect]:
        self.now = self.now if at is None else at
        effects = list(self.machine.on(event, self.now))
        self._fifo.check(effects)
        assert self.machine.fates().add_up()
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.envelope.body, Announce):
                self.cast[effect.envelope.receiver].told.append(effect.envelope.body)
            if isinstance(effect, Send) and isinstance(effect.envelope.body, Enter):
                actor = self.cast[effect.envelope.receiver]
                actor.session, actor.position = effect.envelope.body.session, effect.envelope.body.outer_step
        return effects

    def hears(self, learner: LearnerId, body: Message, at: Nanos | None = None, flaw: Reason | None = None) -> list[Effect]:
        actor = self.cast.setdefault(learner, Cast(self.config))
        lane = body.lane
        envelope = Envelope(learner, actor.incarnation, SYNCER, actor.seq[lane], 0, body)
        actor.seq[lane] += 1
        return self.on(Received(envelope, 0, flaw), at)

    def passes(self, at: Nanos) -> list[Effect]:
        return self.on(DeadlinePassed(), at)

    # ------------------------------------------------------------ learners' words

    def hello(self, learner: LearnerId, *, held: Sequence[OuterStep] | None = None, left: Sequence[Unit] = (),
              own_next: int = 0, reason: Reason = JOINS, at: Nanos | None = None) -> list[Effect]:  # fmt: skip
        actor = self.cast.setdefault(learner, Cast(self.config))
        known = tuple(held) if held is not None else (NO_VERSION,) * self.config.protocol.fragments
        body = Hello(known, actor.local_step, actor.local_step * TOKENS, held is None, tuple(left), own_next, reason)
        return self.hears(learner, body, at)

    def comes_back(self, learner: LearnerId, at: Nanos | None = None) -> list[Effect]:
        """The same learner as a new process, with nothing."""
        incarnation = self.cast[learner].incarnation + 1
        self.cast[learner] = Cast(self.config)
        self.cast[learner].incarnation = incarnation
        return self.hello(learner, at=at)

    def joins(self, learner: LearnerId) -> list[Effect]:
        """The whole way in where Theta is sent: Hello, Theta, Loaded, Enter. Returns the effects of Loaded."""
        effects = self.hello(learner)
        (take,) = sent(effects, learner, TakeTheta)
        return self.loads(learner, take.ticket)  # type: ignore[union-attr]

    def loads(self, learner: LearnerId, ticket: int, source: WorkerId = SYNCER,
              held: Sequence[OuterStep] | None = None) -> list[Effect]:  # fmt: skip
        actor = self.cast[learner]
        actor.told.clear()
        actor.held = list(held) if held is not None else [self.machine.versions.newest(p) for p in range(len(actor.held))]
        return self.hears(learner, Loaded(ticket, source, actor.local_step, tuple(actor.held)))

    def steps(self, learner: LearnerId, at: Nanos | None = None, *, adopts: bool = True, nanos: Nanos = 100 * MS,
              snapshot: OuterStep = 0) -> list[Effect]:  # fmt: skip
        """One more inner step, and the report of it; whatever was announced is adopted at its end unless told not to."""
        actor = self.cast[learner]
        actor.local_step += 1
        actor.position += 1
        actor.batch += 1
        adopted = []
        for told in actor.told if adopts else []:
            actor.held[told.fragment] = told.outer_step
            adopted.append(Adoption(told.fragment, told.outer_step, actor.local_step, actor.local_step * TOKENS))
        if adopts:
            actor.told.clear()
        return self.hears(learner, self.report(learner, nanos=nanos, adopted=tuple(adopted), snapshot=snapshot), at)

    def report(self, learner: LearnerId, *, nanos: Nanos = 100 * MS, adopted: tuple[Adoption, ...] = (),
               snapshot: OuterStep = 0) -> Report:  # fmt: skip
        a = self.cast[learner]
        return Report(
            a.session, a.local_step, a.position, a.local_step * TOKENS, a.local_step, nanos, 0, learner, max(a.batch, 0),
            adopted, snapshot, None,
        )  # fmt: skip

    def wrote(self, learner: LearnerId, snapshot: OuterStep, flaw: Reason | None = None) -> list[Effect]:
        return self.hears(learner, SnapshotPart(snapshot, flaw))

    def contribution(self, learner: LearnerId, outer_step: OuterStep, fragment: int, **changes: Any) -> Contribution:
        a = self.cast[learner]
        numbers: dict[str, Any] = {
            "local_step": a.local_step, "anchor": a.held[fragment], "c_steps": 1, "c_tokens": TOKENS, "c_samples": 1,
            "tokens": a.local_step * TOKENS,
        }  # fmt: skip
        return Contribution(outer_step, fragment, **(numbers | changes))

    def contributes(self, learner: LearnerId, outer_step: OuterStep, fragment: int, at: Nanos | None = None,
                    **changes: Any) -> list[Effect]:  # fmt: skip
        return self.hears(learner, self.contribution(learner, outer_step, fragment, **changes), at)

    def stored(self, outer_step: OuterStep, at: Nanos | None = None) -> list[Effect]:
        return self.on(Stored(outer_step, "digest"), at)

    def full_round(self, at: Nanos | None = None, *, who: Sequence[LearnerId] | None = None) -> OuterStep:
        """Everybody named steps, contributes what is due, and the round is stored. Returns its outer step."""
        t = self.machine.outer_step + 1
        self.now = self.now if at is None else at
        self.effects_of_round(t, sorted(self.cast) if who is None else who)
        return t

    def effects_of_round(self, t: OuterStep, who: Sequence[LearnerId]) -> list[Effect]:
        effects = [effect for learner in who for effect in self.steps(learner)]
        if t in self.machine.rounds:  # an empty outer step is over already
            round_ = self.machine.rounds[t]
            for learner in round_.participants:
                for fragment in round_.due:
                    effects += self.contributes(learner, t, fragment)
            effects += self.stored(t)
        return effects


class LearnerStage:
    """One learner's machine; the test plays the syncer and the peers."""

    def __init__(self, config: Config, learner: LearnerId = 0, incarnation: int = 0) -> None:
        self.config = config
        self.machine = LearnerMachine(config, learner, incarnation)
        self.learner = learner
        self.now: Nanos = 0
        self._seq: dict[tuple[WorkerId, int], int] = {}
        self._fifo = _Fifo()
        self.syncer_clock = 0
        self.on(Started(incarnation))

    def on(self, event: Event, at: Nanos | None = None) -> list[Effect]:
        self.now = self.now if at is None else at
        effects = list(self.machine.on(event, self.now))
        self._fifo.check(effects)
        return effects

    def hears(
        self, body: Message, sender: WorkerId = SYNCER, at: Nanos | None = None, flaw: Reason | None = None
    ) -> list[Effect]:
        channel = (sender, body.lane)
        seq = self._seq.get(channel, 0)
        self._seq[channel] = seq + 1
        clock = self.syncer_clock if sender == SYNCER else 0
        return self.on(Received(Envelope(sender, 0, self.learner, seq, clock, body), 0, flaw), at)

    def announced(self, outer_step: OuterStep, fragment: int, *, previous: OuterStep = NO_VERSION,
                  merged: tuple[LearnerId, ...] = (0,), at: Nanos | None = None) -> list[Effect]:  # fmt: skip
        self.syncer_clock = max(self.syncer_clock, outer_step)
        return self.hears(Announce(outer_step, fragment, previous, merged), at=at)

    def connects(self) -> list[Effect]:
        effects = self.on(Connected(SYNCER))
        self.hears(Welcome(self.syncer_clock))
        return effects

    def enters(self, outer_step: OuterStep = 0, session: int = 1) -> list[Effect]:
        """All the way in with Theta of version 0, up to the first InnerStep. Returns the effects of Enter."""
        self.connects()
        for fragment in range(self.config.protocol.fragments):
            self.announced(0, fragment, merged=())
        self.hears(TakeTheta(1, Reason(Why.NOTHING_MERGED)))
        return self.hears(Enter(session, outer_step))

    def steps(self, at: Nanos | None = None, nanos: Nanos = 100 * MS) -> list[Effect]:
        return self.on(StepDone(TOKENS, 1, nanos, None), at)
