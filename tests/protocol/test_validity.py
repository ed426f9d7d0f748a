"""What learners say is judged before it is believed: impossible words are refused, cost the connection, and change nothing."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import JOINS, MS, TOKENS, Cast, SyncerStage, arrival, exact, of, sent

from atoll.config import CUSTOM, Config
from atoll.ids import SYNCER
from atoll.protocol.accounts import StepMost
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.validity import COUNT_MAX, REASON_MAX, objection
from atoll.protocol.vocabulary import (
    Accept,
    Adoption,
    Announce,
    ConnectionLost,
    Contribution,
    Decline,
    Discard,
    Effect,
    Enter,
    Envelope,
    Finish,
    FixParticipants,
    Goodbye,
    Hello,
    Loaded,
    Membership,
    Merge,
    Message,
    Pull,
    Received,
    Recover,
    RecoveryFailed,
    Refuse,
    Report,
    Send,
    Started,
    StateRequest,
    StateTransfer,
    TakeTheta,
    Unit,
    Welcome,
)  # fmt: skip

replace = msgspec.structs.replace
BIG = (COUNT_MAX + 1, 2**62)
LONG = Reason(Why.LEAVES, "x" * 2000)


def seen(s: SyncerStage) -> tuple[object, ...]:
    """What must not change by a refusal."""
    m = s.machine
    syncer_state = {k: (tuple(b.granted), tuple(b.done), b.ahead) for k, b in m.leases.by_learner.items()}
    rounds = {t: (r.phase, r.participants) for t, r in m.rounds.items()}
    members = {k.learner: (k.standing, k.reported, k.tokens, tuple(k.held), k.position) for k in m.roster}
    return m.fates(), syncer_state, dict(m.leases._next), tuple(m.leases._pool), rounds, members, m.outer_step


def refuses(s: SyncerStage, learner: int, body: Message) -> str:
    before = seen(s)
    effects = s.hears(learner, body)
    (refuse,) = effects
    assert isinstance(refuse, Refuse)
    assert refuse.disconnect
    assert seen(s) == before
    return str(refuse.reason.detail)


def told(s: SyncerStage) -> Report:
    s.steps(0)
    return s.report(0)


REPORT = ["session", "local_step", "tokens", "samples", "step_nanos", "waited_nanos", "batch", "snapshot"]
CONTRIBUTION = ["outer_step", "fragment", "local_step", "anchor", "c_steps", "c_tokens", "c_samples", "tokens"]


@pytest.mark.parametrize("field", REPORT)
@pytest.mark.parametrize("value", [-1, *BIG])
def test_report_with_a_count_that_cannot_be(field: str, value: int) -> None:
    s = SyncerStage(arrival(2), joined=2)
    assert refuses(s, 0, replace(told(s), **{field: value})) == "report names what cannot be"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stream": -1}, "report names what cannot be"),
        ({"stream": 10**6}, "report names what cannot be"),
        ({"position": -2}, "report names a position that cannot be"),
        ({"position": 2**62}, "report names a position that cannot be"),
        ({"tokens": 10**9}, "report claims more tokens or samples than its steps can hold"),
        ({"samples": TOKENS + 1}, "report claims more tokens or samples than its steps can hold"),
        ({"adopted": (Adoption(0, 0, 0, 0),) * 9}, "report names too many adoptions"),
        ({"adopted": (Adoption(0, 0, -1, 0),)}, "report names an adoption that cannot be"),
        ({"adopted": (Adoption(0, 0, 0, TOKENS + 1),)}, "report names an adoption that cannot be"),
        ({"adopted": (Adoption(0, 0, 0, 5, 6),)}, "report names an adoption that cannot be"),
        ({"adopted": (Adoption(0, 0, 0, 5, -1),)}, "report names an adoption that cannot be"),
        ({"adopted": (Adoption(2, 0, 0, 0),)}, "report names an adoption that never could be"),
        ({"adopted": (Adoption(-1, 0, 0, 0),)}, "report names an adoption that never could be"),
        ({"adopted": (Adoption(0, 7, 0, 0),)}, "report names an adoption that never could be"),
        ({"local_step": 2, "stream": 1, "batch": 0}, "report names data that it was not granted"),
        ({"local_step": 2, "stream": 1, "batch": COUNT_MAX}, "report names data that it was not granted"),
    ],
)
def test_report_that_cannot_be(changes: dict[str, Any], reason: str) -> None:
    s = SyncerStage(arrival(2), joined=2)
    assert refuses(s, 0, replace(told(s), **changes)) == reason


def test_report_of_anothers_data_does_not_move_that_learners_stream() -> None:
    """Else the other would be granted units from far away, and never train what lies between."""
    s = SyncerStage(arrival(2), joined=2)
    s.hears(0, replace(told(s), local_step=2, stream=1, batch=10**6))
    assert s.machine.leases.own_next(1) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"held": (0,)}, "Hello names versions that never were"),
        ({"held": (0,) * 3}, "Hello names versions that never were"),
        ({"held": (0, -2)}, "Hello names versions that never were"),
        ({"held": (0, 1)}, "Hello names versions that never were"),
        ({"held": (0, 2**62)}, "Hello names versions that never were"),
        ({"left": (Unit(0, -1),)}, "Hello names data that cannot be"),
        ({"left": (Unit(5000, 0),)}, "Hello names data that cannot be"),
        ({"left": (Unit(0, 0),) * 3000}, "Hello names data that cannot be"),
        ({"left": (Unit(1, 2),)}, "Hello names data that nobody was given"),
        ({"local_step": -1}, "Hello names what cannot be"),
        ({"own_next": 2**62}, "Hello names what cannot be"),
        ({"grants": -1}, "Hello names what cannot be"),
        ({"reason": Reason(Why.JOINS, "x" * (REASON_MAX + 1))}, "Hello names what cannot be"),
        ({"tokens": 10**9, "local_step": 1}, "Hello claims more tokens than its steps can hold"),
        ({"tokens": 1, "local_step": 0}, "Hello claims more tokens than its steps can hold"),
    ],
)
def test_hello_that_cannot_be(changes: dict[str, Any], reason: str) -> None:
    s = SyncerStage(arrival(2), joined=2)
    hello = Hello((0, 0), 0, 0, False, (), 0, Reason(Why.RECONNECTED))
    assert refuses(s, 0, replace(hello, **changes)) == reason


@pytest.mark.parametrize("field", CONTRIBUTION)
@pytest.mark.parametrize("value", [-1, *BIG])
def test_contribution_with_a_number_that_cannot_be(field: str, value: int) -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.steps(0)
    assert refuses(s, 0, replace(s.contribution(0, 1, 1), **{field: value})) == "contribution names what cannot be"


@pytest.mark.parametrize(
    "changes",
    [
        {"c_tokens": TOKENS + 1}, {"tokens": 10 * TOKENS}, {"c_steps": 2}, {"local_step": 2}, {"c_samples": 2},
        {"c_steps": 0},  # tokens without a step: its weight would be without bound
    ],
)  # fmt: skip
def test_contribution_that_claims_more_than_was_reported(changes: dict[str, int]) -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.steps(0)
    assert refuses(s, 0, s.contribution(0, 1, 1, **changes)) == "contribution claims more than was reported"


def test_steps_named_in_a_hello_may_be_contributed_before_the_next_report() -> None:
    """A learner trains on while its connection is broken. It may be asked before its next report: an honest one lost its
    connection over and over, for work that it had named in its Hello."""
    s = SyncerStage(arrival(2, grace="adaptive"), joined=2)
    s.steps(0)
    s.on(ConnectionLost(0, "broke"))
    s.cast[0].local_step += 3
    s.hello(0, held=s.cast[0].held, reason=Reason(Why.RECONNECTED))
    s.steps(1)
    assert sent(s.passes(s.now + 100 * MS), 0, Pull)
    excess = s.contribution(0, 1, 1, tokens=5 * TOKENS)
    assert refuses(s, 0, excess) == "contribution claims more than was reported"
    assert of(s.hears(0, s.contribution(0, 1, 1, c_steps=4, c_tokens=4 * TOKENS, c_samples=4)), Accept)


def test_contribution_cannot_pack_the_tokens_of_many_steps_into_one() -> None:
    """Its weight is tokens times tokens per step: one that claims a thousand steps' tokens in one step would outweigh all."""
    s = SyncerStage(arrival(2), joined=2)
    most = StepMost.of(s.machine.config).tokens
    member = s.machine.roster.get(0)
    assert member is not None
    s.cast[0].local_step = member.reported = 999
    report = replace(s.report(0), local_step=1000, tokens=1000 * most, samples=1000, batch=0)
    s.cast[0].local_step = 1000
    effects = s.hears(0, report)
    assert of(effects, FixParticipants)
    packed = s.contribution(0, 1, 1, c_steps=1, c_tokens=1000 * most, tokens=1000 * most)
    assert refuses(s, 0, packed) == "contribution claims more than was reported"
    honest = s.contribution(0, 1, 1, c_steps=1000, c_tokens=1000 * most, tokens=1000 * most)
    assert of(s.hears(0, honest), Accept)


def test_loop_that_counts_samples_and_no_tokens_is_merged() -> None:
    """`learner.step()` of a user's own loop: images have no tokens, and `shard` counts them by itself."""
    config = arrival(2, aggregation_weighting="num_samples")
    s = SyncerStage(msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, name=CUSTOM)), joined=2)
    s.cast[0].local_step = 1
    assert of(s.hears(0, replace(s.report(0), tokens=0, samples=32)), FixParticipants)
    bodies = s.contribution(0, 1, 1, c_tokens=0, tokens=0, c_samples=32)
    (merge,) = of(s.hears(0, bodies), Merge)
    assert [share.weight for share in merge.shares] == [32.0]


@pytest.mark.parametrize(
    "body",
    [
        Loaded(-1, SYNCER, 0, (0, 0)), Loaded(0, -2, 0, (0, 0)), Loaded(0, SYNCER, 2**62, (0, 0)), Loaded(0, SYNCER, 0, (0,)),
        RecoveryFailed(-1, JOINS), RecoveryFailed(0, LONG), Decline(2**62, JOINS), Decline(0, LONG), Goodbye(LONG),
        Welcome(0), Pull(1, (0,)), Announce(1, 0, -1, ()), TakeTheta(1, JOINS), Enter(1, 1), Recover(JOINS), Finish(1),
        StateRequest(1), StateTransfer(1, 1, (0, 0), ()),
    ],
)  # fmt: skip
def test_other_words_that_cannot_be(body: Message) -> None:
    refuses(SyncerStage(arrival(2), joined=2), 0, body)


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": -1}, {"seq": 2**62}, {"after": -1}, {"after": 2**62}, {"incarnation": -1}, {"incarnation": 2**62},
        {"clock": -1}, {"clock": 2**62},
    ],
)  # fmt: skip
def test_envelope_that_cannot_be(changes: dict[str, Any]) -> None:
    config = arrival(2)
    fine = Envelope(0, 0, SYNCER, 0, 0, Hello((0, 0), 0, 0, False, (), 0, Reason(Why.JOINS)))
    assert objection(config, fine) is None
    refusal = objection(config, replace(fine, **changes))
    assert refusal is not None and refusal.why is Why.IMPOSSIBLE


@pytest.mark.parametrize("sender", [-5, SYNCER, 1024, 2**62])
def test_sender_that_is_no_learner(sender: int) -> None:
    s = SyncerStage(arrival(2))
    effects = s.on(Received(Envelope(sender, 0, SYNCER, 0, 0, Hello((0, 0), 0, 0, False, (), 0, Reason(Why.JOINS))), 0))
    assert effects == [Refuse(sender, Reason(Why.NOT_A_LEARNER), True)]
    assert len(s.machine.roster) == 0


def test_step_longer_than_its_learner_has_been_here_does_not_stop_the_pace() -> None:
    """One of two learners says a step took a hundred days: the median must not hold the other back as long."""
    s = SyncerStage(arrival(2, pace=1.0), joined=2)
    for k in range(6):
        for m in (0, 1):
            s.steps(m, at=(k + 1) * 100 * MS, nanos=COUNT_MAX if m else 100 * MS)
        for t, round_ in list(s.machine.rounds.items()):
            for m in round_.participants:
                for fragment in round_.due:
                    s.contributes(m, t, fragment)
            if round_.phase == "storing":
                s.stored(t)
    deadline = s.machine.deadline()
    assert deadline is not None
    assert deadline < 120_000 * MS


# ---------------------------------------------------------------- suspects


def suspect(s: SyncerStage, learner: int, body: Message) -> list[Effect]:
    actor = s.cast[learner]
    envelope = Envelope(learner, actor.incarnation, SYNCER, actor.seq[body.lane], 0, body)
    actor.seq[body.lane] += 1
    return s.on(Received(envelope, 0, WHY))


WHY = Reason(Why.OUTLIER, "the norm is far beyond the usual")


def test_outlier_is_refused_and_its_round_goes_on_without_it() -> None:
    s = SyncerStage(arrival(2, grace="adaptive"), joined=2)
    s.steps(0)
    s.steps(1)
    t = next(iter(s.machine.rounds))
    (who,) = s.machine.rounds[t].participants[:1]
    effects = suspect(s, who, s.contribution(who, t, s.machine.rounds[t].due[0]))
    assert of(effects, Refuse) == [Refuse(who, WHY, False)]
    assert of(effects, Discard) == [Discard(t, who, WHY)]
    assert of(effects, Membership) == []
    assert sent(effects, who, Recover) == []


def test_outliers_in_a_row_mean_recovery_and_one_good_update_forgives() -> None:
    s = SyncerStage(arrival(1), joined=1)
    outcomes = []
    for flawed in (1, 1, 0, 1, 1, 1):
        effects = s.steps(0)
        t = s.machine.outer_step + 1
        body = s.contribution(0, t, s.machine.rounds[t].due[0])
        if flawed:
            effects = suspect(s, 0, body)
        else:
            s.hears(0, body)
            effects = s.stored(t)
        outcomes.append(bool(sent(effects, 0, Recover)))
    assert outcomes == [False] * 5 + [True]


def test_poison_means_recovery_at_once() -> None:
    s = SyncerStage(arrival(2), joined=2)
    s.steps(0)
    effects = s.hears(0, s.contribution(0, 1, 1), flaw=Reason(Why.POISONED, "fragment 1 holds NaN or Inf"))
    assert sent(effects, 0, Recover) == [Recover(Reason(Why.POISONED, "fragment 1 holds NaN or Inf"))]


@pytest.mark.parametrize("learners", [1, 2])
def test_outliers_of_everybody_who_waits_for_the_round_do_not_stop_the_run(learners: int) -> None:
    """Each waits for the very round it was dropped from and says nothing more: it must be let in again at once."""
    s = SyncerStage(exact(learners=learners), joined=learners)
    for m in [*range(learners)] * 2:
        s.steps(m)
    effects = [e for m in range(learners) for e in suspect(s, m, s.contribution(m, 2, 0))]
    assert {m.standing for m in s.machine.roster} == {"in_sync"}
    assert sorted(e.envelope.receiver for e in effects if isinstance(e, Send) and isinstance(e.envelope.body, Enter)) == [
        *range(learners)
    ]


# ---------------------------------------------------------------- a storm

NUMBERS = st.one_of(st.sampled_from([0, 1, 2, 3, -1, COUNT_MAX, *BIG, -(2**62)]), st.integers(-3, 60))
FEW = st.one_of(st.sampled_from([0, 1, -1, 2**62]), st.integers(0, 3))
UNITS = st.lists(st.builds(Unit, FEW, NUMBERS), max_size=6).map(tuple)
HELD = st.one_of(st.just((0, 0)), st.just((-1, -1)), st.lists(NUMBERS, max_size=4).map(tuple))
ADOPTED = st.lists(st.builds(Adoption, FEW, NUMBERS, NUMBERS, NUMBERS), max_size=10).map(tuple)
TEXT = st.builds(Reason, st.sampled_from(Why), st.one_of(st.just(""), st.just("x" * 2000)))
WORDS = st.one_of(
    st.builds(Hello, HELD, NUMBERS, NUMBERS, st.booleans(), UNITS, NUMBERS, TEXT, NUMBERS),
    st.builds(Hello, st.just((0, 0)), st.integers(0, 4), st.just(0), st.booleans(), st.just(()), st.just(0), st.just(JOINS), FEW),
    st.builds(Report, FEW, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, FEW, NUMBERS, ADOPTED, NUMBERS, st.none()),
    st.builds(Contribution, NUMBERS, FEW, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.builds(Decline, NUMBERS, TEXT), st.builds(Loaded, FEW, NUMBERS, NUMBERS, HELD), st.builds(RecoveryFailed, FEW, TEXT),
    st.builds(Goodbye, TEXT), st.builds(Welcome, NUMBERS), st.builds(StateRequest, NUMBERS),
    st.builds(Announce, NUMBERS, FEW, NUMBERS, st.just(())),
)  # fmt: skip


class Storm:
    """A liar beside an honest learner. The liar's connection is cut as the syncer demands; it dials again at once."""

    def __init__(self, config: Config) -> None:
        self.s = SyncerStage(config)
        self.s.joins(0)
        self.s.cast.setdefault(1, Cast(config))
        self.s.now = 61_000 * MS  # the start-up wait is over: the liar need not be waited for
        self.seq = [0, 0]
        self.incarnation = 0

    def lie(self, body: Message, *, flaw: Reason | None = None, in_order: bool = True, clock: int = 0) -> None:
        lane = body.lane
        seq = self.seq[lane] if in_order else 2**40
        effects = self.s.on(Received(Envelope(1, self.incarnation, SYNCER, seq, clock, body), 0, flaw))
        self.seq[lane] += in_order
        if any(isinstance(e, Refuse) and e.disconnect for e in effects):
            self.s.on(ConnectionLost(1, "refused"))
            self.incarnation += 1
            self.seq = [0, 0]

    def honest_round(self) -> None:
        s = self.s
        s.steps(0, at=s.now + 100 * MS)
        while (deadline := s.machine.deadline()) is not None and deadline <= s.now:
            s.passes(s.now)
        for t, round_ in list(s.machine.rounds.items()):
            if round_.phase == "pulling" and 0 in round_.awaited:
                for fragment in round_.due:
                    s.contributes(0, t, fragment)
        while (round_ := s.machine.rounds.get(s.machine.outer_step + 1)) is not None and round_.phase == "storing":
            s.stored(round_.outer_step)

    def check(self) -> None:
        m = self.s.machine
        fates = m.fates()
        assert fates.add_up()
        assert fates.in_flight >= 0
        assert fates.trained <= 2 * COUNT_MAX * 4
        assert len(m.roster) <= 2
        assert len(m.leases.by_learner) <= 2
        assert len(m.rounds) <= m.config.protocol.overlap + 1
        assert all(m.versions.count(p) <= m.config.limits.versions_max for p in range(2))


FLAWS = [None, None, None, Reason(Why.OUTLIER, "the norm"), Reason(Why.POISONED, "NaN")]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(WORDS, st.booleans(), st.sampled_from(FLAWS)), min_size=20, max_size=60))
def test_no_word_of_a_learner_makes_the_syncer_raise_or_grow(words: list[tuple[Message, bool, Reason | None]]) -> None:
    storm = Storm(arrival(2, total_steps=1000))
    for k, (word, in_order, flaw) in enumerate(words):
        storm.lie(word, in_order=in_order or k % 3 > 0, flaw=flaw)
        storm.check()


@pytest.mark.parametrize("seed", [1, 2])
def test_honest_learner_completes_rounds_through_thousands_of_lies(seed: int) -> None:
    """Two lies between each two of its steps."""
    rng = random.Random(seed)
    storm = Storm(arrival(2, total_steps=100_000, overlap=1))
    storm.honest_round()  # a pull is measured: from here on nobody waits a minute for the liar's
    for k, word in enumerate(_lies(rng, 4000)):
        storm.lie(word, flaw=rng.choice([None, None, None, Reason(Why.OUTLIER, "the norm")]))
        if k % 2:
            storm.honest_round()
            storm.check()
    assert storm.s.machine.refused > 2000
    assert storm.s.machine.outer_step > 1000


def _lies(rng: random.Random, count: int) -> list[Message]:
    """As the strategies above, by a plain generator: thousands are needed, and nothing to shrink."""
    wild = [0, 1, 2, 3, -1, COUNT_MAX, 2**62, -(2**62)]

    def n() -> int:
        return rng.choice(wild) if rng.random() < 0.3 else rng.randint(0, 40)

    def few() -> int:
        return rng.choice([0, 0, 1, 1, 1, 2, -1])

    def units() -> tuple[Unit, ...]:
        return tuple(Unit(few(), n()) for _ in range(rng.randint(0, 3)))

    makers: list[Any] = [
        lambda: Hello((0, 0), 0, 0, True, (), 0, Reason(Why.JOINS)),
        lambda: Hello((rng.choice([0, 0, -1, n()]),) * rng.randint(1, 3), n(), n(), rng.random() < 0.5, units(), n(), JOINS, n()),
        lambda: Report(few(), n(), n(), n(), n(), n(), n(), few(), n(), (), 0, None),
        lambda: Report(1, n(), n(), 0, 0, COUNT_MAX, 0, 1, n(), (), 0, None),
        lambda: Contribution(n(), few(), n(), n(), n(), n(), n(), n()),
        lambda: Decline(n(), JOINS),
        lambda: Loaded(rng.randint(0, 400), SYNCER, 0, (0, 0)),
        lambda: RecoveryFailed(n(), Reason(Why.SOURCE_LOST, "x" * rng.choice([1, 2000]))),
        lambda: Goodbye(Reason(Why.LEAVES, "bye")),
        lambda: StateRequest(n()),
    ]
    return [rng.choice(makers)() for _ in range(count)]


def test_syncer_told_to_start_again_in_the_middle_of_a_storm_goes_on() -> None:
    machine = SyncerMachine(arrival(2))
    machine.on(Started(0), 0)
    for k, word in enumerate(_lies(random.Random(3), 300)):
        machine.on(Received(Envelope(1, k, SYNCER, 0, 0, word), 0), k * MS)
        if k % 100 == 99:
            machine.on(Started(k), k * MS)
    assert machine.fates().add_up()
