"""How the ranks of a learner find each other: one broadcast on torch's process group, then sockets of our own."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor

from atoll.errors import ConfigError, RunFailed
from atoll.runtime.ranks.channel import ChannelClosed, RankChannel
from atoll.runtime.ranks.messages import RankHello, ToLead, ToRank

INVITATION_BYTES: Final = 512


@dataclass(frozen=True)
class RankLink:
    """Two connections for each pair: a message of a few bytes must not wait behind a fragment."""

    control: RankChannel
    bulk: RankChannel

    def close(self) -> None:
        self.control.close()
        self.bulk.close()


def world() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without a process group."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def lead_connects(ranks: int, seconds: float) -> dict[int, RankLink]:
    """Rank 0's side: by rank its connections."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    key = secrets.token_hex(16)
    try:
        listener = socket.create_server((host, 0), backlog=2 * ranks)
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR = {host}: rank 0 cannot listen there ({error.strerror}); give rank 0's address") from None
    with listener:
        _broadcast(f"{host} {listener.getsockname()[1]} {key}", seconds)
        return _accepted(listener, key, ranks, seconds)


def _accepted(listener: socket.socket, key: str, ranks: int, seconds: float) -> dict[int, RankLink]:
    found: dict[tuple[int, bool], RankChannel] = {}
    until = time.monotonic() + seconds
    while len(found) < 2 * (ranks - 1):
        missing = sorted(set(range(1, ranks)) - {rank for rank, bulk in found if bulk})
        listener.settimeout(max(0.1, until - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise RunFailed(f"{_named(missing)} did not connect to rank 0 within {seconds:.0f} s") from None
        connection.settimeout(10.0)
        channel = RankChannel(connection, ToLead)
        with contextlib.suppress(ChannelClosed):
            hello, _ = channel.receive()
            if isinstance(hello, RankHello) and hmac.compare_digest(hello.key, key) and 0 < hello.rank < ranks:
                found[hello.rank, hello.bulk] = channel
                continue
        channel.close()
    return {rank: RankLink(found[rank, False], found[rank, True]) for rank in range(1, ranks)}


def rank_connects(rank: int, seconds: float) -> RankLink:
    host, port, key = _broadcast("", seconds).split()
    channels: list[RankChannel] = []
    for bulk in (False, True):
        try:
            connection = socket.create_connection((host, int(port)), timeout=seconds)
        except OSError as error:
            raise RunFailed(f"rank {rank} cannot reach rank 0 at {host}:{port}: {error}") from None
        channels.append(RankChannel(connection, ToRank))
        channels[-1].send(RankHello(key, rank, bulk))
    return RankLink(*channels)


def _broadcast(invitation: str, seconds: float) -> str:
    """From rank 0 to all. On a group of its own: the user's may be NCCL's, which waits for the device. They leave it together: if
    one closed its connections while another still opened its own, that one's join would fail."""
    distributed: Any = torch.distributed
    data = invitation.encode().ljust(INVITATION_BYTES)
    tensor: Tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    try:
        distributed.broadcast(tensor, src=0, group=group)
        distributed.barrier(group=group)
    except RuntimeError as error:
        raise RunFailed(f"not every rank called atoll.join within {seconds:.0f} s: {error}") from None
    finally:
        distributed.destroy_process_group(group)
    return bytes(tensor.tolist()).decode().strip()


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
