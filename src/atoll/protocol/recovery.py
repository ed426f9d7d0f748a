"""The learners' side of recovery: the newcomer's patience with its ticket, and the peer's queue of whom to serve.

The syncer's side is `admission.py`. A peer answers without pausing, at a step boundary, once it has itself seen the
outer step t_s stamped on the ticket; from t_s on the newcomer has buffered every broadcast.
"""

from __future__ import annotations

from collections import OrderedDict

from atoll.ids import LearnerId, Nanos, OuterStep
from atoll.protocol.vocabulary import Serve, Ticket


class PendingTransfer:
    """The newcomer's: which peer was asked, and until when to hope."""

    __slots__ = ("give_up_at", "ticket")

    def __init__(self) -> None:
        self.ticket: Ticket | None = None
        self.give_up_at: Nanos | None = None

    def begin(self, ticket: Ticket, now: Nanos) -> None:
        self.ticket, self.give_up_at = ticket, now + ticket.patience

    def end(self) -> Ticket | None:
        """The ticket that is over."""
        ended, self.ticket, self.give_up_at = self.ticket, None, None
        return ended

    def asked(self, peer: LearnerId) -> bool:
        return self.ticket is not None and self.ticket.peer == peer

    def expects(self, ticket: int, source: LearnerId) -> bool:
        return self.asked(source) and self.ticket is not None and self.ticket.ticket == ticket


class Service:
    """The peer's: a request counts once the syncer has named the newcomer. Both lists are bounded, oldest out."""

    __slots__ = ("_asked", "_limit", "_named")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._named: OrderedDict[int, Serve] = OrderedDict()
        self._asked: OrderedDict[int, LearnerId] = OrderedDict()

    def name(self, serve: Serve) -> None:
        self._named[serve.ticket] = serve
        if len(self._named) > self._limit:
            self._named.popitem(last=False)

    def ask(self, ticket: int, newcomer: LearnerId) -> None:
        self._asked[ticket] = newcomer
        if len(self._asked) > self._limit:
            self._asked.popitem(last=False)

    def forget_peer(self, peer: LearnerId) -> None:
        for ticket in [t for t, who in self._asked.items() if who == peer]:
            del self._asked[ticket]

    def take_ready(self, outer_known: OuterStep) -> list[tuple[int, LearnerId]]:
        if not self._asked:
            return []
        ready = [
            (ticket, who)
            for ticket, who in self._asked.items()
            if (serve := self._named.get(ticket)) and serve.newcomer == who and outer_known >= serve.outer_step
        ]
        for ticket, _ in ready:
            del self._asked[ticket]
            del self._named[ticket]
        return ready
