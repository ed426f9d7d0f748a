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

    __slots__ = ("arrived", "blocked", "bulk_arrives", "control_arrives", "corrupt_next", "free_at", "held")

    def __init__(self) -> None:
        self.blocked = 0
        self.restart()
        self.held: list[tuple[int, Envelope, Payload | None]] = []
        """Not transmitted yet."""
        self.arrived: list[tuple[int, Envelope, Payload | None]] = []
        """Crossed the wire while the direction was blocked: delivered before anything still in transit."""
        self.corrupt_next = False

    def restart(self) -> None:
        self.free_at: Nanos = 0
        self.control_arrives: Nanos = 0
        self.bulk_arrives: Nanos = 0

    def arrival(self, now: Nanos, transfer: Nanos, latency: Nanos, bulk: bool, overtakes: bool) -> Nanos:
        if bulk:
            self.free_at = max(now, self.free_at) + transfer
            self.bulk_arrives = max(self.free_at + latency, self.control_arrives, self.bulk_arrives)
            return self.bulk_arrives
        own = max(now + transfer + latency, self.control_arrives)
        self.control_arrives = own if overtakes else max(own, self.bulk_arrives)
        return self.control_arrives


class _Connection:
    __slots__ = ("directions", "epoch", "up")

    def __init__(self) -> None:
        self.up = False
        self.epoch = 0
        self.directions: dict[WorkerId, _Direction] = {}

    def direction(self, sender: WorkerId) -> _Direction:
        direction = self.directions.get(sender)
        if direction is None:
            direction = self.directions[sender] = _Direction()
        return direction


class Network:
    def __init__(self, config: Config, world: World, host: Host) -> None:
        c = config.cluster
        self._world = world
        self._host = host
        self._latency = nanos(c.latency_seconds)
        self._detect = nanos(c.detect_seconds)
        self._up = c.up_gbit  # Gbit/s are bits per nanosecond
        self._down = c.down_gbit
        self._connections: dict[tuple[WorkerId, WorkerId], _Connection] = {}
        self._serial = 0

    def _connection(self, a: WorkerId, b: WorkerId) -> _Connection:
        key = (a, b) if a < b else (b, a)
        connection = self._connections.get(key)
        if connection is None:
            connection = self._connections[key] = _Connection()
        return connection

    # ------------------------------------------------------------ dialling

    def dial(self, learner: WorkerId) -> None:
        """A learner's driver dials the syncer until it answers."""
        connection = self._connection(learner, SYNCER)
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
        return all(direction.blocked == 0 for direction in connection.directions.values())

    def _open(self, connection: _Connection) -> None:
        connection.up = True
        connection.epoch += 1
        for direction in connection.directions.values():
            direction.held.clear()
            direction.arrived.clear()
            direction.restart()

    # ------------------------------------------------------------ sending

    def send(self, envelope: Envelope, payload: Payload | None) -> None:
        a, b = envelope.sender, envelope.receiver
        connection = self._connection(a, b)
        if not connection.up:
            if SYNCER in (a, b):
                return  # the connection broke and the machine has not received ConnectionLost yet
            if not self._host.is_up(b):
                self._world.after(self._latency, self._host.dispatch, a, ConnectionLost(b, "no answer"))
                return
            self._open(connection)
        self._serial += 1
        direction = connection.direction(a)
        if direction.blocked:
            direction.held.append((self._serial, envelope, payload))
        else:
            self._transmit(connection, direction, self._serial, envelope, payload)

    def _transmit(
        self, connection: _Connection, direction: _Direction, serial: int, envelope: Envelope, payload: Payload | None
    ) -> None:
        bits = 8 * (FRAME_BYTES + (payload.nbytes if payload else 0))
        rate = self._down if envelope.sender == SYNCER else self._up
        bulk = envelope.body.lane is Lane.BULK
        at = direction.arrival(self._world.now, int(bits / rate), self._latency, bulk, may_overtake(envelope))
        self._world.at(at, self._arrive, connection, connection.epoch, serial, envelope, payload)

    def _arrive(self, connection: _Connection, epoch: int, serial: int, envelope: Envelope, payload: Payload | None) -> None:
        if connection.epoch != epoch or not connection.up:
            return
        direction = connection.direction(envelope.sender)
        if direction.blocked:
            direction.arrived.append((serial, envelope, payload))
        elif direction.corrupt_next:
            direction.corrupt_next = False
            self.cut(envelope.sender, envelope.receiver, "a frame's checksum does not fit", 0)
        else:
            self._host.arrive(envelope, payload)

    # ------------------------------------------------------------ failing

    def block(self, a: WorkerId, b: WorkerId, *, one_way: bool, breaks: bool) -> Callable[[], None]:
        """Hold back a to b (and b to a); returns the function that ends it. `breaks`: the ends notice, and the connection
        breaks."""
        connection = self._connection(a, b)
        directions = [connection.direction(a)] if one_way else [connection.direction(a), connection.direction(b)]
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
                    self._release(connection, direction)

        self._world.after(self._detect, notice)
        return unblock

    def _release(self, connection: _Connection, direction: _Direction) -> None:
        arrived, direction.arrived = direction.arrived, []
        held, direction.held = direction.held, []
        epoch = connection.epoch
        for serial, envelope, payload in arrived:
            self._arrive(connection, epoch, serial, envelope, payload)
        if connection.up and connection.epoch == epoch:
            for serial, envelope, payload in held:
                self._transmit(connection, direction, serial, envelope, payload)

    def corrupt_next(self, a: WorkerId, b: WorkerId) -> None:
        self._connection(a, b).direction(a).corrupt_next = True

    def cut(self, a: WorkerId, b: WorkerId, reason: str, delay: Nanos) -> None:
        """Break a connection: both ends get ConnectionLost, and a learner dials the syncer again."""
        connection = self._connection(a, b)
        if not connection.up:
            return
        connection.up = False
        connection.epoch += 1
        for direction in connection.directions.values():
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
        for a, b in list(self._connections):
            if worker in (a, b):
                self.cut(a, b, reason, self._latency)
