"""What drivers, machines and executors ask of each other. Declared once, here, because every driver needs all of it:
the simulator (`sim/cluster.py`), the live driver (`runtime/driver.py`) and replay (`tape/replay.py`).

A machine decides; an executor carries decisions out. There are two kinds of executor: `executor/null.py` moves only sizes and
digests, `executor/learner.py` and `executor/syncer.py` train.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from atoll.ids import Nanos, WorkerId
from atoll.protocol.reasons import Reason
from atoll.protocol.vocabulary import Effect, Event, Measure, Message, Send


class Machine(Protocol):
    def on(self, event: Event, now: Nanos) -> Sequence[Effect]: ...

    def deadline(self) -> Nanos | None:
        """When the driver must call `on(DeadlinePassed(), now)`."""
        ...


class Payload(msgspec.Struct, eq=False):
    """The bytes that travel beside a message. The network sees only their size; `kind` says which messages may carry them."""

    kind: str
    nbytes: int
    content: Any


class Finding(NamedTuple):
    """What is wrong with a payload (POISONED), or what the machine needs to judge it."""

    flaw: Reason | None = None
    measure: Measure | None = None


CLEAN = Finding()


class Executor(Protocol):
    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        """Carry an effect out and return the events that follow from it. `payload` came with the message being handled.
        Repeating an effect changes nothing: each is keyed by (outer_step, fragment)."""
        ...

    def inspect(self, body: Message, payload: Payload) -> Finding:
        """Looks at the bytes that came with a message, before the machine sees it."""
        ...

    def payload_for(self, send: Send) -> Payload | None:
        """The bytes that travel beside a message of the bulk lane."""
        ...


class Observer(Protocol):
    """Called with every event after it was taped: a tape writer, a view, a checker."""

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None: ...
