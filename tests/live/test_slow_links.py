"""A slow link is not a dead one, and a dead one is noticed: over a cable between two network namespaces."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cable import ADDRESSES, Cable, cable, run, why_no_cable

PORT = 7077
PEER = Path(__file__).with_name("link_peer.py")
STALL_SECONDS = 20.0
PATIENCE_SECONDS = 60.0
NOTICED_SECONDS = 10.0
"""A dead link, on both ends. It is what `test_frozen_connection_...` promises of a link through a proxy."""


@cache
def missing() -> str | None:
    return why_no_cable()


@pytest.fixture
def wire() -> Iterator[Cable]:
    if missing():
        pytest.skip(str(missing()))
    with cable() as made:
        made.limit("3mbit")
        yield made


class End:
    """A process at one end, and what it says."""

    def __init__(self, namespace: str, role: str, payload_bytes: int, stall_seconds: float) -> None:
        command = ["ip", "netns", "exec", namespace, sys.executable, str(PEER), role, f"{ADDRESSES[0]}:{PORT}"]
        self.process = subprocess.Popen([*command, str(payload_bytes), str(stall_seconds)], stdout=subprocess.PIPE, text=True)
        self.said: list[dict[str, Any]] = []
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def until(self, what: str, seconds: float, **more: Any) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            try:
                said = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"not {what} {more} within {seconds} s, but {self.said[-5:]}") from None
            self.said.append(said)
            if said["what"] == what and more.items() <= said.items():
                return said
            assert said["what"] != "closed", said

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def linked(wire: Cable, payload_bytes: int, stall_seconds: float = STALL_SECONDS) -> Iterator[tuple[End, End]]:
    """A server at the first end, who dialled at the second."""
    server = End(wire.ends[0], "serve", payload_bytes, stall_seconds)
    client: End | None = None
    try:
        server.until("listens", PATIENCE_SECONDS)
        client = End(wire.ends[1], "dial", payload_bytes, stall_seconds)
        for end in (server, client):
            end.until("opened", PATIENCE_SECONDS)
        yield server, client
    finally:
        for end in (server, client):
            if end is not None:
                end.stop()


@pytest.mark.soak
def test_transfers_both_ways_longer_than_any_timeout_arrive_on_the_same_link(wire: Cable) -> None:
    """3.4 MB at 3 Mbit/s take 9 s, more than the 8 s after which a quiet link is closed. Pings wait behind seconds of bytes
    meanwhile, and their answers behind as many."""
    with linked(wire, 3_400_000) as ends:
        for end in ends:
            end.until("arrived", 40, head="payload", nbytes=3_400_000)
        assert ends[1].until("closed", 10)["reason"] == "both payloads are there"
        assert all([said["what"] for said in end.said].count("opened") == 1 for end in ends)


@pytest.mark.soak
def test_pulled_cable_is_noticed_on_both_ends_in_the_middle_of_a_transfer(wire: Cable) -> None:
    with linked(wire, 6_000_000) as ends:
        for end in ends:
            end.until("arrived", 5, head="tick")
        wire.pull()
        pulled = time.monotonic()
        for end in ends:
            noticed = end.until("closed", NOTICED_SECONDS)
            assert "the connection broke" in noticed["reason"]
            assert noticed["at"] - pulled < NOTICED_SECONDS


def test_bulk_connection_that_is_lost_alone_is_noticed_by_its_sender(wire: Cable) -> None:
    """The talk stream says that the peer is there, so only the lack of progress tells. The bound is shortened for the test."""
    stall = 3.0
    with linked(wire, 6_000_000, stall) as ends:
        for end in ends:
            end.until("arrived", PATIENCE_SECONDS, head="tick")
        port, lost = bulk_port(wire), time.monotonic()
        wire.lose(PORT, port)
        noticed = [end.until("closed", PATIENCE_SECONDS) for end in ends]
        assert min(said["at"] for said in noticed) - lost > stall * 0.8, "bytes that wait for less are only late"


def bulk_port(wire: Cable) -> int:
    """The client's, of the connection on which more bytes wait."""
    found = re.findall(r"^ESTAB\s+\d+\s+(\d+)\s+\S+:(\d+)\s", run("ip", "netns", "exec", wire.ends[1], "ss", "-Htn"), re.M)
    queued = {int(port): int(size) for size, port in found}
    return max(queued, key=lambda port: queued[port])
