"""What the parts of a machine share: the time of the event at hand, the way out, and the mailbox."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.ids import Nanos, WorkerId
from atoll.protocol.causality import Mailbox
from atoll.protocol.vocabulary import Effect, Message, Send


class Effects(list[Effect]):
    """Those of one event. They leave in the order in which they were decided; between two events there are none."""

    __slots__ = ("mailbox", "now")

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__()
        self.mailbox = mailbox
        self.now: Nanos = 0

    emit = list.append

    def send(self, receiver: WorkerId, body: Message) -> None:
        self.append(Send(self.mailbox.seal(receiver, body)))

    def take(self) -> Sequence[Effect]:
        if not self:
            return ()
        out = self[:]
        self.clear()
        return out
