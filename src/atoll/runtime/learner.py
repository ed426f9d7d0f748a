"""A live learner: one thread trains, a loop in another talks. Both drive the same machine, one event at a time.

The training thread asks for its next inner step and reports it done; everything at a step boundary (adopting, staging,
recording) happens there, between two steps. Messages that come in the middle of a step are noted, or answered from
copies staged at the last boundary, by the loop's thread. Nothing here waits for the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atoll.config import from_builtins
from atoll.errors import RunFailed, UserError
from atoll.executor.hands import Blob, Hands
from atoll.ids import SYNCER, worker_name
from atoll.protocol.causality import may_overtake
from atoll.protocol.learner import DONE, LearnerMachine
from atoll.protocol.vocabulary import (
    Connected,
    ConnectionLost,
    Effect,
    Event,
    InnerStep,
    LeaveAsked,
    Received,
    Refuse,
    Resumed,
    Send,
    Serve,
    Started,
    StepDone,
    Ticket,
)  # fmt: skip
from atoll.runtime import wire
from atoll.runtime.clock import Clock
from atoll.runtime.driver import Driver
from atoll.runtime.loops import Alarm, Mail
from atoll.runtime.peers import Peers
from atoll.runtime.placement import JoinRequest, Placement
from atoll.tape.format import TapeWriter
from atoll.transport import Backoff, ClientCredentials, Limits, Link, LinkFailed, Refused, ServerCredentials, call, dial

log = logging.getLogger("atoll.learner")

GOODBYE_SECONDS = 5.0
"""How long the last words may take to be sent."""
STOOD_SECONDS = 0.5
"""A connection that lasted no longer was cut for what was said on it, and the next one will be too."""


@dataclass(frozen=True)
class Address:
    """How to reach the syncer, and how to be reached by peers that recover."""

    syncer: str
    token: str
    run: str = ""
    credentials: ClientCredentials | None = None
    peer_credentials: ClientCredentials | None = None
    server_credentials: ServerCredentials | None = None
    listen: str = ""
    """Where peers are served; empty: they are not, and recover from others."""
    advertise: str = ""
    """What peers are told to dial; by default where we listen."""
    connections: int = 1
    patience_seconds: float = 60.0
    """How long to knock at first."""
    give_up_seconds: float = 3600.0
    """How long to train on without a syncer."""


async def ask_for_place(address: Address, wants: int, rng: random.Random) -> Placement:
    """Knock until the syncer answers. A refusal that will not change is the user's to mend."""
    backoff, said = Backoff(rng), ""
    deadline = asyncio.get_running_loop().time() + address.patience_seconds
    metadata = {"token": address.token} | ({"run": address.run} if address.run else {})
    request = msgspec.msgpack.encode(JoinRequest(wants=wants))
    while True:
        try:
            reply = await call(address.syncer, "Join", metadata, request, address.credentials)
            return msgspec.msgpack.decode(reply, type=Placement)
        except Refused as no:
            if not no.retry:
                raise UserError(f"syncer {address.syncer}: refuses this learner: {no.reason}") from None
            why = no.reason
        except LinkFailed as error:
            why = str(error)
        if asyncio.get_running_loop().time() > deadline:
            raise UserError(f"syncer {address.syncer}: cannot be joined: {why}")
        if why != said:
            log.info("knocking at %s: %s", address.syncer, why)
            said = why
        await asyncio.sleep(backoff.next())


class Sender:
    """Sends in the order in which it was said. What waits for the device (a packet that a GPU is still encoding) waits in
    a thread of its own, and what was said after it waits behind it: but a control message that may overtake does, unless
    another control message is waiting."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._turn = threading.Condition()
        self._waiting: deque[tuple[Callable[[], None], bool]] = deque()
        """What to do, and whether it is a control message. The first is being done."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, job: Callable[[], None], *, late: bool, control: bool, overtakes: bool) -> None:
        with self._turn:
            passes = overtakes and not any(is_control for _, is_control in self._waiting)
            if not late and (passes or not self._waiting):
                job()
                return
            self._waiting.append((job, control))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="sender", daemon=True)
                self._thread.start()
            self._turn.notify_all()

    def drain(self) -> None:
        with self._turn:
            self._turn.wait_for(lambda: not self._waiting, GOODBYE_SECONDS)

    def close(self) -> None:
        with self._turn:
            self._closed = True
            self._turn.notify_all()

    def _work(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                job = self._waiting[0][0]
            try:
                job()
            except Exception as error:
                self._failed(error)
            del job  # its bytes are the link's now
            with self._turn:
                self._waiting.popleft()
                self._turn.notify_all()


class LiveLearner:
    """`start`, then `next_step` and `step_done` in turn from one thread until `next_step` gives None."""

    def __init__(
        self, address: Address, placement: Placement, hands: Hands, *, tape: TapeWriter | None = None,
        resumed: Resumed | None = None, loop: asyncio.AbstractEventLoop,
    ) -> None:  # fmt: skip
        self.placement = placement
        self.config = from_builtins(placement.config)
        self.machine = LearnerMachine(self.config, placement.learner, placement.incarnation)
        self._address = address
        self._hands = hands
        self._resumed = resumed
        self._loop = loop
        self._clock = Clock(placement.epoch)
        self._alarm = Alarm(loop, self._clock, self._deadline)
        self._driver = Driver(
            self.machine, placement.learner, self._clock, tape, self._carry_out, self._alarm.set, failed=self._failed
        )
        self._link: Link | None = None
        self._sender = Sender(self._failed)
        self._lost = asyncio.Event()
        self._mail: Mail | None = None
        self._rng = random.Random(f"{placement.run} {placement.learner} {placement.incarnation}")
        self._peers = Peers(self, address, placement, self._rng)
        self._limits = Limits(connections=address.connections, payload_bytes_max=1 << 44, queue_bytes_max=1 << 44)
        self._turn = threading.Condition()
        self._keeper: asyncio.Task[None] | None = None
        self._next: InnerStep | None = None
        self._over = False
        self._error: Exception | None = None

    # ------------------------------------------------------------ the training thread

    def start(self) -> None:
        self.happen(Started(self.placement.incarnation))  # before anybody can ask it to leave
        if self._resumed is not None:
            self.happen(self._resumed)
        self._wait_for(self._start())

    def next_step(self) -> InnerStep | None:
        """The next inner step to take. None: the run is over, or this learner has left."""
        with self._turn:
            while self._next is None and not self._over:
                self._turn.wait()
            step, self._next = self._next, None
            if self._error is not None:
                raise self._error
            return None if self._over else step

    def step_done(self, done: StepDone) -> None:
        self.happen(done)

    def leave(self, reason: str) -> None:
        """Politely: deliver what is due soonest, then go. Twice: go now. For any thread and for signal handlers: it takes no
        lock here, because a handler may have interrupted whoever holds it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has left
            self._loop.call_soon_threadsafe(self.happen, LeaveAsked(reason))

    def close(self) -> None:
        self._wait_for(self._close())
        self._driver.close()
        self._sender.close()

    @property
    def over(self) -> bool:
        return self._over

    def rates(self) -> str:
        link = self._link
        if link is None:
            return "not connected"
        up, down = link.bulk_bytes_per_second_up, link.bulk_bytes_per_second_down
        shown = [f"{way} {rate / 1e6:.1f} MB/s" for way, rate in (("up", up), ("down", down)) if rate is not None]
        return ", ".join(shown) or "no transfer long enough to measure a rate"

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ------------------------------------------------------------ events

    def happen(self, event: Event, blob: Blob | None = None) -> None:
        self._driver.happen(event, blob)
        if self.machine.phase == DONE and not self._over:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        with self._turn:
            self._over, self._error = True, error
            self._turn.notify_all()
        self._loop.call_soon_threadsafe(self._lost.set)

    def _deadline(self) -> None:
        self._driver.deadline_passed()
        if self.machine.phase == DONE and not self._over:
            self._end(None)

    # ------------------------------------------------------------ effects

    def _carry_out(self, effect: Effect, blob: Blob | None) -> None:
        match effect:
            case Send():
                self._send(effect)
            case InnerStep():
                with self._turn:
                    self._next = effect
                    self._turn.notify_all()
            case Refuse(peer=peer, reason=reason, disconnect=True):
                log.warning("refused what %s said: %s", worker_name(peer), reason)
                if peer == SYNCER and self._link is not None:
                    self._link.close(f"refused: {reason}")
                elif peer != SYNCER:
                    self._peers.cut(peer, f"refused: {reason}")
            case _:
                for event in self._hands.execute(effect, blob):
                    self._driver.happen(event)

    def _send(self, send: Send) -> None:
        envelope = send.envelope
        blob = self._hands.blob_for(send)
        head = wire.to_head(envelope)
        link, overtakes = self._link, may_overtake(envelope)
        if envelope.receiver != SYNCER:
            self._peers.send(envelope.receiver, head, wire.to_payload(blob) if blob is not None else None)
        elif link is not None:  # this very one: what was said on it must not be heard on the next

            def job() -> None:
                link.send(head, wire.to_payload(blob) if blob is not None else None, may_overtake=overtakes)

            self._sender.put(job, late=wire.is_late(blob), control=blob is None, overtakes=overtakes)

    # ------------------------------------------------------------ the loop's thread

    async def _start(self) -> None:
        await self._peers.start()
        self._keeper = self._loop.create_task(self._keep_connected())
        self._keeper.add_done_callback(self._keeper_ended)

    def _keeper_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._end(error if isinstance(error, Exception) else RunFailed(str(error)))

    async def _keep_connected(self) -> None:
        """Dial, stay, and when the connection is gone dial again: the learner trains on meanwhile."""
        backoff, said = Backoff(self._rng), ""
        away_since = self._loop.time()
        while not self._over:
            self._lost.clear()
            try:
                await dial(
                    self._address.syncer, self, peer="syncer", metadata=self._metadata(), limits=self._limits,
                    credentials=self._address.credentials,
                )  # fmt: skip
            except Refused as no:
                if not no.retry:
                    raise RunFailed(f"the syncer refuses this learner: {no.reason}") from None
                why = no.reason
            except LinkFailed as error:
                why = str(error)
            else:
                since = self._loop.time()
                await self._lost.wait()
                away_since = self._loop.time()
                if away_since - since > STOOD_SECONDS:
                    backoff.reset()
                elif not self._over:  # cut at once: a syncer that finds fault with what it hears must not be stormed
                    await asyncio.sleep(backoff.next())
                continue
            if self._loop.time() - away_since > self._address.give_up_seconds:
                raise RunFailed(f"no syncer for {self._address.give_up_seconds:.0f} s: {why}")
            if why != said:
                log.info("not connected: %s", why)
                said = why
            await asyncio.sleep(backoff.next())

    def _metadata(self) -> dict[str, str]:
        p = self.placement
        return {
            "run": p.run, "learner": str(p.learner), "incarnation": str(p.incarnation), "key": p.key,
            "advertise": self._peers.advertised,
        }  # fmt: skip

    def opened(self, link: Link) -> None:
        self._link = link
        self._mail = Mail(link, self._take, self._failed)
        self.happen(Connected(SYNCER))

    def arrived(self, link: Link, head: bytes, payload: memoryview | None) -> None:
        if self._mail is not None and link is self._link:
            self._mail.put(head, payload)

    def closed(self, link: Link, reason: str) -> None:
        if link is not self._link or self._mail is None:
            return
        if link.ended_here or self._over:
            self._mail.over()
            self._is_lost(link, reason)
        else:
            self._mail.hear_out(lambda: self._is_lost(link, reason))

    def _is_lost(self, link: Link, reason: str) -> None:
        if link is not self._link:
            return
        self._link = None
        if not self._over:
            log.info("connection to the syncer closed: %s", reason)
            try:
                self.happen(ConnectionLost(SYNCER, reason[:300]))
            finally:
                self._lost.set()
        self._lost.set()

    async def _take(self, link: Link, head: bytes, payload: memoryview | None) -> None:
        parcel = wire.from_head(head)
        body = parcel.envelope.body
        if isinstance(body, Ticket):
            self._peers.learn_address(body.peer, parcel.address, body.ticket, parcel.key, body.patience)
        elif isinstance(body, Serve):
            self._peers.expect(body.ticket, body.newcomer, parcel.key)
        await self.take(parcel.envelope, payload, lambda: link is self._link)

    async def take(self, envelope: Any, payload: memoryview | None, still: Callable[[], bool]) -> None:
        """Read the bytes beside a message outside the loop, then let it happen, unless its connection is gone by then."""
        blob = None
        if payload is not None:
            blob = await self._loop.run_in_executor(None, wire.from_payload, envelope.body, payload)
            flaw = self._hands.inspect(envelope.body, blob)
            if flaw:
                raise RunFailed(f"{worker_name(envelope.sender)} sent what does not fit: {flaw}")
        if still() and not self._over:
            self.happen(Received(envelope, payload.nbytes if payload is not None else 0), blob)

    def _failed(self, error: BaseException) -> None:
        self._end(error if isinstance(error, Exception) else RunFailed(str(error)))

    async def _close(self) -> None:
        self._over = True
        self._lost.set()
        self._alarm.stop()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._link is not None:
            try:
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await self._loop.run_in_executor(None, self._sender.drain)
                    await self._link.drain()
            except TimeoutError:
                log.warning("the last words did not get through in %.0f s", GOODBYE_SECONDS)
            link, self._link = self._link, None
            link.close("over", patience=GOODBYE_SECONDS)
            await link.gone()
        if self._mail is not None:
            self._mail.over()
        await self._peers.stop()


class Loop:
    """An asyncio loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="network", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        """What is still closing its connections may end; a loop that is closed under its tasks complains."""
        self.run(self._settle())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5.0)
        self.loop.close()

    @staticmethod
    async def _settle() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=2.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


def own_directory(out: Path | None, placement: Placement) -> Path:
    directory = out or Path("runs") / f"{placement.run}-learner{placement.learner}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {directory}: cannot be made a directory ({error.strerror})") from None
    return directory
