"""The virtual network: connections with latency and bandwidth, FIFO by lane while they stand, and the ways they fail.

A *clog* holds messages back and delivers them late, in order. A *partition* does the same until the ends notice
(`detect_seconds`); then the connection breaks and what was on its way is gone, as with TCP. A damaged frame is noticed
by its checksum and costs the connection. Learners dial the syncer again and again; a connection between two learners is
dialled when something is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from atoll.config import Config
from atoll.ids import SYNCER, Nanos, WorkerId, nanos
from atoll.protocol.causality import BULK_LANE, lane_of, may_overtake
from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import Connected, ConnectionLost, Envelope, Event
from atoll.sim.world import World

FRAME_BYTES = 256
"""What a message costs on the wire beside its payload."""
DIAL_AGAIN: Nanos = nanos(0.5)


class Host(Protocol):
    def is_up(self, worker: WorkerId) -> bool: ...
    def happen(self, worker: WorkerId, event: Event) -> None: ...
    def arrive(self, envelope: Envelope, payload: Payload | None) -> None: ...


class _Way:
    """One direction of a connection. Small messages do not queue behind a transfer; who follows whom is as sealed."""

    __slots__ = ("blocked", "bulk_lands", "control_lands", "corrupt_next", "free_at", "held", "landed")

    def __init__(self) -> None:
        self.blocked = 0
        self.restart()
        self.held: list[tuple[int, Envelope, Payload | None]] = []
        """Not sent yet."""
        self.landed: list[tuple[int, Envelope, Payload | None]] = []
        """Crossed the wire while it was blocked: ahead of whatever is still on its way."""
        self.corrupt_next = False

    def restart(self) -> None:
        self.free_at: Nanos = 0
        self.control_lands: Nanos = 0
        self.bulk_lands: Nanos = 0

    def lands(self, now: Nanos, transfer: Nanos, latency: Nanos, bulk: bool, overtakes: bool) -> Nanos:
        if bulk:
            self.free_at = max(now, self.free_at) + transfer
            self.bulk_lands = max(self.free_at + latency, self.control_lands, self.bulk_lands)
            return self.bulk_lands
        own = max(now + transfer + latency, self.control_lands)
        self.control_lands = own if overtakes else max(own, self.bulk_lands)
        return self.control_lands


class _Line:
    __slots__ = ("epoch", "up", "ways")

    def __init__(self) -> None:
        self.up = False
        self.epoch = 0
        self.ways: dict[WorkerId, _Way] = {}

    def way(self, sender: WorkerId) -> _Way:
        way = self.ways.get(sender)
        if way is None:
            way = self.ways[sender] = _Way()
        return way


class Network:
    def __init__(self, config: Config, world: World, host: Host) -> None:
        c = config.cluster
        self._world = world
        self._host = host
        self._latency = nanos(c.latency_seconds)
        self._detect = nanos(c.detect_seconds)
        self._up = c.up_gbit  # Gbit/s are bits per nanosecond
        self._down = c.down_gbit
        self._lines: dict[tuple[WorkerId, WorkerId], _Line] = {}
        self._serial = 0

    def _line(self, a: WorkerId, b: WorkerId) -> _Line:
        key = (a, b) if a < b else (b, a)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line()
        return line

    # ------------------------------------------------------------ dialling

    def dial(self, learner: WorkerId) -> None:
        """A learner's driver keeps dialling the syncer until it answers."""
        line = self._line(learner, SYNCER)
        if line.up or not self._host.is_up(learner):
            return
        if self._host.is_up(SYNCER) and self._clear(line):
            self._open(line)
            self._host.happen(SYNCER, Connected(learner))
            self._host.happen(learner, Connected(SYNCER))
        else:
            self._world.after(DIAL_AGAIN, self.dial, learner)

    @staticmethod
    def _clear(line: _Line) -> bool:
        return all(way.blocked == 0 for way in line.ways.values())

    def _open(self, line: _Line) -> None:
        line.up = True
        line.epoch += 1
        for way in line.ways.values():
            way.held.clear()
            way.landed.clear()
            way.restart()

    # ------------------------------------------------------------ sending

    def send(self, envelope: Envelope, payload: Payload | None) -> None:
        a, b = envelope.sender, envelope.receiver
        line = self._line(a, b)
        if not line.up:
            if SYNCER in (a, b):
                return  # the connection broke and the machine has not heard of it yet
            if not self._host.is_up(b):
                self._world.after(self._latency, self._host.happen, a, ConnectionLost(b, "nobody answers"))
                return
            self._open(line)
        self._serial += 1
        way = line.way(a)
        if way.blocked:
            way.held.append((self._serial, envelope, payload))
        else:
            self._transmit(line, way, self._serial, envelope, payload)

    def _transmit(self, line: _Line, way: _Way, serial: int, envelope: Envelope, payload: Payload | None) -> None:
        bits = 8 * (FRAME_BYTES + (payload.nbytes if payload else 0))
        rate = self._down if envelope.sender == SYNCER else self._up
        bulk = lane_of(envelope.body) == BULK_LANE
        at = way.lands(self._world.now, int(bits / rate), self._latency, bulk, may_overtake(envelope))
        self._world.at(at, self._land, line, line.epoch, serial, envelope, payload)

    def _land(self, line: _Line, epoch: int, serial: int, envelope: Envelope, payload: Payload | None) -> None:
        if line.epoch != epoch or not line.up:
            return
        way = line.way(envelope.sender)
        if way.blocked:
            way.landed.append((serial, envelope, payload))
        elif way.corrupt_next:
            way.corrupt_next = False
            self.cut(envelope.sender, envelope.receiver, "a frame's checksum does not fit", 0)
        else:
            self._host.arrive(envelope, payload)

    # ------------------------------------------------------------ failing

    def block(self, a: WorkerId, b: WorkerId, *, one_way: bool, breaks: bool) -> Callable[[], None]:
        """Hold back a to b (and b to a); returns how to let go. `breaks`: the ends notice and the connection dies."""
        line = self._line(a, b)
        ways = [line.way(a)] if one_way else [line.way(a), line.way(b)]
        for way in ways:
            way.blocked += 1
        over = False

        def notice() -> None:
            if breaks and not over:
                self.cut(a, b, "the network is partitioned", 0)

        def let_go() -> None:
            nonlocal over
            over = True
            for way in ways:
                way.blocked -= 1
                if way.blocked == 0:
                    self._release(line, way)

        self._world.after(self._detect, notice)
        return let_go

    def _release(self, line: _Line, way: _Way) -> None:
        landed, way.landed = way.landed, []
        held, way.held = way.held, []
        epoch = line.epoch
        for serial, envelope, payload in landed:
            self._land(line, epoch, serial, envelope, payload)
        if line.up and line.epoch == epoch:
            for serial, envelope, payload in held:
                self._transmit(line, way, serial, envelope, payload)

    def corrupt_next(self, a: WorkerId, b: WorkerId) -> None:
        self._line(a, b).way(a).corrupt_next = True

    def cut(self, a: WorkerId, b: WorkerId, reason: str, delay: Nanos) -> None:
        """Break a connection: both ends hear of it, and a learner dials the syncer again."""
        line = self._line(a, b)
        if not line.up:
            return
        line.up = False
        line.epoch += 1
        for way in line.ways.values():
            way.held.clear()
            way.landed.clear()
            way.corrupt_next = False
        for end, other in ((a, b), (b, a)):
            if self._host.is_up(end):
                self._world.after(delay, self._host.happen, end, ConnectionLost(other, reason))
        if SYNCER in (a, b):
            self._world.after(delay + DIAL_AGAIN, self.dial, a if b == SYNCER else b)

    def cut_all(self, worker: WorkerId, reason: str) -> None:
        """The worker died: its peers' sockets close."""
        for a, b in list(self._lines):
            if worker in (a, b):
                self.cut(a, b, reason, self._latency)
