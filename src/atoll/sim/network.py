"""The virtual network: connections with latency and bandwidth, FIFO by lane while they are open, and the ways they fail.

A *clog* holds messages back and delivers them late, in order. A *partition* does the same until the ends notice
(`detect_seconds`); then the connection breaks and messages in transit are lost, as with TCP. A damaged frame fails its
checksum, which closes the connection. A learner dials the syncer until it answers; a connection between two learners opens
when one of them sends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from atoll.config import Config
from atoll.ids import SYNCER, Nanos, WorkerId, nanos
from atoll.protocol.causality import may_overtake
from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import Connected, ConnectionLost, Envelope, Event, Lane
from atoll.sim.world import World

FRAME_BYTES = 256
"""Size of a message on the wire beside its payload."""
DIAL_AGAIN: Nanos = nanos(0.5)


class Host(Protocol):
    def is_up(self, worker: WorkerId) -> bool: ...
    def dispatch(self, worker: WorkerId, event: Event) -> None: ...
    def arrive(self, envelope: Envelope, payload: Payload | None) -> None: ...


class _Direction:
    """One direction of a connection. A control message does not queue behind a transfer, but it overtakes a bulk message only
    where the protocol allows it (`may_overtake`)."""

    __slots__ = (
        "arrived", "blocked", "bulk_arrives", "connection", "control_arrives", "corrupt_next", "free_at", "held", "rate",
    )  # fmt: skip

    def __init__(self, connection: _Connection, rate: float) -> None:
        self.connection = connection
        self.rate = rate
        """Bits per nanosecond."""
        self.blocked = 0
        self.restart()
        self.held: list[tuple[Envelope, Payload | None]] = []
        """Not transmitted yet."""
        self.arrived: list[tuple[Envelope, Payload | None]] = []
        """Crossed the wire while the direction was blocked: delivered before anything still in transit."""
        self.corrupt_next = False

    def restart(self) -> None:
        self.free_at: Nanos = 0
        self.control_arrives: Nanos = 0
        self.bulk_arrives: Nanos = 0

    def arrival(self, now: Nanos, envelope: Envelope, payload: Payload | None, latency: Nanos) -> Nanos:
        transfer = int(8 * (FRAME_BYTES if payload is None else FRAME_BYTES + payload.nbytes) / self.rate)
        if envelope.body.lane is Lane.BULK:
            self.free_at = max(now, self.free_at) + transfer
            self.bulk_arrives = max(self.free_at + latency, self.control_arrives, self.bulk_arrives)
            return self.bulk_arrives
        at = now + transfer + latency
        if at < self.control_arrives:
            at = self.control_arrives
        if at < self.bulk_arrives and not may_overtake(envelope):
            at = self.bulk_arrives
        self.control_arrives = at
        return at


class _Connection:
    __slots__ = ("directions", "epoch", "up")

    def __init__(self) -> None:
        self.up = False
        self.epoch = 0
        self.directions: list[_Direction] = []
        """Both."""


class Network:
    def __init__(self, config: Config, world: World, host: Host) -> None:
        c = config.cluster
        self._world = world
        self._host = host
        self._latency = nanos(c.latency_seconds)
        self._detect = nanos(c.detect_seconds)
        self._up = c.up_gbit  # Gbit/s are bits per nanosecond
        self._down = c.down_gbit
        self._directions: dict[tuple[WorkerId, WorkerId], _Direction] = {}

    def _direction(self, sender: WorkerId, receiver: WorkerId) -> _Direction:
        found = self._directions.get((sender, receiver))
        return self._connect(sender, receiver) if found is None else found

    def _connect(self, sender: WorkerId, receiver: WorkerId) -> _Direction:
        """The two have not met: both directions, of which the first is returned."""
        connection = _Connection()
        for a, b in ((sender, receiver), (receiver, sender)):
            direction = _Direction(connection, self._down if a == SYNCER else self._up)
            self._directions[a, b] = direction
            connection.directions.append(direction)
        return connection.directions[0]

    # ------------------------------------------------------------ dialling

    def dial(self, learner: WorkerId) -> None:
        """A learner's driver dials the syncer until it answers."""
        connection = self._direction(learner, SYNCER).connection
        if connection.up or not self._host.is_up(learner):
            return
        if self._host.is_up(SYNCER) and self._clear(connection):
            self._open(connection)
            self._host.dispatch(SYNCER, Connected(learner))
            self._host.dispatch(learner, Connected(SYNCER))
        else:
            self._world.after(DIAL_AGAIN, self.dial, learner)

    @staticmethod
    def _clear(connection: _Connection) -> bool:
        return all(direction.blocked == 0 for direction in connection.directions)

    def _open(self, connection: _Connection) -> None:
        connection.up = True
        connection.epoch += 1
        for direction in connection.directions:
            direction.held.clear()
            direction.arrived.clear()
            direction.restart()

    # ------------------------------------------------------------ sending

    def send(self, envelope: Envelope, payload: Payload | None) -> None:
        ends = envelope.sender, envelope.receiver
        direction = self._directions.get(ends) or self._connect(*ends)
        if not direction.connection.up and not self._opens(direction.connection, envelope):
            return
        if direction.blocked:
            direction.held.append((envelope, payload))
            return
        at = direction.arrival(self._world.now, envelope, payload, self._latency)
        self._world.at(at, self._arrive, direction, direction.connection.epoch, envelope, payload)

    def _opens(self, connection: _Connection, envelope: Envelope) -> bool:
        """Whether a message opens a connection that is not up."""
        a, b = envelope.sender, envelope.receiver
        if SYNCER in (a, b):
            return False  # the connection broke and the machine has not received ConnectionLost yet
        if not self._host.is_up(b):
            self._world.after(self._latency, self._host.dispatch, a, ConnectionLost(b, "no answer"))
            return False
        self._open(connection)
        return True

    def _arrive(self, direction: _Direction, epoch: int, envelope: Envelope, payload: Payload | None) -> None:
        connection = direction.connection
        if connection.epoch != epoch or not connection.up:
            return
        if direction.blocked:
            direction.arrived.append((envelope, payload))
        elif direction.corrupt_next:
            direction.corrupt_next = False
            self.cut(envelope.sender, envelope.receiver, "a frame's checksum does not fit", 0)
        else:
            self._host.arrive(envelope, payload)

    # ------------------------------------------------------------ failing

    def block(self, a: WorkerId, b: WorkerId, *, one_way: bool, breaks: bool) -> Callable[[], None]:
        """Hold back a to b (and b to a); returns the function that ends it. `breaks`: the ends notice, and the connection
        breaks."""
        there, back = self._direction(a, b), self._direction(b, a)
        directions = [there] if one_way else [there, back]
        for direction in directions:
            direction.blocked += 1
        over = False

        def notice() -> None:
            if breaks and not over:
                self.cut(a, b, "the network is partitioned", 0)

        def unblock() -> None:
            nonlocal over
            over = True
            for direction in directions:
                direction.blocked -= 1
                if direction.blocked == 0:
                    self._release(direction)

        self._world.after(self._detect, notice)
        return unblock

    def _release(self, direction: _Direction) -> None:
        connection = direction.connection
        arrived, direction.arrived = direction.arrived, []
        held, direction.held = direction.held, []
        epoch = connection.epoch
        for envelope, payload in arrived:
            self._arrive(direction, epoch, envelope, payload)
        if connection.up and connection.epoch == epoch:
            for envelope, payload in held:
                at = direction.arrival(self._world.now, envelope, payload, self._latency)
                self._world.at(at, self._arrive, direction, epoch, envelope, payload)

    def corrupt_next(self, a: WorkerId, b: WorkerId) -> None:
        self._direction(a, b).corrupt_next = True

    def cut(self, a: WorkerId, b: WorkerId, reason: str, delay: Nanos) -> None:
        """Break a connection: both ends get ConnectionLost, and a learner dials the syncer again."""
        connection = self._direction(a, b).connection
        if not connection.up:
            return
        connection.up = False
        connection.epoch += 1
        for direction in connection.directions:
            direction.held.clear()
            direction.arrived.clear()
            direction.corrupt_next = False
        for end, other in ((a, b), (b, a)):
            if self._host.is_up(end):
                self._world.after(delay, self._host.dispatch, end, ConnectionLost(other, reason))
        if SYNCER in (a, b):
            self._world.after(delay + DIAL_AGAIN, self.dial, a if b == SYNCER else b)

    def cut_all(self, worker: WorkerId, reason: str) -> None:
        """The worker died: its peers' sockets close."""
        for a, b in list(self._directions):
            if a < b and worker in (a, b):
                self.cut(a, b, reason, self._latency)
