"""The syncer's process: one event loop for the network and the machine, one thread for tensors and the disk.

The tape, the versions and the list of places in its directory are its whole state. After a kill at any moment, a syncer started
in that directory feeds the tape to a new machine, keeps the versions that the machine lists, and goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from atoll.config import Config
from atoll.config.codecs import codec_digests, codec_spec
from atoll.errors import UNDECODABLE, DataError, RunFailed, UserError
from atoll.executor.sharded import ShardLost
from atoll.ids import SYNCER, LearnerId, nanos, worker_name
from atoll.protocol.causality import may_overtake
from atoll.protocol.interface import Observer, Payload
from atoll.protocol.membership import EXPELLED, LEFT, LOST
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.validity import objection
from atoll.protocol.vocabulary import (
    AbortRound,
    Announce,
    AnswerRollback,
    Connected,
    ConnectionLost,
    Contribution,
    Direction,
    Effect,
    Envelope,
    Finished,
    FixParticipants,
    Lane,
    Membership,
    Received,
    Refuse,
    Report,
    Send,
    Serve,
    Started,
    Stored,
    Ticket,
    Violated,
)  # fmt: skip
from atoll.runtime import payload as wire
from atoll.runtime.driver import Driver
from atoll.runtime.log import rate_limited
from atoll.runtime.loop import DailyWarnings, DeadlineTimer, MessageQueue
from atoll.runtime.syncer.announced import Announced
from atoll.runtime.syncer.contributions import RETRY_SECONDS, Contributions
from atoll.runtime.syncer.directory import SyncerDirectory
from atoll.runtime.syncer.places import PROTOCOL, Caller, JoinRequest, Placement, peer_log
from atoll.runtime.syncer.progress import SyncerProgress, membership_line, refusals_line
from atoll.runtime.syncer.rollback import RollbackRequests
from atoll.runtime.syncer.stages import StageTimes
from atoll.runtime.syncer.uploads import ModelUploads
from atoll.store.tensor_files import StorageFailed
from atoll.store.weights import THETA_FILE
from atoll.transport import CERTIFICATE_KEY, Elsewhere, Link, LinkLimits, Refused, Server, ServerCredentials

log = logging.getLogger("atoll.syncer")
rate_limited("grpc._cython.cygrpc")  # it logs a traceback for each write to a peer that does not read

_Any = TypeVar("_Any")
REVOKED_SECONDS = 2.0
"""Between two looks at the list of revoked keys, for the connections that are open; a new one is checked as it comes."""
ROLLBACK_SECONDS = 1.0
"""Between two looks for a request to roll back."""
LISTEN_SECONDS = 30.0
"""How long a syncer that comes back tries to listen where it listened before."""
AWAY_SECONDS = 30.0
"""A learner lost for a shorter time may still reconnect when the run ends."""
NOTIFY_SECONDS = 10
"""How long a finished run waits, after the last byte it sent, for learners to learn that it is over."""


class SyncerProcess:
    def __init__(
        self, directory: SyncerDirectory, listen: str, credentials: ServerCredentials | None = None,
        key_warnings: Callable[[], Iterable[str]] = tuple, bulk_port: int | None = None,
    ) -> None:  # fmt: skip
        """`key_warnings` says, every day, which of its own keys expire soon. `bulk_port`: of payloads, where it is another."""
        self._directory = directory
        self._key_warnings = key_warnings
        self._revoked_seen = 0
        self._config: Config = directory.config
        self._listen = listen
        self._links: dict[LearnerId, _Peer] = {}
        self._shown: dict[LearnerId, dict[str, str]] = {}
        """What each learner showed when it connected last."""
        self._announced = Announced(directory)
        self._contributions = Contributions(directory, lambda: self._storage_blocked, self._block_on_storage, self._unblock)
        self._disk_thread = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._stages = StageTimes()
        limits = LinkLimits(assembling_max=4 + 2 * self._config.protocol.overlap)
        self._server = Server(self, self._admit, limits, credentials, bulk_port=bulk_port)
        directory.places.certified = credentials is not None
        self._server.on_call("Join", self._join, directory.places.check_token)
        self._server.on_upload("Upload", ModelUploads(directory, self._warm_up).begin)
        self._over: asyncio.Future[None]
        self._storage_blocked = False
        self._unnotified: set[LearnerId] = set()
        self._progress = SyncerProgress(self._config, log.info)
        self.address = ""
        self.observers: list[Observer] = []
        """They see every event after it was taped."""

    async def run(self) -> None:
        """Returns when the last outer step is stored and all learners know it."""
        self._loop = loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        self._timer = DeadlineTimer(loop, self._directory.clock, self._deadline)
        self._driver = Driver(
            self._directory.machine, SYNCER, self._directory.clock, self._directory.tape, self._carry_out, self._timer.set,
            must_sync=lambda event: isinstance(event, Started | Stored), on_tape_error=self._tape_failed, failed=self.fail,
            observers=[self._directory.index, *self.observers], between=self._directory.between_events,
        )  # fmt: skip
        self._expiry = DailyWarnings(loop, log, self._key_warnings)
        self._warm_up()
        await loop.run_in_executor(self._disk_thread, bool)  # until it has: versions may have to be merged again
        self.address = await self._listen_on()
        self._directory.write_address(self.address)
        self._say_start()
        self._rollbacks = RollbackRequests(self._directory.directory, self._directory.machine.rollback, self._driver.dispatch)
        for event in self._directory.first_events():
            self._driver.dispatch(event)
        if self._directory.machine.finished:
            self._finish()
        self._check_revoked()
        self._look_for_rollback()
        try:
            await self._over
        finally:
            await self._shut_down()

    async def _listen_on(self) -> str:
        """A killed syncer's port may be taken for a moment: on one machine by a learner's own attempt to connect to it."""
        until = self._loop.time() + (LISTEN_SECONDS if self._directory.restarted else 0.0)
        while True:
            try:
                return await self._server.start(self._listen)
            except UserError as error:
                await self._server.stop(0.0)
                if self._loop.time() >= until:
                    raise
                log.warning("%s; another attempt in %.0f s", error, RETRY_SECONDS)
                await asyncio.sleep(RETRY_SECONDS)

    def _say_start(self) -> None:
        reached, config = self._directory.machine.outer_step, self._config
        log.info("run %s listens on %s, step %d of %d", self._directory.run, self.address, reached, config.total_steps)
        if not self._directory.machine.finished:
            wait = f"the first step waits up to {config.limits.start_wait_seconds:.0f} s for all of them"
            log.info("merges are computed by %s", self._directory.kernels)
            log.info("waiting for %d learners (%s); join token: %s", config.learners, wait, self._directory.token_file)
        caps = self._server.caps
        if 2 * config.learners > caps.connections - caps.unadmitted:
            fit, enough = (caps.connections - caps.unadmitted) // 2, "raise the hard limit of open files (ulimit -Hn)"
            log.warning("learners = %d: only %d fit under the limit of open files; %s", config.learners, fit, enough)

    async def _shut_down(self) -> None:
        self._timer.stop()
        self._expiry.stop()
        if refused := self.refused:
            log.info("%s", refusals_line(refused))
        if not self._directory.machine.finished:
            self._driver.stop()  # or it would go on with those that are disconnected last, and replace snapshots of all by theirs
        await self._server.stop(2.0)
        for peer in self._links.values():
            peer.queue.cancel()  # messages of a peer that has just disconnected may remain: the tape ends here
        self._directory.stopping.set()
        self._disk_thread.shutdown(wait=True)
        complete = self._directory.machine.finished and not self._driver.is_blocked
        self._directory.close(complete=complete)
        if complete and self._directory.layout is not None:
            log.info("trained weights: %s", self._directory.directory / THETA_FILE)
        elif not complete:
            lost = self._over.done() and not self._over.cancelled() and isinstance(self._over.exception(), ShardLost)
            again = "it begins again by itself" if lost else "the same command goes on from here"
            log.info("stopped at step %d of %d; %s", self._directory.machine.outer_step, self._config.total_steps, again)

    def stop(self) -> None:
        """For SIGTERM: everything is on disk already, and a syncer started in this directory goes on."""
        if not self._over.done():
            self._over.set_result(None)

    @property
    def refused(self) -> Counter[str]:
        """Calls, connections and messages, by kind. From any thread: a copy is made in one step."""
        return self._directory.places.refused.copy() + self._server.refused.copy()

    def link_of(self, learner: LearnerId) -> Link | None:
        peer = self._links.get(learner)
        return peer.link if peer is not None else None

    # ------------------------------------------------------------ joining

    def _join(self, metadata: object, request: bytes) -> bytes:
        assert isinstance(metadata, dict)
        token = self._directory.places.check_token(metadata)
        try:
            asked = msgspec.msgpack.decode(request, type=JoinRequest)
        except (*UNDECODABLE, ValueError) as error:
            raise Refused(f"this is not a join request: {error}"[: wire.FLAW_MAX], retry=False) from None
        if asked.protocol != PROTOCOL:
            raise Refused(f"this syncer speaks protocol {PROTOCOL}, not {asked.protocol}: install the same atoll", retry=False)
        if self._directory.machine.finished:
            raise Refused("the run is over", retry=False)
        self._refuse_without_codecs(asked)
        caller = Caller(metadata.get(CERTIFICATE_KEY, ""), token, asked.place, asked.place_key)
        placed, key, place_key = self._directory.places.place(asked.wants, self._loop.time(), caller)
        peer_log.info("%s gets a place as incarnation %d", worker_name(placed.learner), placed.incarnation)
        return msgspec.msgpack.encode(Placement(
            learner=placed.learner, incarnation=placed.incarnation, key=key, run=self._directory.run, epoch=self._directory.epoch,
            config=msgspec.to_builtins(self._config), data_fingerprint=self._directory.data_fingerprint,
            layout=self._directory.layout_digest, needs_model=self._directory.layout is None,
            tokenizer=self._directory.tokenizer_fingerprint, place_key=place_key,
        ))  # fmt: skip

    def _refuse_without_codecs(self, asked: JoinRequest) -> None:
        """A peer that lacks a codec of this run, or has another one under its name, could send only what is refused later."""
        ours, p = codec_digests(), self._config.protocol
        for key, name in (("codec_up", codec_spec(p.codec_up).name), ("codec_down", codec_spec(p.codec_down).name)):
            if asked.codecs.get(name) != ours[name]:
                have = "has another codec of that name" if name in asked.codecs else "lacks it"
                remedy = "start the learner with the --allow-plugin of the syncer"
                raise Refused(f"protocol.{key} = {name!r}: the learner {have}; {remedy}", retry=False)

    def _warm_up(self) -> None:
        """Reads the versions in the thread that will replace and free them."""
        self._server.payload_bytes_max = self._directory.payload_bytes_max()
        self._server.queue_bytes_max = self._directory.queue_bytes_max()
        self._announced.begin(self._server, self.fail)
        if self._directory.layout is not None:
            work = self._directory.disk.load
            self._disk_thread.submit(self._until_stored, work).add_done_callback(self._check_future)

    def _admit(self, metadata: object) -> str:
        assert isinstance(metadata, dict)
        placed = self._directory.places.admit(metadata)
        member = self._directory.machine.roster.get(placed.learner)
        if member is not None and member.standing == EXPELLED:
            raise Refused(str(Reason(Why.EXPELLED)), retry=False)
        if self._directory.layout is None:
            raise Refused("no learner has uploaded the model yet", retry=True)
        if self._storage_blocked:
            raise Refused("the syncer's disk is full", retry=True)
        self._shown[placed.learner] = metadata
        return f"{placed.learner}.{placed.incarnation}"

    def _check_revoked(self) -> None:
        """Closes the connections of learners whose certificate or token was revoked meanwhile."""
        revoked = self._directory.revoked
        revoked.refresh()
        if revoked.changes > self._revoked_seen:
            self._revoked_seen = revoked.changes
            for flaw in revoked.flaws:
                log.error("%s", flaw)
            for peer in list(self._links.values()):
                try:
                    self._directory.places.admit(self._shown[peer.learner])
                except Refused as refusal:
                    peer.cut(f"refused: {refusal.reason}")
        if not self._over.done():
            self._loop.call_later(REVOKED_SECONDS, self._check_revoked)

    def _look_for_rollback(self, again: bool = True) -> None:
        try:
            self._rollbacks.look()
        except DataError as error:
            log.error("%s", error)
        except OSError as error:  # no descriptor is left: the request stays
            log.error("%s", error)
        except StorageFailed as error:  # the answer waits for space
            self._block_on_storage(str(error))
            self._loop.call_later(RETRY_SECONDS, self._unblock)
        if again and not self._over.done():
            self._loop.call_later(ROLLBACK_SECONDS, self._look_for_rollback)

    # ------------------------------------------------------------ links

    def opened(self, link: Link) -> None:
        peer = _Peer(self, link, 8 * self._server.payload_bytes_max)
        before = self._links.pop(peer.learner, None)
        if before is not None:
            before.queue.cancel()
            before.link.close("replaced by a newer connection")
            self._announced.let_go(before.link)
            self._driver.dispatch(ConnectionLost(peer.learner, "replaced by a newer connection"))
        self._links[peer.learner] = peer
        if self._directory.feeds is not None:
            self._directory.feeds.take_from(link)
            link.on_spread = self.arrived
        self._directory.places.touch(peer.learner, self._loop.time())
        self._loop.run_in_executor(None, self._directory.hash_anchors)
        self._driver.dispatch(Connected(peer.learner))

    def arrived(self, link: Link, head: bytes, data: memoryview | Elsewhere | None) -> None:
        peer = self._peer(link)
        if peer is not None:
            peer.queue.put(head, data)

    def closed(self, link: Link, reason: str) -> None:
        peer = self._peer(link)
        if peer is None:
            return
        if link.closed_here:
            peer.queue.cancel()
            self._connection_lost(peer, reason)
        else:  # a last contribution that arrived in full counts, and so does a goodbye after it
            peer.queue.finish(lambda: self._connection_lost(peer, reason))

    def _connection_lost(self, peer: _Peer, reason: str) -> None:
        self._announced.let_go(peer.link)
        if self._links.get(peer.learner) is not peer:
            return  # a newer connection replaced it
        del self._links[peer.learner]
        if not self._directory.machine.finished:
            peer_log.info("%s: connection closed: %s", worker_name(peer.learner), reason)
        self._directory.places.touch(peer.learner, self._loop.time())
        self._driver.dispatch(ConnectionLost(peer.learner, reason[:300]))
        self._mark_notified(peer.learner)

    def _peer(self, link: Link) -> _Peer | None:
        peer = self._links.get(int(link.peer.partition(".")[0]))
        return peer if peer is not None and peer.link is link else None

    async def take(self, peer: _Peer, head: bytes, data: memoryview | Elsewhere | None) -> None:
        """Processes one message of one peer; a peer's messages are processed in order."""
        if peer.is_cut:
            return  # sent before the peer knew that its connection is cut
        try:
            envelope = self._validated(peer, head, data is not None)
        except DataError as error:
            self._directory.places.refused["message"] += 1
            self._driver.dispatch(Violated(peer.learner, str(error)[: wire.FLAW_MAX]))
            peer.cut(f"refused: {error}")
            return
        if data is None:
            if self._links.get(peer.learner) is peer:
                if isinstance(envelope.body, Report):
                    self._progress.reported(peer.learner, envelope.body.loss)
                self._driver.dispatch(Received(envelope, 0))
            return
        body = envelope.body
        assert isinstance(body, Contribution)
        taken = await self._contributions.read(peer.link, peer.learner, body, data)
        if taken is not None and self._links.get(peer.learner) is peer:
            payload, found = taken
            self._driver.dispatch(Received(envelope, data.nbytes, *found), payload)

    def _validated(self, peer: _Peer, head: bytes, has_payload: bool) -> Envelope:
        """Refuses a message that no honest learner sends, before the machine sees it."""
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
                    self._directory.places.left(learner, self._loop.time(), returns=reason.why is Why.LEAVES_FOR_A_WHILE)
                peer_log.info("%s", membership_line(effect))
            case FixParticipants():
                self._progress.fixed(effect)
            case AbortRound(reason=reason) if reason.why is Why.MERGE_REJECTED:
                log.warning("%s; the step is gathered again", reason)
                self._submit(effect, payload)
            case AnswerRollback(outer_step=outer_step, reason=reason):
                (log.warning if outer_step else log.error)("%s", reason)
                self._loop.call_soon(self._look_for_rollback, False)
            case Finished():
                self._finish()
            case _:
                self._submit(effect, payload)

    def _submit(self, effect: Effect, payload: Payload | None) -> None:
        self._disk_thread.submit(self._execute, effect, payload).add_done_callback(self._check_future)

    def _execute(self, effect: Effect, payload: Payload | None) -> None:
        """In the disk's thread, in order."""
        executor = self._directory.executor
        assert executor is not None
        for event in self._until_stored(lambda: self._stages.timed(effect, lambda: executor.execute(effect, payload))) or ():
            self._loop.call_soon_threadsafe(self._driver.dispatch, event)

    def _until_stored(self, work: Callable[[], Sequence[Any]]) -> Sequence[Any] | None:
        """Repeats the work until there is space, and a descriptor. Meanwhile nothing is announced and nothing is lost. None if
        the syncer stops first."""
        while True:
            try:
                result = work()
                break
            except StorageFailed as error:
                self._loop.call_soon_threadsafe(self._block_on_storage, str(error))
                if self._directory.stopping.wait(RETRY_SECONDS):
                    return None
        self._loop.call_soon_threadsafe(self._unblock)
        return result

    def _check_future(self, future: Future[Any]) -> None:
        error = future.exception() if not future.cancelled() else None
        if error is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.fail, error)

    def fail(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error if isinstance(error, Exception) else RunFailed(str(error)))

    def _block_on_storage(self, reason: str) -> None:
        if not self._storage_blocked:
            log.error("the disk refuses bytes, so the run stands still until it takes them again: %s", reason)
            self._directory.let_old_files_go()
        self._storage_blocked = True

    def _unblock(self) -> None:
        if self._driver.is_blocked:
            return  # the tape cannot be written yet
        if self._storage_blocked:
            log.info("the disk takes bytes again; the run goes on")
        self._storage_blocked = False

    def _tape_failed(self, error: OSError) -> None:
        """The tape cannot be written: all connections are closed until it can."""
        self._block_on_storage(f"{self._directory.tape_path}: {error.strerror or error}")
        for peer in list(self._links.values()):
            peer.link.close("the syncer's disk is full")
        self._loop.call_later(RETRY_SECONDS, self._retry_tape)

    def _retry_tape(self) -> None:
        if self._driver.retry_tape():
            self._unblock()

    def _send(self, send: Send) -> None:
        envelope = send.envelope
        peer = self._links.get(envelope.receiver)
        if peer is None or peer.incarnation != self._incarnation_of(envelope.receiver):
            return  # the connection broke, and the machine has not processed that yet
        address, key = "", ""
        body = envelope.body
        if isinstance(body, Ticket):
            address = self._shown.get(body.peer, {}).get("advertise", "")
            key = self._directory.places.ticket_key(body.ticket, envelope.receiver)
        elif isinstance(body, Serve):
            key = self._directory.places.ticket_key(body.ticket, body.newcomer)
        try:
            digests = self._directory.anchor_digests(body.peer) if isinstance(body, Ticket) else None
            head = wire.to_head(envelope, address, key, digests, self._directory.snapshots_kept)
            if isinstance(body, Announce):
                self._announced.send(peer.link, head, send)
            else:
                peer.link.send(head, may_overtake=may_overtake(envelope))
        except StorageFailed as error:  # it reconnects, and is sent what it lacks
            self._block_on_storage(str(error))
            self._loop.call_later(RETRY_SECONDS, self._unblock)
            peer.link.close("the syncer cannot read its files now")

    def _incarnation_of(self, learner: LearnerId) -> int:
        member = self._directory.machine.roster.get(learner)
        return member.incarnation if member is not None else -1

    # ------------------------------------------------------------ time, and the end

    def _deadline(self) -> None:
        self._driver.deadline_passed()

    def _finish(self) -> None:
        log.info("step %d of %d: the run is finished", self._directory.machine.outer_step, self._config.total_steps)
        long_ago = self._directory.clock.now() - nanos(AWAY_SECONDS)
        members = [m for m in self._directory.machine.roster if m.connected or (m.standing == LOST and m.lost_at > long_ago)]
        self._unnotified = {m.learner for m in members}
        self._wait_for_learners()

    def _wait_for_learners(self, sent_before: int = -1, quiet: int = 0) -> None:
        """On a slow link the notice that the run is over queues behind other data; a learner without it keeps reconnecting."""
        sent = sum(peer.link.bytes_sent for learner, peer in self._links.items() if learner in self._unnotified)
        quiet = quiet + 1 if sent == sent_before else 0
        if quiet == NOTIFY_SECONDS:
            self.stop()
        else:
            self._loop.call_later(1.0, self._wait_for_learners, sent, quiet)

    def _mark_notified(self, learner: LearnerId) -> None:
        """A learner closes its connection when it knows that the run is over. One that is disconnected at that moment reconnects
        within seconds; without the notice it would train for nothing."""
        if self._directory.machine.finished:
            self._unnotified.discard(learner)
            if not self._unnotified:
                self._loop.call_later(0.2, self.stop)


class _Peer:
    """A connected learner. A bug while processing its messages stops the syncer: a stopped one can be restarted, and a wrong
    state cannot be repaired."""

    def __init__(self, process: SyncerProcess, link: Link, bytes_max: int) -> None:
        learner, _, incarnation = link.peer.partition(".")
        self.learner, self.incarnation = int(learner), int(incarnation)
        self.link = link
        self.queue: MessageQueue[memoryview | Elsewhere] = MessageQueue(
            link, lambda _, head, data: process.take(self, head, data), process.fail, bytes_max=bytes_max
        )
        self.is_cut = False

    def cut(self, reason: str) -> None:
        self.is_cut = True
        self.link.close(reason, refused=True)
