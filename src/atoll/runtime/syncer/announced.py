"""What learners are sent of a version: the same bytes for all, encoded once, or sent by the shards that have them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from atoll.ids import FragmentId, OuterStep
from atoll.protocol.vocabulary import NO_VERSION, Announce, Send
from atoll.runtime import payload as wire
from atoll.runtime.syncer.directory import SyncerDirectory
from atoll.transport import Buffers, Link, Server, SharedBuffers


class Announced:
    def __init__(self, directory: SyncerDirectory) -> None:
        self._directory = directory
        self._payloads: OrderedDict[tuple[FragmentId, OuterStep, bool], Buffers | None] = OrderedDict()

    def begin(self, server: Server, lost: Callable[[Exception], None]) -> None:
        """Once the versions are there. `lost` hears that a shard cannot send any more."""
        if self._directory.feeds is not None:
            self._directory.feeds.begin(server, lost)

    def let_go(self, link: Link) -> None:
        """All messages of a link that is over were processed."""
        if self._directory.feeds is not None:
            self._directory.feeds.let_go(link)

    def send(self, link: Link, head: bytes, send: Send) -> None:
        """StorageFailed: nothing was sent."""
        body = send.envelope.body
        assert isinstance(body, Announce)
        if self._directory.feeds is not None:
            self._directory.feeds.announce(link, head, body)
        else:
            link.send(head, self._payload(send, body))

    def _payload(self, send: Send, body: Announce) -> Buffers | None:
        """Cached while more learners are likely to need it."""
        key = (body.fragment, body.outer_step, body.previous == NO_VERSION)
        if key not in self._payloads:
            assert self._directory.executor is not None
            payload = self._directory.executor.payload_for(send)
            self._payloads[key] = SharedBuffers(wire.to_buffers(payload) or ()) if payload is not None else None
            while len(self._payloads) > 2 + self._directory.config.protocol.overlap:
                self._payloads.popitem(last=False)
        return self._payloads[key]
