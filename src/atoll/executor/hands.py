"""What a driver asks of whoever carries effects out, and the bytes that travel beside messages.

Three drivers (simulator, runtime, replay) hold two pairs of hands: `null`, which moves only sizes and digests, and
`tensor`, which trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from atoll.protocol.vocabulary import Effect, Event, Message, Send


class Blob:
    """Opaque to the network, which sees its size; `kind` says who may be sent it."""

    __slots__ = ("content", "kind", "nbytes")

    def __init__(self, kind: str, nbytes: int, content: Any) -> None:
        self.kind = kind
        self.nbytes = nbytes
        self.content = content


SUSPECT = "the norm"
"""How a flaw begins that is a matter of degree."""


def is_suspect(flaw: str) -> bool:
    return flaw.startswith(SUSPECT)


class Hands(Protocol):
    def execute(self, effect: Effect, blob: Blob | None) -> Sequence[Event]:
        """Carry an effect out; `blob` came with the message being handled. Returns what happened, if anything did.
        Repeating an effect does nothing new: each is keyed by (outer_step, fragment)."""
        ...

    def inspect(self, body: Message, blob: Blob) -> str:
        """What is wrong with the bytes that came with a message, before the machine sees it; "" if nothing is."""
        ...

    def blob_for(self, send: Send) -> Blob | None:
        """The bytes that travel beside a message."""
        ...
