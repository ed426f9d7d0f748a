"""What the parts of a machine share: the time of the event at hand, the way out, and the mailbox."""

from __future__ import annotations

from atoll.ids import Nanos, WorkerId
from atoll.protocol.causality import Mailbox
from atoll.protocol.vocabulary import Effect, Message, Send


class Effects:
    """Effects leave in the order in which they were decided."""

    __slots__ = ("mailbox", "now", "out")

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.now: Nanos = 0
        self.out: list[Effect] = []

    def emit(self, effect: Effect) -> None:
        self.out.append(effect)

    def send(self, receiver: WorkerId, body: Message) -> None:
        self.out.append(Send(self.mailbox.seal(receiver, body)))

    def take(self) -> list[Effect]:
        out, self.out = self.out, []
        return out
