"""Who may stay connected to a listening process: a table of its connections, and which of them are closed.

A connection is *admitted* while one of its streams is: a link's, or a call or an upload that showed a token or a key. All
others are bounded in number, in total and for each address, in time, and in what they may send. Admitted connections are not
counted by address: a whole site of honest learners may share one.

When there are too many, one of the address that has most of them is closed, so an attacker pushes out its own connections.
Those that have sent nothing go first, oldest first: an honest client speaks as soon as it is connected. Among those that have
spoken the choice is random. Oldest first would close every client whose handshake takes longer than the table takes to turn
over; a random choice leaves each attempt a chance.

The table does not know how connections are found and closed; `sockets.py` does. One thread updates it and closes, another admits.
A connection that is admitted while it is being closed is lost, and its client tries again.
"""

from __future__ import annotations

import ipaddress
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

ADMISSION_SECONDS: Final = 10.0
"""From the connection to its first admitted stream: TLS takes two round trips and a token one more."""
FILES_RESERVED: Final = 128
"""Descriptors for the tape, version files, snapshots, gRPC's own and those of Python. A syncer at work has about 40."""
RELAYED_FILES: Final = 3
"""Descriptors of a connection to gRPC: the client's, and both ends of the relay's own. The others have one."""
UNADMITTED_MOST: Final = 1024
"""At 20 kB of memory each in gRPC, 50 kB while it negotiates TLS, and what they have sent."""
EARLY_BYTES_MAX: Final = 64 << 10
"""What a client may send before it is admitted: a TLS handshake with certificates and a stream's metadata take some 10 kB. gRPC
grants every connection a window of 4 MiB at once, so this is what bounds the memory that outsiders can hold."""
PEER_CONNECTIONS: Final = 128
"""For a learner, which serves a few recovering peers: its process belongs to a user, who needs descriptors too."""

MAPPED: Final = "::ffff:"

Endpoint: TypeAlias = tuple[str, int]
"""A client's address and port."""


@dataclass(frozen=True)
class Caps:
    """The most connections of one listening process."""

    connections: int
    """In all. What is beyond is accepted and closed."""
    unadmitted: int
    unadmitted_per_address: int
    admission_seconds: float = ADMISSION_SECONDS

    @staticmethod
    def from_open_files(limit: int, most: int = 1 << 16) -> Caps:
        """From the limit of open files that the process has. Half may be at gRPC at a time: outsiders, a quarter of all, and
        learners that join or open a link."""
        files = max(limit // 2, limit - FILES_RESERVED)
        connections = min(most, 2 * files // (RELAYED_FILES + 1))
        unadmitted = max(2, min(connections // 4, UNADMITTED_MOST))
        return Caps(connections, unadmitted, unadmitted // 2)


class _Connection:
    __slots__ = ("bytes_before", "endpoint", "group", "since")

    def __init__(self, endpoint: Endpoint, since: float) -> None:
        self.endpoint = endpoint
        self.group = address_group(endpoint[0])
        self.since = since
        """When it was accepted, or when its last admitted stream ended."""
        self.bytes_before: int | None = 0
        """Of those received, how many came before `since`; None if that has to be looked up."""


class Door:
    def __init__(self, caps: Caps, rng: random.Random | None = None) -> None:
        self.caps = caps
        self.closed: Counter[str] = Counter()
        """Connections closed here: "late", "bytes" (too many), "address" (too many of one), "full"."""
        self._rng = rng or random.Random()
        self._connections: dict[Endpoint, _Connection] = {}
        self._admitted: Counter[Endpoint] = Counter()
        self._closing: set[Endpoint] = set()
        """Closed, but still open where connections are found."""

    @contextmanager
    def admitted(self, endpoint: Endpoint, now: Callable[[], float]) -> Iterator[None]:
        """While this lasts, the connection stays. It may not have been seen yet."""
        self._admitted[endpoint] += 1
        try:
            yield
        finally:
            self._admitted[endpoint] -= 1
            if not self._admitted[endpoint]:
                del self._admitted[endpoint]
                if (connection := self._connections.get(endpoint)) is not None:
                    connection.since, connection.bytes_before = now(), None

    def update(self, found: Iterable[Endpoint], now: float) -> None:
        """The connections that are open now."""
        open_ = set(found)
        self._closing &= open_
        before = self._connections
        self._connections = {each: before.get(each) or _Connection(each, now) for each in open_ - self._closing}

    @property
    def unadmitted(self) -> list[Endpoint]:
        return [endpoint for endpoint in self._connections if endpoint not in self._admitted]

    def to_close(self, now: float, received: Mapping[Endpoint, int]) -> list[Endpoint]:
        """Which connections to close now; they leave the table. `received`: how many bytes came on each that is not admitted."""
        groups: dict[str, list[_Connection]] = defaultdict(list)
        chosen: list[_Connection] = []
        for endpoint, count in received.items():
            if endpoint in self._admitted or (connection := self._connections.get(endpoint)) is None:
                continue
            if connection.bytes_before is None:
                connection.bytes_before = count
            if count - connection.bytes_before > EARLY_BYTES_MAX:
                self.closed["bytes"] += 1
                chosen.append(connection)
            elif now - connection.since >= self.caps.admission_seconds:
                self.closed["late"] += 1
                chosen.append(connection)
            else:
                groups[connection.group].append(connection)
        keep = self._sizes_to_keep({group: len(members) for group, members in groups.items()})
        for group, members in groups.items():
            if len(members) > keep[group]:
                chosen += self._excess(members, len(members) - keep[group], received)
        for connection in chosen:
            del self._connections[connection.endpoint]
            self._closing.add(connection.endpoint)
        return [connection.endpoint for connection in chosen]

    def _sizes_to_keep(self, sizes: dict[str, int]) -> dict[str, int]:
        """Of each address at most its share, and in all at most the total, taken from the largest first."""
        keep = {group: min(size, self.caps.unadmitted_per_address) for group, size in sizes.items()}
        self.closed["address"] += sum(sizes.values()) - sum(keep.values())
        excess = sum(keep.values()) - self.caps.unadmitted
        if excess > 0:
            self.closed["full"] += excess
            level = max(keep.values())
            while excess > 0:
                largest = [group for group, size in keep.items() if size == level]
                for group in largest[:excess]:
                    keep[group] -= 1
                excess -= len(largest)
                level -= 1
        return keep

    def _excess(self, members: list[_Connection], excess: int, received: Mapping[Endpoint, int]) -> list[_Connection]:
        silent = sorted((c for c in members if not received[c.endpoint]), key=lambda c: c.since)[:excess]
        others = [c for c in members if received[c.endpoint]]
        return silent + self._rng.sample(others, excess - len(silent))


def address_group(host: str) -> str:
    """What counts as one address: an IPv4 address, or the /64 that a single IPv6 site has at least."""
    return str(ipaddress.ip_network((host, 64), strict=False)) if ":" in host else host


def endpoint_of(host: str, port: int) -> Endpoint:
    """A socket that listens on IPv6 sees an IPv4 client under a mapped address."""
    if host.startswith(MAPPED) and "." in host:
        return host.removeprefix(MAPPED), port
    return (str(ipaddress.IPv6Address(host.partition("%")[0])) if ":" in host else host), port
