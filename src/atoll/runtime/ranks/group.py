"""torch's process group of a learner's ranks, which the ranks that are left can leave and form anew.

torch has no way out of a collective whose peers are gone. Only the neighbours of a dead rank get an error; the others wait for
each other for half an hour. `abort` of gloo's group (torch 2.13) returns, and they wait on. So the connections that were opened
while the group was formed are shut down here: then every collective on them raises at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import xxhash
from torch import Tensor

from atoll.tensors.local import local_part

Open: TypeAlias = frozenset[tuple[int, int]]
"""Sockets of this process, by descriptor and inode: a descriptor alone may be another socket by now."""


def smaller(order: Sequence[int], shards: int, lost: Collection[int]) -> tuple[int, ...]:
    """`order`: ranks by their place in a mesh of replicas of `shards` ranks each. The largest mesh of whole replicas from those
    that are left, rank 0 first; () if they hold no whole replica, or rank 0 is lost."""
    columns = [[rank for rank in order[column::shards] if rank not in lost] for column in range(shards)]
    replicas = min(map(len, columns))
    if order[0] in lost:
        return ()
    return tuple(columns[column][replica] for replica in range(replicas) for column in range(shards))


class TorchGroup:
    """`leave` may be called from any thread, also while the group is being formed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: Open | None = None
        self._own: Open = frozenset()

    @contextlib.contextmanager
    def forming(self) -> Iterator[None]:
        """What is opened inside is the group's."""
        with self._lock:
            self._before = _sockets()
        try:
            yield
        finally:
            with self._lock:
                self._own, self._before = self._own | (_sockets() - self._before), None

    def leave(self) -> None:
        with self._lock:
            there = _sockets()
            for descriptor, _ in (self._own & there) | (frozenset() if self._before is None else there - self._before):
                _shut(descriptor)
            self._own = frozenset()

    def form(self, store: Any, place: int, ranks: int) -> None:
        """After `leave`, on every rank that is left; inside `forming`."""
        torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("gloo", store=store, rank=place, world_size=ranks)


def new_store(host: str, seconds: float) -> Any:
    """On rank 0. Its `port` is a free one."""
    distributed: Any = torch.distributed
    return distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def store_at(host: str, port: int, seconds: float) -> Any:
    distributed: Any = torch.distributed
    return distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def digest_of(optimizer: torch.optim.Optimizer) -> str:
    """Of the trained weights that this rank holds, and of the optimiser's state for them."""
    found = xxhash.xxh3_128()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for value in (parameter, *(state[key] for key in sorted(state))):
                found.update(_bytes_of(value) if isinstance(value, Tensor) else repr(value).encode())
    return found.hexdigest()


def _bytes_of(tensor: Tensor) -> Any:
    flat = local_part(tensor.detach()).cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def _sockets() -> Open:
    found = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            state = os.fstat(int(name))
            if stat.S_ISSOCK(state.st_mode):
                found.add((int(name), state.st_ino))
    return frozenset(found)


def _shut(descriptor: int) -> None:
    """Not a listener: gloo ends the process when its own fails."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        copy.getpeername()
        copy.shutdown(socket.SHUT_RDWR)
