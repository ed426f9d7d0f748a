"""The syncer's process: one loop for the network and the machine, one thread for tensors and the disk.

The tape, the versions and the books of places in its directory are all of its state. Killed at any moment and started
again there, it feeds its tape to a new machine, keeps the versions the machine says are kept, and goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from atoll.config import Config
from atoll.errors import DataError, RunFailed
from atoll.ids import SYNCER, LearnerId, OuterStep, nanos, worker_name
from atoll.protocol.causality import may_overtake
from atoll.protocol.interface import Payload
from atoll.protocol.membership import LEFT, LOST
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.validity import objection
from atoll.protocol.vocabulary import (
    NO_VERSION,
    Announce,
    Connected,
    ConnectionLost,
    Contribution,
    Direction,
    Effect,
    Envelope,
    Event,
    Finished,
    FixParticipants,
    Lane,
    Membership,
    Message,
    Received,
    Refuse,
    Send,
    Serve,
    Started,
    Stored,
    Ticket,
)  # fmt: skip
from atoll.runtime import payload as wire
from atoll.runtime.driver import Driver
from atoll.runtime.log import rate_limited
from atoll.runtime.loop import DeadlineTimer, MessageQueue
from atoll.runtime.syncer.directory import Home
from atoll.runtime.syncer.places import PROTOCOL, JoinRequest, Placement, peer_log
from atoll.store.tensor_files import StorageFailed
from atoll.transport import Link, LinkLimits, Refused, Server, ServerCredentials

log = logging.getLogger("atoll.syncer")
rate_limited("grpc._cython.cygrpc")  # a peer that does not read makes it complain, a traceback a time

RETRY_SECONDS = 1.0
"""How often a full disk is tried again."""
UPLOAD_BYTES_MAX = 1 << 38
FLAW_MAX = 300
"""Characters of what is wrong with a peer's words or bytes."""
AWAY_SECONDS = 30.0
"""A learner lost for no longer may be dialling again when the run ends."""
FAREWELL_SECONDS = 10
"""How long a finished run waits for learners to hear of it, from the last byte that one of them was sent."""


class SyncerProcess:
    def __init__(self, home: Home, listen: str, credentials: ServerCredentials | None = None) -> None:
        self._home = home
        self._config: Config = home.config
        self._listen = listen
        self._links: dict[LearnerId, _Peer] = {}
        self._advertised: dict[LearnerId, str] = {}
        self._payloads: OrderedDict[tuple[int, OuterStep, bool], wire.Buffers | None] = OrderedDict()
        self._disk_thread = ThreadPoolExecutor(1, thread_name_prefix="disk")
        limits = LinkLimits(assembling_max=4 + 2 * self._config.protocol.overlap, queue_bytes_max=1 << 44)
        self._server = Server(self, self._admit, limits, credentials)
        self._server.on_call("Join", self._join)
        self._server.on_upload("Upload", self._upload_model, self._upload_bytes_max)
        self._over: asyncio.Future[None]
        self._held_up = False
        self._to_hear: set[LearnerId] = set()
        self.address = ""

    async def run(self) -> None:
        """Until the last outer step is stored and everybody has heard of it."""
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        self._timer = DeadlineTimer(loop, self._home.clock, self._deadline)
        self._driver = Driver(
            self._home.machine, SYNCER, self._home.clock, self._home.tape, self._carry_out, self._timer.set,
            must_sync=lambda event: isinstance(event, Started | Stored), on_tape_error=self._tape_failed, failed=self.fail,
        )  # fmt: skip
        self._loop = loop
        self._warm_up()
        self.address = await self._server.start(self._listen)
        self._home.write_address(self.address)
        log.info("run %s listens on %s, outer step %d", self._home.run, self.address, self._home.machine.outer_step)
        for event in self._home.first_events():
            self._driver.happen(event)
        if self._home.machine.finished:
            self._finish()
        try:
            await self._over
        finally:
            await self._stop()

    async def _stop(self) -> None:
        self._timer.stop()
        if self._home.places.refused or self._server.refused:
            log.info("refused: %s", dict(self._home.places.refused + self._server.refused))
        await self._server.stop(2.0)
        for peer in self._links.values():
            peer.queue.cancel()  # whoever went just now may not have been heard out: the tape ends here
        self._home.stopping.set()
        self._disk_thread.shutdown(wait=True)
        self._home.close(complete=self._home.machine.finished and not self._driver.is_blocked)

    def leave(self) -> None:
        """Asked to stop (SIGTERM): everything is on disk already; started again in its directory it goes on."""
        if not self._over.done():
            self._over.set_result(None)

    # ------------------------------------------------------------ the door

    def _join(self, metadata: object, request: bytes) -> bytes:
        assert isinstance(metadata, dict)
        self._home.places.check_token(metadata)
        try:
            asked = msgspec.msgpack.decode(request, type=JoinRequest)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise Refused(f"no join request: {error}"[:FLAW_MAX], retry=False) from None
        if asked.protocol != PROTOCOL:
            raise Refused(f"this syncer speaks protocol {PROTOCOL}, not {asked.protocol}: install the same atoll", retry=False)
        if self._home.machine.finished:
            raise Refused("the run is over", retry=False)
        placed, key = self._home.places.place(asked.wants, self._loop.time())
        peer_log.info("%s is incarnation %d", worker_name(placed.learner), placed.incarnation)
        return msgspec.msgpack.encode(Placement(
            learner=placed.learner, incarnation=placed.incarnation, key=key, run=self._home.run, epoch=self._home.epoch,
            config=msgspec.to_builtins(self._config), data_fingerprint=self._home.data_fingerprint,
            layout=self._home.layout_digest, needs_model=self._home.layout is None, tokenizer=self._home.tokenizer_fingerprint,
        ))  # fmt: skip

    def _upload_model(self, metadata: object, data: bytearray) -> bytes:
        """The first learner of a model that only learners have brings its shapes and initial weights."""
        assert isinstance(metadata, dict)
        self._home.places.admit(metadata)
        if self._home.layout is None:
            try:
                self._home.take_model(memoryview(data))
            except DataError as error:
                raise Refused(str(error), retry=False) from None
            self._warm_up()
            log.info("the model came from learner %s", metadata.get("learner"))
        return self._home.layout_digest.encode()

    def _upload_bytes_max(self, metadata: object) -> int:
        """Asked before a byte is taken: whoever has no place brings nothing, and a model that is here is not kept twice."""
        assert isinstance(metadata, dict)
        self._home.places.admit(metadata)
        return UPLOAD_BYTES_MAX if self._home.layout is None else 0

    def _warm_up(self) -> None:
        """The versions are read by the thread that will replace and free them."""
        self._server.payload_bytes_max = self._home.payload_bytes_max()
        if self._home.layout is not None:
            self._disk_thread.submit(self._home.disk.newest).add_done_callback(self._done)

    def _admit(self, metadata: object) -> str:
        assert isinstance(metadata, dict)
        placed = self._home.places.admit(metadata)
        if self._home.layout is None:
            raise Refused("nobody has brought the model yet", retry=True)
        if self._held_up:
            raise Refused("the syncer's disk is full", retry=True)
        self._advertised[placed.learner] = metadata.get("advertise", "")
        return f"{placed.learner}.{placed.incarnation}"

    # ------------------------------------------------------------ links

    def opened(self, link: Link) -> None:
        peer = _Peer(self, link, 8 * self._server.payload_bytes_max)
        before = self._links.pop(peer.learner, None)
        if before is not None:
            before.queue.cancel()
            before.link.close("replaced by a newer connection")
            self._driver.happen(ConnectionLost(peer.learner, "replaced by a newer connection"))
        self._links[peer.learner] = peer
        self._home.places.touch(peer.learner, self._loop.time())
        self._driver.happen(Connected(peer.learner))

    def arrived(self, link: Link, head: bytes, data: memoryview | None) -> None:
        peer = self._peer(link)
        if peer is not None:
            peer.queue.put(head, data)

    def closed(self, link: Link, reason: str) -> None:
        peer = self._peer(link)
        if peer is None:
            return
        if link.closed_here:
            peer.queue.cancel()
            self._lost(peer, reason)
        else:  # a last contribution that came whole counts, and so does a goodbye behind it
            peer.queue.finish(lambda: self._lost(peer, reason))

    def _lost(self, peer: _Peer, reason: str) -> None:
        if self._links.get(peer.learner) is not peer:
            return  # replaced meanwhile, and told so
        del self._links[peer.learner]
        peer_log.info("%s: connection closed: %s", worker_name(peer.learner), reason)
        self._home.places.touch(peer.learner, self._loop.time())
        self._driver.happen(ConnectionLost(peer.learner, reason[:300]))
        self._heard(peer.learner)

    def _peer(self, link: Link) -> _Peer | None:
        peer = self._links.get(int(link.peer.partition(".")[0]))
        return peer if peer is not None and peer.link is link else None

    async def take(self, peer: _Peer, head: bytes, data: memoryview | None) -> None:
        """One message of one peer; a peer's messages are taken one after the other."""
        if peer.is_cut:
            return  # it came before the peer could hear that it is not listened to any more
        try:
            envelope = self._possible(peer, head, data is not None)
        except (DataError, RecursionError) as error:
            peer_log.warning("%s: refused: %s", worker_name(peer.learner), error)
            self._home.places.refused["message"] += 1
            peer.cut(f"refused: {error}")
            return
        if data is None:
            if self._links.get(peer.learner) is peer:
                self._driver.happen(Received(envelope, 0))
            return
        body = envelope.body
        payload, flaw = await self._loop.run_in_executor(None, _read, body, data)
        asked = False
        while flaw is None and not asked and (self._held_up or self._is_awaited(peer.learner, body)):
            asked = True
            flaw = await self._loop.run_in_executor(None, self._inspect, body, payload)
        if self._links.get(peer.learner) is peer:
            self._driver.happen(Received(envelope, data.nbytes, flaw), payload)

    def _possible(self, peer: _Peer, head: bytes, has_payload: bool) -> Envelope:
        """What no learner could say here is refused before it is an event: neither the machine nor the tape sees it."""
        envelope = wire.from_head(head).envelope
        if (envelope.sender, envelope.incarnation, envelope.receiver) != (peer.learner, peer.incarnation, SYNCER):
            raise DataError(f"a message of {worker_name(envelope.sender)}, incarnation {envelope.incarnation}")
        kind = type(envelope.body)
        if kind.direction is not Direction.TO_SYNCER:
            raise DataError(f"{kind.__name__} is not for the syncer")
        if has_payload != (kind.lane is Lane.BULK):
            raise DataError(f"{kind.__name__} came {'with' if has_payload else 'without'} bytes")
        impossible = objection(self._config, envelope)
        if impossible is not None:
            raise DataError(str(impossible))
        return envelope

    def _is_awaited(self, learner: LearnerId, body: Message) -> bool:
        """Only what was asked for is inspected: the machine refuses the rest whatever its bytes are, and what is usual must
        not be learnt from whoever sends most."""
        assert isinstance(body, Contribution)
        round_ = self._home.machine.rounds.get(body.outer_step)
        return round_ is not None and round_.objection(learner, body) is None

    def _inspect(self, body: Message, payload: Payload) -> Reason | None:
        assert self._home.executor is not None
        try:
            return self._home.executor.inspect(body, payload)
        except Exception as error:  # of a peer's bytes: they cost the peer, never the syncer
            return Reason(Why.POISONED, f"bytes that cannot be used: {error!r}"[:FLAW_MAX])

    # ------------------------------------------------------------ effects

    def _carry_out(self, effect: Effect, payload: Payload | None) -> None:
        match effect:
            case Send():
                self._send(effect)
            case Refuse(peer=learner, reason=reason, disconnect=disconnect):
                peer_log.warning("%s: refused: %s", worker_name(learner), reason)
                peer = self._links.get(learner)
                if disconnect and peer is not None:
                    peer.cut(f"refused: {reason}")
            case Membership(learner=learner, standing=standing, reason=reason):
                if standing == LEFT:
                    self._home.places.release(learner)
                peer_log.info("%s is %s: %s", worker_name(learner), standing, reason)
            case FixParticipants():
                pass
            case Finished():
                self._finish()
            case _:
                self._disk_thread.submit(self._do, effect, payload).add_done_callback(self._done)

    def _do(self, effect: Effect, payload: Payload | None) -> None:
        """In the disk's thread, in order. A full disk holds everything up, announces nothing and loses nothing."""
        assert self._home.executor is not None
        while True:
            try:
                events: list[Event] = list(self._home.executor.execute(effect, payload))
                break
            except StorageFailed as error:
                self._loop.call_soon_threadsafe(self._say_held_up, str(error))
                if self._home.stopping.wait(RETRY_SECONDS):
                    return
        self._loop.call_soon_threadsafe(self._say_free)
        for event in events:
            self._loop.call_soon_threadsafe(self._driver.happen, event)

    def _done(self, future: Future[Any]) -> None:
        error = future.exception() if not future.cancelled() else None
        if error is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.fail, error)

    def fail(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error if isinstance(error, Exception) else RunFailed(str(error)))

    def _say_held_up(self, reason: str) -> None:
        if not self._held_up:
            log.error("nothing is announced until this is mended: %s", reason)
        self._held_up = True

    def _say_free(self) -> None:
        if self._driver.is_blocked:
            return  # the tape is not free yet
        if self._held_up:
            log.info("the disk takes bytes again: going on")
        self._held_up = False

    def _tape_failed(self, error: OSError) -> None:
        """The tape itself cannot be written: nobody is listened to until it can."""
        self._say_held_up(f"{self._home.tape_path}: {error.strerror or error}")
        for peer in list(self._links.values()):
            peer.link.close("the syncer's disk is full")
        self._loop.call_later(RETRY_SECONDS, self._retry_tape)

    def _retry_tape(self) -> None:
        if self._driver.retry_tape():
            self._say_free()

    def _send(self, send: Send) -> None:
        envelope = send.envelope
        peer = self._links.get(envelope.receiver)
        if peer is None or peer.incarnation != self._incarnation_of(envelope.receiver):
            return  # the connection broke and the machine has not heard of it yet
        address = key = ""
        body = envelope.body
        if isinstance(body, Ticket):
            address, key = self._advertised.get(body.peer, ""), self._home.places.ticket_key(body.ticket, envelope.receiver)
        elif isinstance(body, Serve):
            key = self._home.places.ticket_key(body.ticket, body.newcomer)
        data = self._payload(send, body) if isinstance(body, Announce) else None
        peer.link.send(wire.to_head(envelope, address, key), data, may_overtake=may_overtake(envelope))

    def _incarnation_of(self, learner: LearnerId) -> int:
        member = self._home.machine.roster.get(learner)
        return member.incarnation if member is not None else -1

    def _payload(self, send: Send, body: Announce) -> wire.Buffers | None:
        """The same bytes go to everybody: made once, for as long as anybody is likely to be sent them."""
        key = (body.fragment, body.outer_step, body.previous == NO_VERSION)
        if key not in self._payloads:
            assert self._home.executor is not None
            payload = self._home.executor.payload_for(send)
            self._payloads[key] = wire.to_buffers(payload) if payload is not None else None
            while len(self._payloads) > 2 + self._config.protocol.overlap:
                self._payloads.popitem(last=False)
        return self._payloads[key]

    # ------------------------------------------------------------ time, and the end

    def _deadline(self) -> None:
        self._driver.deadline_passed()

    def _finish(self) -> None:
        log.info("outer step %d: the run is over", self._home.machine.outer_step)
        long_ago = self._home.clock.now() - nanos(AWAY_SECONDS)
        members = [m for m in self._home.machine.roster if m.connected or (m.standing == LOST and m.lost_at > long_ago)]
        self._to_hear = {m.learner for m in members}
        self._wait_for_ears()

    def _wait_for_ears(self, sent_before: int = -1, quiet: int = 0) -> None:
        """On a slow link the word that it is over comes behind what is still being sent, and without it a learner dials on."""
        sent = sum(peer.link.bytes_sent for learner, peer in self._links.items() if learner in self._to_hear)
        quiet = quiet + 1 if sent == sent_before else 0
        if quiet == FAREWELL_SECONDS:
            self.leave()
        else:
            self._loop.call_later(1.0, self._wait_for_ears, sent, quiet)

    def _heard(self, learner: LearnerId) -> None:
        """Learners close their connections when they have heard that it is over. One that is away just now dials again
        within seconds, and must not train on for nobody."""
        if self._home.machine.finished:
            self._to_hear.discard(learner)
            if not self._to_hear:
                self._loop.call_later(0.2, self.leave)


class _Peer:
    """A connected learner. A mistake of ours while taking its messages stops the syncer: better one that stops and can be
    started again than one that lies."""

    def __init__(self, process: SyncerProcess, link: Link, bytes_max: int) -> None:
        learner, _, incarnation = link.peer.partition(".")
        self.learner, self.incarnation = int(learner), int(incarnation)
        self.link = link
        self.queue = MessageQueue(link, lambda _, head, data: process.take(self, head, data), process.fail, bytes_max=bytes_max)
        self.is_cut = False

    def cut(self, reason: str) -> None:
        self.is_cut = True
        self.link.close(reason)


def _read(body: Message, data: memoryview) -> tuple[Payload, Reason | None]:
    """In another thread: what a peer's bytes hold, and what is wrong with them. Whatever that is costs the peer, never the
    syncer."""
    try:
        payload = wire.from_buffer(body, data)
        if payload.kind == "packet":
            return payload, None
        flaw = "plain numbers, not a packet"
    except Exception as error:
        flaw = f"bytes that cannot be read: {error}"[:FLAW_MAX]
    return Payload("packet", data.nbytes, None), Reason(Why.POISONED, flaw)
