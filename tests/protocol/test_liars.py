"""What a learner that lies can make others believe: no data that cannot be drawn, and no longer deadlines."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from stage import TOKENS, Cast, SyncerStage, arrival, of

from atoll.config import changed, load
from atoll.ids import SECOND, SYNCER
from atoll.protocol.causality import Mailbox
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import (
    NO_VERSION,
    ConnectionLost,
    Contribution,
    Effect,
    Enter,
    Goodbye,
    Grant,
    Hello,
    Loaded,
    Membership,
    Merge,
    Message,
    Received,
    Refuse,
    Report,
    Send,
    Standing,
    Started,
    TakeTheta,
    Unit,
    Violated,
)  # fmt: skip

CONFIG = load(preset_name="decoupled", overrides={
    "learners": 2, "total_steps": 150, "protocol": {"fragments": 6, "local_steps_per_round": 6},
    "data": {"seq_len": 32, "batch_size": 4},
})  # fmt: skip


class Table:
    """A syncer's machine, and learners that say what they like."""

    def __init__(self) -> None:
        self.machine = SyncerMachine(CONFIG)
        self.now = 3600 * SECOND
        self._mailboxes = {m: Mailbox(m, 0) for m in range(8)}
        self.machine.on(Started(0), self.now)

    def say(self, learner: int, body: Message) -> list[Effect]:
        self.now += SECOND // 100
        return list(self.machine.on(Received(self._mailboxes[learner].seal(SYNCER, body), 0), self.now))

    def patience(self) -> int:
        return self.machine.pulse.pull_patience(list(self.machine.roster), 1)

    def joins(self, learner: int) -> tuple[int, Unit]:
        """Its session, and the first unit it may draw."""
        (theta,) = _told(self.say(learner, _hello()), TakeTheta)
        effects = self.say(learner, Loaded(theta.ticket, SYNCER, 0, self.machine.versions.all_newest()))
        return _told(effects, Enter)[0].session, _told(effects, Grant)[0].units[0]


def _hello(*left: Unit) -> Hello:
    return Hello((NO_VERSION,) * 6, 0, 0, True, left, 0, Reason(Why.JOINS))


def _told(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [e.envelope.body for e in effects if isinstance(e, Send) and isinstance(e.envelope.body, kind)]


@pytest.mark.parametrize("index", [2**20, 2**40, 2**50, 2**53])
def test_data_that_a_liar_names_can_be_drawn_and_reported_by_another(index: int) -> None:
    table = Table()
    table.say(5, _hello())
    table.say(5, _hello(Unit(5, index)))
    table.say(5, Goodbye(Reason(Why.LEAVES, "bye")))
    session, unit = table.joins(0)
    batch = unit.index * 6
    effects = table.say(0, Report(session, 1, 0, 128, 4, 10**7, 0, unit.stream, batch, (), 0, 1.0))
    assert not [e for e in effects if isinstance(e, Refuse)]
    table.machine.on(ConnectionLost(0, "broke"), table.now)
    effects = table.say(0, Hello((0,) * 6, 1, 128, False, (unit,), 0, Reason(Why.RECONNECTED), 1))
    assert not [e for e in effects if isinstance(e, Refuse)]


def test_contribution_that_nobody_asked_for_stretches_no_deadline() -> None:
    table = Table()
    table.say(5, _hello())
    before = table.patience()
    table.say(5, Contribution(1, 0, 0, 0, 0, 0, 0, 0))
    assert table.patience() <= before


@pytest.mark.parametrize("away", [1, 400])
def test_step_that_began_before_a_reconnect_is_believed_up_to_the_usual(away: int) -> None:
    """Its report comes soon after the Hello, so the time between them says nothing. It cannot claim more than is usual either."""
    s = SyncerStage(arrival(2), joined=2)
    for step in range(1, 6):
        s.steps(0, at=step * SECOND, nanos=SECOND)
    back = (5 + away) * SECOND
    s.on(ConnectionLost(0, "cable"), at=back - SECOND // 2)
    s.hello(0, held=s.cast[0].held, at=back)
    s.steps(0, at=back + SECOND // 10, nanos=SECOND)
    member = s.machine.roster.get(0)
    assert member is not None and member.step_ema == SECOND
    s.steps(0, at=back + SECOND // 2, nanos=300 * SECOND)
    assert member.step_ema == SECOND


def test_learner_that_sends_what_is_no_message_loses_its_place() -> None:
    s = SyncerStage(arrival(2, limits={"offences_max": 3}), joined=2)
    for _ in range(2):
        (refused,) = of(s.on(Violated(1, "12 bytes that are no message")), Refuse)
        assert refused.disconnect and refused.reason.why is Why.VIOLATION
    effects = s.on(Violated(1, "a Pull is not for the syncer"))
    assert [m.standing for m in of(effects, Membership)] == [Standing.EXPELLED]
    s.cast[1] = Cast(s.config)
    s.cast[1].incarnation = 1
    assert [e.reason.why for e in of(s.hello(1), Refuse)] == [Why.EXPELLED]


def test_peer_that_never_said_hello_loses_its_place_too() -> None:
    s = SyncerStage(arrival(2, limits={"offences_max": 2}), joined=2)
    s.on(Violated(7, "noise"))
    assert of(s.on(Violated(7, "noise")), Membership) and s.full_round() == 1


def share_of_a_liar(s: SyncerStage, tokens: int) -> float:
    """Learner 3 of four claims all its steps and so many tokens in its first round, the others one step: its share."""
    for learner in range(3):
        s.steps(learner)
    liar = s.cast[3]
    liar.local_step, liar.position, liar.batch = liar.local_step + 1, liar.position + 1, liar.batch + 1
    s.hears(3, structs.replace(s.report(3), tokens=tokens))
    (round_,) = s.machine.rounds.in_flight()
    (fragment,) = round_.due
    for learner in range(3):
        s.contributes(learner, round_.outer_step, fragment)
    effects = s.contributes(3, round_.outer_step, fragment, c_steps=liar.local_step, c_tokens=tokens, tokens=tokens)
    (merge,) = of(effects, Merge)
    weights = {share.learner: share.weight for share in merge.shares}
    return float(weights[3] / sum(weights.values()))


def test_learner_that_counts_its_steps_from_a_trillion_weighs_like_the_others() -> None:
    """TRUST.md, row 2: Hello names local step 2**40, and the first contribution claims all of them."""
    s = SyncerStage(arrival(4, quorum=4), joined=3)
    s.cast[3] = Cast(s.config)
    s.cast[3].local_step = 2**40
    s.joins(3)
    assert share_of_a_liar(s, tokens=(2**40 + 1) * TOKENS) == pytest.approx(0.25)


def test_loop_that_claims_a_trillion_tokens_for_a_step_gets_half_at_most() -> None:
    """TRUST.md, row 13: a loop draws its own data, so nobody knows what a step of it holds."""
    s = SyncerStage(changed(arrival(4, quorum=4), ["model.name=custom"]), joined=4)
    assert share_of_a_liar(s, tokens=10**12) <= 0.5
