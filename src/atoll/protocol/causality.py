"""What came before what: one's own count on every message, and FIFO channels by (sender, incarnation, receiver) sequence numbers.

A channel has two lanes, each in order and numbered by itself: messages with bytes beside them, and the rest. A
long transfer must not hold back the reports that let the next round begin, so what merely says how things stand may
overtake it (`after` is 0); everything else names how many of the other lane come before it, and keeps the order in which
it was said.
"""

from __future__ import annotations

from atoll.ids import Incarnation, WorkerId
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Envelope, Lane, Message, Report

DUPLICATE = Reason(Why.DUPLICATE)


def may_overtake(envelope: Envelope) -> bool:
    """It was sealed without a word of what lies before it in the other lane."""
    return envelope.after == 0 and envelope.body.overtakes


class Mailbox:
    """One worker's ends of all its channels, and its own count."""

    __slots__ = ("_expected", "_incarnations", "_marked", "_me", "_next", "clock", "duplicates", "incarnation")

    def __init__(self, me: WorkerId, incarnation: Incarnation) -> None:
        self._me = me
        self.incarnation = incarnation
        self._next: dict[WorkerId, tuple[int, int]] = {}
        self._expected: dict[WorkerId, tuple[int, int]] = {}
        self._incarnations: dict[WorkerId, Incarnation] = {}
        self._marked = 0
        self.clock = 0
        self.duplicates = 0

    def seal(self, receiver: WorkerId, body: Message) -> Envelope:
        control, bulk = self._next.get(receiver, (0, 0))
        if body.lane is Lane.BULK:
            self._next[receiver] = (control, bulk + 1)
            return Envelope(self._me, self.incarnation, receiver, bulk, self.clock, body, control)
        self._next[receiver] = (control + 1, bulk)
        after = 0 if body.overtakes else bulk
        if type(body) is Report and body.snapshot != self._marked and self._marks(body):
            after = bulk
        return Envelope(self._me, self.incarnation, receiver, control, self.clock, body, after)

    def _marks(self, report: Report) -> bool:
        """A report that returns a snapshot's marker keeps its place: what was sent before it belongs before the cut."""
        self._marked = report.snapshot
        return True

    def sent(self) -> tuple[tuple[WorkerId, int, int], ...]:
        """By receiver: how many messages this incarnation has sent, in either lane."""
        return tuple((receiver, control, bulk) for receiver, (control, bulk) in sorted(self._next.items()))

    def advance(self, count: int) -> None:
        """Set one's own count."""
        self.clock = count

    def restart(self, incarnation: Incarnation) -> None:
        """A syncer came back: its channels begin anew under a higher incarnation, its knowledge stays."""
        self.incarnation = incarnation
        self._next.clear()

    def refusal(self, envelope: Envelope) -> Reason | None:
        """None: in order, take it. DUPLICATE is dropped without a word. Nothing changes unless the message is taken."""
        sender, incarnation = envelope.sender, envelope.incarnation
        known = self._incarnations.get(sender, -1)
        body = envelope.body
        opens = body.opens
        if incarnation < known:
            return Reason(Why.OLD_INCARNATION, f"incarnation {incarnation} is older than {known}")
        if incarnation > known and not opens:
            return Reason(Why.CHANNEL_NOT_OPENED, f"incarnation {incarnation} did not open its channel")
        control, bulk = self._expected.get(sender, (0, 0)) if incarnation == known else (0, 0)
        in_bulk = body.lane is Lane.BULK
        mine, other = (bulk, control) if in_bulk else (control, bulk)
        if envelope.seq < mine:
            self.duplicates += 1
            return DUPLICATE
        if not opens:
            if envelope.seq > mine:
                return Reason(Why.OUT_OF_SEQUENCE, f"sequence {envelope.seq} where {mine} was due")
            if envelope.after > other:
                ahead = f"it follows {envelope.after} messages of the other lane, of which {other} have come"
                return Reason(Why.OUT_OF_SEQUENCE, ahead)
        elif envelope.after > other:
            other = envelope.after  # what it follows was lost with the connection before
        self._incarnations[sender] = incarnation
        self._expected[sender] = (other, envelope.seq + 1) if in_bulk else (envelope.seq + 1, other)
        return None
