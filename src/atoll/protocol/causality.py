"""Who knows of what: vector clocks, and FIFO channels by (sender, incarnation, receiver) sequence numbers."""

from __future__ import annotations

from atoll.ids import SYNCER, Incarnation, WorkerId
from atoll.protocol.vocabulary import Envelope, Hello, Message, StateRequest, StateTransfer, Welcome

Clock = tuple[int, ...]

OPENERS = (Hello, Welcome, StateRequest, StateTransfer)
"""Messages that open a channel: after a broken connection the sequence goes on with a gap, and only they may jump it."""


def merge_clocks(a: Clock, b: Clock) -> Clock:
    if a == b:
        return a
    if len(a) < len(b):
        a, b = b, a
    return tuple(map(max, a, b)) + a[len(b) :]


def entry(worker: WorkerId) -> int:
    return 0 if worker == SYNCER else 1 + worker


class Mailbox:
    """One worker's ends of all its channels, and its vector clock."""

    __slots__ = ("_expected", "_incarnations", "_me", "_next", "clock", "duplicates", "incarnation")

    def __init__(self, me: WorkerId, incarnation: Incarnation, workers: int) -> None:
        self._me = me
        self.incarnation = incarnation
        self._next: dict[WorkerId, int] = {}
        self._expected: dict[WorkerId, int] = {}
        self._incarnations: dict[WorkerId, Incarnation] = {}
        self.clock: Clock = (0,) * (1 + workers)
        self.duplicates = 0

    def seal(self, receiver: WorkerId, body: Message) -> Envelope:
        seq = self._next.get(receiver, 0)
        self._next[receiver] = seq + 1
        return Envelope(self._me, self.incarnation, receiver, seq, self.clock, body)

    def advance(self, count: int) -> None:
        """Set one's own count."""
        at = entry(self._me)
        clock = self.clock
        if at >= len(clock):
            clock += (0,) * (at + 1 - len(clock))
        self.clock = (*clock[:at], count, *clock[at + 1 :])

    def restart(self, incarnation: Incarnation) -> None:
        """A syncer came back: its channels begin anew under a higher incarnation, its knowledge stays."""
        self.incarnation = incarnation
        self._next.clear()

    def refusal(self, envelope: Envelope) -> str | None:
        """None: in order, take it. "" : an identical duplicate, drop it silently. Else the reason it is refused.
        Nothing changes unless the message is taken."""
        sender, incarnation = envelope.sender, envelope.incarnation
        known = self._incarnations.get(sender, -1)
        opens = isinstance(envelope.body, OPENERS)
        if incarnation < known:
            return f"incarnation {incarnation} is older than {known}"
        if incarnation > known and not opens:
            return f"incarnation {incarnation} did not open its channel"
        expected = self._expected.get(sender, 0) if incarnation == known else 0
        if envelope.seq < expected:
            self.duplicates += 1
            return ""
        if envelope.seq > expected and not opens:
            return f"sequence {envelope.seq} where {expected} was due"
        self._incarnations[sender] = incarnation
        self._expected[sender] = envelope.seq + 1
        self._learn(envelope)
        return None

    def _learn(self, envelope: Envelope) -> None:
        """Of everybody else the most that is known; of the sender what it says, a new incarnation counts from zero; of
        oneself nobody knows better."""
        clock = merge_clocks(self.clock, envelope.clock)
        for source, at in ((envelope.clock, entry(envelope.sender)), (self.clock, entry(self._me))):
            if at < len(source) and clock[at] != source[at]:
                clock = (*clock[:at], source[at], *clock[at + 1 :])
        self.clock = clock
