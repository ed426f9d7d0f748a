"""Proxies on the links of a local cluster that a chaos plan names, and on no others."""

from __future__ import annotations

import asyncio
import socket

from atoll.chaos import ChaosPlan, Clog, Corrupt, Fault, Partition
from atoll.ids import SYNCER, LearnerId, WorkerId
from atoll.runtime.local.proxy import Faults, Proxy
from atoll.runtime.loop import LoopThread


class FaultProxies:
    """On a link to the syncer the proxy is in front of the syncer, one per learner that the plan names. On a link between two
    learners there is one in front of each, which also affects other learners that recover from them."""

    def __init__(self, plan: ChaosPlan, learners: int) -> None:
        links = [(f.a, f.b) for f in plan.faults if isinstance(f, Partition | Clog | Corrupt)]
        self._to_syncer = {worker for link in links if SYNCER in link for worker in link if worker != SYNCER}
        self._to_peer = {worker for link in links if SYNCER not in link for worker in link}
        self._proxies: dict[WorkerId, Proxy] = {}
        self._peer_proxies: dict[WorkerId, Proxy] = {}
        self._addresses: dict[WorkerId, str] = {}
        self._peer_addresses: dict[WorkerId, tuple[str, str]] = {}
        self._loop: LoopThread | None = None
        self._faults: Faults | None = None

    def start(self, syncer: str) -> None:
        if not self._to_syncer and not self._to_peer:
            return
        self._loop = LoopThread()
        for learner in sorted(self._to_syncer):
            proxy = self._proxies[learner] = Proxy()
            self._addresses[learner] = self._loop.run(proxy.start(syncer))
        for learner in sorted(self._to_peer):
            proxy = self._peer_proxies[learner] = Proxy()
            behind = f"127.0.0.1:{_free_port()}"
            self._peer_addresses[learner] = (behind, self._loop.run(proxy.start(behind)))
        self._faults = Faults(self._proxies, self._peer_proxies)

    def syncer_address(self, learner: LearnerId, otherwise: str) -> str:
        return self._addresses.get(learner, otherwise)

    def listen_options(self, learner: LearnerId) -> list[str]:
        if learner not in self._peer_addresses:
            return ["--listen", "127.0.0.1:0"]
        behind, front = self._peer_addresses[learner]
        return ["--listen", behind, "--advertise", front]

    def inject(self, fault: Fault) -> None:
        assert self._loop is not None and self._faults is not None
        assert isinstance(fault, Partition | Clog | Corrupt)
        asyncio.run_coroutine_threadsafe(self._faults.inject(fault), self._loop.loop)

    def stop(self) -> None:
        if self._loop is None:
            return
        if self._faults is not None:
            self._loop.run(self._faults.stop())
        for proxy in (*self._proxies.values(), *self._peer_proxies.values()):
            self._loop.run(proxy.stop())
        self._loop.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
