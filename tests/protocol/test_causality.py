"""Channels are FIFO by (sender, incarnation) sequence numbers, and a message has its sender's count."""

from __future__ import annotations

import pytest

from atoll.ids import SYNCER
from atoll.protocol.causality import Mailbox, may_overtake
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import (
    Announce,
    Enter,
    Envelope,
    Hello,
    Message,
    Report,
    StateRequest,
    StateTransfer,
    Tick,
    Welcome,
)  # fmt: skip

HELLO = Hello((0,), 0, 0, False, (), 0, Reason(Why.JOINS))


def from_learner(seq: int, body: Message = Tick(1), *, incarnation: int = 0, clock: int = 0) -> Envelope:  # noqa: B008
    return Envelope(0, incarnation, SYNCER, seq, clock, body)


@pytest.fixture
def box() -> Mailbox:
    box = Mailbox(SYNCER, 0)
    assert box.refusal(from_learner(0, HELLO)) is None
    return box


def test_messages_in_sequence_are_taken(box: Mailbox) -> None:
    assert [box.refusal(from_learner(seq)) for seq in (1, 2, 3)] == [None, None, None]


def test_duplicate_is_dropped_silently_and_counted(box: Mailbox) -> None:
    box.refusal(from_learner(1))
    assert box.refusal(from_learner(1)) == Reason(Why.DUPLICATE)
    assert box.refusal(from_learner(0, HELLO)) == Reason(Why.DUPLICATE)
    assert box.duplicates == 2


def test_gap_is_refused_and_the_missing_one_is_still_taken(box: Mailbox) -> None:
    assert box.refusal(from_learner(2)) == Reason(Why.OUT_OF_SEQUENCE, "sequence 2 where 1 was due")
    assert box.refusal(from_learner(1)) is None


@pytest.mark.parametrize("body", [HELLO, Welcome(0), StateRequest(1)])
def test_opener_may_jump_a_gap(box: Mailbox, body: Message) -> None:
    assert body.opens
    assert box.refusal(from_learner(7, body)) is None
    assert box.refusal(from_learner(8)) is None


def test_opener_with_bytes_jumps_the_gap_of_its_own_lane(box: Mailbox) -> None:
    assert box.refusal(from_learner(7, StateTransfer(1, 0, (), ()))) is None
    assert box.refusal(from_learner(8, StateTransfer(2, 0, (), ()))) is None
    assert box.refusal(from_learner(1)) is None


BYTES = Announce(1, 0, -1, ())


def test_lanes_are_numbered_apart_and_bulk_follows_what_was_said_before_it() -> None:
    ours = Mailbox(SYNCER, 0)
    sealed = [ours.seal(0, body) for body in (Welcome(0), BYTES, Tick(1), Enter(1, 0), BYTES)]
    assert [(e.seq, e.after) for e in sealed] == [(0, 0), (0, 1), (1, 0), (2, 1), (1, 3)]
    assert [may_overtake(e) for e in sealed] == [False, False, True, False, False]


def test_tick_may_overtake_bytes_and_enter_may_not() -> None:
    ours, theirs = Mailbox(SYNCER, 0), Mailbox(0, 0)
    welcome, bulk, tick, enter = (ours.seal(0, body) for body in (Welcome(0), BYTES, Tick(1), Enter(1, 0)))
    assert theirs.refusal(bulk) == Reason(Why.CHANNEL_NOT_OPENED, "incarnation 0 did not open its channel")
    assert [theirs.refusal(e) for e in (welcome, tick)] == [None, None]
    assert theirs.refusal(enter) == Reason(Why.OUT_OF_SEQUENCE, "it follows 1 messages of the other lane, of which 0 have come")
    assert [theirs.refusal(e) for e in (bulk, enter)] == [None, None]


def test_report_that_returns_a_marker_keeps_its_place() -> None:
    ours = Mailbox(0, 0)
    ours.seal(SYNCER, StateTransfer(1, 0, (), ()))
    plain, marks, again = (ours.seal(SYNCER, Report(1, 1, 0, 8, 1, 5, 0, 0, 0, (), marker, None)) for marker in (0, 4, 4))
    assert [e.after for e in (plain, marks, again)] == [0, 1, 0]


def test_opener_makes_up_for_bytes_lost_with_the_connection_before() -> None:
    ours, theirs = Mailbox(SYNCER, 0), Mailbox(0, 0)
    assert theirs.refusal(ours.seal(0, Welcome(0))) is None
    ours.seal(0, BYTES)
    assert [theirs.refusal(ours.seal(0, body)) for body in (Welcome(0), BYTES)] == [None, None]


def test_newer_incarnation_must_open_its_channel(box: Mailbox) -> None:
    assert box.refusal(from_learner(0, incarnation=1)) == Reason(Why.CHANNEL_NOT_OPENED, "incarnation 1 did not open its channel")
    assert box.refusal(from_learner(0, HELLO, incarnation=1)) is None
    assert box.refusal(from_learner(1, incarnation=1)) is None


def test_older_incarnation_is_refused_for_ever(box: Mailbox) -> None:
    box.refusal(from_learner(0, HELLO, incarnation=2))
    assert box.refusal(from_learner(1, incarnation=0)) == Reason(Why.OLD_INCARNATION, "incarnation 0 is older than 2")
    assert box.refusal(from_learner(9, HELLO, incarnation=1)) == Reason(Why.OLD_INCARNATION, "incarnation 1 is older than 2")


def test_stranger_that_opens_nothing_is_refused() -> None:
    refusal = Mailbox(SYNCER, 0).refusal(from_learner(0))
    assert refusal is not None and refusal.why is Why.CHANNEL_NOT_OPENED


def test_refused_message_changes_nothing(box: Mailbox) -> None:
    before = box.clock
    box.refusal(from_learner(5, clock=9))
    box.refusal(from_learner(0, clock=9))
    box.refusal(from_learner(0, incarnation=4, clock=9))
    assert box.clock == before
    assert box.refusal(from_learner(1)) is None


def test_taken_message_leaves_ones_own_count_alone(box: Mailbox) -> None:
    box.advance(4)
    assert box.refusal(from_learner(1, clock=7)) is None
    assert box.seal(0, Tick(1)).clock == 4


def test_sequence_numbers_count_per_receiver() -> None:
    box = Mailbox(SYNCER, 0)
    assert [box.seal(r, Tick(1)).seq for r in (0, 0, 1, 0, 1)] == [0, 1, 0, 2, 1]


def test_restart_begins_channels_anew_under_a_higher_incarnation() -> None:
    box = Mailbox(SYNCER, 0)
    box.advance(3)
    box.seal(0, Tick(1))
    box.restart(1)
    sealed = box.seal(0, Welcome(3))
    assert (sealed.incarnation, sealed.seq, sealed.clock) == (1, 0, 3)
