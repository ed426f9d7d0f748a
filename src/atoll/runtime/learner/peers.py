"""Learner to learner: serves a peer's recovery, and requests a peer's state. Both need a ticket from the syncer.

A newcomer dials the address that came with its ticket and presents the ticket's key; the syncer sent the same key to the
peer. All other connections are refused.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from atoll.errors import DataError
from atoll.ids import SECOND, LearnerId, Nanos
from atoll.protocol.vocabulary import ConnectionLost, Event, StateRequest, StateTransfer
from atoll.runtime import payload as wire
from atoll.runtime.loop import MessageQueue
from atoll.runtime.syncer.places import Placement
from atoll.transport import (
    PEER_CONNECTIONS,
    Backoff,
    Caps,
    Link,
    LinkFailed,
    LinkLimits,
    Refused,
    Server,
    dial,
    open_files_limit,
)

if TYPE_CHECKING:
    from atoll.runtime.learner.address import Address

log = logging.getLogger("atoll.learner")

STATE_BYTES_MAX = 1 << 44
"""Larger than the weights, anchors and moments of any model. A learner that knows its model sets a smaller one."""


class PeerListener(Protocol):
    def dispatch(self, event: Event) -> None: ...
    async def take(self, envelope: Any, data: memoryview | None, still: Callable[[], bool]) -> None: ...


class Peers:
    def __init__(
        self, learner: PeerListener, address: Address, placement: Placement, rng: random.Random,
        state_bytes_max: int = STATE_BYTES_MAX, spool: Path | None = None,
    ) -> None:  # fmt: skip
        self._learner = learner
        self._limits = LinkLimits(payload_bytes_max=state_bytes_max, spool=spool)
        self._address = address
        self._placement = placement
        self._rng = rng
        self._server: Server | None = None
        self._keys: OrderedDict[int, tuple[LearnerId, str]] = OrderedDict()
        self._tickets: dict[LearnerId, tuple[str, int, str, Nanos]] = {}
        self._links: dict[LearnerId, MessageQueue[memoryview]] = {}
        self._dialling: dict[LearnerId, asyncio.Task[None]] = {}
        self.advertised = address.advertise

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._address.listen:
            # a newcomer sends a request of a few bytes and receives a whole state
            limits = LinkLimits(payload_bytes_max=1 << 20, queue_bytes_max=STATE_BYTES_MAX)
            caps = Caps.from_open_files(open_files_limit(), PEER_CONNECTIONS)
            self._server = Server(self, self._admit, limits, self._address.server_credentials, caps)
            bound = await self._server.start(self._address.listen)
            self.advertised = self._address.advertise or bound

    async def stop(self) -> None:
        for task in self._dialling.values():
            task.cancel()
        await asyncio.gather(*self._dialling.values(), return_exceptions=True)
        for queue in list(self._links.values()):
            queue.link.close("over")
            queue.cancel()
        if self._server is not None:
            await self._server.stop(1.0)

    # ------------------------------------------------------------ tickets from the syncer

    def allow_ticket(self, ticket: int, newcomer: LearnerId, key: str) -> None:
        self._keys[ticket] = (newcomer, key)
        if len(self._keys) > 64:
            self._keys.popitem(last=False)

    def add_ticket(self, peer: LearnerId, address: str, ticket: int, key: str, patience: Nanos) -> None:
        self._tickets[peer] = (address, ticket, key, patience)

    # ------------------------------------------------------------ sending, from any thread

    def send(self, peer: LearnerId, head: bytes, data: wire.Buffers | None) -> None:
        self._loop.call_soon_threadsafe(self._send, peer, head, data)

    def cut(self, peer: LearnerId, reason: str) -> None:
        queue = self._links.get(peer)
        if queue is not None:
            queue.link.close(reason)

    def _send(self, peer: LearnerId, head: bytes, data: wire.Buffers | None) -> None:
        queue = self._links.get(peer)
        if queue is not None:
            queue.link.send(head, data)
        elif peer in self._tickets and data is None:
            before = self._dialling.pop(peer, None)
            if before is not None:
                before.cancel()
            self._dialling[peer] = self._loop.create_task(self._dial(peer, head))
        else:
            self._learner.dispatch(ConnectionLost(peer, "there is no connection and no ticket"))

    async def _dial(self, peer: LearnerId, head: bytes) -> None:
        address, ticket, key, patience = self._tickets[peer]
        why = "this peer does not serve others"
        backoff, until = Backoff(self._rng), self._loop.time() + patience / SECOND
        while address:
            try:
                me = self._placement
                link = await dial(
                    address, self, peer=str(peer), credentials=self._address.peer_credentials,
                    limits=self._limits,
                    metadata={"run": me.run, "ticket": str(ticket), "key": key, "learner": str(me.learner)},
                )  # fmt: skip
                link.send(head)
                return
            except Refused as refusal:
                why = refusal.reason
                if not refusal.retry:
                    break
            except LinkFailed as error:
                why = str(error)
            if self._loop.time() > until:
                break
            await asyncio.sleep(backoff.next())
        self._learner.dispatch(ConnectionLost(peer, why[:300]))

    # ------------------------------------------------------------ links

    def _admit(self, metadata: Mapping[str, str]) -> str:
        if metadata.get("run") != self._placement.run:
            raise Refused("another run", retry=False)
        ticket = metadata.get("ticket", "")
        newcomer, key = self._keys.get(int(ticket) if ticket.isdecimal() else -1, (-1, ""))
        if not key:
            raise Refused("this ticket is not known here yet", retry=True)
        if not hmac.compare_digest(key, metadata.get("key", "")) or metadata.get("learner") != str(newcomer):
            raise Refused("wrong ticket", retry=False)
        return str(newcomer)

    def opened(self, link: Link) -> None:
        peer = int(link.peer)
        before = self._links.pop(peer, None)
        if before is not None:
            before.link.close("replaced by a newer connection")
            before.cancel()
        self._links[peer] = MessageQueue(link, self._take, lambda error: self._reject(link, error))

    def arrived(self, link: Link, head: bytes, data: memoryview | None) -> None:
        queue = self._links.get(int(link.peer))
        if queue is not None and queue.link is link:
            queue.put(head, data)

    def closed(self, link: Link, reason: str) -> None:
        queue = self._links.get(int(link.peer))
        if queue is None or queue.link is not link:
            return
        if link.closed_here:
            queue.cancel()
            self._lost(queue, reason)
        else:  # a state that arrived in full is used even if its sender is gone
            queue.finish(lambda: self._lost(queue, reason))

    def _lost(self, queue: MessageQueue[memoryview], reason: str) -> None:
        peer = int(queue.link.peer)
        if self._links.get(peer) is queue:
            del self._links[peer]
            self._learner.dispatch(ConnectionLost(peer, reason[:300]))

    async def _take(self, link: Link, head: bytes, data: memoryview | None) -> None:
        envelope = wire.from_head(head).envelope
        if envelope.sender != int(link.peer) or not isinstance(envelope.body, StateRequest | StateTransfer):
            raise DataError(f"{type(envelope.body).__name__} from worker {envelope.sender} is not a message between learners")
        queue = self._links.get(int(link.peer))
        await self._learner.take(envelope, data, lambda: queue is not None and self._links.get(int(link.peer)) is queue)

    def _reject(self, link: Link, error: BaseException) -> None:
        """Bad data from a peer ends its connection, never this learner."""
        log.warning("peer %s: refused: %s", link.peer, error)
        link.close(f"refused: {error}")
