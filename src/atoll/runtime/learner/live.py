"""A live learner: one thread trains, an event loop in another communicates. Both drive the same machine, one event at a time.

The training thread takes its next inner step and reports it done; everything at a step boundary (adopting, staging,
recording) happens in that thread, between two steps. The loop's thread records messages that arrive during a step, or answers
them from copies staged at the last boundary. Nothing here waits for the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from atoll.chaos import Hostile
from atoll.config import from_builtins
from atoll.errors import DataError, PlaceLost, RunFailed
from atoll.executor.hostile import Attacker
from atoll.executor.peer_state import wrong_anchor
from atoll.ids import SYNCER, LearnerId, OuterStep, nanos, seconds, worker_name
from atoll.protocol.causality import may_overtake
from atoll.protocol.interface import Executor, Payload
from atoll.protocol.learner import LearnerMachine
from atoll.protocol.phases import DONE, JOINING
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.validity import REASON_MAX, objection
from atoll.protocol.vocabulary import (
    Connected,
    ConnectionLost,
    Effect,
    Event,
    Finished,
    InnerStep,
    LeaveAsked,
    Message,
    Received,
    Refuse,
    Resumed,
    Send,
    Serve,
    Started,
    StateTransfer,
    StepDone,
    Ticket,
    Wait,
)
from atoll.runtime import payload as wire
from atoll.runtime.clock import Clock
from atoll.runtime.driver import Driver
from atoll.runtime.learner.address import WAIT_LINE_SECONDS, Address, not_admitted
from atoll.runtime.learner.peers import STATE_BYTES_MAX, Peers
from atoll.runtime.learner.sender import GOODBYE_SECONDS, Sender
from atoll.runtime.log import PacedLog
from atoll.runtime.loop import DailyWarnings, DeadlineTimer, MessageQueue
from atoll.runtime.metrics import careful
from atoll.runtime.syncer.places import Placement
from atoll.runtime.tape_roller import TapeRoller, in_thread
from atoll.tape.format import TapeWriter
from atoll.transport import Backoff, Link, LinkFailed, LinkLimits, Refused, dial
from atoll.views.worker_metrics import LearnerMetrics

log = logging.getLogger("atoll.learner")

STABLE_SECONDS = 0.5
"""A connection that broke sooner was cut because of its messages, and the next one will be too."""
REFUSALS_MAX = 5
REFUSED_SECONDS = 60.0
"""A learner ends after so many connections in a row that the syncer closed, each sooner than this, because of its messages."""


UNUSED_BYTES: Final = 8 << 20
"""Or two fragments: what a learner reads beyond what it has used. To one who joins the syncer sends the whole model at once, of
which one fragment is cut for the learner's ranks while the next one arrives."""


class LiveLearner:
    """Call `start`, then `next_step` and `step_done` in turn from one thread until `next_step` returns None."""

    def __init__(
        self, address: Address, placement: Placement, executor: Executor, *, tape: TapeWriter | None = None,
        resumed: Resumed | None = None, loop: asyncio.AbstractEventLoop, state_bytes_max: int = STATE_BYTES_MAX,
        arriving: Callable[[Message, Payload], Payload] | None = None, metrics: LearnerMetrics | None = None,
        spool: Path | None = None, largest_fragment: int = 0, reads_into: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`state_bytes_max`: of a peer's recovery state. `spool`: a folder for it, so that it is never in memory as a whole.
        `arriving`: is given what came with an announcement in the receiving thread, before the driver's lock is taken; it may
        wait. `metrics` sees every event. `largest_fragment`: its parameters. `reads_into`: memory for them, which `arriving` has
        done with when it returns."""
        self.placement = placement
        self.config = from_builtins(placement.config)
        self.machine = LearnerMachine(self.config, placement.learner, placement.incarnation)
        self._address = address
        self._executor = executor
        self._arriving = arriving
        self._reads_into = reads_into
        self._reading = threading.Lock()
        """One message at a time is there: a connection that was lost may leave one that is still being cut."""
        self._resumed = resumed
        self._loop = loop
        self._clock = Clock(placement.epoch)
        self._timer = DeadlineTimer(loop, self._clock, self._deadline)
        roller = TapeRoller(tape, self.machine, self.machine.config.limits, in_thread) if tape is not None else None
        self._driver = Driver(
            self.machine, placement.learner, self._clock, tape, self._carry_out, self._timer.set, failed=self._failed,
            between=roller.look if roller is not None else lambda: None,
            observers=careful(metrics),
        )  # fmt: skip
        self._link: Link | None = None
        if metrics is not None:
            metrics.links.link_of = lambda peer: self._link
        self._sender = Sender(self._failed)
        self._link_down = asyncio.Event()
        self._queue: MessageQueue[memoryview] | None = None
        self._rng = random.Random(f"{placement.run} {placement.learner} {placement.incarnation}")
        self._peers = Peers(self, address, placement, self._rng, state_bytes_max, spool)
        self._spools = spool is not None
        self._digests: dict[int, dict[int, str]] = {}
        self.on_kept: Callable[[tuple[OuterStep, ...]], None] = lambda kept: None
        """Is told which snapshots the syncer keeps."""
        bulks = address.connections_for(largest_fragment)
        self._limits = LinkLimits(
            connections=bulks, payload_bytes_max=1 << 44, queue_bytes_max=1 << 44,
            unused_bytes_max=max(UNUSED_BYTES, 2 * 4 * largest_fragment),
        )  # fmt: skip
        self._condition = threading.Condition()
        self._connection_task: asyncio.Task[None] | None = None
        self._attacker: Attacker | None = None
        self._held = threading.Event()
        self._next: InnerStep | None = None
        self._expiry: DailyWarnings | None = None
        self._wait_reason = self._close_reason = ""
        self._over = False
        self.finished = False
        """The run is over, and this learner has heard so."""
        self._error: Exception | None = None

    # ------------------------------------------------------------ the training thread

    def start(self) -> None:
        self.dispatch(Started(self.placement.incarnation))  # first: `leave` may be called at any time
        if self._resumed is not None:
            self.dispatch(self._resumed)
        self._wait_for(self._start())

    def next_step(self) -> InnerStep | None:
        """Waits for the next inner step to take. None: the run is over, or this learner has left."""
        with self._condition:
            line = PacedLog(WAIT_LINE_SECONDS, at_once=False)
            while self._next is None and not self._over:
                self._condition.wait(WAIT_LINE_SECONDS)
                if self._next is None and not self._over and line.due():
                    log.info("no inner step to take: %s", self._waiting_for())
            step, self._next = self._next, None
            if self._error is not None:
                raise self._error
            return None if self._over else step

    def _waiting_for(self) -> str:
        if self.machine.phase == JOINING:
            return "the syncer has not let this learner enter the run yet"
        return self._wait_reason or "the machine waits"

    def step_done(self, done: StepDone) -> None:
        self.dispatch(done)

    def leave(self, reason: str, within_seconds: float | None = None, *, returns: bool = False) -> None:
        """Delivers what is due next, then leaves; a second call leaves at once. May be called from any thread and from signal
        handlers: it takes no lock, which the interrupted code may hold."""
        within = nanos(within_seconds) if within_seconds is not None else None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the learner has left
            self._loop.call_soon_threadsafe(self.dispatch, LeaveAsked(reason[:REASON_MAX], within, returns))

    def close(self) -> None:
        self._wait_for(self._close())
        self._driver.close()
        self._sender.close()

    @property
    def over(self) -> bool:
        """Ended in order. After a failure it is not over: the next call of `next_step` raises the reason, which a loop that only
        asks whether it is over would never hear."""
        return self._over and self._error is None

    def rates(self) -> str:
        link = self._link
        if link is None:
            return "not connected"
        up, down = link.bulk_bytes_per_second_up, link.bulk_bytes_per_second_down
        shown = [f"{direction} {rate / 1e6:.1f} MB/s" for direction, rate in (("up", up), ("down", down)) if rate is not None]
        return ", ".join(shown) or "no transfer long enough to measure a rate"

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ------------------------------------------------------------ events

    def dispatch(self, event: Event, payload: Payload | None = None) -> None:
        self._driver.dispatch(event, payload)
        if self.machine.phase == DONE and not self._over:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        with self._condition:
            self._over, self._error = True, error
            self._condition.notify_all()
        self._loop.call_soon_threadsafe(self._link_down.set)

    def _deadline(self) -> None:
        self._driver.deadline_passed()
        if self.machine.phase == DONE and not self._over:
            self._end(None)

    # ------------------------------------------------------------ effects

    def _carry_out(self, effect: Effect, payload: Payload | None) -> None:
        if isinstance(effect, Wait):
            self._wait_reason = str(effect.reason)
        self.finished = self.finished or isinstance(effect, Finished)
        match effect:
            case Send():
                self._send(effect)
            case InnerStep():
                with self._condition:
                    self._next = effect
                    self._condition.notify_all()
            case Refuse(peer=peer, reason=reason, disconnect=True):
                log.warning("refused a message of %s: %s", worker_name(peer), reason)
                if peer == SYNCER and self._link is not None:
                    self._link.close(f"refused: {reason}")
                elif peer != SYNCER:
                    self._peers.cut(peer, f"refused: {reason}")
            case _:
                for event in self._executor.execute(effect, payload):
                    self._driver.dispatch(event)

    def attack(self, fault: Hostile | None) -> None:
        """For chaos plans: from now on this learner attacks the syncer; None ends it."""
        self._attacker = Attacker(self.config, fault) if fault is not None else None

    def _send(self, send: Send) -> None:
        envelope = send.envelope
        payload, held = self._executor.payload_for(send), 0.0
        if self._attacker is not None and envelope.receiver == SYNCER:
            envelope, payload = self._attacker.sent(envelope, payload)
            held = seconds(self._attacker.delay(envelope))
        head = wire.to_head(envelope)
        link, overtakes = self._link, may_overtake(envelope)
        if envelope.receiver != SYNCER:
            self._send_to_peer(envelope.receiver, head, payload)
        elif link is not None:  # bound to this connection: the message must not go out on the next one

            def job() -> None:
                if held:
                    self._held.wait(held)
                parts = wire.to_stripes(payload, link.feeds) if payload is not None and link.feeds else None
                if parts is not None:
                    link.send_spread(head, parts)
                else:
                    link.send(head, wire.to_buffers(payload) if payload is not None else None, may_overtake=overtakes)

            waits = bool(held) or wire.waits_for_device(payload)
            self._sender.put(job, waits_for_device=waits, control=payload is None, overtakes=overtakes)

    def _send_to_peer(self, peer: LearnerId, head: bytes, payload: Payload | None) -> None:
        if not wire.waits_for_device(payload):
            self._peers.send(peer, head, wire.to_buffers(payload) if payload is not None else None)
            return

        def gather() -> None:
            """Of a state whose parts other ranks send. If they do not, the peer takes its state from another."""
            assert payload is not None
            try:
                buffers = wire.to_buffers(payload)
                if not buffers:
                    raise RunFailed("a rank of this learner is gone")
                self._peers.send(peer, head, buffers)
            except Exception as error:
                log.warning("learner %d gets no state from this one: %s", peer, error)
                self._loop.call_soon_threadsafe(self._peers.cut, peer, f"its state could not be gathered: {error}"[:300])

        threading.Thread(target=gather, name="state for a peer", daemon=True).start()  # training goes on meanwhile

    # ------------------------------------------------------------ the loop's thread

    async def _start(self) -> None:
        await self._peers.start()
        self._expiry = DailyWarnings(self._loop, log, self._address.warnings)
        self._connection_task = self._loop.create_task(self._keep_connected())
        self._connection_task.add_done_callback(self._connection_task_ended)

    def _connection_task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._end(error if isinstance(error, Exception) else RunFailed(str(error)))

    async def _keep_connected(self) -> None:
        """Dials, and dials again when the connection is lost; the learner trains on meanwhile."""
        backoff, line = Backoff(self._rng), PacedLog(WAIT_LINE_SECONDS)
        away_since, refusals = self._loop.time(), 0
        while not self._over:
            self._link_down.clear()
            try:
                link = await dial(
                    self._address.where(), self, peer="syncer", metadata=self._metadata(), limits=self._limits,
                    credentials=self._address.credentials,
                )  # fmt: skip
            except Refused as refusal:
                if refusal.rejoin:
                    raise PlaceLost(f"the syncer refuses this learner: {refusal.reason}") from None
                if not refusal.retry:
                    raise not_admitted(self._address, refusal.reason) from None
                why = refusal.reason
            except LinkFailed as error:
                why = str(error)
            else:
                since = self._loop.time()
                await self._link_down.wait()
                away_since = self._loop.time()
                refusals = refusals + 1 if link.refused_by_peer and away_since - since < REFUSED_SECONDS else 0
                if refusals == REFUSALS_MAX:
                    raise not_admitted(self._address, f"{self._close_reason} (as {refusals} connections in a row)")
                if away_since - since > STABLE_SECONDS:
                    backoff.reset()
                elif not self._over:  # cut at once: do not flood a syncer that refuses this learner's messages
                    await asyncio.sleep(backoff.next())
                continue
            away, limit = self._loop.time() - away_since, self._address.reconnect_timeout_seconds
            if away > limit:
                raise RunFailed(f"no connection to the syncer for {limit:.0f} s: {why}")
            if line.due():
                log.warning("no connection to the syncer for %.0f of at most %.0f s, training goes on: %s", away, limit, why)
            await asyncio.sleep(backoff.next())

    def _metadata(self) -> dict[str, str]:
        p = self.placement
        return {
            "run": p.run, "learner": str(p.learner), "incarnation": str(p.incarnation), "key": p.key,
            "advertise": self._peers.advertised,
        }  # fmt: skip

    def opened(self, link: Link) -> None:
        self._link = link
        self._queue = MessageQueue(link, self._take, self._failed)
        self.dispatch(Connected(SYNCER))

    def arrived(self, link: Link, head: bytes, data: memoryview | None) -> None:
        if self._queue is not None and link is self._link:
            self._queue.put(head, data)

    def closed(self, link: Link, reason: str) -> None:
        if link is not self._link or self._queue is None:
            return
        if link.closed_here or self._over:
            self._queue.cancel()
            self._connection_lost(link, reason)
        else:
            self._queue.finish(lambda: self._connection_lost(link, reason))

    def _connection_lost(self, link: Link, reason: str) -> None:
        if link is not self._link:
            return
        self._link, self._close_reason = None, reason
        if not self._over:
            log.warning("the connection to the syncer is closed, training goes on: %s", reason)
            try:
                self.dispatch(ConnectionLost(SYNCER, reason[:300]))
            finally:
                self._link_down.set()
        self._link_down.set()

    async def _take(self, link: Link, head: bytes, data: memoryview | None) -> None:
        message = wire.from_head(head)
        body = message.envelope.body
        self.on_kept(message.kept)
        if isinstance(body, Ticket):
            self._digests = message.digests
            self._peers.add_ticket(body.peer, message.address, body.ticket, message.key, body.patience)
        elif isinstance(body, Serve):
            self._peers.allow_ticket(body.ticket, body.newcomer, message.key)
        await self.take(message.envelope, data, lambda: link is self._link)

    async def take(self, envelope: Any, data: memoryview | None, still: Callable[[], bool]) -> None:
        """Decodes and checks the payload, a large one outside the loop, then dispatches the message, unless its connection is
        lost by then."""
        payload, flaw, body = None, None, envelope.body
        if envelope.sender != SYNCER and (impossible := objection(self.config, envelope)) is not None:
            raise DataError(str(impossible))
        if isinstance(body, StateTransfer):
            payload, flaw = await self._loop.run_in_executor(None, self._read_state, body, data if data is not None else b"")
        elif data is not None:
            payload = await self._read(body, data)
            misfit = self._executor.inspect(body, payload).flaw
            if misfit is not None:
                raise RunFailed(f"{worker_name(envelope.sender)} sent what does not fit: {misfit}")
        if still() and not self._over:
            self.dispatch(Received(envelope, data.nbytes if data is not None else 0, flaw), payload)

    async def _read(self, body: Message, data: memoryview) -> Payload:
        if self._arriving is None and data.nbytes <= wire.QUICK_BYTES:
            return wire.from_buffer(body, data)
        return await self._loop.run_in_executor(None, self._decode, body, data)

    def _decode(self, body: Message, data: memoryview) -> Payload:
        if self._arriving is None:
            return wire.from_buffer(body, data)
        with self._reading:
            return self._arriving(body, wire.from_buffer(body, data, into=self._reads_into))

    def _read_state(self, body: StateTransfer, data: memoryview | bytes) -> tuple[Payload, Reason | None]:
        """In another thread: a peer's state, with the reason if it cannot be used. Its bytes end a recovery, never a learner."""
        try:
            payload = wire.from_buffer(body, memoryview(data), shared=self._spools and isinstance(data, memoryview))
            with ThreadPoolExecutor(1, "digests") as beside:  # neither holds the interpreter's lock for long
                anchors = beside.submit(wrong_anchor, body, payload.content, self._digests)
                misfit = self._executor.inspect(body, payload).flaw
                flaw = misfit if misfit is not None else anchors.result()
            if flaw is None and self._arriving is not None:
                payload = self._arriving(body, payload)
        except RunFailed:  # a rank of this learner is gone: no fault of the peer's
            raise
        except Exception as error:
            payload, flaw = Payload("state", len(data), None), Reason(Why.BAD_STATE, f"bytes that cannot be used: {error}"[:300])
        if flaw is not None:
            log.warning("a peer's recovery state is not loaded: %s", flaw)
        return payload, flaw

    def fail(self, error: Exception) -> None:
        """Something that this learner needs is gone: the next call of `next_step`, or one that waits, raises the error."""
        self._end(error)

    def _failed(self, error: BaseException) -> None:
        self._end(error if isinstance(error, Exception) else RunFailed(str(error)))

    async def _close(self) -> None:
        self._over = True
        self._link_down.set()
        self._timer.stop()
        if self._expiry is not None:
            self._expiry.stop()
        if self._connection_task is not None:
            self._connection_task.cancel()
            await asyncio.gather(self._connection_task, return_exceptions=True)
        if self._link is not None:
            try:
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await self._loop.run_in_executor(None, self._sender.drain)
                    await self._link.drain()
            except TimeoutError:
                log.warning("the last messages were not sent within %.0f s", GOODBYE_SECONDS)
            link, self._link = self._link, None
            link.close("over", timeout=GOODBYE_SECONDS)
            await link.wait_closed()
        if self._queue is not None:
            self._queue.cancel()
        await self._peers.stop()
