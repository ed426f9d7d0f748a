"""Two machines for a test: network namespaces joined by a cable that can be slow, lose every packet, or lose one connection's.

A proxy in user space cannot stand for such a cable: it acknowledges what it has not delivered, so neither the kernel nor gRPC
on either side sees the queue that a slow link has, or the silence of a dead one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NOBODY = "02:00:00:00:00:99"


class Cable:
    def __init__(self, ends: tuple[str, str]) -> None:
        self.ends = ends

    def limit(self, rate: str) -> None:
        """Both ways. The bucket is small and so is its queue: bytes wait in their sender's socket, as behind any slow modem."""
        bucket = ("tbf", "rate", rate, "burst", "16kb", "latency", "100ms")
        for end in self.ends:
            run("tc", "-n", end, "qdisc", "replace", "dev", "cable", "root", *bucket)

    def pull(self) -> None:
        """Every packet from now on is addressed to a card that is not there: nothing arrives, and nobody is told."""
        for end, other in zip(self.ends, reversed(ADDRESSES), strict=True):
            run("ip", "-n", end, "neigh", "replace", other, "lladdr", NOBODY, "dev", "cable", "nud", "permanent")

    def lose(self, server_port: int, client_port: int) -> None:
        """Packets of this one connection vanish. The server is at the first end."""
        for end, (here, there) in zip(self.ends, ((server_port, client_port), (client_port, server_port)), strict=True):
            run("ip", "-n", end, "rule", "add", "ipproto", "tcp", "sport", str(here), "dport", str(there), "blackhole")


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def cable() -> Iterator[Cable]:
    first, second = (f"atoll-{os.getpid()}-{which}" for which in "ab")
    with ExitStack() as stack:
        for name in (first, second):
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
        run("ip", "link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip((first, second), ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            run("ip", "-n", name, "link", "set", "cable", "up")
        yield Cable((first, second))


def why_no_cable() -> str | None:
    """What this machine lacks. Tried rather than guessed: root inside a container may make no namespaces."""
    if sys.platform != "linux" or not all(map(shutil.which, ("ip", "tc", "ss"))):
        return "network namespaces need Linux, with ip, tc and ss of iproute2"
    try:
        with cable() as made:
            made.limit("1mbit")
    except OSError as error:
        return f"no network namespaces here: {error}"
    return None
